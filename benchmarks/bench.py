"""Time pyflash beside its peers: each answer is checked, then all are timed in turn in one run.

    python benchmarks/bench.py                          all workloads, best instruction set
    python benchmarks/bench.py --isa avx2 --only 4096   the peers are held to AVX2 too
    python benchmarks/bench.py --json results/x.json

Medians of interleaved repetitions, next to the machine's own limits measured in the same run.
Bind the threads (OMP_PROC_BIND=true) and keep the machine quiet.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

#: Before any OpenMP runtime is loaded, which would bind this thread to one of them.
CPUS = sorted(os.sched_getaffinity(0))

import numpy as np  # noqa: E402
from limits import FLAGS, Limits  # noqa: E402
from workloads import WORKLOADS, Workload  # noqa: E402

import pyflash  # noqa: E402
from pyflash import _runtime  # noqa: E402

#: What holds the libraries under torch to an instruction set; they read it when they are loaded.
TORCH_ISA = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {},
    "scalar": {"ATEN_CPU_CAPABILITY": "default"},
}

Call = Callable[[], np.ndarray]


def pyflash_call(w: Workload, q: np.ndarray, k: np.ndarray, v: np.ndarray, isa: str, threads: int) -> Call:
    """Return the call under test; the result array is allocated once, like those of the peers."""
    out = np.empty(q.shape, q.dtype)
    return lambda: pyflash.flash_attention(
        q, k, v, causal=w.causal, layout="bhsd", out=out, isa=isa, num_threads=threads
    )


def torch_call(w: Workload, q: np.ndarray, k: np.ndarray, v: np.ndarray, threads: int) -> Call:
    """Return torch's scaled_dot_product_attention; heads of a decode group are packed as queries."""
    import torch

    torch.set_num_threads(threads)
    group = w.num_heads // w.num_kv_heads
    if w.seqlen_q == 1 and group > 1:
        q = q.reshape(w.batch, w.num_kv_heads, group, w.head_dim)
    tensors = [
        torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
        if w.dtype == "bfloat16"
        else torch.from_numpy(x)
        for x in (q, k, v)
    ]

    def call() -> np.ndarray:
        with torch.no_grad():
            out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=w.causal)
        return out.float().numpy() if w.dtype == "bfloat16" else out.numpy()

    return call


def check(w: Workload, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> float:
    """Return the largest error in the last rows of two heads, against float64."""
    rows = min(w.seqlen_q, 64)
    worst = 0.0
    out = out.reshape(q.shape).astype(np.float64)
    for head in {0, w.num_heads - 1}:
        kv_head = head // (w.num_heads // w.num_kv_heads)
        wide = (q[-1, head, -rows:], k[-1, kv_head], v[-1, kv_head])
        exact = pyflash.naive_attention(*(x.astype(np.float64) for x in wide), causal=w.causal)
        worst = max(worst, float(np.abs(out[-1, head, -rows:] - exact).max()))
    return worst


def measure(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Time the calls in turn, the order rotated, for about so many seconds in all."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    while len(times[names[0]]) < 5 or time.perf_counter() - start < seconds:
        for name in names:
            begin = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - begin)
        names.append(names.pop(0))
    return times


def run(w: Workload, isa: str, threads: int, seconds: float, peers: list[str]) -> dict:
    """Check and time one workload; return its row."""
    q, k, v = w.arrays()
    calls = {"pyflash": pyflash_call(w, q, k, v, isa, threads)}
    if "torch" in peers:
        calls["torch"] = torch_call(w, q, k, v, threads)
    errors = {name: check(w, q, k, v, call()) for name, call in calls.items()}
    tolerance = 1e-5 if w.dtype == "float32" else 2e-2
    assert errors["pyflash"] < tolerance, f"{w.name}: wrong by {errors['pyflash']}"
    times = measure(calls, seconds)
    return {
        "name": w.name,
        "flops": w.flops,
        "kv_bytes": w.kv_bytes,
        "bound": "read" if w.seqlen_q == 1 else "flops",
        "errors": errors,
        "median_seconds": {name: statistics.median(t) for name, t in times.items()},
        "repetitions": {name: len(t) for name, t in times.items()},
    }


def table(result: dict) -> str:
    """Return the rows as text: times, the fraction of the limit, and how much slower the peer is."""
    lines = [f"{'workload':<38}{'pyflash ms':>12}{'of limit':>10}{'torch ms':>12}{'ratio':>8}"]
    for row in result["rows"]:
        ours = row["median_seconds"]["pyflash"]
        limit = result["limits"]["flops" if row["bound"] == "flops" else "read_bytes"]
        work = row["flops"] if row["bound"] == "flops" else row["kv_bytes"]
        theirs = row["median_seconds"].get("torch")
        peer = f"{theirs * 1e3:>12.3f}{theirs / ours:>8.2f}" if theirs else f"{'-':>12}{'-':>8}"
        lines.append(f"{row['name']:<38}{ours * 1e3:>12.3f}{work / ours / limit:>10.1%}{peer}")
    return "\n".join(lines)


def machine() -> dict:
    """Return what a reader needs to know about where the numbers come from."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit + ("+changes" if dirty else ""),
        "runtime": dict(_runtime.runtime_report()),
        "platform": platform.platform(),
        "omp_proc_bind": os.environ.get("OMP_PROC_BIND"),
    }


def main() -> None:
    """Parse arguments, run, print the table and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", default=pyflash.available_isas()[-1], choices=list(FLAGS))
    parser.add_argument("--threads", type=int, default=len(CPUS))
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--seconds", type=float, default=3.0, help="time per workload")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    peers = []
    if not args.no_peers:
        os.environ.update(TORCH_ISA[args.isa])
        try:
            import torch

            peers.append("torch")
        except ImportError:
            print("torch is not installed: no peer", file=sys.stderr)
    limits = Limits(args.isa, CPUS)
    result = {
        "machine": machine(),
        "isa": args.isa,
        "threads": args.threads,
        "peers": {"torch": torch.__version__} if peers else {},
        "limits": {"flops": limits.flops(args.threads), "read_bytes": limits.read(args.threads)},
        "rows": [
            run(w, args.isa, args.threads, args.seconds, peers) for w in WORKLOADS if args.only in w.name
        ],
    }
    result["limits_after"] = {"flops": limits.flops(args.threads), "read_bytes": limits.read(args.threads)}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name in ("limits", "limits_after"):
        values = result[name]
        print(f"{name}: {values['flops'] / 1e9:.1f} GFLOP/s, read {values['read_bytes'] / 1e9:.1f} GB/s")
    print(f"{args.isa}, {args.threads} threads; causal counts half the operations")
    print(table(result))


if __name__ == "__main__":
    main()
