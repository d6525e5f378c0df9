"""Memory beyond the output: constant in the number of keys, at most 1 MiB a thread up to head_dim 128."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import pyflash

MIB = 2**20
#: Types of queries, and of keys and values.
TYPES = {
    "float64": ("float64", "float64"),
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("float32", "int8"),
}
LENGTHS = (8192, 65536, 1048576)


def _zeros(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of any length in next to no memory: a plan looks at shapes and types only."""
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        dtype = ml_dtypes.bfloat16
    return np.broadcast_to(np.zeros((), dtype), shape)


def plan(c_backend, kind: str, seqlen: int, *, types: str, head_dim: int, threads: int):
    """Explain a prefill of `seqlen` causal queries, or a decode of one query, on `seqlen` keys."""
    q_type, kv_type = TYPES[types]
    heads, kv_heads, seqlen_q = (2, 2, seqlen) if kind == "prefill" else (32, 8, 1)
    kv = (1, seqlen, kv_heads, head_dim)
    options = dict(k_scale=np.float32(1), v_scale=np.float32(1)) if kv_type == "int8" else {}
    return pyflash.explain(
        _zeros((1, seqlen_q, heads, head_dim), q_type),
        _zeros(kv, kv_type),
        _zeros(kv, kv_type),
        causal=True,
        num_threads=threads,
        **options,
        **c_backend.kwargs,
    )


@pytest.mark.parametrize("types", TYPES)
def test_prefill_takes_as_much_for_a_million_keys_as_for_eight_thousand(c_backend, types):
    sizes = [
        plan(c_backend, "prefill", n, types=types, head_dim=128, threads=1).workspace_bytes for n in LENGTHS
    ]
    assert len(set(sizes)) == 1, sizes


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_thread_takes_at_most_a_mebibyte(c_backend, kind, threads, head_dim, types):
    for seqlen in LENGTHS:
        told = plan(c_backend, kind, seqlen, types=types, head_dim=head_dim, threads=threads)
        assert told.family == kind
        assert told.workspace_bytes <= MIB * told.num_threads, (seqlen, told)


@pytest.mark.parametrize("types", TYPES)
def test_wider_heads_take_memory_in_proportion(c_backend, types):
    narrow, wide = (
        plan(c_backend, "prefill", 8192, types=types, head_dim=d, threads=1).workspace_bytes
        for d in (128, 512)
    )
    assert wide <= MIB * 4
    assert wide > narrow


def test_the_plan_is_what_a_call_needs(c_backend):
    """A work space of the explained size does, and one byte less is refused."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 700, 2, 64), dtype=np.float32) for _ in range(3))
    needed = pyflash.explain(q, k, v, num_threads=2, **c_backend.kwargs).workspace_bytes
    assert needed > 0
    plain = pyflash.flash_attention(q, k, v, num_threads=2, **c_backend.kwargs)
    space = np.zeros(needed, np.uint8)
    out = pyflash.flash_attention(q, k, v, num_threads=2, workspace=space, **c_backend.kwargs)
    np.testing.assert_array_equal(out, plain)
    with pytest.raises(pyflash.InvalidArgument, match="workspace"):
        pyflash.flash_attention(q, k, v, num_threads=2, workspace=space[:-1], **c_backend.kwargs)


GROWTH = """
import sys
from pathlib import Path
import numpy as np
import pyflash

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

seqlen_q, seqlen_kv, heads = map(int, sys.argv[1:])
q = np.full((1, seqlen_q, heads, 64), 0.5, np.float32)
k = np.full((1, seqlen_kv, 1, 64), 0.5, np.float32)
out = np.full(q.shape, 0, np.float32)
pyflash.flash_attention(k[:, :64], k[:, :64], k[:, :64], num_threads=1)
Path("/proc/self/clear_refs").write_text("5")
before = peak()
pyflash.flash_attention(q, k, k, out=out, num_threads=1)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of resident memory is set back in /proc")
@pytest.mark.parametrize("shape", [(8192, 8192, 1), (1, 1048576, 4)], ids=["prefill", "decode"])
def test_resident_memory_is_flat(shape):
    child = subprocess.run(
        [sys.executable, "-c", GROWTH, *map(str, shape)], capture_output=True, text=True, check=True
    )
    assert int(child.stdout) <= 1.5 * MIB  # pages of the runtimes beside the work space
