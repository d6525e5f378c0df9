"""Splits of the keys of a prefill: how many its plan chooses, and that parts give what the whole gives."""

from __future__ import annotations

import numpy as np
import pytest
from calls import assert_same_bits, dense, explain, on_device, on_host, paged, paged_varlen, run, varlen
from conftest import TestedBackend
from oracle import assert_matches
from test_cuda_forward_mma import H200

import pyflash
from pyflash import _call_table, _device_calls
from pyflash.gpu import _choose, _forward_mma, _forward_wgmma, _plan, _splits
from pyflash.gpu._plan import Plan, Problem

CUDA = TestedBackend("cuda", {"backend": "cuda"})
CHUNK = H200._replace(
    batch=1, num_heads=8, num_kv_heads=8, num_queries=256, max_seqlen_q=256, max_seqlen_kv=8192
)


@pytest.fixture(params=["forward_mma", "forward_wgmma"])
def planned(request):
    """Plan for one of the kernels."""

    def plan(problem: Problem) -> Plan:
        found = _choose.plan(problem._replace(hopper=request.param == "forward_wgmma"))
        assert found.kernel == request.param
        return found

    return plan


def slots(plan: Plan, problem: Problem) -> int:
    """How many blocks run at a time."""
    constants = dict(plan.steps[0].source.defines)
    return problem.num_sms * int(constants.get("PF_MIN_BLOCKS", 1))


@pytest.mark.parametrize("seqlen_kv", [8192, 32768, 131072])
@pytest.mark.parametrize("num_kv_heads", [8, 1])
def test_few_queries_on_many_keys_fill_the_gpu(planned, seqlen_kv, num_kv_heads):
    problem = CHUNK._replace(max_seqlen_kv=seqlen_kv, num_kv_heads=num_kv_heads)
    plan = planned(problem)
    blocks = plan.steps[0].num_blocks
    assert 0.75 <= blocks / slots(plan, problem) <= 1, "one wave, most of it there"
    assert [step.source.name for step in plan.steps[1:]] == ["pf_combine"]
    assert _plan.workspace_bytes(problem, plan) == plan.splits.max_splits * 256 * 8 * (128 + 2) * 4
    assert any(f"splits: {plan.splits.max_splits} of the keys" in reason for reason in plan.reasons)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(32, 64), (16, 128), (8, 256)])
@pytest.mark.parametrize(("batch", "seqlen"), [(32, 512), (16, 1024), (4, 4096), (1, 16384)])
def test_blocks_that_are_enough_are_not_cut(planned, batch, seqlen, num_heads, head_dim, causal):
    change = dict(num_queries=batch * seqlen, max_seqlen_q=seqlen, max_seqlen_kv=seqlen)
    change |= dict(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, head_dim_v=head_dim)
    problem = H200._replace(batch=batch, causal=causal, spans=causal, **change)
    plan = planned(problem)
    assert plan.splits == _plan.Splits() and len(plan.steps) == 1
    assert _plan.workspace_bytes(problem, plan) == 0


@pytest.mark.parametrize("seqlen_kv", [0, 1, 64, 128])
def test_few_keys_are_not_cut(planned, seqlen_kv):
    assert not planned(CHUNK._replace(max_seqlen_kv=seqlen_kv)).splits.are_merged


def test_a_last_wave_of_few_blocks_is_cut_if_they_are_long():
    """144 blocks take twice as long as 132; of short ones that is less than a merge takes."""
    problem = CHUNK._replace(hopper=True, num_queries=2304, max_seqlen_q=2304)
    assert not _choose.plan(problem).splits.are_merged
    plan = _choose.plan(problem._replace(max_seqlen_kv=131072))
    assert plan.steps[0].num_blocks == 132  # each takes several
    waves = 144 * plan.splits.max_splits / 132
    assert np.ceil(waves) / waves < 1.2


def test_parts_are_of_keys_that_are_seen(planned):
    window = dict(causal=True, spans=True, window=(4095, -1))
    long = planned(CHUNK._replace(max_seqlen_kv=131072, **window))
    short = planned(CHUNK._replace(max_seqlen_kv=8192, **window))
    assert long.splits == short.splits and long.splits.split_seen
    assert 1 < long.splits.max_splits <= 1 + (4096 + 128) // long.tile + 1
    few = planned(CHUNK._replace(max_seqlen_kv=131072, causal=True, spans=True, window=(63, -1)))
    assert few.splits.max_splits <= 1 + (64 + 128) // few.tile


