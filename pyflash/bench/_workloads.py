"""The calls that are timed, by name, and what each of them has to do at least.

Workloads of one group are timed together, round by round, so that ratios between them mean something
as well: 16 bits against 32, paged against dense, 4 tokens against one. Loaded in every library's process,
whose Python may lack pyflash: nothing but NumPy is needed here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int4": 0.5}
#: Largest code of a quantised type.
CODE_MAX = {"int8": 127, "int4": 7}


class Workload(NamedTuple):
    """One attention call: shapes as in ``(batch, heads, seqlen, head_dim)``."""

    name: str
    group: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    causal: bool = False
    dtype: str = "float32"  # of queries and outputs, and of keys and values unless kv_dtype says otherwise
    kv_dtype: str = ""
    variant: str = ""  # "paged", "no-out": what only pyflash has
    base: str = ""  # the workload of the same group that this one is compared with
    alone: bool = False  # only builds of pyflash: peers would need too much time or memory
    memory: bool = False  # the growth of resident memory is measured, not the time
    device: bool = False  # sized for a GPU: of the host only pyflash, where it gets through in time

    @property
    def stored(self) -> str:
        """The type of keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def flops(self) -> float:
        """Operations of both products, half of them when causal."""
        pairs = self.seqlen_q * self.seqlen_kv / (2 if self.causal else 1)
        return 4.0 * self.batch * self.num_heads * pairs * self.head_dim

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values, each counted once, and of their scales."""
        places = 2.0 * self.batch * self.num_kv_heads * self.seqlen_kv
        scales = 4 if self.kv_dtype in CODE_MAX else 0
        return places * (self.head_dim * ITEM_BYTES[self.stored] + scales)

    @property
    def out_bytes(self) -> float:
        """Bytes of the output."""
        return float(self.batch * self.num_heads * self.seqlen_q * self.head_dim * ITEM_BYTES[self.dtype])

    @property
    def num_scores(self) -> int:
        """Elements of the matrix of scores of one key/value head, which only the textbook's way keeps."""
        return self.num_heads // self.num_kv_heads * self.seqlen_q * self.seqlen_kv

    def arrays(self) -> dict[str, Array]:
        """Return q, k, v in layout bhsd, of bfloat16 its bits, and scales of quantised keys and values."""
        rng = np.random.default_rng(0)
        shape_q = (self.batch, self.num_heads, self.seqlen_q, self.head_dim)
        shape_kv = (self.batch, self.num_kv_heads, self.seqlen_kv, self.head_dim)
        found = {"q": stored_as(rng.standard_normal(shape_q, np.float32), self.dtype)}
        for name in ("k", "v"):
            x = rng.standard_normal(shape_kv, np.float32)
            if self.kv_dtype in CODE_MAX:
                found[name], found[f"{name}_scale"] = quantised(x, self.kv_dtype)
            else:
                found[name] = stored_as(x, self.stored)
        return found


def stored_as(x: Array, dtype: str) -> Array:
    """Return float32 numbers in a float type; bfloat16, which NumPy lacks, as its bits."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def quantised(x: Array, dtype: str) -> tuple[Array, Array]:
    """Return codes and their scales, one per token and head; two codes of int4 share a byte."""
    scale = np.abs(x).max(axis=-1) / CODE_MAX[dtype]
    codes = np.rint(x / scale[..., np.newaxis]).astype(np.int8)
    if dtype == "int4":
        nibbles = codes.view(np.uint8) & 0xF
        codes = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return codes, scale.astype(np.float32)


def numbers(x: Array, dtype: str, scale: Array | None = None) -> Array:
    """Return what stored elements mean, exactly, in float32 or wider."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    if dtype == "int4":
        low, high = (x << 4).view(np.int8) >> 4, x.view(np.int8) >> 4
        x = np.stack((low, high), axis=-1).reshape(*x.shape[:-1], -1)
    if scale is not None:
        return x.astype(np.float32) * scale[..., np.newaxis]
    return x if dtype in ("float32", "float64") else x.astype(np.float32)


