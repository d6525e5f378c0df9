"""Time the CUDA kernels beside PyTorch's, and where that ends in time beside C and NumPy, in one process.

    python benchmarks/bench_gpu.py                                        all workloads
    python benchmarks/bench_gpu.py --only "prefill-*x128*" --seconds 1    some of them, longer
    python benchmarks/bench_gpu.py --results build/gpu.json               the file to write

Needs an NVIDIA GPU, CuPy, and PyTorch for CUDA, which has the peers and makes the arrays, once, on the
device. Rows of each answer are compared with float64 before it is timed. Then those on the GPU have turns, in
random order, on the same tensors, and after them those on the host. How a time is taken:

* prefill: CUDA events around a batch of calls of about --turn seconds, after a call that does not count.
  Outputs are passed in, where the library takes them.
* decode: the same around replays of a CUDA graph that holds one call for each of several sets of keys and
  values, together several times the second-level cache: no set is found there, and the host does not count.
* c, numpy: the clock of the host around each call; the arrays lie in host memory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from driver import HERE, MIN_ROUNDS, TOLERANCE, Row, checked_rows, commit, machine
from workloads import Workload

DEVICE = "cuda"  # the current one
#: Peers, and the backend of scaled_dot_product_attention that each is.
TORCH = {
    "torch-flash": "FLASH_ATTENTION",
    "torch-cudnn": "CUDNN_ATTENTION",
    "torch-efficient": "EFFICIENT_ATTENTION",
}
#: How PyTorch says that such a backend has no kernel for a call.
NO_KERNEL = ("No available kernel", "No viable backend")
LIBRARIES = ("cuda", *TORCH, "c", "numpy")
#: The largest workload of the backends on the host, in operations and in bytes of keys and values.
MOST_ON_HOST = {"c": (3e11, 2e9), "numpy": (5e9, 1e8)}
#: Sets of keys and values of a decode hold so many times what the second-level cache does.
ROTATED = 6
DEFAULT_RESULTS = HERE.parent / "build" / "gpu-benchmark.json"


def _prefills() -> Iterator[Workload]:
    """Yield calls of 16384 tokens in all, and smaller ones that every backend gets through."""
    for d, heads in ((64, 32), (128, 16), (256, 8)):
        for n in (1024, 4096, 16384):
            for causal in (False, True):
                name = f"prefill-{16384 // n}x{heads}x{n}x{d}{'-causal' if causal else ''}-bfloat16"
                yield Workload(name, "prefill", 16384 // n, heads, heads, n, n, d, causal, "bfloat16")
    shapes = [("float32", 16, 4096, 128), *((t, 8, 1024, 64) for t in ("float32", "float16", "bfloat16"))]
    for dtype, heads, n, d in shapes:
        name = f"prefill-1x{heads}x{n}x{d}-{dtype}"
        yield Workload(name, "prefill", 1, heads, heads, n, n, d, False, dtype)


def _decodes() -> Iterator[Workload]:
    for b, n in ((1, 8192), (16, 8192), (64, 4096)):
        yield Workload(f"decode-{b}x{n}-bfloat16", "decode", b, 32, 8, 1, n, 128, False, "bfloat16")


WORKLOADS = {w.name: w for w in (*_prefills(), *_decodes())}


class Unsupported(Exception):
    """The library has no such call, or none that ends in time."""


class Timed(NamedTuple):
    """A call that is ready: its turns, what it answered and what the reader should know."""

    turn: Callable[[], float]  # seconds of one call
    answers: list[Any]  # (set, output) of the sets that are checked
    notes: Row


def missing() -> str | None:
    """Return why nothing can be measured here, None if it can."""
    import pyflash

    if (reason := pyflash.available_backends()["cuda"]) is not None:
        return f"cuda: {reason}"
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return f"PyTorch, which has the peers and makes the arrays, cannot be imported: {error}"
    return None if torch.cuda.is_available() else f"PyTorch {torch.__version__} finds no GPU"


def picked(patterns: list[str]) -> list[Workload]:
    """Return the workloads whose names fit one of some shell patterns; all without any."""
    return [w for w in WORKLOADS.values() if not patterns or any(fnmatch(w.name, p) for p in patterns)]


def exact_row(w: Workload, q: np.ndarray, k: np.ndarray, v: np.ndarray, query: int) -> np.ndarray:
    """Return one row of attention in float64, the textbook's way; q is the row, k and v its head's."""
    visible = query + 1 + w.seqlen_kv - w.seqlen_q if w.causal else w.seqlen_kv
    scores = k[:visible] @ q * w.head_dim**-0.5
    weights = np.exp(scores - scores.max())
    return weights @ v[:visible] / weights.sum()


def num_sets(w: Workload, cache_bytes: int) -> int:
    """Return how many sets of keys and values a workload rotates through."""
    if w.seqlen_q > 1:
        return 1
    return max(2, math.ceil(ROTATED * cache_bytes / w.kv_bytes))


def in_turn(turns: dict[str, Callable[[], float]], seconds: float) -> dict[str, list[float]]:
    """Give each its turn, round by round in random order, for about so many seconds; the times of each."""
    rng, names = np.random.default_rng(0), list(turns)
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    while names and (len(times[names[0]]) < MIN_ROUNDS or time.perf_counter() < end):
        for index in rng.permutation(len(names)):
            times[names[index]].append(turns[names[index]]())
    return times


class Tensors:
    """The inputs of a workload on the device, in layout bhsd."""

    def __init__(self, w: Workload) -> None:
        torch = importlib.import_module("torch")
        generator = torch.Generator(DEVICE).manual_seed(0)

        def normal(heads: int, seqlen: int) -> Any:
            shape, dtype = (w.batch, heads, seqlen, w.head_dim), getattr(torch, w.dtype)
            return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)

        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self.torch, self.w = torch, w
        self.q = normal(w.num_heads, w.seqlen_q)
        self.sets = [
            (normal(w.num_kv_heads, w.seqlen_kv), normal(w.num_kv_heads, w.seqlen_kv))
            for _ in range(num_sets(w, cache_bytes))
        ]

    def error(self, number: int, out: Any) -> float:
        """Return the largest error of some rows of an answer, relative to their largest element."""
        w, (k, v) = self.w, self.sets[number]
        out = out.reshape(w.batch, w.num_heads, w.seqlen_q, w.head_dim)
        rows = checked_rows(w)

        def numbers(x: Any) -> np.ndarray:
            return x.double().cpu().numpy()

        exact = []
        for b, h, i in rows:
            kv = h // (w.num_heads // w.num_kv_heads)
            exact.append(exact_row(w, numbers(self.q[b, h, i]), numbers(k[b, kv]), numbers(v[b, kv]), i))
        found = np.array([numbers(out[row]) for row in rows])
        return float(np.abs(found - exact).max() / np.abs(exact).max())


class Bench:
    """Measures workloads, one after another."""

    def __init__(self, seconds: float, turn: float) -> None:
        self.torch = importlib.import_module("torch")
        self.seconds, self.turn_seconds = seconds, turn
        self.limits = [self.measure_limits()]

    # --- what is timed ---

    def _prepare(self, library: str, tensors: Tensors) -> Timed:
        if library in MOST_ON_HOST:
            return self._on_host(library, tensors)
        if library == "cuda":
            return self._pyflash(tensors)
        return self._peer(library, tensors)

    def _pyflash(self, tensors: Tensors) -> Timed:
        import pyflash

        q, torch, w = tensors.q, self.torch, tensors.w
        outs = [torch.full_like(q, float("nan")) for _ in tensors.sets]
        options: dict[str, Any] = {"layout": "bhsd", "causal": w.causal}
        told = pyflash.explain(q, *tensors.sets[0], out=outs[0], **options)
        workspace = torch.empty(max(told.workspace_bytes, 1), dtype=torch.uint8, device=DEVICE)

        def one(number: int) -> Any:
            k, v = tensors.sets[number]
            pyflash.flash_attention(q, k, v, out=outs[number], workspace=workspace, **options)
            return outs[number]

        notes = {"kernel": told.kernel, "splits": told.num_splits, "workspace_bytes": told.workspace_bytes}
        return self._on_device(tensors, one, notes)

    def _peer(self, library: str, tensors: Tensors) -> Timed:
        """Return PyTorch's call; of the two ways to share key/value heads the faster one."""
        w, torch = tensors.w, self.torch
        if library == "torch-efficient" and w.dtype != "float32":
            raise Unsupported("timed for float32 only, which the others do not have")
        attention = torch.nn.functional.scaled_dot_product_attention
        attend = importlib.import_module("torch.nn.attention")
        backend = [getattr(attend.SDPBackend, TORCH[library])]

        def form(q: Any, **options: Any) -> Callable[[int], Any]:
            def one(number: int) -> Any:
                return attention(q, *tensors.sets[number], is_causal=w.causal, **options)

            return one

        forms = {"": form(tensors.q)}
        if w.num_heads != w.num_kv_heads:
            forms = {"enable_gqa": form(tensors.q, enable_gqa=True)}
            if not w.causal:  # queries of a head would count as later ones than those of the head before
                packed = tensors.q.reshape(w.batch, w.num_kv_heads, -1, w.head_dim)
                forms["heads as queries"] = form(packed)
        found, refused = [], ""
        for name, one in forms.items():
            notes = {"kernel": TORCH[library], "form": name}
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # which say why there is no kernel
                    found.append(self._on_device(tensors, one, notes, lambda: attend.sdpa_kernel(backend)))
            except RuntimeError as error:
                if not str(error).startswith(NO_KERNEL):
                    raise
                refused = str(error).splitlines()[0]
        if not found:
            raise Unsupported(refused)
        return min(found, key=lambda timed: timed.turn())

    def _on_host(self, library: str, tensors: Tensors) -> Timed:
        import pyflash

        w = tensors.w
        if w.flops > MOST_ON_HOST[library][0] or w.kv_bytes > MOST_ON_HOST[library][1]:
            raise Unsupported("would take too long")
        q, (k, v) = tensors.q.cpu(), (x.cpu() for x in tensors.sets[0])
        options: dict[str, Any] = {"layout": "bhsd", "causal": w.causal, "backend": library}
        out = pyflash.flash_attention(q, k, v, **options)

        def turn() -> float:
            begin = time.perf_counter()
            pyflash.flash_attention(q, k, v, out=out, **options)
            return time.perf_counter() - begin

        return Timed(turn, [(0, out)], {"kernel": pyflash.explain(q, k, v, **options).kernel})

    def _on_device(
        self,
        tensors: Tensors,
        one: Callable[[int], Any],
        notes: Row,
        context: Callable[[], Any] = contextlib.nullcontext,
    ) -> Timed:
        """Return a call of one set of keys as turns that are timed on the device."""
        torch, sets = self.torch, range(len(tensors.sets))
        with torch.no_grad(), context():
            answers = [(n, one(n).clone()) for n in sorted({0, len(sets) - 1})]
            run = (lambda: one(0)) if len(sets) == 1 else self._captured(one, sets)
        torch.cuda.synchronize()

        def timed(count: int) -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.no_grad(), context():
                run()  # does not count
                begin.record()
                for _ in range(count):
                    run()
                end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3 / count

        count = max(1, round(self.turn_seconds / max(timed(1), 1e-6)))
        return Timed(lambda: timed(count) / len(sets), answers, notes)

    def _captured(self, one: Callable[[int], Any], sets: range) -> Callable[[], Any]:
        """Return what replays the calls of all sets as one graph."""
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for number in sets:
                one(number)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [one(number) for number in sets]
        return lambda: (graph.replay(), kept)

    # --- rows ---

    def rows(self, w: Workload, libraries: tuple[str, ...] = LIBRARIES) -> dict[str, Row]:
        """Return a row for each library, with its times per call or why there are none."""
        self.torch.cuda.empty_cache()  # of the workload before
        tensors, rows, turns = Tensors(w), {}, {}
        for library in libraries:
            rows[library] = self._checked(library, tensors, turns)
        times: dict[str, list[float]] = {}
        for of_host in (False, True):  # a GPU that waits for the host cools down, and is faster for a while
            there = {name: turn for name, turn in turns.items() if (name in MOST_ON_HOST) == of_host}
            times |= in_turn(there, self.seconds * len(there))
        for library, found in times.items():
            rows[library] |= {"median": statistics.median(found), "min": min(found), "times": found}
            if library != "cuda" and "cuda" in times:
                rows[library]["ratio"] = ratio(found, times["cuda"])
        return rows

    def _checked(self, library: str, tensors: Tensors, turns: dict[str, Callable[[], float]]) -> Row:
        try:
            timed = self._prepare(library, tensors)
            error = max(tensors.error(number, out) for number, out in timed.answers)
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        except Exception as failure:  # of any library: the row shows it, the other rows go on
            return {"failed": f"{type(failure).__name__}: {failure}".splitlines()[0]}
        if not error <= TOLERANCE[tensors.w.dtype]:  # NaN is wrong as well
            return {"wrong": error}
        turns[library] = timed.turn
        return {**timed.notes, "error": error}

    # --- the machine ---

    def measure_limits(self) -> dict[str, float]:
        """Return bytes copied and bfloat16 operations per second, by PyTorch, best of a few rounds."""
        torch = self.torch
        source = torch.zeros(2**30, dtype=torch.uint8, device=DEVICE)
        target, a = torch.empty_like(source), torch.randn(8192, 8192, device=DEVICE).bfloat16()

        def rate(run: Callable[[], Any], done: float) -> float:
            def seconds() -> float:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(10):
                    run()
                end.record()
                end.synchronize()
                return begin.elapsed_time(end) / 1e4

            seconds()
            return done / min(seconds() for _ in range(3))

        found = {"copy": rate(lambda: target.copy_(source), 2.0 * source.numel())}
        found["matmul"] = rate(lambda: a @ a, 2.0 * 8192**3)
        return found

    def header(self, of_commit: str) -> Row:
        """Return what a reader needs to know about where the numbers come from."""
        import cupy

        import pyflash

        properties = self.torch.cuda.get_device_properties(0)
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
            "commit": of_commit,
            "machine": {**machine(), "gpu": properties.name, "sms": properties.multi_processor_count},
            "gpu": smi("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit"),
            "versions": {
                "pyflash": pyflash.__version__,
                "cupy": cupy.__version__,
                "torch": self.torch.__version__,
                "cudnn": self.torch.backends.cudnn.version(),
            },
            "settings": {"seconds": self.seconds, "turn_seconds": self.turn_seconds, "sets": ROTATED},
            "timing": (__doc__ or "").split("How a time is taken:")[-1].strip(),
        }


