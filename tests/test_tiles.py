"""How `explain` counts tiles: exactly, and without walking over them; the check of a call counts none."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import dense, explain, varlen
from conftest import TestedBackend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_calls import attention_calls
from terms import Sizes, holes, rising_spans, rng
from threads import on_ranks

import pyflash
from pyflash import _api, _reference
from pyflash._description import AttentionArgs
from pyflash._layout import row_blocks, sequences
from pyflash._masks import key_tiles
from pyflash._reference import plan
from pyflash._tiles import Count, count_tiles
from pyflash.distributed import (
    _arguments,
    _decode,
    context_parallel_decode,
    head_parallel_attention,
    ring_attention,
)

NUMPY = TestedBackend("numpy", {"backend": "numpy"})


def described(call: Any, **more: Any) -> AttentionArgs:
    """The call as backends get it."""
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_reference.NumpyBackend, "explain", lambda _, args: kept.append(args))
        explain(call, NUMPY, **more)
    return kept[0]


def one_by_one(args: AttentionArgs, sequence: Any, rows: int, borders: Any, tile: int) -> Count:
    """The tiles of each item, by asking the masks about each of them."""
    items = tiles = seen = 0
    for block in row_blocks(args, sequence, rows):
        items += 1
        tiles += sum(-(-(hi - lo) // tile) for lo, hi in borders)
        seen += sum(1 for lo, hi in borders for _ in key_tiles(args, block, lo, hi, tile))
    return Count(items, tiles, seen)


def check(args: AttentionArgs, rows: int, tile: int) -> list[Count]:
    counts = []
    for sequence in sequences(args):
        for borders in (plan(args, sequence).borders, ((0, sequence.seqlen_kv),)):
            counts.append(count_tiles(args, sequence, rows, borders, tile))
            assert counts[-1] == one_by_one(args, sequence, rows, borders, tile)
    return counts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(attention_calls(), st.sampled_from([1, 3, 16, 32, 100]), st.sampled_from([3, 16, 64, 128]))
def test_random_calls(call, rows, tile):
    check(described(call), rows, tile)


N = Sizes(batch=2, num_heads=6, seqlen_q=40, seqlen_kv=150)
#: One row of keys for all, keys of each head, of each row, and a whole stretch that nobody sees.
KEYS = np.arange(N.seqlen_kv)
STRETCH = (KEYS < 20) | (KEYS > 100)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": dict(causal=True),
    "top left": dict(causal="top_left"),
    "window": dict(window=(20, 5)),
    "window and sinks": dict(causal=True, window=(20, None), sink_tokens=30),
    "one side": dict(window=(None, 7), q_offset=0),
    "far away": dict(causal=True, q_offset=-(10**9)),
    "spans": dict(spans=rising_spans(N, 1)),
    "spans with gaps": dict(spans=(np.arange(40) // 15 * 60, np.arange(40) // 15 * 60 + 9)),
    "spans and window": dict(spans=rising_spans(N, 2), window=(30, 30), sink_tokens=9, causal=True),
    "keys": dict(mask=STRETCH),
    "keys of sequences": dict(mask=holes((2, 1, 1, 150), 3, 0.01)),
    "no keys": dict(mask=np.zeros(150, bool), window=(20, 5)),
    "keys, causal and window": dict(mask=STRETCH, causal=True, window=(60, 0), sink_tokens=50),
    "keys and spans": dict(mask=STRETCH, spans=rising_spans(N, 4)),
    "bias of keys": dict(bias=np.where(STRETCH, 0.0, -np.inf), causal=True),
    "heads": dict(mask=holes((6, 1, 150), 5, 0.01)),
    "rows": dict(mask=holes((40, 150), 6, 0.002)),
    "everything": dict(mask=holes((2, 6, 40, 150), 7, 0.002), causal=True),
}


@pytest.mark.parametrize("rows", [1, 7, 32])
@pytest.mark.parametrize("num_kv_heads", [2, 6])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, num_kv_heads, rows):
    shape = dict(batch=2, seqlen_q=40, seqlen_kv=150, num_heads=6, num_kv_heads=num_kv_heads)
    counts = check(described(dense(11, **shape, **MASKS[name])), rows, 16)
    if name not in ("none", "top left"):
        assert any(count.seen < count.tiles for count in counts)


@pytest.mark.parametrize("name", ["keys", "rows", "heads"])
def test_few_pairs_at_a_time(monkeypatch, name):
    """Chunks of rows and of keys that end in the middle of tiles and items."""
    monkeypatch.setattr("pyflash._tiles._PAIRS", 700)
    args = described(dense(12, batch=2, seqlen_q=40, seqlen_kv=150, num_heads=6, **MASKS[name]))
    for rows in (1, 7, 32, 1000):
        check(args, rows, 16)


def test_many_sequences():
    lengths = rng(13).integers(0, 70, (2, 12))
    args = described(varlen(*lengths.tolist(), seed=13, num_heads=4, num_kv_heads=2, causal=True))
    assert sum(count.tiles for count in check(args, 16, 16)) > 0


def wide(num_tokens: int, num_heads: int = 1) -> np.ndarray:
    """Tokens that need no memory."""
    return np.broadcast_to(np.float32(0.5), (1, num_tokens, num_heads, 8))


def test_a_million_rows():
    """What the sum over rows is in closed form."""
    x = wide(1 << 20, 3)
    told = pyflash.explain(x, x, x, causal=True, backend="numpy")
    num_items, num_tiles = (1 << 20) // told.rows_per_item, (1 << 20) // told.tile
    assert told.num_items == 3 * num_items and told.tiles_total == 3 * num_items * num_tiles
    per_tile = told.tile // told.rows_per_item
    assert told.tiles_total - told.tiles_skipped == 3 * per_tile * num_tiles * (num_tiles + 1) // 2


# ------------------------------------------------------------- what does not grow


def steps_of(function: Callable[[], Any]) -> int:
    """How many lines of Python a call runs, each time that it does, and functions that it enters."""
    count = 0

    def trace(*_: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def available(backend: str) -> bool:
    return pyflash.available_backends()[backend] is None


BACKENDS = [name for name in ("numpy", "c", "cuda") if available(name)]
LENGTHS = (1 << 12, 1 << 20)
PLANNED = 4000  # lines of a plan for a length not seen before: far below one a tile of 128 rows
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda n: {},
    "causal": lambda n: dict(causal=True),
    "window": lambda n: dict(causal=True, window=(4096, 0)),
    "spans": lambda n: dict(spans=(np.maximum(np.arange(n) - 500, 0), np.arange(n) + 1)),
    "packed": lambda n: dict(cu_seqlens_q=np.array([0, n // 4, n]), cu_seqlens_kv=np.array([0, n // 4, n])),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_check_does_not_walk_over_rows(backend, name):
    def checked(n: int) -> int:
        x, options = wide(n), OPTIONS[name](n)
        x = x[0] if "cu_seqlens_q" in options else x
        return steps_of(lambda: _api.check(x, x, x, backend=backend, **options))

    checked(LENGTHS[0])  # fills caches
    few, many = map(checked, LENGTHS)
    assert 0 < many <= few + PLANNED


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_explain_does_not_walk_over_rows(backend, name):
    def told(n: int) -> int:
        x, options = wide(n), OPTIONS[name](n)
        x = x[0] if "cu_seqlens_q" in options else x
        return steps_of(lambda: pyflash.explain(x, x, x, backend=backend, **options))

    told(LENGTHS[0])
    few, many = map(told, LENGTHS)
    assert 0 < many <= few + PLANNED


@pytest.mark.parametrize("backend", BACKENDS)
def test_explain_of_a_decode_does_not_walk_over_keys(backend):
    def told(n: int) -> int:
        x = wide(n)
        return steps_of(lambda: pyflash.explain(x[:, :1], x, x, num_splits=4, backend=backend))

    told(LENGTHS[0])
    few, many = map(told, LENGTHS)
    assert 0 < many <= few + PLANNED


@pytest.mark.parametrize("backend", BACKENDS)
def test_distributed_checks_count_no_tiles(backend, monkeypatch):
    """Neither the ring nor heads nor the decode asks a backend to explain, nor walks over tokens."""

    def refuse(*_: Any) -> None:
        raise AssertionError("tiles are counted")

    monkeypatch.setattr(type(pyflash._backends.load(backend)), "explain", refuse)

    def ring(n: int) -> int:
        x = wide(n, 2)
        keywords = inspect.signature(ring_attention).parameters.values()
        options = {one.name: one.default for one in keywords if one.default is not one.empty}
        options |= dict(causal=True, backend=backend)
        return on_ranks(1, lambda comm: steps_of(lambda: _arguments.arguments(comm, x, x, x, options)))[0]

    ring(LENGTHS[0])
    few, many = map(ring, LENGTHS)
    assert 0 < many <= few + PLANNED
    monkeypatch.setattr(_decode, "_digests", {})
    x = np.ones((1, 6, 2, 8), np.float32)
    for function in (ring_attention, head_parallel_attention, context_parallel_decode):
        for out in on_ranks(2, lambda comm: function(x, x, x, comm=comm, backend=backend)):  # noqa: B023
            np.testing.assert_allclose(out, x, rtol=1e-6)
