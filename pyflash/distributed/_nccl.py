"""Messages by NCCL, through CuPy: arrays of CuPy on the GPU of the communicator."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _dtypes
from .._array_kinds import CUPY
from .._checks import describe
from .._description import Array
from .._errors import invalid, unsupported

#: What has to be an array of CuPy. All else may be whatever kernels take.
_SENT = ("q", "k", "v")

#: What arrays are multiplied by.
_TERMS = ("alibi_slopes", "sinks")

#: Bytes of a small value that travel with its length; a longer one takes a second collective.
_FRAME = 1024
#: Priority of messages: the first there is, since CUDA takes the nearest that it has.
_FIRST = -1000


def is_nccl(comm: Any) -> bool:
    """Return whether an object is a communicator of CuPy's NCCL."""
    module = sys.modules.get("cupy_backends.cuda.libs.nccl")
    kind = getattr(module, "NcclCommunicator", None)
    return kind is not None and isinstance(comm, kind)


def allgather_pickled(gather: Callable[[Array], Array], value: Any) -> list[Any]:
    """Return a value of every rank, by a function that gathers equally many bytes of each."""
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    frame = np.zeros(8 + _FRAME, np.uint8)
    frame[:8] = np.frombuffer(np.int64(data.size).tobytes(), np.uint8)
    frame[8 : 8 + min(data.size, _FRAME)] = data[:_FRAME]
    frames = gather(frame)
    lengths = np.ascontiguousarray(frames[:, :8]).view(np.int64)[:, 0]
    everyone = frames[:, 8:]
    if lengths.max() > _FRAME:
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: data.size] = data
        everyone = gather(padded)
    return [
        pickle.loads(mine[:length].tobytes()) for mine, length in zip(everyone, lengths.tolist(), strict=True)
    ]


@functools.cache
def _stream_of(device: int) -> Any:
    """Return the stream of a GPU on which messages travel beside the caller's work.

    What sends them takes part of the GPU. It comes first where a kernel leaves room, or a rank would hear
    from the others only when its kernel has ended.
    """
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True, priority=_FIRST)


class _Sent:
    """Messages under way. Waiting makes the current stream wait, not the process."""

    def __init__(self, cupy: Any, device: int, done: Any, arrays: Sequence[Any]) -> None:
        self._cupy, self._device, self._done, self._arrays = cupy, device, done, arrays

    def wait(self) -> None:
        self._cupy.cuda.get_current_stream(self._device).wait_event(self._done)
        self._arrays = ()


class _Gathering:
    """Bytes of all ranks under way to pinned memory of the host."""

    def __init__(self, done: Any, found: Array, kept: Sequence[Any]) -> None:
        self._done, self._found, self._kept = done, found, kept

    def wait(self) -> Array:
        self._done.synchronize()
        self._kept = ()
        return np.array(self._found)  # the pinned memory is used again


class NcclCommunicator:
    """A communicator of ``cupy.cuda.nccl``.

    Parameters
    ----------
    comm : cupy.cuda.nccl.NcclCommunicator
        Its messages must not be in flight while pyflash uses it.
    """

    def __init__(self, comm: Any) -> None:
        self._cupy = sys.modules["cupy"]
        self._nccl = sys.modules["cupy_backends.cuda.libs.nccl"]
        self._comm = comm
        self._rank, self._size = int(comm.rank_id()), int(comm.size())
        self._device = int(comm.device_id())
        self._stream = _stream_of(self._device)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def mark(self) -> Any:
        """Return an event of the current stream."""
        with self._cupy.cuda.Device(self._device):
            return self._cupy.cuda.get_current_stream(self._device).record()

    def see(self, name: str, x: Any) -> Any:
        """Return queries, keys and values, which have to be on the GPU, and all else as kernels take it."""
        is_cupy = isinstance(x, self._cupy.ndarray)
        if is_cupy and x.device.id != self._device:
            where = f"an array on GPU {x.device.id}"
            raise unsupported(name, where, "this communicator", f"expected GPU {self._device}")
        if name in _SENT and not is_cupy:
            raise invalid(name, describe(x), "an array of CuPy, for a communicator of NCCL")
        if name in _TERMS and isinstance(x, np.ndarray):
            with self._cupy.cuda.Device(self._device):
                return self._cupy.asarray(x)
        return x

    def give_back(self, array: Any, like: Any) -> Any:
        """Return the array itself."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """Return a new array."""
        dtype = _dtypes.numpy_dtype(dtype) if isinstance(dtype, str) else dtype
        with self._cupy.cuda.Device(self._device):
            return CUPY.new(shape, dtype, self._device)

    def from_host(self, array: Array, like: Any) -> Any:
        """Return numbers as an array."""
        with self._cupy.cuda.Device(self._device):
            return CUPY.upload(array, self._device)

    def allgather(self, value: Any) -> list[Any]:
        """Return a value of every rank."""
        return allgather_pickled(lambda mine: self.start_allgather_bytes(mine).wait(), value)

    def start_allgather_bytes(self, mine: Array) -> _Gathering:
        """Start to gather bytes of every rank through the memory of the GPUs."""
        cuda, num = self._cupy.cuda, mine.size
        with cuda.Device(self._device), self._stream as stream:
            pinned = np.frombuffer(cuda.alloc_pinned_memory((self._size + 1) * num + 1), np.uint8)
            ours, found = pinned[:num], pinned[num : (self._size + 1) * num].reshape(self._size, num)
            ours[:] = mine
            sent, everyone = (self._cupy.empty(x.shape, np.uint8) for x in (ours, found))
            sent.set(ours, stream)
            self._gather(sent, everyone)
            everyone.get(stream, out=found, blocking=False)
            return _Gathering(stream.record(), found, (pinned, sent, everyone))

    def start_allgather(self, mine: Any, everyone: Any) -> _Sent:
        """Start to gather an array of every rank."""
        return self._started(lambda: self._gather(mine, everyone), (mine, everyone))

    def _gather(self, mine: Any, everyone: Any) -> None:
        if not mine.nbytes:
            return
        where = (mine.data.ptr, everyone.data.ptr)
        self._comm.allGather(*where, mine.nbytes, self._nccl.NCCL_UINT8, self._stream.ptr)

    def start(
        self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]], after: Any = None
    ) -> _Sent:
        """Start all messages as one group, as bytes."""

        def post() -> None:
            how = (self._nccl.NCCL_UINT8,)
            self._nccl.groupStart()
            try:
                for post_one, messages in ((self._comm.send, sends), (self._comm.recv, receives)):
                    for array, rank in messages:
                        if array.size:
                            post_one(array.data.ptr, array.nbytes, *how, rank, self._stream.ptr)
            finally:
                self._nccl.groupEnd()

        return self._started(post, [array for array, _ in (*sends, *receives)], after)

    def _started(self, post: Callable[[], None], arrays: Sequence[Any], after: Any = None) -> _Sent:
        """Post messages behind what was computed before."""
        with self._cupy.cuda.Device(self._device):
            self._stream.wait_event(self.mark() if after is None else after)
            post()
            return _Sent(self._cupy, self._device, self._stream.record(), arrays)
