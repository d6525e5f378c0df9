"""`score_mod` and `mask_mod`: NumPy functions on the reference, C function pointers on C."""

from __future__ import annotations

import concurrent.futures
import ctypes
import re

import numpy as np
import pytest
from calls import DTYPE_NAMES, assert_same_bits, dense, once, paged, paged_varlen, run, varlen
from oracle import Call, assert_matches
from oracle_terms import UserFunction
from terms import BATCHED, BY_BATCH, SOFTER, SPARSE, holes, sizes_of

import pyflash

FAMILIES = ["prefill", "decode"]

#: name -> options
FUNCTIONS = {
    "score": dict(score_mod=SOFTER),
    "score by batch": dict(score_mod=BY_BATCH, causal=True),
    "mask": dict(mask_mod=SPARSE),
    "mask by batch": dict(mask_mod=BATCHED, causal=True),
    "both": dict(score_mod=BY_BATCH, mask_mod=BATCHED, window=(20, None)),
    "constant": dict(score_mod=UserFunction(lambda s, b, h, i, j: 0.0 * j, "0", of_score=True)),
    "nothing seen": dict(mask_mod=UserFunction(lambda b, h, i, j: j < 0, "key < 0", of_score=False)),
    "all seen": dict(mask_mod=UserFunction(lambda b, h, i, j: j >= 0, "true", of_score=False)),
    "one dimension": dict(
        mask_mod=UserFunction(lambda b, h, i, j: j % 5 == 2, "key % 5 == 2", of_score=False)
    ),
    "query alone": dict(
        mask_mod=UserFunction(lambda b, h, i, j: i % 2 == 0, "query % 2 == 0", of_score=False)
    ),
    "after the cap": dict(
        score_mod=UserFunction(lambda s, b, h, i, j: 3 * s, "3 * score", of_score=True), softcap=0.5
    ),
}


@once
def small(name: str, dtype: str = "float32", seqlen_q: int = 9) -> Call:
    call = dense(501, seqlen_q=seqlen_q, seqlen_kv=40, num_heads=4, num_kv_heads=2, dtype=dtype)
    return call.but(**FUNCTIONS[name])


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(backend, name, dtype):
    for family in FAMILIES:
        call = small(name, dtype)
        assert_matches(*run(call, backend, family=family), call)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_query_and_splits(backend, name):
    call = small(name, seqlen_q=1)
    assert_matches(*run(call, backend), call)
    assert_matches(*run(call, backend, num_splits=3), call)


@pytest.mark.parametrize("name", ["score by batch", "both"])
def test_packed_and_paged(backend, name):
    """They are told the number of the sequence, the position of the query and the key in its sequence."""
    call = varlen([3, 1, 0, 20], [20, 9, 3, 20], seed=502, num_heads=2).but(**FUNCTIONS[name])
    want = run(call, backend)
    assert_matches(*want, call)
    assert_same_bits(run(paged_varlen(call, 7), backend), want)
    call = dense(503, batch=3, seqlen_q=2, seqlen_kv=20, num_heads=2).but(**FUNCTIONS[name])
    call = call.but(seq_lens=np.array([20, 3, 11]))
    want = run(call, backend)
    assert_matches(*want, call)
    assert_same_bits(run(paged(call, 7), backend), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_follow_the_offset(backend, family):
    call = small("both").but(q_offset=np.array([-3, 100]))
    assert_matches(*run(call, backend, family=family), call)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_score_of_nan_is_visible_and_minus_infinity_has_no_weight(backend, family):
    nan_at_7 = UserFunction(
        lambda s, b, h, i, j: s + np.where(j == 7, np.nan, 0.0), "key == 7 ? pf_nan() : score", of_score=True
    )
    out_at_7 = UserFunction(
        lambda s, b, h, i, j: s + np.where(j == 7, -np.inf, 0.0),
        "key == 7 ? -pf_infinity() : score",
        of_score=True,
    )
    call = dense(504, seqlen_q=9, seqlen_kv=12, num_heads=2, causal=True, q_offset=2)
    for function in (nan_at_7, out_at_7):
        one = call.but(score_mod=function)
        out, lse = run(one, backend, family=family)
        assert_matches(out, lse, one)
    hidden = call.but(score_mod=nan_at_7, mask=np.arange(12) != 7)
    out, lse = run(hidden, backend, family=family)
    assert_matches(out, lse, hidden)
    assert np.isfinite(out).all()


def test_with_every_other_term(backend):
    call = small("both").but(
        softcap=2.0,
        alibi_slopes=np.full(4, 0.1),
        bias=np.linspace(-1, 1, 40).astype("f4"),
        mask=holes(sizes_of(small("both")), 505, 0.9),
        sinks=np.zeros(4),
        sink_tokens=2,
    )
    for family in FAMILIES:
        assert_matches(*run(call, backend, family=family), call)


def test_any_number_of_threads(c_backend):
    call = dense(506, seqlen_q=40, seqlen_kv=70, num_heads=4, num_kv_heads=2).but(**FUNCTIONS["both"])
    want = run(call, c_backend, num_threads=1)
    assert_same_bits(run(call, c_backend, num_threads=2), want)


def test_calls_from_many_threads_of_python(backend):
    """Each waits for the interpreter where it calls back; none waits for another."""
    call = small("both")
    want = run(call, backend)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: run(call, backend), range(8)):
            assert_same_bits(got, want)


