"""`pyflash.trace`: the values of its steps, and the recurrence that fails."""

from __future__ import annotations

import numpy as np
import pytest

import pyflash


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_two_steps_by_hand():
    """Scores ln 1, ln 2 | ln 4, ln 3: the second tile raises the maximum from ln 2 to ln 4."""
    q, k = np.ones((1, 1)), np.log([[1.0], [2.0], [4.0], [3.0]])
    v = np.array([[1.0], [2.0], [3.0], [4.0]])
    got = pyflash.trace(q, k, v, tile=2, scale=1.0)
    first, second = got.steps
    assert (first.split, first.tile, first.key_lo, first.key_hi, first.pages) == (0, 0, 0, 2, ())
    assert (second.split, second.tile, second.key_lo, second.key_hi) == (0, 1, 2, 4)
    np.testing.assert_array_equal(first.scores, k[:2].T)
    assert first.m_before[0] == -np.inf and first.m_after[0] == np.log(2.0) == second.m_before[0]
    assert first.alpha[0] == 0 and first.rescaled == 0
    np.testing.assert_allclose(
        [first.l[0], first.o[0, 0], first.out[0, 0]], [3 / 2, 5 / 2, 5 / 3], rtol=1e-15
    )
    np.testing.assert_allclose(second.alpha, [1 / 2], rtol=1e-15)
    assert second.m_after[0] == np.log(4.0) and second.rescaled == 1
    np.testing.assert_allclose([second.l[0], second.o[0, 0]], [10 / 4, 29 / 4], rtol=1e-15)
    np.testing.assert_allclose(got.out, [[2.9]], rtol=1e-15)
    np.testing.assert_allclose(got.lse, np.log([10.0]), rtol=1e-15)
    np.testing.assert_allclose(first.error, 2.9 - 5 / 3, rtol=1e-14)
    assert second.error == got.error < 1e-15
    assert got.combinations == ()


@pytest.mark.parametrize("tile", [1, 3, 5, 16, 100])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (2, 0)}, {"causal": "top_left"}], ids=str
)
def test_result_is_exact(tile, num_splits, options):
    q, k, v = normal(1, 7, 4), normal(2, 16, 4), normal(3, 16, 2)
    got = pyflash.trace(q, k, v, tile=tile, num_splits=num_splits, **options)
    want, lse = pyflash.naive_attention(q, k, v, return_lse=True, **options)
    np.testing.assert_array_equal(got.exact, want)
    np.testing.assert_array_equal(got.exact_lse, lse)
    assert got.error == np.abs(got.out - want).max() <= 1e-15 * np.abs(v).max()
    np.testing.assert_allclose(got.lse, lse, rtol=1e-14)
    assert len(got.combinations) == num_splits - 1
    assert sum(step.key_hi - step.key_lo for step in got.steps) == 16


def test_each_step_is_the_answer_over_the_keys_so_far():
    q, k, v = normal(1, 3, 4), normal(2, 10, 4), normal(3, 10, 2)
    for step in pyflash.trace(q, k, v, tile=3).steps:
        so_far = pyflash.naive_attention(q, k[: step.key_hi], v[: step.key_hi])
        np.testing.assert_allclose(step.out, so_far, rtol=1e-13, atol=1e-15)


def test_splits_are_combined_along_the_tree():
    q, k, v = normal(1, 2, 4), normal(2, 10, 4), normal(3, 10, 2)
    got = pyflash.trace(q, k, v, tile=2, num_splits=5)
    tree = [(c.left, c.right) for c in got.combinations]
    assert tree == [((0, 1), (1, 2)), ((2, 3), (3, 4)), ((0, 2), (2, 4)), ((0, 4), (4, 5))]
    np.testing.assert_array_equal(got.combinations[-1].out, got.out)
    first = pyflash.naive_attention(q, k[:4], v[:4])
    np.testing.assert_allclose(got.combinations[0].out, first, rtol=1e-13, atol=1e-15)


