"""Merges, appends and statistics on the CUDA backend where index arrays lie on the device, unchecked.

The kernels run on the emulator, whose device memory is the host's: an array of the host that is called a
`DeviceArray` is one on the device. What the shared suite can say with host arrays is not repeated here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import emulator
import numpy as np
import pytest
from calls import assert_same_bits, normal
from test_append import tables

from pyflash import _args_stats, _reference
from pyflash._arrays import DeviceArray
from pyflash._description import MergeArgs
from pyflash.gpu import _device, _operations, _places, _plan

PLATFORM = emulator.Platform()
NUM_PAGES, PAGE, HEADS, DIM = 12, 4, 2, 8


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    if (reason := PLATFORM.unavailable()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(_device, "platform", PLATFORM)
    return PLATFORM.device(0)


def there(x: np.ndarray) -> DeviceArray:
    """An array as one on the device."""
    return x.view(DeviceArray)


def here(x: np.ndarray) -> np.ndarray:
    return x.view(np.ndarray)


# --- append ---


def append_args(num_tokens: int, kv_dtype: str = "float32", **more: Any) -> SimpleNamespace:
    """An append without places yet; caches of numbers of their own, so that a stray write shows."""
    stored = {"float32": np.float32, "int8": np.int8, "int4": np.uint8}[kv_dtype]
    width = DIM // 2 if kv_dtype == "int4" else DIM
    shape = (NUM_PAGES, PAGE, HEADS, width)
    pools = [(np.arange(np.prod(shape)).reshape(shape) % 97).astype(stored) + n for n in range(2)]
    scales = [None, None]
    if kv_dtype != "float32":
        scales = [there(np.arange(np.prod(shape[:3]), dtype="f4").reshape(shape[:3]) + n) for n in range(2)]
    given = dict(
        k=there(normal(1, (num_tokens, HEADS, DIM))),
        v=there(normal(2, (num_tokens, HEADS, DIM))),
        k_cache=there(pools[0]),
        v_cache=there(pools[1]),
        kv_dtype=kv_dtype,
        k_scale=scales[0],
        v_scale=scales[1],
        writes_scales=kv_dtype != "float32",
        slots=None,
        cos=None,
        sin=None,
        interleaved=False,
        positions=None,
        block_table=None,
        seq_lens=None,
        cu_seqlens=None,
    )
    return SimpleNamespace(**{**given, **more})


WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale")


def expected_append(args: SimpleNamespace, slots: list[int]) -> dict[str, np.ndarray]:
    """What the reference makes of the same tokens with slots that are known, one after the other."""
    mine = {name: here(x).copy() if isinstance(x, DeviceArray) else x for name, x in vars(args).items()}
    for t, slot in enumerate(slots):
        if slot >= 0:
            one = {"k": mine["k"][t : t + 1], "v": mine["v"][t : t + 1], "slots": np.array([slot])}
            if mine["cos"] is not None:
                row = t if mine["positions"] is None else mine["positions"][t]
                one |= {name: mine[name][row : row + 1] for name in ("cos", "sin")}
            _reference.BACKEND.append_kv(SimpleNamespace(**{**mine, **one}))
    return {name: mine[name] for name in WRITTEN if mine[name] is not None}


def check_append(device: Any, args: SimpleNamespace, slots: list[int], positions: Any = None) -> None:
    known = SimpleNamespace(**vars(args))
    if positions is not None:
        known.positions = positions
    want = expected_append(known, slots)
    _operations.append_kv(device, 0, _places.Places(device, 0), args)
    for name, right in want.items():
        assert_same_bits(here(getattr(args, name)), right, name)


@pytest.mark.parametrize("dtype", ["i4", "i8"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("num_tokens", [1, 3, 40, 300])
def test_slots_on_the_device(device, num_tokens, kv_dtype, dtype):
    """The later of two tokens for one place stays, in any block; what is no place is skipped."""
    slots = np.random.default_rng(num_tokens).integers(-3, NUM_PAGES * PAGE + 3, num_tokens).astype(dtype)
    spread = np.zeros((num_tokens, 3), dtype)
    spread[:, 1] = slots
    args = append_args(num_tokens, kv_dtype, slots=there(spread[:, 1]))
    check_append(device, args, [s if s < NUM_PAGES * PAGE else -1 for s in slots.tolist()])


def test_slots_whose_marks_are_the_same(device):
    """Slots far apart are told from each other, though the first look at them says that they are equal."""
    args = append_args(3)
    pools = [np.zeros((8192 + 1, 1, HEADS, DIM), "f4") for _ in range(2)]
    args.k_cache, args.v_cache = map(there, pools)
    args.slots = there(np.array([0, 8192, 7]))
    check_append(device, args, [0, 8192, 7])


TABLE = np.array([[5, 0, -1], [2, 4, 1], [3, -7, 99], [6, 7, 8]])
LENS = np.array([3, 7, 0, 11])
COUNTS = [2, 4, 3, 1]
#: name -> (what is wrong, in a sequence or none): nothing of that sequence is written
WRONG: dict[str, tuple[dict[str, Any], int | None]] = {
    "nothing": ({}, None),
    "length below 0": ({"seq_lens": (0, -1)}, 0),
    "length behind the table": ({"seq_lens": (3, 12)}, 3),
    "huge length": ({"seq_lens": (1, 2**62)}, 1),
    "page below 0": ({"block_table": ((1, 2), -1)}, 1),
    "page behind the pool": ({"block_table": ((1, 1), NUM_PAGES)}, 1),
    "page that is not needed": ({"block_table": ((1, 0), 1000)}, None),
}


def sequences_args(name: str, how: str, dtype: str) -> tuple[SimpleNamespace, list[int], list[int]]:
    """An append to four sequences, the slots and the positions that its tokens must have."""
    wrong, bad = WRONG[name]
    counts = COUNTS if how == "packed" else [2, 2, 2, 1 + (how == "equal")]
    index = {"block_table": TABLE.copy(), "seq_lens": LENS.copy()}
    if how == "equal":
        index["seq_lens"][3] = 10
    for array, (place, value) in wrong.items():
        index[array][place] = value
    if how == "packed":
        index["cu_seqlens"] = np.cumsum([0, *counts])
    if dtype == "i4":
        index = {array: x.clip(-(2**31), 2**31 - 1).astype(dtype) for array, x in index.items()}
    slots, positions = [], []
    for b, count in enumerate(counts):
        for t in range(count):
            position = int(index["seq_lens"][b]) + t if b != bad else 0
            page = int(TABLE[b, position // PAGE])
            slots.append(-1 if b == bad else page * PAGE + position % PAGE)
            positions.append(position)
    # Some on the device and some on the host, as a caller may have them.
    placed = {array: there(x) if array != "block_table" or dtype == "i8" else x for array, x in index.items()}
    return append_args(sum(counts), **placed), slots, positions


@pytest.mark.parametrize("dtype", ["i4", "i8"])
@pytest.mark.parametrize("how", ["packed", "equal"])
@pytest.mark.parametrize("name", WRONG)
def test_table_and_lengths_on_the_device(device, name, how, dtype):
    args, slots, _ = sequences_args(name, how, dtype)
    check_append(device, args, slots)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_rows", [12, 11])
def test_rotation_by_position(device, num_rows, interleaved):
    """The rows of cos and sin are positions; a sequence that goes behind their end is skipped."""
    args, slots, positions = sequences_args("nothing", "packed", "i8")
    args.cos, args.sin = map(there, tables(num_rows, 3, "float64"))
    args.interleaved = interleaved
    if num_rows == 11:
        slots[-1] = -1
    check_append(device, args, slots, np.array(positions))


def test_rotation_by_given_positions(device):
    args = append_args(4, slots=np.array([5, 0, 5, 9]), positions=np.array([7, 2, 2, 0]))
    args.cos, args.sin = map(there, tables(8, 4, "float32"))
    check_append(device, args, [5, 0, 5, 9])


@pytest.mark.parametrize("length", [0, 3, 4])
def test_dense_cache(device, length):
    """Without a table page b is sequence b; one that is full is skipped."""
    lens = np.full(NUM_PAGES, 1)
    lens[5] = length
    args = append_args(NUM_PAGES, seq_lens=there(lens))
    slots = [b * PAGE + int(lens[b]) for b in range(NUM_PAGES)]
    slots[5] = 5 * PAGE + length if length < PAGE else -1
    check_append(device, args, slots)


@pytest.mark.parametrize(
    ("sums", "written"),
    [
        ([0, 3, 3, 5, 6], [0, 1, 2, 3, 4, 5]),
        ([1, 3, 3, 5, 5], [1, 2, 3, 4]),
        ([0, 3, 2, 5, 6], [0, 1, 2, 3, 4, 5]),  # sequence 1 is none, 2 begins with the third token
        ([-2, 3, 3, 5, 9], [3, 4]),
    ],
    ids=str,
)
def test_prefix_sums_that_cannot_be(device, sums, written):
    """Nothing behind the ends, and no sequence with a border that cannot be."""
    lens, table = np.zeros(4, "i8"), np.arange(4)[:, None]
    args = append_args(6, seq_lens=there(lens), block_table=there(table), cu_seqlens=there(np.array(sums)))
    before = here(args.k_cache).copy()
    _operations.append_kv(device, 0, _places.Places(device, 0), args)
    changed = (here(args.k_cache) != before).any(axis=(2, 3))
    found = [t for t in range(6) if (here(args.k_cache) == here(args.k)[t]).all(axis=(2, 3)).any()]
    assert found == written and changed.sum() == len(written)


# --- merges ---


def merged(device: Any, parts: np.ndarray, lse: np.ndarray, sinks: Any, on_device: bool) -> list[np.ndarray]:
    out, total = np.full(parts.shape[1:], 7, parts.dtype), np.full(lse.shape[1:], 7, lse.dtype)
    place = there if on_device else here
    args = MergeArgs(place(parts), place(lse), sinks, True, place(out), place(total))
    _operations.merge_states(device, 0, _places.Places(device, 0), args)
    return [out, total]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_merge_on_the_device(device, dtype):
    parts = normal(3, (5, 2, 3, 4, 6)).astype(dtype)
    lse, sinks = normal(4, (5, 2, 4, 3)).astype(dtype), normal(5, (4,)).astype("f2")
    want = merged(device, parts, lse, sinks.astype("f8"), on_device=False)
    got = merged(device, parts.swapaxes(1, 3).copy().swapaxes(1, 3), lse, there(sinks), on_device=True)
    for mine, right in zip(got, want, strict=True):
        assert_same_bits(mine, right)


@pytest.mark.parametrize("sink", [None, -np.inf, 0.5, np.inf, np.nan], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rare_merges_are_those_of_the_reference(device, dtype, sink):
    """Empty parts, broken and not; outputs whose sum is infinite and whose mean is not; all of it at once."""
    inf, nan, large = np.inf, np.nan, float(np.finfo(dtype).max)
    rows = [
        ([0, 0, 0], [-inf, -inf, -inf]),
        ([0, inf, 0], [-inf, -inf, -inf]),
        ([nan, 0, 0], [-inf, -inf, -inf]),
        ([nan, 2, 3], [-inf, 1, 2]),
        ([large, large, large], [0, 0, 0]),
        ([large, -large, 5], [700, 700, -700]),
        ([large, inf, 1], [0, 0, 0]),
        ([1, 2, nan], [0, 1, 2]),
        ([1, 2, 3], [0, nan, 2]),
        ([1, 2, 3], [-inf, nan, -inf]),
        ([1, 2, 3], [large, -large, 0]),
        ([1, 2, 3], [-large, -large, -inf]),
    ]
    parts = np.array([x for x, _ in rows], dtype).T[:, None, :, None, None].repeat(2, axis=4)
    parts[..., 1] = np.where(np.array([[y] for _, y in rows], dtype).T[:, :, :, None] == -inf, 0, 1)
    lse = np.array([y for _, y in rows], dtype).T[:, None, None]
    sinks = None if sink is None else np.array([sink])
    got = merged(device, parts, lse, sinks, on_device=True)
    want = [np.empty_like(x) for x in got]
    _reference.BACKEND.merge_states(MergeArgs(parts, lse, sinks, True, *want))
    for mine, right, name in zip(got, want, ("out", "lse"), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-6, err_msg=name)


# --- statistics ---


RESULTS = ("max_logit", "entropy", "key_mass", "top_k_values", "top_k_indices", "row_probabilities")


def found_out(device: Any, call: Any, **changes: Any) -> Any:
    """What becomes of the arguments of a dense call of float32, after changes to the checked ones."""
    expressions = changes.pop("expressions", {})
    args = call.args._replace(**changes)
    batch, seqlen_q, num_heads, head_dim = args.attention.q.shape
    args = args._replace(attention=args.attention._replace(max_seqlen_q=seqlen_q))
    problem = _plan.Problem(
        capability=90,
        num_sms=4,
        shared_bytes=100_000,
        q_dtype="float32",
        kv_dtype="float32",
        out_dtype="float32",
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=args.attention.k.shape[2],
        head_dim=head_dim,
        head_dim_v=head_dim,
        num_queries=batch * seqlen_q,
        max_seqlen_q=seqlen_q,
        max_seqlen_kv=args.attention.k.shape[1],
        packed=False,
        page_size=0,
        aligned=True,
        scaled=False,
        terms=frozenset(expressions),
        expressions=tuple((f"PF_{name.upper()}_EXPRESSION", text) for name, text in expressions.items()),
    )
    _operations.attention_stats(device, 0, _places.Places(device, 0), args, problem)
    return args


def stats_call(batch: int, seqlen_q: int, seq_lens: Any, want: Any, rows: np.ndarray) -> Any:
    return _args_stats.stats(
        normal(6, (batch, seqlen_q, 4, 8)),
        normal(7, (batch, 150, 2, 8)),
        normal(8, (batch, 4, seqlen_q)),
        backend="numpy",
        want=want,
        top_k=5,
        rows=rows,
        last_queries=None,
        index={"block_table": None, "seq_lens": seq_lens, "cu_seqlens_q": None, "cu_seqlens_kv": None},
        layouts={"layout": "bshd", "cache_layout": "nhd"},
        options={},
    )


@pytest.mark.parametrize("seqlen_q", [3, 70])
@pytest.mark.parametrize("bad", [-1, 151, 2**62])
def test_statistics_of_a_length_that_cannot_be(device, seqlen_q, bad):
    """They are NaN for that sequence; the others have their bits."""
    lens, both = np.array([150, 11, 0]), []
    for lengths in (lens, np.array([150, bad, 0])):
        call = stats_call(3, seqlen_q, lens, _args_stats.WANT, np.array([2, 0]))
        attention = call.args.attention._replace(seq_lens=there(lengths))
        both.append(found_out(device, call, attention=attention))
    for name in RESULTS:
        right, mine = (getattr(args, name) for args in both)
        assert_same_bits(mine[[0, 2]], right[[0, 2]], name)
        if name == "top_k_indices":
            assert (mine[1] == -1).all()
        else:
            assert np.isnan(mine[1]).all(), name
        assert np.isfinite(right[0]).all(), name


def test_chosen_rows_that_do_not_exist_choose_nothing(device):
    """On the device nobody has looked at the numbers of rows."""
    found = []
    for rows in (np.array([69, 3, 69]), np.array([69, 3, 69, 70, -1, 2**62])):
        call = stats_call(1, 70, None, ("rows",), np.array([0]))
        results = np.full((1, 4, len(rows), 150), 7, "f4")
        found_out(device, call, rows=there(rows), row_probabilities=there(results))
        found.append(results)
    assert_same_bits(found[1][:, :, :3], found[0], "rows that exist")
    assert (found[1][:, :, 3:] == 7).all() and (found[0] != 7).all()


def test_statistics_with_expressions(device):
    """The caller's functions are compiled into both kernels."""
    call, same = (stats_call(2, 3, None, _args_stats.WANT, np.array([1])) for _ in range(2))
    expressions = {"score_mod": "(0.5f * score)", "mask_mod": "(key >= 100 + batch)"}
    got = found_out(device, call, expressions=expressions)
    lo = np.repeat([[100], [101]], 3, axis=1)
    attention = same.args.attention
    attention = attention._replace(scale=attention.scale / 2, spans=(lo, np.full_like(lo, 150)))
    want = found_out(device, same, attention=attention)
    for name in RESULTS:
        assert_same_bits(getattr(got, name), getattr(want, name), name)
