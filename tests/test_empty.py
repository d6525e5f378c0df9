"""Zero sizes and rows without a visible key: out is 0, lse is -inf, never NaN."""

from __future__ import annotations

import numpy as np
import pytest
from calls import DTYPE_NAMES, dense, paged, run
from oracle import assert_matches

#: name -> shape with a zero in it
SIZES = {
    "no batch": dict(batch=0, seqlen_q=3, seqlen_kv=4),
    "no queries": dict(seqlen_q=0, seqlen_kv=5),
    "no keys": dict(seqlen_q=3, seqlen_kv=0),
    "no keys, many queries": dict(seqlen_q=70, seqlen_kv=0),
    "neither queries nor keys": dict(seqlen_q=0, seqlen_kv=0),
    "no heads": dict(num_heads=0, num_kv_heads=0),
    "no query heads": dict(num_heads=0, num_kv_heads=2),
}


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(2, 0)), dict(num_splits=3)], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_zero_sizes(backend, name, options):
    for family in (None, "prefill", "decode"):
        call = dense(**SIZES[name], **options, family=family)
        assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_no_keys_of_every_type(backend, dtype):
    call = dense(dtype=dtype, seqlen_kv=0)
    assert_matches(*run(call, backend), call)


#: name -> (shape, options): rows that see nothing, in the first tile, in the last, in all
ROWS = {
    "more queries than keys": (dict(seqlen_q=80, seqlen_kv=30), dict(causal=True)),
    "one key for 40 queries": (dict(seqlen_q=40, seqlen_kv=1), dict(causal=True)),
    "window ends before the keys": (dict(seqlen_q=40, seqlen_kv=70), dict(window=(5, 0), q_offset=-30)),
    "window starts behind the keys": (dict(seqlen_q=40, seqlen_kv=70), dict(window=(5, 5), q_offset=60)),
    "all before": (dict(seqlen_q=40, seqlen_kv=300), dict(causal=True, q_offset=-40)),
    "all behind": (dict(seqlen_q=40, seqlen_kv=300), dict(window=(0, 0), q_offset=300)),
    "lengths 0, 1 and all": (
        dict(batch=3, seqlen_q=20, seqlen_kv=300),
        dict(causal=True, seq_lens=np.array([0, 1, 300])),
    ),
    "empty tiles before the window": (dict(seqlen_q=40, seqlen_kv=700), dict(window=(3, 0))),
}


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_see_nothing(backend, name, family):
    shape, options = ROWS[name]
    call = dense(81, num_heads=2, num_kv_heads=1, **shape, **options, family=family)
    for more in ({}, dict(num_splits=4)):
        assert_matches(*run(call, backend, **more), call)
    call = paged(dense(81, num_heads=2, num_kv_heads=1, **shape, **options, family=family), 16)
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_a_row_that_sees_nothing_beside_strong_scores(backend, family):
    """The running maximum starts empty, not at 0: scores of -500 and +500 behind an empty tile."""
    for sign in (-1.0, 1.0):
        call = dense(82, seqlen_q=40, seqlen_kv=30, num_heads=1, causal=True, scale=1.0, family=family)
        call.arrays["q"][..., 0] = 100
        call.arrays["k"][..., 0] = 5 * sign
        assert_matches(*run(call, backend), call)