def test_a_function_of_a_c_library(c_backend):
    """Any pointer of the right signature will do, also one that knows nothing of Python."""
    signature = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, *[ctypes.c_int64] * 4)
    try:
        fabs = ctypes.CDLL(None).fabs
    except (OSError, AttributeError, TypeError) as error:
        pytest.skip(f"no C library to look in: {error}")
    pointer = ctypes.cast(fabs, signature)
    call = dense(507, seqlen_q=9, seqlen_kv=70, num_heads=2)
    with_python = call.but(score_mod=UserFunction(lambda s, b, h, i, j: abs(s), "fabs(score)", of_score=True))
    assert_same_bits(run(call.but(score_mod=pointer), c_backend), run(with_python, c_backend))
    assert_matches(*run(with_python, c_backend), with_python)


def test_pointers_of_cffi(c_backend):
    cffi = pytest.importorskip("cffi")
    ffi = cffi.FFI()
    score = ffi.callback("double(double, int64_t, int64_t, int64_t, int64_t)", SOFTER.numpy)
    mask = ffi.callback("int32_t(int64_t, int64_t, int64_t, int64_t)", SPARSE.numpy)
    call = dense(508, seqlen_q=5, seqlen_kv=20, num_heads=2)
    want = run(call.but(score_mod=SOFTER, mask_mod=SPARSE), c_backend)
    assert_same_bits(run(call.but(score_mod=score, mask_mod=mask), c_backend), want)


def test_a_cfunc_of_numba(c_backend):
    numba = pytest.importorskip("numba")
    compiled = numba.cfunc("float64(float64, int64, int64, int64, int64)")(SOFTER.numpy)
    call = dense(508, seqlen_q=5, seqlen_kv=20, num_heads=2)
    got = run(call.but(score_mod=compiled), c_backend)
    assert_matches(*got, call.but(score_mod=SOFTER))


class Address:
    """What numba's cfunc has: an address."""

    address = ctypes.cast(SOFTER.c, ctypes.c_void_p).value


def test_anything_with_an_address(c_backend):
    call = dense(508, seqlen_q=5, seqlen_kv=20, num_heads=2)
    want = run(call.but(score_mod=SOFTER), c_backend)
    assert_same_bits(run(call.but(score_mod=Address()), c_backend), want)


def test_numpy_functions_are_given_arrays_that_broadcast():
    """The reference hands over whole blocks; what comes back broadcasts to (rows, keys)."""
    shapes = set()

    def look(score, batch, head, query, key):
        shape = np.broadcast_shapes(*map(np.shape, (score, batch, head, query, key)))
        assert len(shape) == 2 and np.shape(score) == shape and score.dtype == np.float64
        assert np.issubdtype(np.asarray(query).dtype, np.integer)
        shapes.add(shape)
        return np.float64(0)

    call = dense(509, batch=1, seqlen_q=5, seqlen_kv=20, num_heads=1)
    out = pyflash.flash_attention(*call.arrays.values(), score_mod=look, backend="numpy")
    mean = call.arrays["v"].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=1e-6)
    assert shapes


