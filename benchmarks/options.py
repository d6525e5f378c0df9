"""Time what each option costs: a call with it beside the plain call, in turn, in one run.

    python benchmarks/options.py                        prefill and decode, best instruction set
    python benchmarks/options.py --only decode --json results/x.json

Figures are ratios of medians to the plain call of the same group. Bind the threads
(OMP_PROC_BIND=true) and keep the machine quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

import pyflash
from pyflash.bench._engine import interleave
from pyflash.bench._results import machine, own_commit

#: Name of an option -> keywords of the call, from (batch, num_heads, seqlen_q, seqlen_kv).
Options = dict[str, dict[str, Any]]
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8", "int4")


def options_of(num_heads: int, seqlen_q: int, seqlen_kv: int) -> Options:
    """Return the options that change scores or hide keys."""
    rng = np.random.default_rng(1)
    slopes = (2.0 ** -np.arange(1, num_heads + 1)).astype(np.float32)
    bias = rng.standard_normal((1, 1, seqlen_q, seqlen_kv)).astype(np.float32)
    hole = rng.random((1, 1, seqlen_q, seqlen_kv)) < 0.9
    block = np.zeros((1, 1, seqlen_q, seqlen_kv), bool)  # half of all tiles are dead
    for lo in range(0, seqlen_kv, 1024):
        block[..., lo : lo + 512] = True
    tree = np.minimum(np.arange(seqlen_q) - 1, 3)[np.newaxis] if seqlen_q <= 16 else None
    found: Options = {
        "softcap": {"softcap": 30.0},
        "alibi_slopes": {"alibi_slopes": slopes},
        "bias per row": {"bias": bias},
        "bias per head and row": {"bias": np.repeat(bias, num_heads, axis=1)},
        "bias per key (padding)": {"bias": bias[:, :, :1]},
        "mask, all true": {"mask": np.ones((1, 1, 1, seqlen_kv), bool)},
        "mask, one key in ten hidden": {"mask": hole},
        "mask, half of the tiles dead": {"mask": block},
        "window of 1/8": {"window": (seqlen_kv // 8, 0)},
        "window of 1/8 and 4 sink_tokens": {"window": (seqlen_kv // 8, 0), "sink_tokens": 4},
        "spans (two documents)": {
            "spans": (
                np.where(np.arange(seqlen_q) < seqlen_q // 2, 0, seqlen_kv // 2),
                np.where(np.arange(seqlen_q) < seqlen_q // 2, seqlen_kv // 2, seqlen_kv),
            )
        },
        "sinks": {"sinks": np.zeros(num_heads, np.float32)},
        "all terms": {
            "softcap": 30.0,
            "alibi_slopes": slopes,
            "bias": bias,
            "mask": hole,
            "sinks": np.zeros(num_heads, np.float32),
        },
    }
    if tree is not None:
        found["tree of drafts"] = {"tree": tree}
    return found


def quantised(k: np.ndarray, v: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Return keys and values ``(batch, seqlen, heads, head_dim)`` as stored, and their scales."""
    width = k.shape[-1] // 2 if dtype == "int4" else k.shape[-1]
    caches = [np.zeros((*k.shape[:-1], width), np.int8 if dtype == "int8" else np.uint8) for _ in range(2)]
    scales = [np.zeros(k.shape[:-1], np.float32) for _ in range(2)]
    short = {"float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2", "int4": "int4"}.get(dtype)
    options = {"k_scale": scales[0], "v_scale": scales[1], "kv_dtype": short}
    pyflash.append_kv(k, v, *caches, seq_lens=np.zeros(len(k), np.int32), **options)
    return caches[0], caches[1], options


def groups(threads: int) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """Yield groups of calls, the plain one first."""
    shapes = {"prefill 1x8x2048x64": (8, 8, 2048, 2048, 64), "prefill 1x8x2048x128": (8, 8, 2048, 2048, 128)}
    shapes["decode 32/8 1x16384x128"] = (32, 8, 1, 16384, 128)
    shapes["decode 32/8 4x16384x128"] = (32, 8, 4, 16384, 128)
    for name, (heads, kv_heads, seqlen_q, seqlen_kv, head_dim) in shapes.items():
        rng = np.random.default_rng(0)
        q = rng.standard_normal((1, seqlen_q, heads, head_dim), np.float32)
        k, v = (rng.standard_normal((1, seqlen_kv, kv_heads, head_dim), np.float32) for _ in range(2))
        out = np.empty_like(q)

        def call(k: np.ndarray = k, v: np.ndarray = v, q: Any = q, out: Any = out, **more: Any) -> Any:
            return lambda: pyflash.flash_attention(q, k, v, out=out, num_threads=threads, **more)

        calls = {"plain": call()}
        for option, keywords in options_of(heads, seqlen_q, seqlen_kv).items():
            calls[option] = call(**keywords)
        if seqlen_q > 16:
            calls["causal"] = call(causal=True)
        for dtype in ("float16", *QUANTISED):
            if dtype == "float16":
                calls["keys in float16"] = call(k.astype(np.float16), v.astype(np.float16))
            else:
                stored_k, stored_v, keywords = quantised(k, v, dtype)
                calls[f"keys in {dtype}, a scale per token"] = call(stored_k, stored_v, **keywords)
        yield name, calls


def timed(call: Callable[[], Any]) -> Callable[[], tuple[list[float], float]]:
    """Return a turn of one call."""

    def turn() -> tuple[list[float], float]:
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        return [took], took

    return turn


def main() -> None:
    """Parse arguments, run, print the table and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", default=pyflash.available_isas()[-1], choices=pyflash.available_isas())
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="groups whose name contains this")
    parser.add_argument("--seconds", type=float, default=20.0, help="time per group")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["PYFLASH_ISA"] = args.isa
    result: dict[str, Any] = {
        "machine": machine(),
        "commit": own_commit(),
        "isa": args.isa,
        "threads": args.threads,
        "groups": {},
    }
    for name, calls in groups(args.threads):
        if args.only not in name:
            continue
        for call in calls.values():
            call()
        rounds = interleave({option: timed(call) for option, call in calls.items()}, args.seconds)
        times = {option: statistics.median(chain.from_iterable(r)) for option, r in rounds.items()}
        result["groups"][name] = times
        print(f"{name}, {args.isa}, {args.threads} threads: plain {times['plain'] * 1e3:.3f} ms")
        for option, seconds in times.items():
            print(f"  {option:<40}{seconds / times['plain']:>8.3f}", flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