def ratio(times: list[float], others: list[float]) -> float:
    """Return how many times longer: round by round where they were timed in turn, else by the medians."""
    if len(times) != len(others):
        return statistics.median(times) / statistics.median(others)
    return statistics.median(x / y for x, y in zip(times, others, strict=True))


def smi(*fields: str) -> dict[str, str]:
    """Return what nvidia-smi says of the first GPU, nothing where it is not there."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split(", ")
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def fraction(w: Workload, seconds: float, limits: dict[str, float]) -> float:
    """Return the part of the GPU's limit that a time reaches: bfloat16 products, or one pass over K and V."""
    return max(w.flops / limits["matmul"], w.kv_bytes / limits["copy"]) / seconds


def words(w: Workload, row: Row) -> str:
    """Return a row in words."""
    if "median" in row:
        t, longer = row["median"], f" {row['ratio']:8.2f}x the time" if "ratio" in row else ""
        rates = f"{w.flops / t / 1e12:7.1f} TFLOP/s {w.kv_bytes / t / 1e12:6.2f} TB/s"
        return f"{t * 1e6:11.1f} us {rates}{longer}  {row['kernel']} {row.get('form', '')}".rstrip()
    kind = next(name for name in ("unsupported", "wrong", "failed") if name in row)
    return f"{'-' if kind == 'unsupported' else kind.upper():>11}    {row[kind]}"


