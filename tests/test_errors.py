"""Refusals of the attention functions: before any work, in the same words on every backend.

Each message names the argument, what was found and what was expected.
"""

from __future__ import annotations

import numpy as np
import pytest
from calls import normal
from refusals import DENSE, F4, PAGED, VARLEN, K, Q, V, arrays, packed, paged
from refusals_options import DENSE_OPTIONS, PAGED_OPTIONS, VARLEN_OPTIONS

import pyflash

ALL_DENSE = {**DENSE, **DENSE_OPTIONS}
REFUSED = {
    **{("flash_attention", name): case for name, case in ALL_DENSE.items()},
    **{("flash_attention_varlen", name): case for name, case in {**VARLEN, **VARLEN_OPTIONS}.items()},
    **{("paged_attention", name): case for name, case in {**PAGED, **PAGED_OPTIONS}.items()},
}

#: Options that only the C backend takes: elsewhere they are unsupported before they are wrong.
C_ONLY = ("isa", "num_threads", "workspace")


@pytest.mark.parametrize("key", REFUSED, ids=" ".join)
def test_refused_by_name(any_isa, key):
    function, _ = key
    arguments, words = REFUSED[key]
    options = {"backend": any_isa.name} | arguments
    with pytest.raises(pyflash.InvalidArgument) as caught:
        getattr(pyflash, function)(**options)
    assert str(caught.value) == words
    assert type(caught.value) is pyflash.InvalidArgument and isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("key", REFUSED, ids=" ".join)
def test_explain_refuses_what_the_call_refuses(any_isa, key):
    function, _ = key
    arguments, words = REFUSED[key]
    names = {"k_cache": "k", "v_cache": "v"} if function == "paged_attention" else {}
    arguments = {names.get(name, name): value for name, value in arguments.items()}
    with pytest.raises(pyflash.InvalidArgument) as caught:
        pyflash.explain(**arguments, backend=any_isa.name)
    assert str(caught.value) == words


@pytest.mark.parametrize("function", ["flash_decoding", "naive_attention"])
@pytest.mark.parametrize("name", ALL_DENSE)
def test_the_other_dense_functions_refuse_the_same(function, name):
    arguments, words = ALL_DENSE[name]
    if function == "naive_attention" and {"num_splits", "tile", "family", *C_ONLY} & set(arguments):
        pytest.skip("no option of this function")
    if function == "flash_decoding":
        arguments = {"num_splits": 2, **arguments}
    with pytest.raises(pyflash.InvalidArgument) as caught:
        getattr(pyflash, function)(**arguments, backend="numpy")
    assert str(caught.value) == words


def test_num_splits_of_flash_decoding_is_not_optional(any_isa):
    with pytest.raises(pyflash.InvalidArgument) as caught:
        pyflash.flash_decoding(Q, K, V, num_splits=None, **any_isa.kwargs)
    assert str(caught.value) == "num_splits: found None, expected the number of parts, at least 1"
    with pytest.raises(TypeError):
        pyflash.flash_decoding(Q, K, V, **any_isa.kwargs)


@pytest.mark.parametrize("other", ["q", "k", "v"])
def test_an_output_that_overlaps_an_input(any_isa, other):
    square = dict(q=Q.copy(), k=normal(2, (2, 3, 4, 8)), v=normal(3, (2, 3, 4, 8)))
    for out in (square[other], square[other][::-1], square[other].view()):
        with pytest.raises(pyflash.InvalidArgument) as caught:
            pyflash.flash_attention(**square, out=out, **any_isa.kwargs)
        assert (
            str(caught.value) == f"out: found memory that it shares with {other}, expected memory of its own"
        )


def test_an_output_that_overlaps_a_pool(any_isa):
    pool = np.zeros((6, 4, 2, 8), F4)
    arguments = paged(
        k_cache=pool, v_cache=pool, q=normal(1, (2, 4, 8)), out=pool.reshape(-1)[:64].reshape(2, 4, 8)
    )
    with pytest.raises(pyflash.InvalidArgument) as caught:
        pyflash.paged_attention(**arguments, **any_isa.kwargs)
    assert str(caught.value) == "out: found memory that it shares with k_cache, expected memory of its own"


