"""The plan of the prefill kernel for the matrix unit: what it takes, its shapes, its memory."""

from __future__ import annotations

import pytest

from pyflash.gpu import _choose, _compile, _forward_mma, _plan
from pyflash.gpu._plan import Problem

H200 = Problem(
    capability=90,
    num_sms=132,
    shared_bytes=232448,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
    out_dtype="bfloat16",
    batch=2,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    head_dim_v=128,
    num_queries=8192,
    max_seqlen_q=4096,
    max_seqlen_kv=4096,
    packed=False,
    page_size=0,
    aligned=True,
    scaled=False,
)


def constants(problem: Problem) -> dict[str, int]:
    return {name: int(value) for name, value in _forward_mma.prefill_step(problem).source.defines}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sections_have_no_more_heads_than_the_grid(dtype):
    """Short keys make room for any number of heads; where sections begin is a number of 32 bits."""
    problem = H200._replace(q_dtype=dtype, kv_dtype=dtype, spans=True, max_seqlen_kv=0, max_seqlen_q=2**20)
    (step,) = _choose.plan(problem).steps
    fields = dict(step.fields)
    assert 0 < fields["section"] * fields["row_blocks"] <= step.num_blocks


def test_a_prefill_is_taken_by_one_step_that_covers_all_rows():
    plan = _forward_mma.plan(H200)
    assert plan is not None
    (step,) = plan.steps
    fields = dict(step.fields)
    assert fields["row_blocks"] * plan.rows_per_item >= H200.max_seqlen_q
    assert step.num_blocks == fields["row_blocks"] * H200.num_heads * H200.batch
    assert (fields["min_rows"], fields["max_rows"]) == (0, _plan.NO_LIMIT)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_dtype": "float8_e4m3fn"},
        {"q_dtype": "float32", "kv_dtype": "float32"},
        {"capability": 75},  # bfloat16 begins with sm_80
        {"aligned": False},
        {"scaled": True},
        {"head_dim": 100},
        {"head_dim_v": 264},
        {"max_seqlen_kv": 2**31},
        {"family": "decode"},
        {"max_seqlen_q": 16},
        {"tile": 7},
    ],
)
def test_what_it_does_not_take(change):
    assert _forward_mma.plan(H200._replace(**change)) is None


def test_sm_75_has_float16():
    problem = H200._replace(capability=75, shared_bytes=65536, q_dtype="float16", kv_dtype="float16")
    assert _forward_mma.plan(problem) is not None
    assert constants(problem)["PF_STAGES"] == 1


def test_sequences_of_few_rows_go_elsewhere():
    problem = H200._replace(packed=True)
    assert _forward_mma.plan(problem) is None
    plan = _choose.plan(problem)
    assert plan.family == "prefill+decode"
    prefill, *decode = (dict(step.fields) for step in plan.steps)
    assert [step.source.name for step in plan.steps] == ["pf_forward_mma", "pf_decode_mma", "pf_combine"]
    assert all(prefill["min_rows"] == fields["max_rows"] + 1 for fields in decode)
    assert not plan.steps[0].splits.are_merged


def test_heads_share_a_block_when_queries_are_few():
    few = H200._replace(num_kv_heads=2, max_seqlen_q=30, num_queries=60)
    assert constants(few)["PF_PACKED"] == 1
    step = _forward_mma.prefill_step(few)
    assert dict(step.fields)["row_blocks"] == 2  # 240 rows of each key/value head
    assert step.num_blocks == 2 * few.num_kv_heads * few.batch * step.splits.max_splits
    assert constants(few._replace(max_seqlen_q=4096))["PF_PACKED"] == 0


def test_splits_are_merged():
    plan = _forward_mma.plan(H200._replace(num_splits=3))
    assert plan is not None
    assert [step.source.name for step in plan.steps] == ["pf_forward_mma", "pf_combine"]
    assert plan.steps[0].num_blocks == 3 * _forward_mma.prefill_step(H200).num_blocks


@pytest.mark.parametrize("width", _forward_mma.CLASSES)
@pytest.mark.parametrize(("capability", "shared"), [(75, 65536), (80, 166912), (86, 101376), (90, 232448)])
def test_every_width_fits_everywhere(width, capability, shared):
    for paged in (False, True):
        for final in (False, True):
            tiles = _forward_mma.choose_tiles(
                width, width, capability, shared, paged=paged, final=final, wide_terms=final, spans=paged
            )
            assert tiles is not None
            needed = _forward_mma.shared_bytes(tiles, width, width, paged=paged, final=final)
            assert needed * tiles.min_blocks <= shared


def test_options_that_are_not_there_are_constants():
    assert constants(H200)["PF_TERMS"] == constants(H200)["PF_SPANS"] == constants(H200)["PF_PAGED"] == 0
    assert (
        constants(H200._replace(terms=frozenset(("alibi_slopes",))))["PF_TERMS"]
        == _plan.TERMS["alibi_slopes"]
    )


def test_variants_are_all_different_and_of_this_file():
    variants = [(v.source, v.architectures) for v in _forward_mma.variants()]
    assert len(set(variants)) == len(variants) > 50
    assert {source.file for source, _ in variants} == {"forward_mma.cu"}
    assert "pf_forward_mma" in _compile.text(variants[0][0])