def test_what_is_asked_for_comes_first(planned):
    asked = planned(CHUNK._replace(num_splits=3))
    assert asked.splits == _plan.Splits(3, 3) and "splits: as asked for" in asked.reasons
    fixed = planned(CHUNK._replace(batch_invariant=True))
    assert fixed.splits == _plan.Splits()
    assert "splits: none, since bits do not depend on the batch" in fixed.reasons


def test_packed_sequences_count_as_if_they_were_the_longest():
    """One chunk of a prompt beside sequences that decode is one chunk; the blocks of the others are empty."""
    alone = CHUNK._replace(page_size=16, num_kv_heads=2)
    beside = alone._replace(batch=8, packed=True, num_queries=263)
    kernels = [step.source.name for step in _choose.plan(beside).steps]
    assert kernels == ["pf_forward_mma", "pf_combine", "pf_decode_mma", "pf_combine"]
    most = _choose.plan(alone).splits.max_splits
    assert most / 2 <= _choose.plan(beside).steps[0].splits.max_splits <= most
    even = _choose.plan(alone._replace(batch=64, packed=True, num_queries=64 * 256))
    assert not even.steps[0].splits.are_merged
    # Keys that are packed too are those of all sequences.
    keys = dict(page_size=0, batch=4, packed=True, num_queries=1024)
    grid = _splits._grid(alone._replace(**keys, max_seqlen_kv=4 * 4096), _splits.Blocks(128, 128, 1, 1e6))
    assert grid.tiles == (32,)


@pytest.mark.parametrize("queries", [8, 16])
def test_short_queries_of_grouped_heads_read_keys_once(queries):
    """Rows of a group are one block, no larger than it has to be; all multiprocessors have one."""
    problem = H200._replace(
        batch=16, num_heads=32, num_kv_heads=8, num_queries=16 * queries, max_seqlen_q=queries,
        max_seqlen_kv=8192,
    )  # fmt: skip
    plan = _choose.plan(problem)
    assert plan.kernel == "forward_mma" and plan.rows_per_item == _forward_mma.FEW_ROWS
    assert plan.steps[0].num_blocks == 16 * 8 * plan.splits.max_splits
    assert plan.steps[0].num_blocks / slots(plan, problem) > 0.9
    usual = _choose.plan(problem._replace(max_seqlen_q=64, num_queries=1024))
    assert usual.rows_per_item > _forward_mma.FEW_ROWS and usual.tile == plan.tile


@pytest.mark.parametrize("width", _forward_mma.CLASSES)
@pytest.mark.parametrize(("capability", "shared"), [(75, 65536), (80, 166912), (86, 101376), (90, 232448)])
def test_blocks_of_few_rows_fit(width, capability, shared):
    """Also with pages and terms; their tiles are those of more rows."""
    for page_size in (0, 16):
        for terms in (frozenset(), frozenset(("bias",))):
            problem = CHUNK._replace(
                capability=capability, shared_bytes=shared, page_size=page_size, terms=terms, head_dim=width,
                head_dim_v=width, q_dtype="float16", kv_dtype="float16",
            )  # fmt: skip
            few = _choose.plan(problem._replace(max_seqlen_q=40, num_queries=40))
            assert few.rows_per_item <= _forward_mma.FEW_ROWS
            assert few.tile == _choose.plan(problem).tile
            blocks = int(dict(few.steps[0].source.defines)["PF_MIN_BLOCKS"])
            assert blocks * (few.steps[0].shared_bytes + 1024) <= shared + 1024


