"""Prefill on a GPU beside PyTorch's kernels, without the host: `python benchmarks/prefill_gpu.py`.

Calls are put into CUDA graphs, which take turns in rotated order; what is given is the median of the replays.
`pyflash bench gpu` measures calls as a program makes them, with their Python. Needs PyTorch beside CuPy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyflash

#: (head_dim, heads) with 16,384 tokens in all.
SHAPES = ((128, 16), (64, 32), (256, 8))
LENGTHS = (16384, 4096, 1024, 512)
TOKENS = 16384
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
#: Largest difference from PyTorch's answer, of values of size 1.
TOLERANCE = {"bfloat16": 0.02, "float16": 0.004}


def calls(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Callable[[], Any]]:
    """Return what is compared, by name."""
    out = torch.empty_like(q)

    def own() -> Any:
        pyflash.flash_attention(q, k, v, layout="bhsd", causal=causal, out=out)
        return out

    def peer(backend: SDPBackend) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend), torch.no_grad():
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    return {"pyflash": own} | {name: peer(backend) for name, backend in PEERS.items()}


def captured(call: Callable[[], Any], times: int) -> Any:
    """Return a graph of so many calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(times):
                call()
    return graph


def milliseconds(graph: Any) -> float:
    """Return the time of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def measured(
    head_dim: int, heads: int, length: int, causal: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """Return one row: TFLOP/s by name, causal counted as half."""
    shape = TOKENS // length, heads, length, head_dim
    q, k, v = (torch.randn(shape, device="cuda", dtype=getattr(torch, args.dtype)) for _ in range(3))
    compared = calls(q, k, v, causal)
    want = compared["flash"]().float()
    error = float((compared["pyflash"]().float() - want).abs().max())
    if not error <= TOLERANCE[args.dtype]:
        raise SystemExit(f"wrong by {error:.2g} at {shape}, causal={causal}")
    flops = 4 * TOKENS * heads * length * head_dim / (2 if causal else 1)
    times = max(1, int(args.flops / flops))
    graphs = {name: captured(call, times) for name, call in compared.items()}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for turn in range(args.rounds + 1):
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            time = milliseconds(graphs[name]) / times
            if turn:  # the first is not counted
                found[name].append(time)
    rates = {name: round(flops / statistics.median(times) / 1e9, 1) for name, times in found.items()}
    return dict(head_dim=head_dim, heads=heads, length=length, causal=causal, error=error, tflops=rates)


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=TOLERANCE, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--flops", type=float, default=2e12, help="of one replay, at least one call's")
    parser.add_argument("--commit", default="", help="what the result file says; by default git's")
    parser.add_argument("--json", type=Path, help="write results here")
    args = parser.parse_args()
    rows = []
    for head_dim, heads in SHAPES:
        for length in LENGTHS:
            for causal in (False, True):
                rows.append(row := measured(head_dim, heads, length, causal, args))
                rates = "  ".join(f"{name} {rate:6.1f}" for name, rate in row["tflops"].items())
                print(f"{head_dim:4} {length:6} {'causal' if causal else 'full':7} {rates}", flush=True)
    result = {
        **dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, dtype=args.dtype),
        **dict(date=date.today().isoformat(), commit=args.commit or commit(), tokens=TOKENS, rows=rows),
        **dict(how="CUDA graphs in turn, median of replays", cpus=os.cpu_count()),
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