def test_an_output_is_untouched_after_a_refusal(any_isa):
    out = np.full((2, 3, 4, 6), 7.0, F4)
    with pytest.raises(pyflash.InvalidArgument):
        pyflash.flash_attention(Q, K, V, out=out, window=3, **any_isa.kwargs)
    assert (out == 7).all()


@pytest.mark.parametrize("keyword", ["scaling", "softmax_scale", "attn_mask", "dropout"])
def test_unknown_keywords_are_type_errors(any_isa, keyword):
    for function, arguments in (
        ("flash_attention", arrays()),
        ("flash_attention_varlen", packed()),
        ("paged_attention", paged()),
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
            getattr(pyflash, function)(**arguments, **{keyword: None}, **any_isa.kwargs)


def test_options_are_keywords_only():
    with pytest.raises(TypeError):
        pyflash.flash_attention(Q, K, V, True)


@pytest.mark.parametrize(
    ("name", "value"), [("isa", "scalar"), ("num_threads", 2), ("workspace", np.zeros(64, np.uint8))], ids=str
)
def test_the_numpy_backend_refuses_what_it_does_not_have(name, value):
    with pytest.raises(
        pyflash.UnsupportedError, match=f"^{name}: .* is not supported by the numpy backend; leave"
    ):
        pyflash.flash_attention(Q, K, V, backend="numpy", **{name: value})


def test_naive_attention_is_numpy_only():
    with pytest.raises(pyflash.UnsupportedError) as caught:
        pyflash.naive_attention(Q, K, V, backend="c")
    assert isinstance(caught.value, NotImplementedError)
    assert str(caught.value) == (
        "backend: 'c' is not supported by naive_attention; the textbook exists in NumPy only"
    )


def test_an_unknown_instruction_set_lists_what_there_is():
    with pytest.raises(pyflash.PyflashError) as caught:
        pyflash.flash_attention(Q, K, V, backend="c", isa="avx3")
    assert str(caught.value).startswith("isa: ") and "'avx3'" in str(caught.value)
    for name in pyflash.available_isas():
        assert name in str(caught.value)


def test_work_space_that_overlaps(c_backend):
    buffer = np.zeros(1 << 22, np.uint8)
    q = buffer[: Q.nbytes].view(F4).reshape(Q.shape)
    out = buffer[: 2 * 3 * 4 * 6 * 4].view(F4).reshape(2, 3, 4, 6)
    for name, arguments in (("q", arrays(q=q)), ("out", arrays(out=out))):
        with pytest.raises(pyflash.InvalidArgument) as caught:
            pyflash.flash_attention(**arguments, workspace=buffer, **c_backend.kwargs)
        assert (
            str(caught.value)
            == f"workspace: found memory that it shares with {name}, expected memory of its own"
        )


def test_a_work_space_that_is_too_small(c_backend):
    needed = pyflash.explain(Q, K, V, **c_backend.kwargs).workspace_bytes
    if not needed:
        pytest.skip("this call needs no work space")
    with pytest.raises(pyflash.InvalidArgument, match=f"^workspace: found .*, expected .*{needed}"):
        pyflash.flash_attention(Q, K, V, workspace=np.zeros(needed - 1, np.uint8), **c_backend.kwargs)


@pytest.mark.parametrize(
    ("name", "value"), [("batch_invariant", True), ("q_scale", 0.5), ("check_indices", True)], ids=str
)
def test_options_of_cuda_are_refused_elsewhere(any_isa, name, value):
    if any_isa.name == "cuda":
        pytest.skip("this is where they belong")
    with pytest.raises(pyflash.UnsupportedError) as caught:
        pyflash.flash_attention(Q, K, V, **{name: value}, **any_isa.kwargs)
    found = f"{value} ({type(value).__name__})"
    assert (
        str(caught.value) == f"{name}: {found} is not supported by the {any_isa.name} backend; leave it out"
    )


def test_options_of_cuda_that_ask_for_nothing_are_fine(any_isa):
    out = pyflash.flash_attention(
        Q, K, V, batch_invariant=False, q_scale=None, check_indices=False, max_seqlen_q=3, **any_isa.kwargs
    )
    assert (out == pyflash.flash_attention(Q, K, V, **any_isa.kwargs)).all()
