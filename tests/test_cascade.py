"""Cascade attention: held to the oracle over the concatenated keys, whatever option crosses the border."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import (
    assert_same_bits,
    assert_same_rows,
    dense,
    given,
    normal,
    once,
    pages_of,
    prefix_sums,
    quantised,
    varlen,
)
from conftest import available
from oracle import Call, assert_matches
from oracle_terms import UserFunction
from terms import (
    BATCHED,
    BY_BATCH,
    TERMS,
    Sizes,
    bias_with_holes,
    holes,
    rising_spans,
    rubbish,
    sizes_of,
    unseen_keys,
    with_terms,
)

import pyflash
from pyflash import _backends

#: Keys of the prefix in most tests: more than a tile of the smallest kernels, and no multiple of anything.
SHARED = 37


def shared_prefix(call: Call, shared_len: int = SHARED) -> Call:
    """A dense call in which all sequences begin with the keys of the first one."""
    arrays = dict(call.arrays)
    for name in "kv":
        array = arrays[name] = arrays[name].copy()
        array[:, :shared_len] = array[:1, :shared_len]
    return Call(call.function, arrays, call.options)


def run(
    call: Call,
    backend: Any,
    shared_len: int = SHARED,
    *,
    page_size: int | None = None,
    shared_pages: bool = True,
    cache_layout: str = "nhd",
    **more: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """The cascade that means the same as a dense call of a shared prefix, in pages if a size is given."""
    options = {**given(call.options, backend), **more}
    lens, prefix, own = options.pop("seq_lens", None), {}, {}
    scaled = [name for name in ("k_scale", "v_scale") if np.ndim(options.get(name)) == 3]
    stored = {**{name: call.arrays[name] for name in "kv"}, **{name: options.pop(name) for name in scaled}}
    for name, x in stored.items():
        prefix[name], own[name] = x[0, :shared_len], x[:, shared_len:]
    own_lens = np.full(len(own["k"]), own["k"].shape[1]) if lens is None else lens - shared_len
    if page_size:
        sequences = [tuple(x[b, : own_lens[b]] for x in own.values()) for b in range(len(own_lens))]
        pages = pages_of([*sequences, tuple(prefix.values())], page_size, cache_layout=cache_layout)
        table = pages["block_table"]
        options |= {
            "block_table": table[:-1],
            "seq_lens": pages["seq_lens"][:-1],
            "cache_layout": cache_layout,
        }
        own = {name: pages[{"k": "k_cache", "v": "v_cache"}.get(name, name)] for name in own}
        if shared_pages:
            prefix = own
            options |= {"shared_block_table": table[-1], "shared_len": shared_len}
    elif lens is not None:
        options["seq_lens"] = own_lens
    options |= {name: own[name] for name in scaled} | {f"{name}_shared": prefix[name] for name in scaled}
    arrays = [call.arrays["q"], prefix["k"], prefix["v"], own["k"], own["v"]]
    return checked(arrays, options, backend)


def checked(arrays: list[np.ndarray], options: dict[str, Any], backend: Any) -> Any:
    """Make the call, and see that it changes no input."""
    inputs = [*arrays, *(x for name, x in options.items() if isinstance(x, np.ndarray) and name != "out")]
    before = [x.tobytes() for x in inputs]
    result = pyflash.cascade_attention(*arrays, **options, return_lse=True, **backend.kwargs)
    assert [x.tobytes() for x in inputs] == before
    return result


def is_refused(call: Call, backend: Any) -> bool:
    """Whether the call has functions that the backend would call with positions of one pass only."""
    return backend.name == "c" and any(isinstance(x, UserFunction) for x in call.options.values())


# --- every option ---

LENGTHS = {
    "full": None,
    "uneven": np.array([SHARED + 9, SHARED + 4, SHARED + 4, SHARED + 2]),
    "empty": np.array([SHARED, SHARED + 9, SHARED, SHARED + 1]),
}


@once
def terms_call(name: str, lengths: str, seqlen_q: int = 2) -> Call:
    call = shared_prefix(
        dense(7, batch=4, seqlen_q=seqlen_q, seqlen_kv=SHARED + 9, num_heads=4, num_kv_heads=2)
    )
    call = with_terms(call, name)
    return call if LENGTHS[lengths] is None else call.but(seq_lens=LENGTHS[lengths])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", TERMS)
def test_terms(backend, name, lengths):
    call = terms_call(name, lengths)
    if is_refused(call, backend):
        with pytest.raises(pyflash.UnsupportedError, match="cascade_attention"):
            run(call, backend)
        return
    if "tree" in call.options and lengths == "empty":
        with pytest.raises(pyflash.InvalidArgument, match="tree: found 2 draft tokens, expected at most 0"):
            run(call, backend)
        return
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("name", ["none", "alibi", "mask", "many"])
def test_many_rows(backend, name):
    """More rows than own keys: the first rows sit inside the prefix."""
    call = terms_call(name, "uneven", 20)
    assert_matches(*run(call, backend), call)


#: Options that cross the border between prefix and own keys in one way or another.
CROSSING = {
    "top_left": dict(causal="top_left"),
    "q_offset before the prefix's end": dict(causal=True, q_offset=10),
    "q_offset of each": dict(causal=True, q_offset=np.array([0, SHARED - 1, SHARED, SHARED + 20])),
    "window into the prefix": dict(window=(12, 0)),
    "window behind the prefix": dict(window=(3, None), q_offset=SHARED + 5),
    "window to the right": dict(window=(None, 2), q_offset=np.array([5, SHARED - 3, SHARED, SHARED])),
    "sink tokens": dict(window=(4, 0), sink_tokens=5, causal=True),
    "all of the prefix and more are sink tokens": dict(window=(1, 0), sink_tokens=SHARED + 2),
    "as many sink tokens as keys of the prefix": dict(window=(1, 1), sink_tokens=SHARED),
    "sink tokens past the causal end": dict(window=(1, 1), sink_tokens=30, q_offset=12, causal=True),
    "span inside the prefix": dict(spans=(4, 20)),
    "span over the border": dict(spans=(SHARED - 5, SHARED + 5)),
    "span behind the border": dict(spans=(SHARED + 1, 999)),
    "span of rows": dict(spans=(np.arange(6) * 9, np.arange(6) * 9 + 4)),
    "bias that hides the prefix": dict(bias=np.where(np.arange(SHARED + 9) < SHARED, -np.inf, 1.0)),
    "mask that hides the rest": dict(mask=np.arange(SHARED + 9) < SHARED),
    "mask of one row": dict(mask=(np.arange(6) != 2)[:, None]),
    "bias of each head": dict(bias=normal(4, (4, 1, 1))),
    "bias of each sequence": dict(bias=normal(4, (4, 1, 6, 1))),
    "scale": dict(scale=-0.4, softcap=1.0),
}  # fmt: skip


@once
def crossing_call(name: str, group: int) -> Call:
    spec = dict(batch=4, seqlen_q=6, seqlen_kv=SHARED + 9, num_heads=4, num_kv_heads=4 // group)
    return shared_prefix(dense(8, **spec, **CROSSING[name]))


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("name", CROSSING)
def test_borders(backend, name, group):
    call = crossing_call(name, group)
    assert_matches(*run(call, backend), call)


@once
def user_call(lengths: str) -> Call:
    spans = rising_spans(sizes_of(terms_call("none", lengths)), 3)
    return terms_call("none", lengths).but(score_mod=BY_BATCH, mask_mod=BATCHED, spans=spans, window=(40, 1))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_user_functions_see_the_callers_indices(lengths):
    """Groups of sequences become heads, others sequences of another number: the functions never know."""
    numpy = numpy_backend()
    assert_matches(*run(user_call(lengths), numpy), user_call(lengths))
    alike = terms_call("none", lengths).but(score_mod=BY_BATCH, mask_mod=BATCHED)
    assert_matches(*run(alike, numpy), alike)


def numpy_backend() -> Any:
    return next(x for x in available() if x.name == "numpy")


# --- every address ---


@pytest.mark.parametrize("shared_pages", [False, True], ids=["dense prefix", "paged prefix"])
@pytest.mark.parametrize("cache_layout", ["nhd", "hnd"])
@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("name", ["none", "many", "tree"])
def test_paged(backend, name, page_size, cache_layout, shared_pages):
    """Pages lie shuffled in a pool full of NaN; the result has the bits of the dense cascade."""
    call = terms_call(name, "uneven")
    got = run(call, backend, page_size=page_size, cache_layout=cache_layout, shared_pages=shared_pages)
    assert_matches(*got, call)
    assert_same_bits(got, run(call, backend), "paged and dense")


def test_one_token_a_sequence(backend):
    call = terms_call("alibi", "uneven", 1)
    sequences = [
        tuple(call.arrays[n][b, SHARED:length] for n in "kv") for b, length in enumerate(LENGTHS["uneven"])
    ]
    pages = pages_of(sequences, 4)
    arrays = [call.arrays["q"][:, 0], *(call.arrays[n][0, :SHARED] for n in "kv")]
    arrays += [pages["k_cache"], pages["v_cache"]]
    options = {name: x for name, x in call.options.items() if name != "seq_lens"}
    options |= {"block_table": pages["block_table"], "seq_lens": pages["seq_lens"]}
    out, lse = checked(arrays, options, backend)
    assert out.shape == (4, 4, 8) and lse.shape == (4, 4)
    assert_matches(out[:, None], lse[:, :, None], call)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_layouts(backend, layout):
    call = terms_call("mask of keys", "uneven")
    arrays = [call.arrays["q"], *(call.arrays[n][0, :SHARED] for n in "kv")]
    arrays += [call.arrays[n][:, SHARED:] for n in "kv"]
    options = {**call.options, "seq_lens": call.options["seq_lens"] - SHARED, "layout": layout}
    want = run(call, backend)
    if layout == "bhsd":
        arrays = [x.swapaxes(-2, -3) for x in arrays]
    out = np.full(arrays[0].shape, np.nan, "f4")
    got, lse = checked(arrays, {**options, "out": out}, backend)
    assert got is out
    assert_same_bits((got.swapaxes(1, 2) if layout == "bhsd" else got, lse), want, layout)


#: Rows and own keys of packed sequences: chunks of prompts and single tokens, empty ones, twins.
PACKED = ([4, 1, 0, 1, 6, 1], [9, 3, 5, 3, 0, 7])


@once
def packed_call(name: str) -> Call:
    lengths_q, own = PACKED
    call = varlen(lengths_q, [SHARED + n for n in own], 5, num_heads=4, num_kv_heads=2)
    arrays = dict(call.arrays)
    for part in "kv":
        array = arrays[part] = arrays[part].copy()
        for first in arrays["cu_seqlens_kv"][:-1]:
            array[first : first + SHARED] = array[:SHARED]
    call = Call(call.function, arrays, call.options)
    if name == "spans":
        return call.but(spans=(np.arange(13) // 3 * 0 + 3, np.full(13, SHARED + 2)))
    return call.but(causal=True) if name == "none" else with_terms(call, name)


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize(
    "name",
    [
        "none",
        "alibi",
        "alibi of each sequence",
        "sink tokens",
        "bias",
        "mask of keys",
        "spans",
        "sinks",
        "many",
    ],
)
def test_packed(backend, name, page_size):
    call = packed_call(name)
    borders = call.arrays["cu_seqlens_kv"]
    own = {
        n: [call.arrays[n][hi - m : hi] for hi, m in zip(borders[1:], PACKED[1], strict=True)] for n in "kv"
    }
    arrays = [call.arrays["q"], *(call.arrays[n][:SHARED] for n in "kv")]
    options = {**call.options, "cu_seqlens_q": call.arrays["cu_seqlens_q"]}
    if page_size:
        pages = pages_of(list(zip(own["k"], own["v"], strict=True)), page_size)
        arrays += [pages["k_cache"], pages["v_cache"]]
        options |= {"block_table": pages["block_table"], "seq_lens": pages["seq_lens"]}
    else:
        arrays += [np.concatenate(own[n]) for n in "kv"]
        options["cu_seqlens_kv"] = prefix_sums(PACKED[1])
    assert_matches(*checked(arrays, options, backend), call)


# --- types ---


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_types(backend, dtype, out_dtype):
    spec = dict(batch=3, seqlen_q=4, seqlen_kv=SHARED + 20, dtype=dtype, head_dim=16, head_dim_v=24)
    call = shared_prefix(dense(9, **spec, sinks=normal(2, (2,)), causal=True))
    if out_dtype is not None:
        call = call.but(out_dtype=out_dtype)
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("scales", ["number", "heads", "tokens"])
@pytest.mark.parametrize("stored", ["float16", "float8_e4m3fn", "int8", "int4"])
def test_storage(backend, stored, scales):
    call = shared_prefix(dense(10, batch=3, seqlen_q=2, seqlen_kv=SHARED + 8, num_heads=4, num_kv_heads=2))
    call = quantised(call, stored, scales).but(causal=True)
    assert_matches(*run(call, backend), call)
    assert_same_bits(run(call, backend, page_size=4), run(call, backend), "paged and dense")


# --- what must not reach a result, and what must ---


@pytest.mark.parametrize(
    "name", ["none", "sink tokens", "spans", "mask of blocks", "bias of keys with holes", "many"]
)
def test_hidden_keys_may_be_nan(backend, name):
    call = terms_call(name, "uneven", 6)
    arrays = {n: call.arrays[n].copy() for n in "kv"}
    unseen = unseen_keys(call)
    for array in arrays.values():
        array[:, :SHARED][:, np.all([x[:SHARED] for x in unseen], axis=0)] = rubbish(array.dtype)
        for b, part in enumerate(unseen):
            array[b, SHARED : len(part)][part[SHARED:]] = rubbish(array.dtype)
            array[b, len(part) :] = rubbish(array.dtype)
    assert_same_rows(backend, run(call.of(**arrays), backend), run(call, backend), "poisoned")


@pytest.mark.parametrize("place", [3, SHARED + 1])
def test_visible_nan_shows(backend, place):
    call = terms_call("none", "full")
    v = call.arrays["v"].copy()
    v[:, place, 0, 5] = np.nan
    out, _ = run(call.of(v=v), backend)
    assert np.isnan(out[:, :, :2, 5]).all() and np.isfinite(out[:, :, 2:]).all()


def test_a_finite_sink_beside_nothing_but_minus_infinity(backend):
    """Scores of -inf in both parts are NaN, as in one call, unless a sink takes all of the weight."""
    call = terms_call("none", "full")
    q, k = np.abs(call.arrays["q"]), np.full_like(call.arrays["k"], -np.inf)
    sinks = np.array([0.5, -np.inf, np.inf, np.nan])
    out, lse = run(call.of(q=q, k=k).but(sinks=sinks), backend)
    assert not out[:, :, [0, 2]].any() and np.isnan(out[:, :, [1, 3]]).all() and np.isneginf(lse).all()


# --- reproducibility ---


@pytest.mark.parametrize("name", ["none", "alibi", "many"])
def test_bits_from_run_to_run(backend, name):
    call = terms_call(name, "uneven", 6)
    assert_same_bits(run(call, backend), run(call, backend), name)


@pytest.mark.parametrize("name", ["none", "alibi", "many"])
def test_bits_of_any_number_of_threads(c_backend, name):
    call = terms_call(name, "uneven", 6)
    want = run(call, c_backend, num_threads=1)
    for num_threads in (2, 5):
        assert_same_bits(run(call, c_backend, num_threads=num_threads), want, f"{num_threads} threads")


@pytest.mark.parametrize("options", [dict(num_splits=3), dict(family="decode"), dict(family="prefill")])
def test_options_of_kernels(backend, options):
    call = terms_call("none", "uneven", 6)
    assert_matches(*run(call, backend, **options), call)


# --- sharing ---


@pytest.fixture
def passes(monkeypatch):
    """The descriptions of all passes that the NumPy backend makes."""
    seen = []
    backend = _backends.load("numpy")
    attention = type(backend).attention
    monkeypatch.setattr(
        type(backend), "attention", lambda self, args: (seen.append(args), attention(self, args))[1]
    )
    return seen


def of_prefix(passes):
    """(rows, heads) of each pass over the prefix."""
    return [(args.q.shape[1], args.q.shape[2]) for args in passes[:-1]]


@pytest.mark.parametrize(
    ("name", "lengths", "shapes"),
    [
        ("none", "full", [(8, 4)]),  # one sequence of all rows
        ("sinks", "uneven", [(8, 4)]),
        ("alibi", "full", [(2, 16)]),  # one sequence whose heads are those of all
        ("alibi", "uneven", [(2, 8), (4, 4)]),  # twins, and two by themselves
        ("mask of blocks", "uneven", [(2, 16)]),  # the same for all, wherever they are
        ("mask of keys", "full", [(8, 4)]),  # differs: each sequence by itself
    ],
)
def test_prefix_is_read_once_for_all_alike(passes, name, lengths, shapes):
    call = terms_call(name, lengths)
    assert_matches(*run(call, numpy_backend()), call)
    assert of_prefix(passes) == shapes
    for args in passes:
        assert args.k.base is not None  # never a copy of keys


# --- nothing ---


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "shared_len", "own"),
    [(0, 2, 5, 3), (2, 0, 5, 3), (2, 3, 0, 3), (2, 3, 5, 0), (2, 3, 0, 0)],
)
@pytest.mark.parametrize("name", ["none", "alibi"])
def test_empty(backend, name, batch, seqlen_q, shared_len, own):
    call = dense(11, batch=batch, seqlen_q=seqlen_q, seqlen_kv=shared_len + own, causal=True)
    if batch:
        call = shared_prefix(call, shared_len)
    call = with_terms(call, name)
    if batch:
        assert_matches(*run(call, backend, shared_len), call)
        return
    arrays = [call.arrays["q"], *[np.zeros((shared_len, 2, 8), "f4")] * 2]
    out, lse = checked([*arrays, *(call.arrays[n][:, shared_len:] for n in "kv")], call.options, backend)
    assert out.shape == (0, 2, 2, 8) and lse.shape == (0, 2, 2)


def test_part_of_a_dense_prefix(backend):
    call = terms_call("none", "full")
    arrays = [call.arrays["q"]]
    for name in "kv":
        room = np.full((SHARED + 30, 2, 8), np.nan, "f4")
        room[:SHARED] = call.arrays[name][0, :SHARED]
        arrays.append(room)
    arrays += [call.arrays[n][:, SHARED:] for n in "kv"]
    assert_same_bits(checked(arrays, {"shared_len": SHARED}, backend), run(call, backend), "part")


def test_holes_are_not_shared(backend):
    """Masks that differ by head but not by sequence, and the other way round."""
    for shape in ((1, 4, 2, SHARED + 9), (4, 1, 2, SHARED + 9), (1, 1, 2, SHARED + 9)):
        call = terms_call("none", "uneven").but(mask=holes(shape, 3), causal=True)
        assert_matches(*run(call, backend), call)


# --- any options together ---


@once
def random_call(seed: int) -> tuple[Call, int]:
    """A call with every option drawn by itself, and the length of its prefix."""
    rng = np.random.default_rng(seed)
    batch, seqlen_q, shared_len, own = (int(x) for x in rng.integers([1, 1, 1, 0], [5, 8, 40, 9]))
    num_kv_heads, group = (int(x) for x in rng.integers(1, 4, 2))
    n = Sizes(batch, num_kv_heads * group, seqlen_q, shared_len + own)
    lens = shared_len + rng.integers(0, own + 1, batch)

    def shape(*full: int) -> tuple[int, ...]:
        return tuple(x if rng.random() < 0.5 else 1 for x in full)

    drawn = {
        "causal": lambda: True,
        "seq_lens": lambda: lens,
        "window": lambda: tuple(int(x) for x in rng.integers(-1, n.seqlen_kv, 2)),
        "sink_tokens": lambda: int(rng.integers(0, shared_len + 5)),
        "q_offset": lambda: rng.choice([-2, 0, shared_len, n.seqlen_kv - seqlen_q], batch),
        "spans": lambda: rising_spans(n, seed),
        "alibi_slopes": lambda: normal(seed, n[:2]),
        "bias": lambda: bias_with_holes(shape(*n), seed),
        "mask": lambda: holes(shape(*n), seed),
        "sinks": lambda: normal(seed, (n.num_heads,)),
        "softcap": lambda: 1.3,
    }
    options = {name: draw() for name, draw in drawn.items() if rng.random() < 0.35}
    call = dense(
        seed,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=n.seqlen_kv,
        num_heads=n.num_heads,
        num_kv_heads=num_kv_heads,
        **options,
    )
    return shared_prefix(call, shared_len), shared_len


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(backend, seed):
    call, shared_len = random_call(seed)
    assert_matches(*run(call, backend, shared_len), call)
