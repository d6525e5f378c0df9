"""`attention_stats` against the matrix of probabilities, which the oracle has and the package never makes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from calls import (
    assert_same_bits,
    bits,
    dense,
    given,
    once,
    paged,
    paged_varlen,
    quantised,
    varlen,
)
from oracle import Call, expected, lse_shape, sequences
from oracle_terms import modified_scores, seen_by
from terms import TERMS, poisoned_where_unseen, with_terms

import pyflash

ALL = ("max_logit", "entropy", "key_mass", "top_k", "rows")
#: What the arguments of a call are about that the statistics do not ask about.
NOT_OF_SCORES = ("sinks", "lse_includes_sinks", "v_scale", "out", "out_dtype")

#: (relative, absolute) error of sums of float32 probabilities; scores are of the order of 10.
TOLERANCE = {"float32": (3e-5, 1e-5), "float64": (1e-12, 1e-13)}


class Truth:
    """Scores, visibility and probabilities ``(num_heads, rows, keys)`` of each sequence of a call."""

    def __init__(self, call: Call, lse: list[np.ndarray]) -> None:
        self.seen, self.scores, self.p = [], [], []
        for sequence, sums in zip(sequences(call), lse, strict=True):
            seen, scores = seen_by(sequence, call), _scores(sequence, call)
            with np.errstate(all="ignore"):
                self.p.append(np.where(seen, np.exp(scores - sums[:, :, None]), 0))
            self.seen.append(seen)
            self.scores.append(scores)


def _scores(sequence: Any, call: Call) -> np.ndarray:
    """Final scores of one sequence in float64, hidden keys included."""
    wide = np.float64
    q, k = sequence.q.astype(wide), sequence.k.astype(wide)
    group = q.shape[1] // max(k.shape[1], 1)
    scale = call.options.get("scale")
    scale = 1 / np.sqrt(q.shape[2]) if scale is None else scale
    with np.errstate(all="ignore"):
        each = [
            modified_scores(scale * (q[:, h] @ k[:, h // group].T), h, sequence, call)
            for h in range(q.shape[1])
        ]
    return np.array(each).reshape(q.shape[1], len(q), len(k))


def exact_lse(call: Call) -> list[np.ndarray]:
    """The log-sum-exp (num_heads, seqlen_q) of each sequence, in the type in which calls return it."""
    compute = "f8" if call.arrays["q"].dtype == np.float64 else "f4"
    return [lse.astype(compute) for _, lse in expected(call).exact]


def joined(parts: list[np.ndarray], call: Call) -> np.ndarray:
    """Results of rows, ``(num_heads, rows, ...)`` of each sequence, as the call has them."""
    packed = call.function == "flash_attention_varlen" or "cu_seqlens_q" in call.options
    whole = np.concatenate(parts, axis=1) if packed else np.stack(parts)
    return whole.reshape(lse_shape(call) + parts[0].shape[2:])


def stats(call: Call, backend: Any, lse: np.ndarray | None = None, **more: Any) -> Any:
    """Ask for the statistics of an attention call; see that no input changes."""
    arrays = dict(call.arrays)
    q = arrays.pop("q")
    k = arrays.pop("k_cache" if call.function == "paged_attention" else "k")
    arrays.pop("v", arrays.pop("v_cache", None))
    options = {n: x for n, x in given(call.options, backend).items() if n not in NOT_OF_SCORES}
    lse = joined(exact_lse(call), call) if lse is None else lse
    options = {**arrays, **options, **more}
    inputs = [q, k, lse, *(x for x in options.values() if isinstance(x, np.ndarray))]
    before = [x.tobytes() for x in inputs]
    result = pyflash.attention_stats(q, k, lse, **options, **backend.kwargs)
    assert [x.tobytes() for x in inputs] == before
    return result


def close(got: np.ndarray, want: np.ndarray, what: str) -> None:
    relative, absolute = TOLERANCE[got.dtype.name]
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    np.testing.assert_allclose(got, want, relative, absolute, err_msg=what)


def assert_right(
    got: Any, call: Call, rows: np.ndarray | None = None, last_queries: int | None = None
) -> None:
    """Hold all statistics of a call to the matrix of its probabilities."""
    truth = Truth(call, [x.astype(np.float64) for x in exact_lse(call)])
    compute = np.dtype("f8" if call.arrays["q"].dtype == np.float64 else "f4")
    for name, array in got._asdict().items():
        assert array is None or array.dtype == (np.int64 if name == "top_k_indices" else compute)
    with np.errstate(all="ignore"):
        visible = [np.where(s, x, -np.inf) for s, x in zip(truth.seen, truth.scores, strict=True)]
        logs = [np.where(p > 0, p * np.log(p), 0) for p in truth.p]
    close(got.max_logit, joined([x.max(axis=2, initial=-np.inf) for x in visible], call), "max_logit")
    close(got.entropy, joined([-x.sum(axis=2) for x in logs], call), "entropy")
    mass = [p[:, -last_queries:] if last_queries else p for p in truth.p]
    num_keys = got.key_mass.shape[-1]
    close(got.key_mass, of_keys([p.sum(axis=1) for p in mass], num_keys, call), "key_mass")
    if rows is not None:
        longest = max(p.shape[1] for p in truth.p)
        padded = [np.pad(p, [(0, 0), (0, longest - p.shape[1]), (0, 0)]) for p in truth.p]
        close(got.rows, of_keys([p[:, rows] for p in padded], num_keys, call), "rows")
    assert_top(got, truth, call)


def of_keys(parts: list[np.ndarray], num_keys: int, call: Call) -> np.ndarray:
    """Results of keys, ``(num_heads, ..., keys)`` of each sequence, with 0 behind the keys there are."""
    shape = (len(parts), *parts[0].shape[:-1], num_keys)
    whole = np.zeros(shape)
    for one, part in zip(whole, parts, strict=True):
        one[..., : part.shape[-1]] = part
    if call.function != "flash_attention" or call.arrays["q"].ndim == 4:
        return whole
    return whole[0] if call.arrays["q"].ndim == 3 else whole[0, 0]


def assert_top(got: Any, truth: Truth, call: Call) -> None:
    """The largest probabilities, falling; each index once, with the probability that it is said to have."""
    values, indices = got.top_k_values, got.top_k_indices
    assert values.shape == indices.shape == (*lse_shape(call), values.shape[-1])
    k = values.shape[-1]
    best, there = [], []
    for p, seen in zip(truth.p, truth.seen, strict=True):
        fallen = -np.sort(-np.where(seen, p, -1), axis=2)[..., :k]
        room = [(0, 0), (0, 0), (0, k - fallen.shape[2])]
        best.append(np.pad(fallen.clip(0), room))
        there.append(np.pad(fallen >= 0, room))
    there = joined(there, call)
    close(values, joined(best, call), "top_k_values")
    assert (np.diff(values, axis=-1) <= 0).all()
    assert ((indices >= 0) == there).all() and (indices[~there] == -1).all() and not values[~there].any()
    for p, seen, mine, keys in zip(
        truth.p, truth.seen, split(values, call), split(indices, call), strict=True
    ):
        valid = keys >= 0
        at = np.take_along_axis(p, keys.clip(0), axis=2) if p.shape[2] else 0 * mine
        close(mine * valid, at * valid, "top_k_indices")
        if p.shape[2]:
            assert np.take_along_axis(seen, keys.clip(0), axis=2)[valid].all()
        ordered = np.sort(np.where(valid, keys, -1 - np.arange(k)), axis=2)
        assert (np.diff(ordered, axis=2) > 0).all(), "a key twice"


def split(array: np.ndarray, call: Call) -> list[np.ndarray]:
    """The parts ``(num_heads, rows, k)`` of a result of rows that belong to each sequence."""
    borders = call.arrays.get("cu_seqlens_q", call.options.get("cu_seqlens_q"))
    if borders is not None:
        return [array[:, lo:hi] for lo, hi in itertools.pairwise(borders)]
    rows = [len(sequence.q) for sequence in sequences(call)]
    num_heads = next(sequences(call)).q.shape[1]
    return list(array.reshape(len(rows), num_heads, rows[0], array.shape[-1]))


# --- every option ---


@once
def terms_call(name: str) -> Call:
    return with_terms(
        dense(21, batch=2, seqlen_q=19, seqlen_kv=141, num_heads=4, num_kv_heads=2, amplitude=1.5), name
    )


@pytest.mark.parametrize("name", TERMS)
def test_terms(backend, name):
    call, rows = terms_call(name), np.array([0, 18, 7])
    assert_right(stats(call, backend, rows=rows), call, rows)


@pytest.mark.parametrize(
    "options",
    [
        dict(causal="top_left"),
        dict(causal=True, q_offset=np.array([3, 60])),
        dict(window=(5, 2), q_offset=70),
        dict(
            window=(5, 2), sink_tokens=9, q_offset=0
        ),  # some rows see a key as a sink token, some by the window
        dict(scale=-0.3),
        dict(seq_lens=np.array([141, 33], np.int32), causal=True),
        dict(seq_lens=np.array([0, 7])),
    ],
    ids=str,
)
def test_alignment(backend, options):
    call, rows = terms_call("none").but(**options), np.arange(19)
    assert_right(stats(call, backend, rows=rows), call, rows)


# --- every address ---


@once
def decode_call() -> Call:
    lens = np.array([9, 700, 130])
    return dense(22, batch=3, seqlen_q=1, seqlen_kv=700, num_heads=8, num_kv_heads=2, seq_lens=lens)


def test_decode(backend):
    call, rows = decode_call(), np.array([0])
    assert_right(stats(call, backend, rows=rows), call, rows)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("axes", [4, 3, 2])
def test_layouts(backend, layout, axes):
    call = dense(23, batch=1, seqlen_q=6, seqlen_kv=20, num_heads=2 if axes > 2 else 1)
    if layout == "bhsd":
        call = call.of(**{n: np.ascontiguousarray(x.swapaxes(1, 2)) for n, x in call.arrays.items()})
    call = call.but(layout=layout, causal=True)
    drop = {4: np.s_[:], 3: np.s_[0], 2: np.s_[0, :, 0] if layout == "bshd" else np.s_[0, 0]}[axes]
    call, rows = call.of(**{n: x[drop] for n, x in call.arrays.items()}), np.array([5])
    assert_right(stats(call, backend, rows=rows), call, rows)


@once
def packed_call(name: str) -> Call:
    return with_terms(varlen([7, 0, 30, 1, 3], [9, 4, 52, 140, 0], 24, num_heads=4, num_kv_heads=2), name)


@pytest.mark.parametrize("name", ["none", "alibi", "bias", "sink tokens", "spans", "many"])
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_packed(backend, name, page_size):
    call, rows = packed_call(name), np.array([2, 0, 29])
    if page_size:
        call = paged_varlen(call, page_size)
    assert_right(stats(call, backend, rows=rows), call, rows)


@pytest.mark.parametrize("cache_layout", ["nhd", "hnd"])
@pytest.mark.parametrize("name", ["none", "tree", "mask of keys"])
def test_paged(backend, name, cache_layout):
    """Pages lie shuffled in a pool full of NaN; the results have the bits of dense keys."""
    call, rows = terms_call(name), np.array([4])
    pages = paged(call, 16, cache_layout=cache_layout)
    got = stats(pages, backend, rows=rows)
    assert_right(got, pages, rows)
    for name, mine, other in zip(got._fields, got, stats(call, backend, rows=rows), strict=True):
        assert_same_bits(mine, other, name)


def test_one_token_a_sequence(backend):
    call = paged(decode_call(), 32)
    token = Call(call.function, {**call.arrays, "q": call.arrays["q"][:, 0]}, call.options)
    got = stats(token, backend)
    assert got.max_logit.shape == got.entropy.shape == (3, 8)
    assert got.top_k_values.shape == (3, 8, 8) and got.key_mass.shape == (3, 8, 700)
    assert_right(got, token)


# --- types ---


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_types(backend, dtype):
    call = dense(25, seqlen_q=9, seqlen_kv=150, dtype=dtype, head_dim=24, causal=True)
    assert_right(stats(call, backend), call)


@pytest.mark.parametrize("stored", ["float8_e5m2", "int8", "int4"])
@pytest.mark.parametrize("scales", ["number", "heads", "tokens"])
def test_storage(backend, stored, scales):
    call = quantised(dense(26, seqlen_q=9, seqlen_kv=70, num_heads=4, num_kv_heads=2), stored, scales)
    assert_right(stats(call, backend), call)


def test_wide_lse_beside_narrow_queries(backend):
    call = terms_call("none")
    lse = joined(exact_lse(call), call)
    wide = stats(call, backend, lse.astype("f8"))
    for name, mine, other in zip(wide._fields[:-1], wide, stats(call, backend, lse), strict=False):
        assert_same_bits(mine, other, name)


# --- what is wanted ---


@pytest.mark.parametrize("want", [*((name,) for name in ALL), ["entropy", "key_mass"], {"rows"}, ()])
def test_want(backend, want):
    """What was not asked for is None, and asking for less changes no bit of the rest."""
    call, rows = terms_call("softcap"), np.array([3, 4], np.int32)
    everything = stats(call, backend, rows=rows)
    got = stats(call, backend, want=want, **({"rows": rows} if "rows" in want else {}))
    wanted = {"top_k_values", "top_k_indices"} if "top_k" in want else set()
    wanted |= set(want) - {"top_k"}
    for name, array in got._asdict().items():
        if name in wanted:
            assert_same_bits(array, getattr(everything, name), name)
        else:
            assert array is None


def test_default_has_rows_where_they_are_chosen(any_isa):
    call = terms_call("none")
    assert stats(call, any_isa).rows is None
    assert stats(call, any_isa, rows=np.array([1, 1])).rows.shape == (2, 4, 2, 141)
    assert stats(call, any_isa, rows=np.array([], int)).rows.shape == (2, 4, 0, 141)


@pytest.mark.parametrize("last_queries", [1, 5, 19, 1000])
def test_last_queries(backend, last_queries):
    call = terms_call("alibi")
    assert_right(stats(call, backend, last_queries=last_queries), call, last_queries=last_queries)


@pytest.mark.parametrize("last_queries", [1, 4])
def test_last_queries_of_packed_sequences(backend, last_queries):
    call = packed_call("none")
    assert_right(stats(call, backend, last_queries=last_queries), call, last_queries=last_queries)


@pytest.mark.parametrize("top_k", [1, 2, 31, 141, 200])
def test_top_k(backend, top_k):
    call = terms_call("alibi")
    assert_right(stats(call, backend, top_k=top_k), call)


def test_of_equal_probabilities_the_first_key_comes_first(backend):
    """Four different keys, over and over, also across the borders of tiles."""
    call = dense(27, batch=1, seqlen_q=3, seqlen_kv=400, num_heads=2)
    k = np.tile(call.arrays["k"][:, :4], (1, 100, 1, 1))
    k[:, :, :, 1:] = 0
    call = call.of(k=k)  # scores that are one product: equal in any order of additions
    for top_k in (5, 130):
        got = stats(call, backend, top_k=top_k)
        p = Truth(call, [x.astype(np.float64) for x in exact_lse(call)]).p[0]
        order = np.argsort(-p, axis=2, kind="stable")[..., :top_k]
        np.testing.assert_array_equal(got.top_k_indices[0], order)


def test_all_keys_alike(backend):
    call = dense(28, batch=1, seqlen_q=4, seqlen_kv=300, num_heads=2, causal=True)
    call = call.of(k=np.broadcast_to(call.arrays["k"][:, :1], call.arrays["k"].shape))
    got = stats(call, backend)
    assert (got.top_k_indices == np.arange(8)).all()
    close(got.entropy[0], np.log(np.full((2, 1), 297) + np.arange(4)), "entropy")


# --- what must not reach a result, and what must ---


@pytest.mark.parametrize("name", [name for name in TERMS if name != "none"])
def test_hidden_keys_may_be_nan(backend, name):
    call = terms_call(name)
    lse = joined(exact_lse(call), call)
    got, want = (stats(x, backend, lse) for x in (poisoned_where_unseen(call), call))
    for field, mine, other in zip(got._fields[:-1], got, want, strict=False):
        assert_same_bits(mine, other, field)


def test_hidden_scales_may_be_nan(backend):
    call = quantised(dense(29, seqlen_q=4, seqlen_kv=40, seq_lens=np.array([40, 11])), "int8", "tokens")
    lse = joined(exact_lse(call), call)
    got, want = (stats(x, backend, lse) for x in (poisoned_where_unseen(call), call))
    for field, mine, other in zip(got._fields[:-1], got, want, strict=False):
        assert_same_bits(mine, other, field)


def test_nan_of_other_rows(backend):
    """A key that only the last row sees is NaN: the other rows keep their bits, that one shows it."""
    call = terms_call("softcap")  # causal
    k, lse = call.arrays["k"].copy(), joined(exact_lse(call), call)
    k[:, -1] = np.nan
    bad_lse = lse.copy()
    bad_lse[:, :, -1] = np.nan
    got, want = stats(call.of(k=k), backend, bad_lse), stats(call, backend, lse)
    for name in ("max_logit", "entropy", "top_k_values", "top_k_indices"):
        assert_same_bits(getattr(got, name)[:, :, :-1], getattr(want, name)[:, :, :-1], name)
    assert np.isnan(got.entropy[:, :, -1]).all() and np.isnan(got.key_mass[:, :, -1]).all()


def test_rows_that_see_nothing(backend):
    seen = np.ones((19, 141), bool)
    seen[[0, 6, 18]] = False
    call, rows = terms_call("none").but(mask=seen), np.array([6, 5])
    got = stats(call, backend, rows=rows)
    assert_right(got, call, rows)
    blind = np.s_[:, :, [0, 6, 18]]
    assert np.isneginf(got.max_logit[blind]).all() and not got.entropy[blind].any()
    assert not got.top_k_values[blind].any() and (got.top_k_indices[blind] == -1).all()
    assert not got.rows[:, :, 0].any()


@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 0, 3), (2, 3, 0)])
def test_empty(backend, sizes):
    batch, seqlen_q, seqlen_kv = sizes
    call = dense(30, batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    got = stats(call, backend, np.full((batch, 2, seqlen_q), -np.inf, "f4"))
    assert got.max_logit.shape == (batch, 2, seqlen_q) and np.isneginf(got.max_logit).all()
    assert got.key_mass.shape == (batch, 2, seqlen_kv) and not got.key_mass.any()
    assert got.top_k_indices.shape == (batch, 2, seqlen_q, 8) and (got.top_k_indices == -1).all()


# --- with the calls that they are about ---


def test_after_a_call(backend):
    """With the log-sum-exp that the backend itself returned, the probabilities of a row add up to 1."""
    call = terms_call("alibi")
    _, lse = pyflash.flash_attention(*call.arrays.values(), **call.options, return_lse=True, **backend.kwargs)
    got = stats(call, backend, lse, rows=np.arange(19))
    close(got.rows.sum(axis=3), np.ones((2, 4, 19)), "sums of rows")
    close(got.rows.sum(axis=2), got.key_mass.astype("f8"), "sums of keys")


def test_sinks_in_the_lse_take_their_part(backend):
    call = terms_call("sinks in the lse")
    _, lse = pyflash.flash_attention(*call.arrays.values(), **call.options, return_lse=True, **backend.kwargs)
    without = call.but(lse_includes_sinks=False)
    _, plain = pyflash.flash_attention(
        *call.arrays.values(), **without.options, return_lse=True, **backend.kwargs
    )
    got = stats(call, backend, lse, rows=np.arange(19))
    close(got.rows.sum(axis=3), np.exp(plain.astype("f8") - lse), "what the sinks leave")


@pytest.mark.parametrize("name", ["none", "alibi", "mask"])
def test_bits_of_any_number_of_threads(c_backend, name):
    call = dense(31, batch=2, seqlen_q=70, seqlen_kv=300, num_heads=4, num_kv_heads=2)
    call, rows = with_terms(call, name), np.array([69])
    want = stats(call, c_backend, rows=rows, num_threads=1)
    for num_threads in (1, 2, 5):
        got = stats(call, c_backend, rows=rows, num_threads=num_threads)
        for field, mine, other in zip(got._fields, got, want, strict=True):
            assert_same_bits(mine, other, f"{field}, {num_threads} threads")


def test_rows_do_not_depend_on_other_rows(backend):
    call = terms_call("none").but(q_offset=100, causal=True)
    lse = joined(exact_lse(call), call)
    whole = stats(call, backend, lse)
    part = call.of(q=call.arrays["q"][:, 5:8]).but(q_offset=105)
    got = stats(part, backend, lse[:, :, 5:8])
    for name in ("max_logit", "top_k_indices"):
        assert_same_bits(getattr(got, name), getattr(whole, name)[:, :, 5:8], name)
    close(got.entropy, whole.entropy[:, :, 5:8].astype("f8"), "entropy")


def test_results_are_contiguous_and_new(any_isa):
    got = stats(terms_call("none"), any_isa)
    assert all(x.flags.c_contiguous and x.flags.writeable for x in got[:-1])
    assert len({x.ctypes.data for x in got[:-1]}) == 5 and bits(got.entropy).any()
