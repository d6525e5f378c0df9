"""The prefill kernel for Hopper: its plan, and what it computes, emulated or on such a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from calls import assert_same_bits, dense, paged, paged_varlen, run, varlen
from conftest import TestedBackend
from oracle import assert_matches
from test_cuda_forward_mma import H200

import pyflash
from pyflash.gpu import _choose, _forward_wgmma

CUDA = TestedBackend("cuda", {"backend": "cuda"})
HOPPER = H200._replace(hopper=True)
WIDTHS = [(64, 64), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128), (40, 24), (96, 80)]


def test_it_is_taken_only_where_it_is_asked_for():
    assert _forward_wgmma.plan(HOPPER) is not None
    assert _choose.plan(HOPPER).kernel == "forward_wgmma"
    assert _choose.plan(H200).kernel == "forward_mma"


@pytest.mark.parametrize(
    "change",
    [
        {"capability": 89},
        {"capability": 100},  # other instructions
        {"kv_dtype": "float8_e4m3fn"},
        {"aligned": False},
        {"scaled": True},
        {"head_dim": 100},
        {"head_dim_v": 264},
        {"max_seqlen_q": 16},
        {"tile": 7},
        {"shared_bytes": 65536},
    ],
)
def test_what_it_does_not_take(change):
    assert _forward_wgmma.plan(HOPPER._replace(**change)) is None


@pytest.mark.parametrize(("width", "width_v"), WIDTHS)
def test_blocks_fit_and_registers_are_those_of_a_multiprocessor(width, width_v):
    for page_size, terms in itertools.product((0, 16), ((), ("bias",))):
        problem = HOPPER._replace(
            head_dim=width, head_dim_v=width_v, page_size=page_size, terms=frozenset(terms)
        )
        plan = _forward_wgmma.plan(problem)
        assert plan is not None
        (step,) = plan.steps
        constants = {name: int(value) for name, value in step.source.defines}
        assert step.shared_bytes <= problem.shared_bytes
        covered = step.num_blocks * plan.rows_per_item >= 2 * 16 * problem.max_seqlen_q
        assert covered or step.num_blocks == problem.num_sms, "each takes several"
        tile_bytes = constants["PF_TILE"] * 128  # of 64 elements of all rows
        assert tile_bytes % 1024 == 0, "pieces of 8 rows of 128 bytes lie at multiples of 1024 bytes"
        computing = step.threads // 128 - 1
        registers = constants["PF_COPY_REGISTERS"] + computing * constants["PF_COMPUTE_REGISTERS"]
        assert 128 * registers <= 65536
        assert all(constants[name] % 8 == 0 for name in ("PF_COPY_REGISTERS", "PF_COMPUTE_REGISTERS"))


def test_sequences_of_few_rows_go_elsewhere():
    plan = _choose.plan(HOPPER._replace(packed=True))
    assert [step.source.name for step in plan.steps] == ["pf_forward_wgmma", "pf_decode_mma", "pf_combine"]


# --- what it computes ---


@pytest.fixture
def hopper(monkeypatch):
    reason = pyflash.available_backends()["cuda"]
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(_forward_wgmma, "is_on", True)

    def check(call, **options):
        arrays = [call.arrays[name] for name in "qkv" if name in call.arrays]
        if len(arrays) == 3 and call.function == "flash_attention":
            told = pyflash.explain(*arrays, **call.options, backend="cuda", family="prefill", **options)
            if told.kernel != "forward_wgmma":
                pytest.skip(f"no Hopper: {told.kernel}")
        got = run(call, CUDA, family="prefill", **options)
        assert_matches(*got, call)
        return got

    return check


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("width", "width_v"), WIDTHS)
def test_widths_cuda(hopper, width, width_v, dtype):
    shape = dict(batch=1, num_heads=2, num_kv_heads=1, head_dim=width, head_dim_v=width_v, dtype=dtype)
    hopper(dense(1, seqlen_q=130, seqlen_kv=300, **shape))
    hopper(dense(2, seqlen_q=150, seqlen_kv=290, causal=True, **shape))


SHAPE = dict(batch=1, num_heads=2, head_dim=64, dtype="float16")


@pytest.mark.parametrize("seqlen_kv", [1, 127, 128, 129, 255, 256, 257, 640, 1100])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (100, 0)}], ids=str)
def test_numbers_of_tiles_cuda(hopper, seqlen_kv, options):
    """Stages come round several times; first and last tiles that are seen in part, or by some rows."""
    hopper(dense(3, seqlen_q=129, seqlen_kv=seqlen_kv, **SHAPE, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"window": (3, 5)},
        {"window": (200, 300), "sink_tokens": 70},
        {"causal": True, "window": (30, 0), "sink_tokens": 4},
        {"softcap": 3.0},
        {"alibi_slopes": np.array([0.5, 0.25])},
        {"sinks": np.array([0.5, -np.inf])},
        {"scale": -0.3},
        {"scale": 0.0},
        {"q_offset": -40, "causal": True},
        {"spans": pyflash.spans.chunked(200, 500, 130)},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_cuda(hopper, options):
    hopper(dense(4, seqlen_q=200, seqlen_kv=500, **SHAPE, **options))


def test_a_mask_and_a_bias_cuda(hopper):
    rng = np.random.default_rng(5)
    mask = rng.random((1, 2, 150, 300)) < 0.3
    mask[..., :130] = False  # the first tile is hidden to the last key
    hopper(dense(5, seqlen_q=150, seqlen_kv=300, mask=mask, **SHAPE))
    bias = rng.standard_normal((1, 2, 150, 300)).astype(np.float32)
    hopper(dense(6, seqlen_q=150, seqlen_kv=300, bias=bias, **SHAPE))


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_pages_cuda(hopper, page_size):
    call = dense(7, seqlen_q=70, seqlen_kv=400, causal=True, **SHAPE | {"batch": 2})
    hopper(paged(call, page_size))


def test_packed_sequences_cuda(hopper):
    shape = dict(num_heads=4, num_kv_heads=2, head_dim=64, dtype="float16", causal=True)
    call = varlen([1, 0, 140, 33], [300, 7, 200, 130], seed=8, **shape)
    hopper(call)
    hopper(paged_varlen(call, 16))


@pytest.mark.parametrize("num_splits", [2, 5])
def test_split_keys_cuda(hopper, num_splits):
    hopper(dense(9, seqlen_q=100, seqlen_kv=700, causal=True, **SHAPE), num_splits=num_splits)


def test_heads_that_share_keys_are_packed_cuda(hopper):
    shape = SHAPE | dict(num_heads=6, num_kv_heads=2)
    hopper(dense(10, seqlen_q=50, seqlen_kv=300, causal=True, **shape))


def test_nothing_of_hidden_keys_is_seen_cuda(hopper):
    call = dense(11, seqlen_q=130, seqlen_kv=260, causal=True, **SHAPE)
    for name in "kv":
        call.arrays[name][:, -1:] = np.nan  # only the last row sees it
    out, _ = hopper(call)
    assert np.isnan(out[:, -1]).all() and not np.isnan(out[:, :-1]).any()


def stored(problem):
    plan = _forward_wgmma.plan(problem)
    return dict(plan.steps[0].source.defines)["PF_STORED"], plan.steps[0].box_rows[1]


def test_the_copy_unit_writes_rows_that_it_can_be_told_of():
    assert stored(HOPPER) == ("0", 0)
    assert stored(HOPPER._replace(out_mapped=True)) == ("1", 16)
    shared_keys = dict(num_heads=8, num_kv_heads=2, max_seqlen_q=40)
    assert stored(HOPPER._replace(out_mapped=True, **shared_keys)) == ("0", 0), "rows of several heads"


@pytest.mark.parametrize("options", [{}, {"out_dtype": "float32"}, {"layout": "bhsd"}], ids=str)
@pytest.mark.parametrize("seqlen_q", [144, 300])
def test_rows_are_written_whoever_writes_them_cuda(hopper, seqlen_q, options):
    """By the copy unit, or lane by lane where a warp has less than its rows; block after block."""
    shape = SHAPE | dict(batch=3, num_heads=4, head_dim_v=128)
    call = dense(14, seqlen_q=seqlen_q, seqlen_kv=200, causal=True, **shape)
    if options.get("layout"):
        call.arrays.update({name: x.swapaxes(1, 2).copy() for name, x in call.arrays.items()})
    call.options.update(options)
    out, _ = hopper(call)
    plain = pyflash.flash_attention(*call.arrays.values(), **call.options, backend="cuda", family="prefill")
    assert_same_bits(plain, out)


@pytest.mark.parametrize("key", [0, 40, 255])
def test_rows_that_are_computed_once_more_cuda(hopper, key):
    """With care, after the copy unit has written what came out first."""
    call = dense(15, seqlen_q=256, seqlen_kv=256, causal=True, **SHAPE | {"num_heads": 3})
    call.arrays["v"][:, key, 1, ::3] = np.inf
    out, _ = hopper(call)
    assert np.isinf(out[:, key:, 1, ::3]).all() and np.isfinite(out[:, :key]).all()
    assert np.isfinite(out[:, :, [0, 2]]).all() and np.isfinite(out[:, :, 1, 1::3]).all()


def test_bits_do_not_depend_on_the_run_cuda(hopper):
    call = dense(12, seqlen_q=300, seqlen_kv=900, causal=True, **SHAPE)
    want = hopper(call)
    for _ in range(3):
        assert_same_bits(run(call, CUDA, family="prefill"), want)


def test_maxima_that_keep_growing_cuda(hopper):
    """Every tile has a larger maximum than the one before, and sums are rescaled each time."""
    call = dense(13, seqlen_q=128, seqlen_kv=1000, **SHAPE)
    call.arrays["q"][...] = np.abs(call.arrays["q"])
    call.arrays["k"][...] = np.linspace(-3, 3, 1000).astype(np.float16)[None, :, None, None]
    hopper(call)