def test_pages():
    q, k, v = normal(1, 2, 4), normal(2, 7, 4), normal(3, 7, 4)
    table = np.array([3, 0, 2, -1], np.int32)
    k_cache, v_cache = np.full((2, 4, 3, 4), np.nan)
    for place in range(7):
        k_cache[table[place // 3], place % 3], v_cache[table[place // 3], place % 3] = k[place], v[place]
    got = pyflash.trace(q, k_cache, v_cache, tile=4, block_table=table, seq_lens=7, causal=True)
    assert [step.pages for step in got.steps] == [(3, 0), (0, 2)]
    dense = pyflash.trace(q, k, v, tile=4, causal=True)
    np.testing.assert_array_equal(got.out, dense.out)
    np.testing.assert_array_equal(got.exact, dense.exact)


def test_first_tile_without_a_visible_key():
    """Row 1 sees only keys of the second tile; unguarded, its first maximum is -inf minus -inf."""
    q, k, v = normal(1, 2, 4), normal(2, 6, 4), normal(3, 6, 2)
    guarded = pyflash.trace(q, k, v, tile=3, window=(1, 0))
    assert guarded.steps[0].m_after[1] == -np.inf
    assert guarded.steps[0].l[1] == 0
    assert guarded.error < 1e-15

    unguarded = pyflash.trace(q, k, v, tile=3, window=(1, 0), guard=False)
    assert np.isnan(unguarded.steps[0].l[1])
    assert np.isnan(unguarded.out[1]).all()
    assert np.isnan(unguarded.error)
    np.testing.assert_array_equal(unguarded.exact, guarded.exact)


def test_spans():
    """Rows 1 and 2 see nothing of the first tile, dense and behind a block table."""
    q, k, v = normal(1, 3, 4), normal(2, 6, 4), normal(3, 6, 2)
    spans = (np.array([0, 3, 3]), 6)
    got = pyflash.trace(q, k, v, tile=3, spans=spans)
    np.testing.assert_array_equal(np.isneginf(got.steps[0].scores).all(axis=1), [False, True, True])
    np.testing.assert_array_equal(got.exact, pyflash.naive_attention(q, k, v, spans=spans))
    assert got.error < 1e-15
    pages = {"block_table": np.array([1, 0]), "seq_lens": 6}
    swapped = (np.concatenate([x[3:], x[:3]]).reshape(2, 3, -1) for x in (k, v))
    paged = pyflash.trace(q, *swapped, tile=3, spans=spans, **pages)
    np.testing.assert_array_equal(paged.out, got.out)
    unguarded = pyflash.trace(q, k, v, tile=3, spans=spans, guard=False)
    np.testing.assert_array_equal(np.isnan(unguarded.out).any(axis=1), [False, True, True])


def test_without_a_hole_the_guard_changes_no_bit():
    q, k, v = normal(1, 4, 4), normal(2, 9, 4), normal(3, 9, 2)
    guarded, unguarded = (pyflash.trace(q, k, v, tile=2, guard=guard) for guard in (True, False))
    np.testing.assert_array_equal(guarded.out, unguarded.out)


def test_row_without_any_key_and_no_keys_at_all():
    q, k, v = normal(1, 3, 4), normal(2, 2, 4), normal(3, 2, 2)
    got = pyflash.trace(q, k, v, tile=1, causal=True)
    assert (got.out[0] == 0).all() and got.lse[0] == -np.inf
    nothing = pyflash.trace(q, k[:0], v[:0], tile=1, num_splits=2)
    assert nothing.steps == () and (nothing.out == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_types_are_traced_in_float64(dtype):
    q, k, v = (normal(seed, 4, 4).astype(dtype) for seed in (1, 2, 3))
    got = pyflash.trace(q, k, v, tile=2)
    assert got.out.dtype == got.exact.dtype == np.float64
    assert got.error < 1e-15


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((2, 1, 4))}, "q: found shape .*, expected shape .seqlen_q, head_dim."),
        ({"q": np.zeros((0, 4))}, "q: found shape .*, expected at least one row"),
        ({"k": np.zeros((3, 5))}, "k: found head_dim 5, expected head_dim 4"),
        ({"tile": 0}, "tile: found 0, expected an integer, at least 1"),
        ({"tile": None}, "tile: found None"),
        ({"num_splits": 0}, "num_splits: found 0"),
        ({"guard": 1}, "guard: found 1 .int., expected True or False"),
        ({"seq_lens": 4}, "seq_lens.* found 4"),
        ({"block_table": np.zeros(1, int)}, "k: found shape"),
        ({"window": 3}, "window: found 3"),
        ({"spans": 3}, "spans: found 3"),
    ],
)
def test_refusals(changes, message):
    arguments = {"q": np.zeros((2, 4)), "k": np.zeros((3, 4)), "v": np.zeros((3, 4)), "tile": 2, **changes}
    with pytest.raises(pyflash.InvalidArgument, match=message):
        pyflash.trace(**arguments)


def test_block_table_needs_the_number_of_keys():
    with pytest.raises(pyflash.InvalidArgument, match="seq_lens: found None"):
        pyflash.trace(
            np.zeros((1, 4)), np.zeros((2, 3, 4)), np.zeros((2, 3, 4)), tile=1, block_table=np.zeros(1, int)
        )