def _prefill(b: int, h: int, n: int, d: int, *dtypes: str) -> list[Workload]:
    group, found = f"prefill-{b}x{h}x{n}x{d}", []
    for causal in (False, True):
        kind = f"{group}{'-causal' if causal else ''}"
        for dtype in dtypes:
            base = "" if dtype == "float32" else f"{kind}-float32"
            found.append(Workload(f"{kind}-{dtype}", group, b, h, h, n, n, d, causal, dtype, base=base))
    return found


def _decode(b: int, n: int) -> list[Workload]:
    """Return decodes of 32 heads on 8 with a head_dim of 128, and what they are compared with."""
    group = f"decode-{b}x{n}"

    def one(dtype: str, base: str = "", heads: int = 32, tokens: int = 1, **more: Any) -> Workload:
        words = [group, more.get("kv_dtype") or dtype]
        words += [f"group-{heads // 8}"] if heads != 32 else []
        words += [f"{tokens}-tokens"] if tokens > 1 else []
        words += [more["variant"]] if "variant" in more else []
        base = f"{group}-{base}" if base else ""
        return Workload("-".join(words), group, b, heads, 8, tokens, n, 128, False, dtype, base=base, **more)

    floats = ("float32", "float16", "bfloat16")
    found = [one(dtype) for dtype in floats]
    found += [one("float16", "float16", kv_dtype=kv) for kv in ("int8", "int4")]
    found += [one(dtype, dtype, variant="paged") for dtype in floats]
    found += [one("float16", "int8", kv_dtype="int8", variant="paged")]
    found += [one(dtype, dtype, tokens=tokens) for dtype in floats for tokens in (4, 16)]
    found += [one(dtype, heads=heads) for dtype in floats for heads in (64, 128)]
    return found


def _tiny() -> list[Workload]:
    shape = (1, 1, 1, 1, 16, 64)
    return [
        Workload("tiny-float32", "tiny", *shape),
        Workload("tiny-float32-no-out", "tiny", *shape, variant="no-out", base="tiny-float32"),
    ]


