"""Messages by a group of torch.distributed: NCCL for tensors on GPUs, gloo for those in host memory."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from .._checks import describe
from .._description import Array
from .._errors import invalid, unsupported

#: What has to be a tensor where the group's backend can send it. All else may be whatever kernels take.
_SENT = ("q", "k", "v")

#: What tensors are multiplied by.
_TERMS = ("alibi_slopes", "sinks")


@functools.cache
def _side_stream(device: int) -> Any:
    """Return a GPU's stream for what does not wait for all of the caller's work."""
    return sys.modules["torch"].cuda.Stream(device)


def is_group(comm: Any) -> bool:
    """Return whether an object is a process group of torch.distributed."""
    distributed = sys.modules.get("torch.distributed")
    group = getattr(distributed, "ProcessGroup", None)
    return group is not None and isinstance(comm, group)


class _Works:
    """Messages under way. Waiting makes the current stream wait, of gloo the process."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[Any]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._tensors = ()


class _Gathering:
    """Bytes of all ranks under way, on a stream that waits for no kernel."""

    def __init__(self, work: Any, everyone: Any, on_stream: AbstractContextManager[Any]) -> None:
        self._work, self._everyone, self._on_stream = work, everyone, on_stream

    def wait(self) -> Array:
        with self._on_stream:
            self._work.wait()
            found: Array = self._everyone.cpu().numpy()
        return found


class TorchCommunicator:
    """A process group of torch.distributed.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        Its messages must not be in flight while pyflash uses it.
    """

    def __init__(self, group: Any) -> None:
        self._torch = sys.modules["torch"]
        self._distributed = distributed = sys.modules["torch.distributed"]
        self._group = group
        self._rank, self._size = int(distributed.get_rank(group)), int(distributed.get_world_size(group))
        self._on_gpu: bool = distributed.get_backend(group) == "nccl"

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._size

    def mark(self) -> Any:
        """Return an event of the current stream; None of the host, whose kernels do not go on."""
        return self._torch.cuda.current_stream().record_event() if self._on_gpu else None

    def see(self, name: str, x: Any) -> Any:
        """Return queries, keys and values, which have to be tensors, and all else as kernels take it."""
        is_tensor = isinstance(x, self._torch.Tensor)
        if name in _SENT:
            if not is_tensor:
                raise invalid(name, describe(x), "a torch tensor, for a process group of torch")
            if bool(x.is_cuda) != self._on_gpu:
                where = "a GPU" if self._on_gpu else "the host"
                raise unsupported(name, f"a tensor on {x.device}", "this process group", f"expected {where}")
        elif name in _TERMS and isinstance(x, np.ndarray):
            return self._tensor_of(x)
        return x

    def _tensor_of(self, x: Array) -> Any:
        """Return a copy of an array as a tensor; what torch has no type for stays for the checks to name."""
        device = f"cuda:{self._torch.cuda.current_device()}" if self._on_gpu else "cpu"
        if x.dtype.name == "bfloat16":
            bits = self._torch.from_numpy(np.array(x).view(np.int16))
            return bits.view(self._torch.bfloat16).to(device)
        if x.dtype.kind not in "fiub" or not x.dtype.isnative:
            return x
        return self._torch.from_numpy(np.array(x)).to(device)

    def give_back(self, array: Any, like: Any) -> Any:
        """Return the tensor itself."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """Return a new tensor."""
        dtype = getattr(self._torch, dtype) if isinstance(dtype, str) else dtype
        return self._torch.empty(shape, dtype=dtype, device=like.device)

    def from_host(self, array: Array, like: Any) -> Any:
        """Return numbers as a tensor."""
        return self._torch.from_numpy(np.array(array)).to(like.device)

    def allgather(self, value: Any) -> list[Any]:
        """Return a value of every rank."""
        values = [None] * self._size
        self._distributed.all_gather_object(values, value, group=self._group)
        return values

    def start_allgather_bytes(self, mine: Array) -> _Gathering:
        """Start to gather bytes of every rank, on GPUs through their memory."""
        torch, on_stream = self._torch, contextlib.nullcontext()
        if self._on_gpu:
            on_stream = torch.cuda.stream(_side_stream(torch.cuda.current_device()))
        with on_stream:
            tensor = torch.from_numpy(mine)
            tensor = tensor.cuda() if self._on_gpu else tensor
            everyone = torch.empty((self._size, mine.size), dtype=torch.uint8, device=tensor.device)
            work = self._distributed.all_gather(
                list(everyone.unbind(0)), tensor, group=self._group, async_op=True
            )
        return _Gathering(work, everyone, on_stream)

    def start_allgather(self, mine: Any, everyone: Any) -> _Works:
        """Start to gather a tensor of every rank."""
        parts = list(everyone.unbind(0))
        work = self._distributed.all_gather(parts, mine, group=self._group, async_op=True)
        return _Works([work], (mine, everyone))

    def start(
        self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]], after: Any = None
    ) -> _Works:
        """Start all messages as one group, as bytes."""
        distributed = self._distributed
        operations = [
            distributed.P2POp(
                operation,
                # Of one element the stride may be any, and a view as bytes wants 1.
                tensor.as_strided((tensor.numel(),), (1,)).view(self._torch.uint8),
                distributed.get_global_rank(self._group, rank),
                self._group,
            )
            for operation, messages in ((distributed.isend, sends), (distributed.irecv, receives))
            for tensor, rank in messages
            if tensor.numel()
        ]
        with self._behind(after):
            works = distributed.batch_isend_irecv(operations) if operations else []
        return _Works(works, [tensor for tensor, _ in (*sends, *receives)])

    def _behind(self, after: Any) -> AbstractContextManager[Any]:
        """Return what lets messages wait for a mark, and not for all of the current stream."""
        if after is None:
            return contextlib.nullcontext()
        stream = _side_stream(self._torch.cuda.current_device())
        stream.wait_event(after)
        on_stream: AbstractContextManager[Any] = self._torch.cuda.stream(stream)
        return on_stream