def table(results: dict[str, dict[str, Row]], limits: dict[str, float]) -> list[str]:
    """Return the lines of the table that stands last: times of cuda, and how much longer the others take."""
    others = [name for name in LIBRARIES if name != "cuda"]
    head = ["workload", "kernel", "us", "TFLOP/s", "TB/s", "of limit", *(f"{name} x" for name in others)]
    lines = [head]
    for name, rows in results.items():
        w, row = WORKLOADS[name], rows.get("cuda", {})
        cells = [name, "-", next((k for k in ("wrong", "failed", "unsupported") if k in row), "-"), *"---"]
        if (t := row.get("median")) is not None:
            cells = [name, row["kernel"], f"{t * 1e6:.1f}", f"{w.flops / t / 1e12:.1f}"]
            cells += [f"{w.kv_bytes / t / 1e12:.2f}", f"{fraction(w, t, limits):.0%}"]
        for other in others:
            found = rows.get(other, {})
            bad = next((k for k in ("wrong", "failed") if k in found), "-")
            cells.append(f"{found['ratio']:.2f}" if "ratio" in found else bad)
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)).rstrip() for line in lines]


def described(limits: dict[str, float]) -> str:
    """Return the limits in words."""
    return f"copy {limits['copy'] / 1e12:.2f} TB/s, bfloat16 matmul {limits['matmul'] / 1e12:.0f} TFLOP/s"


