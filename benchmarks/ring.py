"""A long prefill and a decode on one rank and on several: `mpiexec -n 2 python -m mpi4py benchmarks/ring.py`.

On the host each rank has one thread and messages are MPI's. With ``--gpu`` each rank has a GPU of its own,
arrays are CuPy's and messages NCCL's; MPI only introduces the ranks to each other. Rank 0 times one process
first, while the others wait. Then all of them run each schedule, in turn; the time of a run is that of its
slowest rank. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import pyflash
from pyflash.distributed import (
    communicator,
    context_parallel_decode,
    head_parallel_attention,
    ring_attention,
    shard,
)
from pyflash.distributed._schedules import SCHEDULES

COMM = MPI.COMM_WORLD
#: Largest error of an element, relative to the largest of its row.
TOLERANCE = {"float64": 1e-12, "float32": 1e-4, "float16": 1e-2}


class Host:
    """Ranks that are processes with a thread each."""

    engine, options = "MPI", {"num_threads": 1}

    def __init__(self) -> None:
        self.ranks: Any = COMM

    def random(self, seed: int, shape: tuple[int, ...], dtype: str) -> Any:
        return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)

    def contiguous(self, x: Any) -> Any:
        return np.ascontiguousarray(x)

    def synchronize(self) -> None:
        """Everything is done when it returns."""

    def largest_error(self, found: Any, want: Any) -> float:
        error = np.abs(found.astype("f8") - want).max(axis=-1)
        return float((error / np.abs(want).astype("f8").max(axis=-1)).max(initial=0))

    def on_all(self, work: Callable[[], Any]) -> Any:
        """Return what one rank computes: cores are shared."""
        return COMM.bcast(work() if COMM.rank == 0 else None)

    def most_bytes(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """Return a result, and the bytes of all arrays that were there at once."""
        tracemalloc.start()
        done = work()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return done, most


class Gpu:
    """Ranks with a GPU each, counted on this host."""

    engine, options = "NCCL", {}

    def __init__(self) -> None:
        import cupy
        from cupy.cuda import nccl

        self.cupy = cupy
        cupy.cuda.Device(COMM.rank % cupy.cuda.runtime.getDeviceCount()).use()
        self.ranks: Any = nccl.NcclCommunicator(COMM.size, COMM.bcast(nccl.get_unique_id()), COMM.rank)

    def random(self, seed: int, shape: tuple[int, ...], dtype: str) -> Any:
        found = self.cupy.empty(shape, dtype)
        flat, draw = found.reshape(-1), self.cupy.random.RandomState(seed)
        for first in range(0, flat.size, 1 << 26):  # not all in float32 at once
            part = flat[first : first + (1 << 26)]
            part[...] = draw.standard_normal(part.size, dtype=np.float32)
        return found

    def contiguous(self, x: Any) -> Any:
        return self.cupy.ascontiguousarray(x)

    def synchronize(self) -> None:
        self.cupy.cuda.Device().synchronize()

    def largest_error(self, found: Any, want: Any) -> float:
        largest = 0.0
        for first in range(0, found.shape[1], 8192):
            a, b = (x[:, first : first + 8192].astype("f4") for x in (found, want))
            error = self.cupy.abs(a - b).max(axis=-1) / self.cupy.abs(b).max(axis=-1)
            largest = max(largest, float(error.max()))
        return largest

    def on_all(self, work: Callable[[], Any]) -> Any:
        return work()

    def most_bytes(self, work: Callable[[], Any]) -> tuple[Any, int]:
        pool = self.cupy.get_default_memory_pool()
        pool.free_all_blocks()
        before = pool.used_bytes()
        done = work()
        self.synchronize()
        return done, pool.total_bytes() - before


def sleep_until_all_are_here() -> None:
    """A barrier that leaves the processor to the others: MPI's own spins."""
    request = COMM.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