@pytest.mark.parametrize("seed", range(8))
def test_tiles_that_blocks_see(seed):
    """Counted one by one: what the formula says of each block of rows."""
    rng = np.random.default_rng(seed)
    num_queries, num_keys = int(rng.integers(1, 60)), int(rng.integers(1, 200))
    rows, tile, sink = 8, 16, int(rng.choice([0, 3, 20]))
    window = tuple(int(rng.choice([-1, 0, 5, 40])) for _ in range(2))
    causal = bool(rng.integers(2))
    num_blocks = -(-num_queries // rows)
    got = _splits._seen_tiles(
        num_queries, num_keys, rows, tile, num_blocks, causal=causal, window=window, sink_tokens=sink
    )
    i = np.arange(num_queries)[:, None] + num_keys - num_queries
    j = np.arange(num_keys)[None]
    seen = np.ones((num_queries, num_keys), bool)
    if causal:
        seen &= j <= i
    if window[0] >= 0:
        seen &= (j >= i - window[0]) | (j < sink)
    if window[1] >= 0:
        seen &= j <= i + window[1]
    some = sorted({round(b * (num_blocks - 1) / (_splits._SAMPLES - 1)) for b in range(_splits._SAMPLES)})
    if len(got) == 1:
        some = some[:1]
    for block, tiles in zip(some, got, strict=True):
        keys = seen[block * rows : (block + 1) * rows].any(0)
        want = sum(keys[t : t + tile].any() for t in range(0, num_keys, tile))
        # A tile of first tokens may be one of the window too, and the first row may see fewer of those.
        assert want <= tiles <= want + (2 if sink or num_queries > num_keys else 0) or len(got) == 1


@pytest.mark.parametrize(
    ("num_heads", "head_dim_v", "num_queries"),
    [(1, 128, 1), (7, 64, 500), (8, 96, 2000), (3, 512, 9), (40, 8, 90), (2, 130, 700), (2, 1000, 3)],
)
def test_rows_of_the_merge_are_all_there(num_heads, head_dim_v, num_queries):
    change = dict(num_heads=num_heads, num_kv_heads=1, head_dim_v=head_dim_v, num_queries=num_queries)
    step = _plan.combine_step(CHUNK._replace(**change), (), _plan.Splits(2, 2))
    blocks = dict(step.fields)["row_blocks"]
    rows = -(-num_heads // blocks)
    outputs = int(dict(step.source.defines)["PF_OUTPUTS"])
    assert step.num_blocks == num_queries * blocks
    assert step.threads <= 128 and step.threads % 32 == 0
    assert step.threads // rows >= min(-(-head_dim_v // outputs), 128), "a thread for all outputs"


# --- what parts give ---


@pytest.fixture(params=["forward_mma", "forward_wgmma", "forward_fma"])
def cut(request, monkeypatch):
    """Make a call whose plan chooses a number of splits, and compare it with the exact answer."""
    reason = pyflash.available_backends()["cuda"]
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(_forward_wgmma, "is_on", request.param == "forward_wgmma")

    def check(build, num_splits, **options):
        monkeypatch.setattr(_splits, "_best", lambda grid: num_splits)
        for memory in (_call_table, _device_calls):
            memory.clear()  # what it remembers has other splits, or is another kernel's
        call = build("float32" if request.param == "forward_fma" else "float16")
        told = explain(call, CUDA, family="prefill", **options)
        if told.kernel == "forward_mma" and request.param == "forward_wgmma":
            pytest.skip("no Hopper")
        assert (told.kernel, told.num_splits) == (request.param, num_splits)
        assert told.workspace_bytes > 0
        got = run(call, CUDA, family="prefill", **options)
        assert_matches(*got, call)
        return got

    check.kernel = request.param
    return check


SHAPE = dict(batch=1, num_heads=4, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (100, 0)},
        {"window": (200, 30), "sink_tokens": 70},
        {"causal": True, "window": (300, 0), "sink_tokens": 150},
        {"softcap": 3.0},
        {"sinks": np.array([0.5, -np.inf, 2.0, 0.0])},
        {"scale": -0.3},
        {"q_offset": -40, "causal": True},
        {"spans": pyflash.spans.chunked(150, 700, 130)},
    ],
    ids=lambda options: "-".join(options) or "all",
)
@pytest.mark.parametrize("num_splits", [3, 7])
def test_options_cuda(cut, options, num_splits):
    cut(lambda dtype: dense(1, seqlen_q=150, seqlen_kv=700, dtype=dtype, **SHAPE, **options), num_splits)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_kv", [1, 5, 64, 65, 200])
def test_more_parts_than_tiles_or_keys_cuda(cut, seqlen_kv, causal):
    """Parts without keys are states of nothing."""
    cut(lambda dtype: dense(2, seqlen_q=40, seqlen_kv=seqlen_kv, dtype=dtype, causal=causal, **SHAPE), 9)


@pytest.mark.parametrize("head_dim_v", [24, 96, 128])
def test_widths_of_values_cuda(cut, head_dim_v):
    """The merge has as many threads a row as it has outputs, also where that is no power of two."""
    shape = SHAPE | dict(num_heads=6, head_dim_v=head_dim_v)
    cut(lambda dtype: dense(3, seqlen_q=70, seqlen_kv=300, dtype=dtype, causal=True, **shape), 4)


