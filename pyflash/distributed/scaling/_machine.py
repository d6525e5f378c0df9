"""Speeds of ranks and links, the call, and both as measured points say them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._checks import integer
from ..._dtypes import BY_NAME
from ..._errors import invalid

#: Bytes that a merge of two states reads and writes, in bytes of a state: both are copied side by side (4),
#: merged (3) and put back (2). The last one reads them where they lie, and is counted like the others.
MERGE_PASSES = 9


def _positive(name: str, speed: float) -> None:
    if not speed > 0:
        raise invalid(name, speed, "a number above 0")


@dataclass(frozen=True)
class Link:
    """A connection between two ranks.

    Parameters
    ----------
    bytes_per_second : float
        Each way, of one rank while all others send too.
    latency : float, default 0
        Seconds of an empty message.
    """

    bytes_per_second: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _positive("bytes_per_second", self.bytes_per_second)

    def seconds(self, num_bytes: Any) -> Any:
        """Return how long messages take; none takes no time."""
        return np.where(np.asarray(num_bytes) > 0, self.latency + num_bytes / self.bytes_per_second, 0.0)


@dataclass(frozen=True)
class Hardware:
    """Speeds of one rank.

    Parameters
    ----------
    flops : float
        Floating point operations of the prefill kernel in a second, ``4 * head_dim`` for a row and a key.
    merge : float
        Bytes that merging states reads and writes in a second.
    copy : float
        Bytes that copying arrays reads and writes in a second.
    read : float
        Bytes of keys and values that decoding reads in a second.
    near : Link
        To ranks of the same host.
    far : Link, optional
        To ranks of other hosts; by default as `near`.
    ranks_per_host : int, optional
        By default all ranks share one host.
    step_seconds : float, default 0
        What a step of the ring costs its caller without any work: Python, launches, collectives. Hidden
        behind the work where that goes on by itself.
    decode_seconds : float, default 0
        The same of a call of `context_parallel_decode`, which hides nothing.
    overlaps : bool, default True
        Whether messages move, and the caller goes on, while the kernel works: NCCL does that, MPI does not.
    """

    flops: float
    merge: float
    copy: float
    read: float
    near: Link
    far: Link | None = None
    ranks_per_host: int | None = None
    step_seconds: float = 0.0
    decode_seconds: float = 0.0
    overlaps: bool = True

    def __post_init__(self) -> None:
        for name in ("flops", "merge", "copy", "read"):
            _positive(name, getattr(self, name))
        if self.ranks_per_host is not None:
            integer("ranks_per_host", self.ranks_per_host, 1)

    def links(self, ranks: int) -> tuple[int, Link, Link]:
        """Return how many ranks share a host, and the links near and far."""
        per_host = min(self.ranks_per_host or ranks, ranks)
        return per_host, self.near, self.far or self.near


@dataclass(frozen=True)
class Workload:
    """One call of attention over a whole sequence.

    Parameters
    ----------
    tokens : int
        Of the whole sequence, queries and keys alike; in decoding keys.
    heads, kv_heads, head_dim : int
        Of queries, of keys and values, and the width of both.
    itemsize : int, default 2
        Bytes of an element.
    causal : bool, default True
        Rows see the keys up to their own.
    batch : int, default 1
        Sequences.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2
    causal: bool = True
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "kv_heads", "head_dim", "itemsize", "batch"):
            integer(name, getattr(self, name), 1)
        if self.heads % self.kv_heads:
            raise invalid("heads", self.heads, f"a multiple of kv_heads, which is {self.kv_heads}")

    @property
    def pairs(self) -> float:
        """Pairs of a row and a key that it sees, of one head of one sequence."""
        return self.tokens * (self.tokens + 1) / 2 if self.causal else float(self.tokens**2)

    @property
    def flops_of_pair(self) -> int:
        """Floating point operations of a pair, over all heads and sequences."""
        return 4 * self.head_dim * self.heads * self.batch

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of a token, over all heads and sequences."""
        return 2 * self.head_dim * self.kv_heads * self.itemsize * self.batch

    @property
    def q_bytes(self) -> int:
        """Bytes of a token's queries, and of its result."""
        return self.head_dim * self.heads * self.itemsize * self.batch

    @property
    def state_bytes(self) -> int:
        """Bytes of a token's state in float32."""
        return 4 * (self.head_dim + 1) * self.heads * self.batch