class Bench:
    """Measures calls of one kind of machine."""

    def __init__(self, machine: Host | Gpu, args: argparse.Namespace) -> None:
        self.machine, self.args = machine, args

    def alone(self, work: Callable[[], Any]) -> float:
        """Seconds of rank 0 by itself."""
        seconds = []
        for _ in range(self.args.repeats + 1):
            sleep_until_all_are_here()
            if COMM.rank == 0:
                self.machine.synchronize()
                begin = time.perf_counter()
                work()
                self.machine.synchronize()
                seconds.append(time.perf_counter() - begin)
            sleep_until_all_are_here()
        return float(COMM.bcast(statistics.median(seconds[1:]) if seconds else None))

    def once(self, work: Callable[[], Any]) -> float:
        """Seconds of the slowest rank."""
        self.machine.synchronize()
        COMM.Barrier()
        begin = time.perf_counter()
        work()
        self.machine.synchronize()
        return float(COMM.allreduce(time.perf_counter() - begin, op=MPI.MAX))

    def together(self, works: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Seconds of several works, which take turns."""
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for repeat in range(self.args.repeats + 1):
            for name, work in works.items():
                taken = self.once(work)
                if repeat:  # the first is not counted
                    seconds[name].append(taken)
        return {name: statistics.median(values) for name, values in seconds.items()}

    def check(self, found: Any, want: Any, dtype: str, what: str) -> None:
        error = COMM.allreduce(self.machine.largest_error(found, want), op=MPI.MAX)
        if not error <= TOLERANCE[dtype]:
            raise SystemExit(f"{what} is wrong by {error:.2g} of the largest element of a row")

    def messages(self, k: Any, v: Any) -> Callable[[], None]:
        """What travels in a ring, without any computation between."""
        world = communicator(self.machine.ranks)
        held, coming = (k, v), tuple(world.empty(x.shape, x.dtype, x) for x in (k, v))

        def steps() -> None:
            nonlocal held, coming
            for _ in range(world.size - 1):
                sends = [(x, (world.rank + 1) % world.size) for x in held]
                world.start(sends, [(x, (world.rank - 1) % world.size) for x in coming]).wait()
                held, coming = coming, held

        return steps

    def prefill(self, tokens: int) -> dict[str, Any]:
        args, machine = self.args, self.machine
        heads = (args.heads, args.kv_heads, args.kv_heads)
        q, k, v = (
            machine.random(seed, (1, tokens, n, args.width), args.dtype) for seed, n in enumerate(heads)
        )
        options: dict[str, Any] = dict(causal=True, **machine.options)
        works: dict[str, Callable[[], Any]] = {}
        memory: dict[str, int] = {}
        whole = machine.on_all(lambda: pyflash.flash_attention(q, k, v, **options))
        for name in (*SCHEDULES, "heads"):
            schedule = "contiguous" if name == "heads" else name
            function = head_parallel_attention if name == "heads" else ring_attention
            how: dict[str, Any] = dict(rank=COMM.rank, size=COMM.size, schedule=schedule)
            parts = [machine.contiguous(shard(x, **how)) for x in (q, k, v)]

            def work(function=function, parts=parts, schedule=schedule) -> Any:
                return function(*parts, comm=machine.ranks, schedule=schedule, **options)

            mine, memory[name] = machine.most_bytes(work)
            self.check(mine, shard(whole, **how), args.dtype, f"{name} of {tokens} tokens")
            works[name] = work
            if name == "zigzag":
                works["messages"] = self.messages(*parts[1:])
        alone = self.alone(lambda: pyflash.flash_attention(q, k, v, **options))
        # All of it on all ranks: cores of one machine are slower when the others work too.
        works["busy"] = lambda: pyflash.flash_attention(q, k, v, **options)
        seconds = self.together(works)
        return {
            **dict(ranks=COMM.size, batch=1, tokens=tokens, heads=args.heads, kv_heads=args.kv_heads),
            **dict(head_dim=args.width, dtype=args.dtype, causal=True, alone_seconds=alone),
            "busy_seconds": seconds.pop("busy"),
            "seconds": {name: value for name, value in seconds.items() if name != "messages"},
            "messages_seconds": seconds["messages"],
            "bytes_of_a_rank": {name: int(COMM.allreduce(n, op=MPI.MAX)) for name, n in memory.items()},
        }

    def decode(self, tokens: int, batch: int) -> dict[str, Any]:
        args, machine = self.args, self.machine
        heads = (args.decode_heads, args.decode_kv_heads, args.decode_kv_heads)
        q, k, v = (
            machine.random(seed, (batch, 1 if not seed else tokens, n, args.width), args.dtype)
            for seed, n in enumerate(heads)
        )
        how: dict[str, Any] = dict(rank=COMM.rank, size=COMM.size, schedule="contiguous")
        parts = [machine.contiguous(shard(x, **how)) for x in (k, v)]
        options: dict[str, Any] = dict(machine.options)
        whole = machine.on_all(lambda: pyflash.flash_attention(q, k, v, **options))

        def work() -> Any:
            return context_parallel_decode(q, *parts, comm=machine.ranks, **options)

        self.check(work(), whole, args.dtype, f"the decode of {tokens} tokens")
        times = args.decode_steps

        def often(one: Callable[[], Any]) -> Callable[[], None]:
            return lambda: [one() for _ in range(times)] and None

        alone = self.alone(often(lambda: pyflash.flash_attention(q, k, v, **options))) / times
        world = communicator(machine.ranks)
        state = world.empty((batch * args.decode_heads * (args.width + 1),), "float32", q)
        states = world.empty((world.size, *state.shape), "float32", q)

        def gather() -> None:
            world.start_allgather_bytes(np.zeros(40, np.uint8)).wait()
            world.start_allgather_bytes(np.zeros(1, np.uint8)).wait()
            world.start_allgather(state, states).wait()

        seconds = self.together({"decode": often(work), "gather": often(gather)})
        return {
            **dict(ranks=COMM.size, batch=batch, rows=1, tokens=tokens, heads=args.decode_heads),
            **dict(kv_heads=args.decode_kv_heads, head_dim=args.width, dtype=args.dtype, alone_seconds=alone),
            **dict(seconds=seconds["decode"] / times, gather_seconds=seconds["gather"] / times),
        }

    def step(self) -> float:
        """Seconds of a ring's step that has nothing to do."""
        q = self.machine.random(0, (1, 16, 1, self.args.width), self.args.dtype)
        return (
            self.together({"": lambda: ring_attention(q, q, q, comm=self.machine.ranks, causal=True)})[""]
            / COMM.size
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="a GPU for each rank, NCCL between them")
    parser.add_argument("--length", type=int, nargs="+", default=[16384], help="tokens of prefills")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--decode", type=int, nargs="*", default=[], help="tokens of each sequence")
    parser.add_argument("--decode-batch", type=int, default=1)
    parser.add_argument("--decode-heads", type=int, default=8)
    parser.add_argument("--decode-kv-heads", type=int, default=2)
    parser.add_argument("--decode-steps", type=int, default=20, help="calls that are timed together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--machine", default="", help="what the result file says")
    parser.add_argument("--commit", default="", help="what the result file says; by default git's")
    parser.add_argument("--json", type=Path, help="write results here")
    return parser.parse_args()


def show(name: str, seconds: float, alone: float, note: str = "") -> None:
    print(f"{name:11} {1e3 * seconds:10.3f} ms  {alone / seconds:5.2f} times as fast{note}")


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    args = arguments()
    bench = Bench(Gpu() if args.gpu else Host(), args)
    result: dict[str, Any] = {
        "machine": args.machine or os.uname().machine,
        **dict(engine=bench.machine.engine, date=date.today().isoformat(), commit=args.commit or commit()),
        **dict(ranks_per_host=COMM.size, step_seconds=bench.step(), prefill=[], decode=[]),
    }
    for tokens in args.length:
        row = bench.prefill(tokens)
        result["prefill"].append(row)
        if COMM.rank == 0:
            shape = f"{args.heads}/{args.kv_heads} heads of {args.width}, {args.dtype}"
            print(
                f"{COMM.size} ranks, {tokens} tokens, {shape}, one rank {1e3 * row['alone_seconds']:.3f} ms, "
                f"while the others do the same {1e3 * row['busy_seconds']:.3f} ms"
            )
            for name, seconds in row["seconds"].items():
                note = f", {row['bytes_of_a_rank'][name] / 1e6:.1f} MB a rank"
                show(name, seconds, row["alone_seconds"], note)
            print(f"{'messages':11} {1e3 * row['messages_seconds']:10.3f} ms", flush=True)
    for tokens in args.decode:
        row = bench.decode(tokens, args.decode_batch)
        result["decode"].append(row)
        if COMM.rank == 0:
            shape = f"{args.decode_heads}/{args.decode_kv_heads} heads of {args.width}, {args.dtype}"
            print(f"decode of {args.decode_batch} x {tokens} tokens, {shape}, one rank ", end="")
            print(f"{1e3 * row['alone_seconds']:.3f} ms")
            show("decode", row["seconds"], row["alone_seconds"])
            print(f"{'collectives':11} {1e3 * row['gather_seconds']:10.3f} ms", flush=True)
    if COMM.rank == 0 and args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