def test_packed_sequences_and_pages_cuda(cut):
    shape = dict(num_heads=4, num_kv_heads=2, head_dim=64, causal=True)
    lengths = [1, 0, 140, 33, 60], [300, 7, 200, 130, 40]
    cut(lambda dtype: varlen(*lengths, seed=4, dtype=dtype, **shape), 5)
    cut(lambda dtype: paged_varlen(varlen(*lengths, seed=5, dtype=dtype, **shape), 16), 5)
    cut(lambda dtype: paged(dense(6, seqlen_q=70, seqlen_kv=400, dtype=dtype, **SHAPE), 48), 5)


def test_sequences_of_both_families_cuda(cut, monkeypatch):
    """Each family has its own splits, and the merge of one leaves the rows of the other alone."""
    monkeypatch.setattr(_splits, "_best", lambda grid: 4)
    dtype = "float32" if cut.kernel == "forward_fma" else "float16"
    shape = dict(num_heads=4, num_kv_heads=2, head_dim=64, causal=True, dtype=dtype)
    call = varlen([2, 100, 1, 0, 30, 3], [600, 300, 500, 9, 200, 40], seed=7, **shape)
    told = explain(call, CUDA)
    assert told.kernel.startswith(cut.kernel + "+")
    assert told.workspace_bytes >= 4 * 136 * 4 * (64 + 2) * 4
    assert_matches(*run(call, CUDA), call)


def test_lengths_on_the_device_cuda(cut):
    """Parts are of the real lengths; a length that cannot be makes the rows of its sequence NaN."""
    lengths = [300, 7, 129]
    shape = SHAPE | dict(batch=3)
    cut(lambda dtype: dense(8, seqlen_q=40, seqlen_kv=300, dtype=dtype, **shape), 3)
    call = dense(8, seqlen_q=40, seqlen_kv=300, dtype="float16", causal=True, **shape)
    want, _ = run(call, CUDA, family="prefill", seq_lens=np.array(lengths))
    given = [on_device(call.arrays[name]) for name in "qkv"]
    options = dict(causal=True, family="prefill", backend="cuda")
    got = on_host(pyflash.flash_attention(*given, seq_lens=on_device(np.array(lengths)), **options))
    assert_same_bits(got, want)
    lengths[1] = 301
    bad = on_host(pyflash.flash_attention(*given, seq_lens=on_device(np.array(lengths)), **options))
    assert np.isnan(bad[1]).all()
    assert_same_bits(bad[[0, 2]], want[[0, 2]])


def test_a_workspace_at_a_multiple_of_8_cuda(cut):
    def build(dtype):
        return dense(9, seqlen_q=40, seqlen_kv=300, dtype=dtype, causal=True, **SHAPE)

    want = cut(build, 4)
    call = build("float32" if cut.kernel == "forward_fma" else "float16")
    needed = explain(call, CUDA, family="prefill").workspace_bytes
    memory = on_device(np.zeros(needed + 8, np.uint8))[8:]  # allocations begin at multiples of 16
    given = [on_device(call.arrays[name]) for name in "qkv"]
    options = dict(causal=True, family="prefill", backend="cuda", workspace=memory)
    assert_same_bits(on_host(pyflash.flash_attention(*given, **options)), want[0])


def test_bits_do_not_depend_on_the_run_cuda(cut):
    def build(dtype):
        return dense(10, seqlen_q=130, seqlen_kv=700, dtype=dtype, causal=True, **SHAPE)

    want = cut(build, 5)
    assert_same_bits(cut(build, 5), want)


@pytest.mark.parametrize("head_dim_v", [64, 72])
def test_bits_do_not_depend_on_how_many_outputs_a_thread_merges_cuda(cut, monkeypatch, head_dim_v):
    def build(dtype):
        return dense(12, seqlen_q=40, seqlen_kv=700, dtype=dtype, **SHAPE | dict(head_dim_v=head_dim_v))

    monkeypatch.setattr(_plan, "_COMBINE_ROWS", 0)
    want = cut(build, 7)
    monkeypatch.setattr(_plan, "_COMBINE_ROWS", 10**9)
    assert_same_bits(cut(build, 7), want)


def test_nothing_of_hidden_keys_is_seen_cuda(cut):
    def build(dtype):
        call = dense(11, seqlen_q=50, seqlen_kv=260, dtype=dtype, causal=True, **SHAPE)
        for name in "kv":
            call.arrays[name][:, -1:] = np.nan  # only the last row sees it
        return call

    out, _ = cut(build, 3)
    assert np.isnan(out[:, -1]).all() and not np.isnan(out[:, :-1]).any()