#: An H200 in a cluster, for 16 bits with heads of 128. Measured with this library on two of them:
#: the kernel (causal, 131,072 tokens, both at once), and what a step costs (benchmarks/results/ring/gpu);
#: on one: copies, reading a cache. Nominal: links (NVLink 4, 400 Gbit/s a GPU). Assumed: merging as fast as
#: copying, latencies, and that a decode call costs what it costs ranks of MPI, measured.
H200 = Hardware(
    flops=592e12,
    merge=4.2e12,
    copy=4.2e12,
    read=4.0e12,
    near=Link(450e9, 5e-6),
    far=Link(50e9, 15e-6),
    ranks_per_host=8,
    step_seconds=7.4e-4,
    decode_seconds=1.65e-4,
)


def hardware_of(measured: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> Hardware:
    """Return the speeds that measured points say.

    Parameters
    ----------
    measured : dict
        What a file of benchmarks/results/ring holds.
    run : dict, optional
        One of its entries "prefill", whose `busy_seconds`, or else `alone_seconds`, give the kernel's speed;
        by default the first one. What it lacks is taken from the first one that has it.

    Returns
    -------
    Hardware
        Of one host. Without `merge_seconds` merging is as fast as copying, and what
        nobody measured costs nothing.

    Raises
    ------
    InvalidArgument
        No entry has `messages_seconds`.
    """
    run = measured["prefill"][0] if run is None else run

    def first(name: str) -> Mapping[str, Any] | None:
        return next((x for x in (run, *measured["prefill"]) if x.get(name)), None)

    sent, merged = first("messages_seconds"), first("merge_seconds")
    if sent is None:
        raise invalid("measured", "no messages_seconds", "the seconds of the ring's messages alone")
    copy = measured.get("copy_bytes_per_second", math.inf)
    merge = copy
    if merged is not None:
        state = workload_of(merged).state_bytes * merged["tokens"] / merged["ranks"]
        passed = MERGE_PASSES * state * (merged["ranks"] - 1)  # of the rank with most, whatever the schedule
        merge = passed / float(np.median(list(merged["merge_seconds"].values())))
    decodes = measured.get("decode", ())
    reads = [x["tokens"] * workload_of(x).kv_bytes / x["alone_seconds"] for x in decodes]
    gathers = [x["gather_seconds"] for x in decodes if "gather_seconds" in x]
    own, sent_bytes = workload_of(run), sent["tokens"] / sent["ranks"] * workload_of(sent).kv_bytes
    return Hardware(
        flops=own.pairs * own.flops_of_pair / run.get("busy_seconds", run["alone_seconds"]),
        merge=merge,
        copy=copy,
        read=float(np.median(reads)) if reads else math.inf,
        near=Link((sent["ranks"] - 1) * sent_bytes / sent["messages_seconds"]),
        step_seconds=measured.get("step_seconds", 0.0),
        decode_seconds=measured.get("decode_seconds", float(np.median(gathers)) if gathers else 0.0),
        overlaps=measured["engine"] != "MPI",
    )


def workload_of(run: Mapping[str, Any]) -> Workload:
    """Return the call of an entry of a file of measured points.

    Parameters
    ----------
    run : dict
        An entry "prefill" or "decode".

    Returns
    -------
    Workload
        The call.
    """
    names = ("tokens", "heads", "kv_heads", "head_dim", "batch")
    itemsize = BY_NAME[run["dtype"]].itemsize
    return Workload(**{name: run[name] for name in names}, itemsize=itemsize, causal=run.get("causal", True))