def test_the_wrong_kind_of_function_is_refused_by_name():
    call = dense(510)
    python = {"score_mod": lambda s, b, h, i, j: s, "mask_mod": lambda b, h, i, j: i == i}
    c = {"score_mod": SOFTER.c, "mask_mod": SPARSE.c}
    for backend, functions in (("numpy", c), ("c", python)):
        if pyflash.available_backends()[backend] is not None:
            continue
        for name, function in functions.items():
            with pytest.raises(pyflash.UnsupportedError, match=f"^{name}: .*{backend} backend"):
                pyflash.flash_attention(*call.arrays.values(), **{name: function}, backend=backend)


def test_exceptions_of_numpy_functions_come_through():
    def fail(score, batch, head, query, key):
        raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        pyflash.flash_attention(*dense(510).arrays.values(), score_mod=fail, backend="numpy")


SIGNATURES = {
    "score_mod": "double (*)(double, int64_t, int64_t, int64_t, int64_t)",
    "mask_mod": "int32_t (*)(int64_t, int64_t, int64_t, int64_t)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_is_no_function_is_refused_by_name(any_isa, name):
    variables = "score, batch, head, query, key" if name == "score_mod" else "batch, head, query, key"
    wanted = {
        "numpy": "a function of NumPy arrays",
        "c": f"a C function {SIGNATURES[name]}",
        "cuda": f"a CUDA C++ expression in {variables}, as a str",
    }[any_isa.name]
    with pytest.raises(pyflash.InvalidArgument) as caught:
        pyflash.flash_attention(*dense(510).arrays.values(), **{name: 3}, **any_isa.kwargs)
    assert str(caught.value) == f"{name}: found 3 (int), expected {wanted}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_expressions_are_for_cuda(name):
    for backend, instead in (
        ("numpy", "a function of NumPy arrays"),
        ("c", f"a C function {SIGNATURES[name]}"),
    ):
        if pyflash.available_backends()[backend] is not None:
            continue
        with pytest.raises(pyflash.UnsupportedError) as caught:
            pyflash.flash_attention(*dense(510).arrays.values(), **{name: "key < 3"}, backend=backend)
        assert str(caught.value) == (
            f"{name}: a CUDA expression is not supported by the {backend} backend; give {instead}"
        )


@pytest.mark.parametrize("name", SIGNATURES)
def test_pointers_of_another_signature_and_to_nothing_are_refused(any_isa, name):
    if any_isa.name == "cuda":
        pytest.skip("takes no functions, but expressions")
    other = (SPARSE if name == "score_mod" else SOFTER).c
    nowhere = ctypes.cast(None, type((SOFTER if name == "score_mod" else SPARSE).c))
    for value, found in ((other, "another signature, "), (nowhere, "a null pointer")):
        with pytest.raises(pyflash.InvalidArgument) as caught:
            pyflash.flash_attention(*dense(510).arrays.values(), **{name: value}, **any_isa.kwargs)
        words = str(caught.value)
        assert words.startswith(f"{name}: found {found}")
        assert words.endswith(f", expected a C function {SIGNATURES[name]}")


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
@pytest.mark.parametrize("expression", ["no_such_name + 1", "1 +", "key // 2"])
def test_an_expression_that_does_not_compile_is_named(any_isa, name, expression):
    if any_isa.name != "cuda":
        pytest.skip("takes no expressions")
    for options in ({}, {"score_mod": "score", "mask_mod": "key <= query"}):  # beside one that does
        with pytest.raises(pyflash.InvalidArgument) as caught:
            pyflash.flash_attention(
                *dense(510).arrays.values(), **{**options, name: expression}, **any_isa.kwargs
            )
        words = f"{name}: found {expression!r}, expected a C++ expression that compiles ("
        assert str(caught.value).startswith(words)
        assert re.search(r"\w+\.cu\W.*: error: ", str(caught.value)), "what the compiler said first"
