"""A long prefill on one rank and on several, each with one thread: `mpiexec -n 2 python benchmarks/ring.py`.

Rank 0 times one process first, while the others wait. Then all of them run each schedule, in turn; the time
of a run is that of its slowest rank. Results are compared before anything is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc

import numpy as np
from mpi4py import MPI

import pyflash
from pyflash.distributed import communicator, head_parallel_attention, ring_attention, shard
from pyflash.distributed._schedules import SCHEDULES


def sleep_until_all_are_here(comm) -> None:
    """A barrier that leaves the processor to the others: MPI's own spins."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def timed(comm, work) -> float:
    """Seconds of the slowest rank."""
    comm.Barrier()
    begin = time.perf_counter()
    work()
    return comm.allreduce(time.perf_counter() - begin, op=MPI.MAX)


def moved(comm, parts) -> float:
    """Seconds that the messages of one call take alone, without any computation between them."""
    world, rank, size = communicator(comm), comm.rank, comm.size
    k, v = (np.ascontiguousarray(x) for x in parts[1:])
    held, coming = (k, v), (np.empty_like(k), np.empty_like(v))

    def steps() -> None:
        nonlocal held, coming
        for _ in range(size - 1):
            world.start(
                [(x, (rank + 1) % size) for x in held], [(x, (rank - 1) % size) for x in coming]
            ).wait()
            held, coming = coming, held

    return timed(comm, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16384, help="tokens")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(0)
    heads = (args.heads, args.kv_heads, args.kv_heads)
    q, k, v = (
        rng.standard_normal((1, args.length, n, args.width), dtype=np.float32).astype(args.dtype)
        for n in heads
    )
    alone = []
    options = dict(causal=True, num_threads=1)
    out = None
    for _ in range(args.repeats):
        sleep_until_all_are_here(comm)
        if comm.rank == 0:
            begin = time.perf_counter()
            out = pyflash.flash_attention(q, k, v, **options)
            alone.append(time.perf_counter() - begin)
        sleep_until_all_are_here(comm)
    out = comm.bcast(out)
    seconds: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    for repeat in range(args.repeats + 1):  # the first is not counted
        for name in (*SCHEDULES, "heads"):
            schedule = "contiguous" if name == "heads" else name
            function = head_parallel_attention if name == "heads" else ring_attention
            parts = [
                np.ascontiguousarray(shard(x, comm.rank, comm.size, schedule=schedule)) for x in (q, k, v)
            ]

            def work(function=function, parts=parts, schedule=schedule):
                return function(*parts, comm=comm, schedule=schedule, **options)

            if not repeat:
                tracemalloc.start()
                mine = work()
                memory[name] = comm.allreduce(tracemalloc.get_traced_memory()[1], op=MPI.MAX)
                tracemalloc.stop()
                want = shard(out, comm.rank, comm.size, schedule=schedule)
                tolerance = 2e-6 if args.dtype == "float32" else 2e-2
                np.testing.assert_allclose(mine.astype(np.float32), want.astype(np.float32), atol=tolerance)
                continue
            seconds.setdefault(name, []).append(timed(comm, work))
            if name == "zigzag":
                seconds.setdefault("messages", []).append(moved(comm, parts))
    if comm.rank:
        return
    one = statistics.median(alone)
    shape = f"{args.heads}/{args.kv_heads} heads of {args.width}, {args.dtype}"
    print(f"{comm.size} ranks, {args.length} tokens, {shape}")
    print(f"one rank    {one:8.3f} s")
    for name, values in seconds.items():
        middle = statistics.median(values)
        note = (
            ""
            if name == "messages"
            else f"  {one / middle:5.2f} times as fast, {memory[name] / 1e6:.1f} MB a rank"
        )
        print(f"{name:11} {middle:8.4f} s{note}")


if __name__ == "__main__":
    main()