def save(path: Path, header: Row, limits: list[dict[str, float]], results: dict[str, dict[str, Row]]) -> None:
    """Write the result file; single times are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {
        name: {library: {k: x for k, x in row.items() if k != "times"} for library, row in of_all.items()}
        for name, of_all in results.items()
    }
    text = json.dumps({**header, "limits": limits, "rows": rows}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = found.add_argument
    option("--only", nargs="+", default=[], metavar="PATTERN", help="workloads whose names fit")
    option("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES, help="by default all")
    option("--seconds", type=float, default=0.2, help="time per workload and library (0.2)")
    option("--turn", type=float, default=0.01, help="seconds of one batch of calls (0.01)")
    option("--commit", default=commit(HERE.parent), help="what the file says, by default what git says")
    option("--results", type=Path, default=DEFAULT_RESULTS, help="result file (build/gpu-benchmark.json)")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a line per row as it comes, write the file after each workload, print the table."""
    args = parser().parse_args(arguments)
    workloads = picked(args.only)
    if not workloads:
        parser().error(f"no workload fits {args.only}; there are {', '.join(WORKLOADS)}")
    if (reason := missing()) is not None:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 1
    bench = Bench(args.seconds, args.turn)
    header, results = bench.header(args.commit), {}
    print(f"{header['machine']['gpu']}: {described(bench.limits[0])}")
    for w in workloads:
        rows = results[w.name] = bench.rows(w, tuple(args.libraries))
        clocks = smi("clocks.sm", "power.draw", "temperature.gpu")
        for library, row in rows.items():
            row["afterwards"] = clocks
            print(f"{w.name:<40}{library:<16}{words(w, row)}", flush=True)
        save(args.results, header, bench.limits, results)
    bench.limits.append(bench.measure_limits())
    save(args.results, header, bench.limits, results)
    print(f"limits afterwards: {described(bench.limits[1])}; written to {args.results}\n")
    print("\n".join(table(results, bench.limits[0])))
    return int(any({"wrong", "failed"} & rows.get("cuda", {}).keys() for rows in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
