"""Random calls over the whole argument space against the oracle, and against themselves bit for bit."""

from __future__ import annotations

import collections
import inspect

import pytest
from calls import STORED_NAMES, assert_same_bits, paged, run
from conftest import TestedBackend, on_cuda, on_host
from hypothesis import event, given, seed, settings
from hypothesis import strategies as st
from oracle import Call, assert_matches
from random_calls import attention_calls, batches, drawn
from terms import rows_of, sequence_of

import pyflash

FEW = settings(max_examples=200, deadline=None, derandomize=True)
MANY = settings(FEW, max_examples=2500, derandomize=False)
#: On CUDA about every random call needs a kernel of its own: few calls, in parts that processes share out.
PART = settings(max_examples=6, deadline=None, database=None)


def on_cuda_in_parts(test):
    """Run a test of random calls on CUDA, if that can be tested here, with several seeds."""
    test = pytest.mark.parametrize("part", range(8))(test)
    return pytest.mark.parametrize("backend", on_cuda(), ids=lambda backend: backend.id)(test)


#: How many calls of each test had an option.
DRAWN: dict[str, collections.Counter[str]] = {"few": collections.Counter(), "many": collections.Counter()}

#: Keywords that are no part of a random call: they belong to a test of another kind, or to CUDA alone.
ELSEWHERE = {"backend", "isa", "out", "num_threads", "workspace", "return_lse"}
ELSEWHERE |= {"batch_invariant", "q_scale", "check_indices"}


def count(call: Call, counted: str) -> None:
    """Note which options a call has."""
    for name in sorted(drawn(call)):
        event(name)
        DRAWN[counted][name] += 1


def check_bits(data: st.DataObject, call: Call, backends: list[TestedBackend]) -> None:
    """Pages, threads, other sequences and other rows leave no trace in the bits of a row."""
    batch, seqlen_q = call.arrays["q"].shape[:2]
    pages = paged(call, data.draw(st.integers(1, 70), label="page_size"))
    b = data.draw(st.integers(0, batch - 1), label="sequence")
    lo = data.draw(st.integers(0, seqlen_q), label="lo")
    hi = data.draw(st.integers(lo, seqlen_q), label="hi")
    num_threads = data.draw(st.integers(2, 9), label="num_threads")
    alone, rows = sequence_of(call, b), rows_of(call, lo, hi)
    for backend in backends:
        out, lse = run(call, backend)
        assert_same_bits(run(pages, backend), (out, lse), f"{backend.id}: paged")
        assert_same_bits(run(alone, backend), (out[b : b + 1], lse[b : b + 1]), f"{backend.id}: alone")
        assert_same_bits(run(rows, backend), (out[:, lo:hi], lse[..., lo:hi]), f"{backend.id}: rows")
        if backend.has_threads:
            assert_same_bits(
                run(call, backend, num_threads=num_threads), (out, lse), f"{backend.id}: threads"
            )


def check(call: Call, num_threads: int, backends: list[TestedBackend]) -> None:
    """Hold backends to one oracle."""
    for backend in backends:
        out, lse = run(call, backend, **({"num_threads": num_threads} if backend.has_threads else {}))
        try:
            assert_matches(out, lse, call)
        except AssertionError as error:
            raise AssertionError(f"{backend.id}: {error}") from None


def assert_every_option_was_drawn(counted: str, least: int, of_each_form: int) -> None:
    """Every keyword of every function, every type and every form, often enough to mean something.

    In a few calls the forms of an option come in clusters; in many they all come.
    """
    counts = DRAWN[counted]
    if not counts:
        pytest.skip("the test that counts has not been run")
    functions = (pyflash.flash_attention, pyflash.flash_attention_varlen, pyflash.paged_attention)
    wanted = {function.__name__: least for function in functions}
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        wanted |= {p.name: least for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ELSEWHERE}
    wanted |= {f"stored {name}": of_each_form for name in STORED_NAMES}
    wanted |= {f"q of {name}": of_each_form for name in ("float64", "float32", "float16", "bfloat16")}
    wanted |= {f"{name} {n} axes": of_each_form for name in ("bias", "mask") for n in (1, 2, 3, 4)}
    wanted |= {f"{name} {n} axes": of_each_form for name in ("k_scale", "v_scale") for n in (0, 1)}
    wanted |= {f"tree {n} axes": of_each_form for n in (2, 3)}
    forms = ("causal top_left", "pages of packed queries", "lengths of a dense cache")
    wanted |= dict.fromkeys(forms, of_each_form)
    wanted |= {f"alibi_slopes {n} axes": of_each_form for n in (1, 2)}
    rare = {name: counts[name] for name, count in wanted.items() if counts[name] < count}
    assert not rare, f"drawn too rarely: {rare}"


@FEW
@given(call=attention_calls(), num_threads=st.integers(1, 4))
def test_random_calls(call, num_threads):
    count(call, "few")
    check(call, num_threads, on_host())


@on_cuda_in_parts
def test_random_calls_on_cuda(backend, part):
    @seed(part)
    @PART
    @given(call=attention_calls())
    def check_one(call):
        call.options.pop("tile", None)  # each of its kernels has tiles of its own
        check(call, 1, [backend])

    check_one()


def test_every_option_was_drawn():
    assert_every_option_was_drawn("few", 20, 0)


@FEW
@given(data=st.data(), call=batches())
def test_random_calls_keep_their_bits(data, call):
    check_bits(data, call, on_host())


@on_cuda_in_parts
def test_random_calls_keep_their_bits_on_cuda(backend, part):
    @seed(part)
    @PART
    @given(data=st.data(), call=batches())
    def check_one(data, call):
        call.options.pop("tile", None)
        check_bits(data, call, [backend.reproducible])

    check_one()


@pytest.mark.long
@MANY
@given(data=st.data(), call=batches())
def test_many_random_calls_keep_their_bits(data, call):
    check_bits(data, call, on_host())


@pytest.mark.long
@MANY
@given(call=attention_calls(), num_threads=st.integers(1, 8))
def test_many_random_calls(call, num_threads):
    count(call, "many")
    check(call, num_threads, on_host())


@pytest.mark.long
def test_every_option_was_drawn_many_times():
    assert_every_option_was_drawn("many", 200, 20)