def _over_n() -> list[Workload]:
    """Return prefills with about the same work per row of keys: heads get fewer as sequences get longer."""
    return [
        Workload(
            f"over-n-{n}{'-causal' if causal else ''}", "over-n", 1, max(1, 16384 // n), max(1, 16384 // n),
            n, n, 64, causal, alone=n > 16384,
        )
        for n in (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
        for causal in (False, True)
    ]  # fmt: skip


def _few_heads() -> list[Workload]:
    """Return calls with fewer heads than a large machine has threads."""
    prefills = [
        Workload(f"few-heads-prefill-1x{h}x4096x128", "few-heads", 1, h, h, 4096, 4096, 128) for h in (1, 2)
    ]
    return [*prefills, Workload("few-heads-decode-1x65536", "few-heads", 1, 4, 1, 1, 65536, 128)]


def _memory() -> list[Workload]:
    def one(name: str, *shape: Any, **more: Any) -> Workload:
        # A group of its own is a process of its own: nothing that was freed is there to be taken.
        return Workload(f"memory-{name}", f"memory-{name}", *shape)._replace(memory=True, **more)

    return [
        *(one(f"over-n-{n}", 1, 1, 1, n, n, 64) for n in MEMORY_LENGTHS),
        one("prefill-1x8x8192x64", 1, 8, 8, 8192, 8192, 64),
        one("prefill-1x8x8192x64-causal", 1, 8, 8, 8192, 8192, 64, causal=True),
        one("prefill-1x1x65536x64", 1, 1, 1, 65536, 65536, 64, alone=True),
        one("decode-1x8192", 1, 4, 1, 1, 8192, 128),
        one("decode-1x1048576", 1, 4, 1, 1, 1048576, 128),
    ]


def _device() -> Iterator[Workload]:
    """Yield calls for a GPU: 16384 tokens in all, smaller prefills, and decodes of many keys.

    One by one and not in groups, as the memory of a smaller GPU would not hold their arrays together.
    """
    for d, heads in ((64, 32), (128, 16), (256, 8)):
        for n in (1024, 4096, 16384):
            for causal in (False, True):
                name = f"prefill-{16384 // n}x{heads}x{n}x{d}{'-causal' if causal else ''}-bfloat16"
                yield Workload(name, name, 16384 // n, heads, heads, n, n, d, causal, "bfloat16", device=True)
    for b, n in ((1, 8192), (16, 8192), (64, 4096)):
        name = f"decode-{b}x{n}-bfloat16"
        yield Workload(name, name, b, 32, 8, 1, n, 128, False, "bfloat16", device=True)


_FLOATS = ("float32", "float16", "bfloat16")
MEMORY_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)

WORKLOADS = {
    w.name: w
    for w in (
        *_tiny(),
        *_prefill(1, 12, 128, 64, *_FLOATS),
        *_prefill(8, 12, 128, 32, *_FLOATS),
        *_prefill(1, 8, 1024, 64, *_FLOATS),
        *_prefill(1, 8, 4096, 64, *_FLOATS),
        *_prefill(1, 8, 4096, 128, *_FLOATS, "float64"),
        *_prefill(1, 32, 2048, 128, *_FLOATS),
        *_prefill(1, 16, 4096, 64, "float32", "bfloat16"),
        *_prefill(1, 16, 4096, 128, "float32", "bfloat16"),
        *(w for b, n in ((1, 4096), (8, 4096), (1, 32768)) for w in _decode(b, n)),
        *_over_n(),
        *_few_heads(),
        *_memory(),
        *_device(),
    )
}

#: Names that stand for several workloads: patterns of each. "gpu" is what README.md shows of a GPU.
SUITES = {
    "quick": (
        "tiny-float32",
        "prefill-1x8x1024x64-float32",
        "prefill-1x8x1024x64-causal-float32",
        "decode-1x4096-float32",
        "decode-1x4096-float16",
        "decode-1x4096-int8",
        *(f"over-n-{n}" for n in (128, 256, 512, 1024, 2048, 4096)),
        *(f"memory-over-n-{n}" for n in (512, 1024, 2048, 4096, 16384)),
    ),
    "gpu": (
        *(w.name for w in _device()),
        "prefill-1x16x4096x128-float32",
        "prefill-1x8x1024x64-float32",
        "prefill-1x8x1024x64-float16",
        "prefill-1x8x1024x64-bfloat16",
    ),
    "all": ("*",),
}


class UnknownWorkload(Exception):
    """No workload fits a pattern."""

    def __init__(self, pattern: str) -> None:
        known = [*SUITES, *dict.fromkeys(w.group for w in WORKLOADS.values()), *WORKLOADS]
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
        super().__init__(pattern, near)
        self.pattern, self.near = pattern, near


def picked(patterns: Iterable[str]) -> list[Workload]:
    """Return the workloads that are named, in their order.

    Parameters
    ----------
    patterns : iterable of str
        Names of workloads, groups or `SUITES`; with ``*``, ``?`` and ``[...]`` as in a shell.

    Raises
    ------
    UnknownWorkload
        Nothing fits one of the patterns.
    """
    wanted: set[str] = set()
    for pattern in patterns:
        shell = SUITES.get(pattern, (pattern,))
        found = {w.name for w in WORKLOADS.values() if any(_fits(w, p) for p in shell)}
        if not found:
            raise UnknownWorkload(pattern)
        wanted |= found
    return [w for w in WORKLOADS.values() if w.name in wanted]


def _fits(w: Workload, pattern: str) -> bool:
    return fnmatchcase(w.name, pattern) or w.group == pattern


def by_group(workloads: Iterable[Workload]) -> Iterator[list[Workload]]:
    """Yield the workloads group by group, in their order."""
    groups: dict[str, list[Workload]] = {}
    for w in workloads:
        groups.setdefault(w.group, []).append(w)
    yield from groups.values()
