"""Time pyflash beside its peers: each answer is checked, then all are timed in turn in one run.

    python benchmarks/bench.py                              all workloads, the peers of `make bench-peers`
    python benchmarks/bench.py --only "decode-*" tiny-float32   some of them
    python benchmarks/bench.py --peer torch=/usr/bin/python3 --threads 16 --runs 5
    python benchmarks/bench.py --no-peers --also before=../old-checkout --only "decode-*"
    python benchmarks/bench.py --only "over-n-*" --threads 1,2   cost over N; scaling over threads

Needs NumPy and a C compiler beside what it compares, and no network. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
import os
import sys
from fnmatch import fnmatch
from pathlib import Path

import peers
from driver import HERE, Library, Row, Session, by_group, commit, default_path, save
from limits import described
from workloads import WORKLOADS, Workload


def add_arguments(
    parser: argparse._ArgumentGroup | argparse.ArgumentParser, add: str = "add_argument"
) -> None:
    """Declare what says how to measure; pytest's groups call their method `addoption`."""
    option = getattr(parser, add)
    option("--peer", action="append", default=[], metavar="NAME=PYTHON", help="a peer's interpreter")
    option("--no-peers", action="store_true", help="none of build/peers")
    option("--also", action="append", default=[], metavar="NAME=WHERE", help="another pyflash: a Python or a "
           "folder to import it from")  # fmt: skip
    option("--isa", default="", help="instruction set of pyflash and, where they can be held, of the peers")
    option("--threads", default=str(len(os.sched_getaffinity(0))), help="one number, or several with commas")
    option("--seconds", type=float, default=1.0, help="time per workload and library")
    option("--turn", type=float, default=0.05, help="seconds of one turn")
    option("--rotate", type=float, default=0.0, metavar="MIB", help="decodes rotate through sets of keys and "
           "values that are so large together: for caches that are larger than one set")  # fmt: skip
    option(
        "--commit", default=commit(HERE.parent), help="what the result file says, by default what git says"
    )
    option("--results", type=Path, help="result file; by default benchmarks/results/MACHINE-ISA-THREADS.json")


def libraries(args: argparse.Namespace) -> list[Library]:
    """Return pyflash, its other builds, and the peers."""
    found = [Library("pyflash", "pyflash", sys.executable)]
    found += [Library.parse(text, "pyflash") for text in args.also]
    named = [Library.parse(text) for text in args.peer]
    for peer in named:
        if peer.module not in peers.PEERS:
            raise SystemExit(f"--peer {peer.name}: there are {', '.join(peers.PEERS)}")
    if not args.no_peers:
        given = {peer.name for peer in named}
        found += [Library(n, n, str(python)) for n, python in peers.installed().items() if n not in given]
        missing = set(peers.PEERS) - given - set(peers.installed())
        if missing:
            print(f"not installed, not measured: {', '.join(sorted(missing))} (make bench-peers)")
    return found + named


def session(args: argparse.Namespace, threads: int) -> Session:
    """Return a run with these arguments."""
    return Session(libraries(args), args.isa, threads, args.seconds, args.turn, args.rotate, args.commit)


def picked(patterns: list[str]) -> list[Workload]:
    """Return the workloads whose names fit one of some shell patterns; all without any."""
    return [w for w in WORKLOADS.values() if not patterns or any(fnmatch(w.name, p) for p in patterns)]


def line(workload: Workload, library: str, row: Row, limits: dict[str, float]) -> str:
    """Return a row in words."""
    if "growth_bytes" in row:
        said = f"{row['growth_bytes'] / 2**20:>10.2f} MiB beyond the output"
        if "workspace_bytes" in row["notes"]:
            said += f", of which work space {row['notes']['workspace_bytes'] / 2**20:.2f}"
    elif "median" in row:
        rate = workload.flops / row["median"] / 1e9, workload.kv_bytes / row["median"] / 1e9
        said = f"{row['median'] * 1e3:>10.4f} ms {rate[0]:>8.1f} GFLOP/s {rate[1]:>6.1f} GB/s"
        said += f" {fraction(workload, row['median'], limits):>6.1%} of limit"
        said += f" {row['ratio']:>6.2f}x the time" if "ratio" in row else ""
        said += f" {row['base_ratio']:>6.3f} of {workload.base}" if "base_ratio" in row else ""
    elif "unsupported" in row:
        said = f"{'-':>10}    {row['unsupported']}"
    else:
        said = f"{'ERROR':>10}    {row.get('failed') or 'wrong by {wrong:.2g}'.format(**row)}"
    return f"{workload.name:<44}{library:<12}{said}"


def fraction(w: Workload, seconds: float, limits: dict[str, float]) -> float:
    """Return the part of the machine's limit that a time reaches: what binds is the longer of both."""
    peak = limits["float64" if w.dtype == "float64" else "float32"]
    if w.dtype == "bfloat16":
        peak = limits.get("amx", peak)
    return max(w.flops / peak, w.kv_bytes / limits["read"]) / seconds


def main() -> None:
    """Parse arguments, run, print the rows and write the file after each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="workloads whose names fit")
    parser.add_argument("--runs", type=int, default=1, help="whole runs; the median of their medians counts")
    args = parser.parse_args()
    workloads = picked(args.only)
    if not workloads:
        parser.error(f"no workload fits {args.only}")
    runs: list[Row] = []
    for number in range(args.runs):
        for threads in [int(n) for n in args.threads.split(",")]:
            run = session(args, threads)
            print(f"run {number + 1} of {args.runs}, {run.isa}, {threads} threads: {described(run.before)}")
            rows: dict[tuple[str, str], Row] = {}
            for workloads_of_group in by_group(workloads):
                group = run.group(workloads_of_group)
                for (name, library), row in group.rows.items():
                    print(line(WORKLOADS[name], library, row, run.before), flush=True)
                rows |= group.rows
            runs.append(run.finished(rows))
            limits = runs[-1]["limits"]
            agreed = "agree" if limits["agree"] else "DO NOT AGREE within 5 %: this run does not count"
            print(f"limits afterwards: {described(limits['after'])}: they {agreed}")
            path = args.results or default_path(run.header(), runs)
            save(path, run.header(), runs)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
