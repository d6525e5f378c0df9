"""`PagedKVCache` against dense lists: contents, sharing, free pages, and nothing done by halves."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter

import numpy as np
import pytest
from calls import on_host
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pyflash

NUM_KV_HEADS, HEAD_DIM, HEAD_DIM_V = 2, 4, 6


def tokens_of(serials, num_layers):
    """Return k, v ``(num_layers, total, heads, width)`` that are different for every token and layer."""
    layer = np.arange(num_layers)[:, None, None, None]
    token = np.array(serials, np.int64)[:, None, None]
    head = np.arange(NUM_KV_HEADS)[:, None]
    k = layer * 7 + token * 100 + head * 10 + np.arange(HEAD_DIM)
    v = -(layer * 7 + token * 100 + head * 10 + np.arange(HEAD_DIM_V))
    return k.astype(np.float32), v.astype(np.float32)


def gather(cache, seq):
    """Return k, v ``(num_layers, length, heads, width)`` of a sequence, through its block table."""
    length, page_size = lengths_of(cache, seq)[0], cache.page_size
    pages = on_host(cache.block_table(seq))[0]
    position = np.arange(length)
    result = []
    for pool in map(on_host, (cache.k_cache, cache.v_cache)):
        by_token = pool if cache.cache_layout == "nhd" else pool.swapaxes(-3, -2)
        result.append(by_token[:, pages[position // page_size], position % page_size])
    return result


def lengths_of(cache, seqs):
    return on_host(cache.seq_lens(seqs)).tolist()


def make_cache(num_pages=8, page_size=4, *, backend="numpy", **options):
    return pyflash.PagedKVCache(
        num_pages, page_size, NUM_KV_HEADS, HEAD_DIM, head_dim_v=HEAD_DIM_V, backend=backend, **options
    )


class Abort(Exception):
    """Stands for whatever may fail in the middle of a forward pass."""


class CacheMachine(RuleBasedStateMachine):
    """Random lives of sequences. The model of the cache: a list of token serials per sequence."""

    backend = "numpy"

    @initialize(
        num_pages=st.integers(6, 20),
        page_size=st.integers(1, 4),
        num_layers=st.integers(1, 3),
        cache_layout=st.sampled_from(["nhd", "hnd"]),
    )
    def create(self, num_pages, page_size, num_layers, cache_layout):
        self.cache = make_cache(
            num_pages, page_size, num_layers=num_layers, cache_layout=cache_layout, backend=self.backend
        )
        self.model: dict[int, list[int]] = {}
        self.next_serial = 1
        self.freed: set[int] = set()
        self.add()

    def pages(self, seq):
        return on_host(self.cache.block_table(seq))[0].tolist()

    def holders(self):
        """Return how many sequences hold each page, as the block tables have it."""
        return Counter(page for seq in self.model for page in self.pages(seq))

    def num_pages_for(self, length):
        return -(-length // self.cache.page_size)

    def draw_request(self, data):
        seqs = data.draw(st.permutations(sorted(self.model)).map(lambda seqs: seqs[:3]), label="seqs")
        counts = [data.draw(st.integers(0, 5), label=f"tokens of {seq}") for seq in seqs]
        serials = []
        for count in counts:
            serials.append(list(range(self.next_serial, self.next_serial + count)))
            self.next_serial += count
        return seqs, counts, serials

    def pages_needed(self, seqs, counts):
        """Return the fewest new pages that a request can do with."""
        holders, needed, leaving = self.holders(), 0, Counter()
        for seq, count in zip(seqs, counts, strict=True):
            length = len(self.model[seq])
            needed += self.num_pages_for(length + count) - self.num_pages_for(length)
            if count and length % self.cache.page_size:
                leaving[self.pages(seq)[-1]] += 1
        # Where all holders of a page move on, one of them can keep it.
        return needed + sum(min(n, holders[page] - 1) for page, n in leaving.items())

    @rule()
    def add(self):
        assume(len(self.model) < 6)
        self.model[self.cache.add_sequence()] = []

    @rule(data=st.data(), how=st.sampled_from(["append", "layers", "append", "abort", "incomplete"]))
    def grow(self, data, how):
        seqs, counts, serials = self.draw_request(data)
        k, v = tokens_of([serial for row in serials for serial in row], self.cache.num_layers)
        needed, free_before = self.pages_needed(seqs, counts), self.cache.num_free_pages
        expected = {"abort": Abort, "incomplete": pyflash.InvalidArgument}.get(how)
        if needed > free_before:
            expected = pyflash.OutOfPages
        with pytest.raises(expected) if expected else contextlib.nullcontext():
            if how == "append":
                self.cache.append(seqs, k, v, num_tokens=counts)
            else:
                self.grow_by_layers(seqs, counts, k, v, how)
        assert self.cache.num_free_pages == free_before - (0 if expected else needed)
        if not expected:
            for seq, row in zip(seqs, serials, strict=True):
                self.model[seq] = self.model[seq] + row

    def grow_by_layers(self, seqs, counts, k, v, how):
        free_after = self.cache.num_free_pages - self.pages_needed(seqs, counts)
        with self.cache.reserve(seqs, counts) as step:
            assert self.cache.num_free_pages == free_after
            layers = range(self.cache.num_layers)
            for layer in layers[:-1] if how == "incomplete" else layers:
                step.append(layer, k[layer], v[layer])
            if how == "abort":
                raise Abort

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data):
        assume(len(self.model) < 6)
        seq = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.none() | st.integers(0, len(self.model[seq])))
        free_before = self.cache.num_free_pages
        self.model[self.cache.fork(seq, length=length)] = self.model[seq][:length]
        assert self.cache.num_free_pages == free_before

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def trim(self, data):
        seq = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(0, len(self.model[seq])))
        self.cache.trim(seq, length)
        self.model[seq] = self.model[seq][:length]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        seq = data.draw(st.sampled_from(sorted(self.model)))
        self.cache.free(seq)
        del self.model[seq]
        self.freed.add(seq)

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def use_freed(self, data):
        seq = data.draw(st.sampled_from(sorted(self.freed)))
        for use in (self.cache.free, self.cache.fork, self.cache.block_table, self.cache.seq_lens):
            with pytest.raises(pyflash.InvalidArgument, match=f"{seq}, which was freed"):
                use(seq)

    @invariant()
    def contents(self):
        for seq, serials in self.model.items():
            for found, expected in zip(
                gather(self.cache, seq), tokens_of(serials, self.cache.num_layers), strict=True
            ):
                np.testing.assert_array_equal(found, expected)

    @invariant()
    def pages_are_counted(self):
        holders = self.holders()
        assert self.cache.num_free_pages + len(holders) == self.cache.num_pages
        assert self.cache._pages.references == [holders[page] for page in range(self.cache.num_pages)]
        assert sorted(self.cache._pages.free_pages) == sorted(set(range(self.cache.num_pages)) - set(holders))
        for seq, serials in self.model.items():
            pages = self.pages(seq)
            assert len(pages) == len(set(pages)) == self.num_pages_for(len(serials))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


if pyflash.available_backends()["cuda"] is None:

    class CacheMachineOnGpu(CacheMachine):
        """The same with pools and tables on a GPU."""

        backend = "cuda"

    TestCacheMachineOnGpu = CacheMachineOnGpu.TestCase
    TestCacheMachineOnGpu.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)


@pytest.fixture
def cache(any_isa):
    return make_cache(backend=any_isa.name)


def grow(cache, seqs, count, serial=1):
    seqs = seqs if isinstance(seqs, list) else [seqs]
    cache.append(seqs, *tokens_of(range(serial, serial + count * len(seqs)), cache.num_layers))


def test_block_table_and_lengths(cache):
    a, b, c = (cache.add_sequence() for _ in range(3))
    grow(cache, a, 9)
    grow(cache, b, 1)
    table, lengths = (on_host(x) for x in (cache.block_table([a, b, c]), cache.seq_lens([a, b, c])))
    assert table.dtype == lengths.dtype == np.int32
    assert table.tolist() == [[0, 1, 2], [3, -1, -1], [-1, -1, -1]]
    assert lengths.tolist() == [9, 1, 0]
    assert cache.block_table([]).shape == (0, 0)
    assert on_host(cache.block_table(b)).tolist() == [[3]]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("cache_layout", ["nhd", "hnd"])
def test_attention_reads_what_was_appended(any_isa, page_size, cache_layout):
    random = np.random.default_rng(7)
    cache = pyflash.PagedKVCache(
        32, page_size, 2, 8, num_layers=2, dtype="float64", cache_layout=cache_layout, backend=any_isa.name
    )
    seqs = [cache.add_sequence() for _ in range(3)]
    counts = [5, 1, 9]
    k, v = random.standard_normal((2, 2, sum(counts), 2, 8))
    q = random.standard_normal((sum(counts), 4, 8))
    with cache.reserve(seqs, counts) as step:
        assert step.host.cu_seqlens.tolist() == [0, 5, 6, 15]
        assert step.host.positions.tolist() == [*range(5), 0, *range(9)]
        for name, x in step.host._asdict().items():
            np.testing.assert_array_equal(on_host(getattr(step, name)), x, strict=True)
        for layer in range(2):
            out = pyflash.paged_attention(
                *cache.placed(q),
                *step.append(layer, k[layer], v[layer]),
                step.block_table,
                step.seq_lens,
                cu_seqlens_q=step.cu_seqlens,
                max_seqlen_q=step.max_seqlen_q,
                cache_layout=cache_layout,
                causal=True,
                **any_isa.kwargs,
            )
            for lo, hi in itertools.pairwise(step.host.cu_seqlens):
                dense = pyflash.naive_attention(q[lo:hi], k[layer, lo:hi], v[layer, lo:hi], causal=True)
                np.testing.assert_allclose(on_host(out)[lo:hi], dense, rtol=0, atol=1e-14)


def test_keys_are_rotated_by_the_rows_of_their_tokens(cache):
    angles = np.linspace(0, 3, 4)[:, None] * np.array([1.0, 0.1])
    k, v = tokens_of(range(4), 1)
    a, b = cache.add_sequence(), cache.add_sequence()
    cache.append([a, b], k, v, cos=np.cos(angles), sin=np.sin(angles), interleaved=True)
    expected = np.empty_like(k[0])
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    expected[..., 0::2] = k[0, ..., 0::2] * cos - k[0, ..., 1::2] * sin
    expected[..., 1::2] = k[0, ..., 1::2] * cos + k[0, ..., 0::2] * sin
    found = np.concatenate([gather(cache, a)[0][0], gather(cache, b)[0][0]])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)


def test_of_sequences_that_leave_one_page_together_the_longest_keeps_it(cache):
    a = cache.add_sequence()
    grow(cache, a, 3)
    b = cache.fork(a, length=2)
    with contextlib.suppress(Abort), cache.reserve([a, b], 1) as step:
        assert on_host(step.block_table).tolist() == [[0], [1]]
        step.append(0, *(x[0] for x in tokens_of([98, 99], 1)))
        raise Abort
    for seq, length in ((a, 3), (b, 2)):
        np.testing.assert_array_equal(gather(cache, seq)[0], tokens_of(range(1, 1 + length), 1)[0])
    grow(cache, [b, a], 1, serial=50)
    assert cache.num_free_pages == cache.num_pages - 2
    np.testing.assert_array_equal(gather(cache, b)[0], tokens_of([1, 2, 50], 1)[0])
    np.testing.assert_array_equal(gather(cache, a)[0], tokens_of([1, 2, 3, 51], 1)[0])


def test_out_of_pages_is_all_or_nothing(cache):
    a, b = cache.add_sequence(), cache.add_sequence()
    grow(cache, a, 4)
    with pytest.raises(pyflash.OutOfPages, match="need 8 new pages of 4 tokens, 7 of 8 are free"):
        grow(cache, [a, b], 16)
    assert cache.num_free_pages == 7
    assert lengths_of(cache, [a, b]) == [4, 0]
    with pytest.raises(MemoryError):
        grow(cache, b, 29)
    grow(cache, b, 28)
    assert cache.num_free_pages == 0


def test_an_open_sequence_is_locked(cache):
    a, b = cache.add_sequence(), cache.add_sequence()
    k, v = (x[0] for x in tokens_of([1, 2], 1))
    with cache.reserve(a, 2) as step:
        uses = (
            lambda: cache.free(a),
            lambda: cache.trim(a, 0),
            lambda: cache.fork(a),
            lambda: cache.seq_lens([b, a]),
            lambda: cache.append(a, k, v),
            lambda: cache.reserve([b, a], 1).__enter__(),
        )
        for use in uses:
            with pytest.raises(pyflash.InvalidArgument, match=f"{a}, which is being extended"):
                use()
        cache.append(b, k, v)  # others are free to go on
        step.append(0, k, v)
    assert lengths_of(cache, [a, b]) == [2, 2]


def test_misuse_of_a_reservation(cache):
    a = cache.add_sequence()
    k, v = (x[0] for x in tokens_of([1], 1))
    step = cache.reserve(a, 1)
    with pytest.raises(pyflash.InvalidArgument, match=r"with cache\.reserve"):
        step.append(0, k, v)
    with step:
        with pytest.raises(pyflash.InvalidArgument, match=r"layer: found 1"):
            step.append(1, k, v)
        with pytest.raises(pyflash.InvalidArgument):
            step.append(0, k[:, :1], v)
        step.append(0, k, v)
        with pytest.raises(pyflash.InvalidArgument, match="appended before"):
            step.append(0, k, v)
    with pytest.raises(pyflash.InvalidArgument, match=r"with cache\.reserve"):
        step.append(0, k, v)
    with pytest.raises(pyflash.InvalidArgument, match="used before"), step:
        pass
    assert lengths_of(cache, a) == [1]


def test_layers_that_were_not_written_are_named(any_isa):
    cache = make_cache(num_layers=3, backend=any_isa.name)
    a = cache.add_sequence()
    k, v = tokens_of([1], 3)
    with (
        pytest.raises(pyflash.InvalidArgument, match=r"no keys for the layers \[0, 2\]"),
        cache.reserve(a, 1) as step,
    ):
        step.append(1, k[1], v[1])
    assert lengths_of(cache, a) == [0]
    assert cache.num_free_pages == cache.num_pages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_pages": 0}, "num_pages: found 0"),
        ({"page_size": 2.5}, r"page_size: found 2\.5"),
        ({"num_layers": True}, "num_layers: found True"),
        ({"dtype": "int16"}, "dtype: found 'int16'"),
        ({"dtype": "nonsense"}, "dtype: found 'nonsense'"),
        ({"cache_layout": "bhsd"}, "cache_layout: found 'bhsd'"),
    ],
)
def test_bad_sizes_are_refused(arguments, message):
    with pytest.raises(pyflash.InvalidArgument, match=message):
        make_cache(**arguments)


def test_bad_requests_are_refused(cache):
    a = cache.add_sequence()
    k, v = tokens_of([1, 2, 3], 1)
    requests = [
        (lambda: cache.append([a, a], k, v, num_tokens=[1, 2]), "each sequence at most once"),
        (lambda: cache.append(a, k, v, num_tokens=-3), "num_tokens: found -3"),
        (lambda: cache.append(a, k, v, num_tokens=[1, 2]), "num_tokens: found 2 numbers"),
        (lambda: cache.append([a, cache.add_sequence()], k, v), "3 tokens for 2 sequences"),
        (lambda: cache.append(a, k.tolist(), v), "k: found list"),
        (lambda: cache.append(a, k[0, 0], v), "k: found shape"),
        (lambda: cache.append(17, k, v), "seqs: found 17, which was freed or never existed"),
        (lambda: cache.trim(a, 1), "length: found 1"),
        (lambda: cache.fork(a, length=-1), "length: found -1"),
        (lambda: cache.free("a"), "seq: found 'a'"),
    ]
    for request, message in requests:
        with pytest.raises(pyflash.InvalidArgument, match=message):
            request()
    assert cache.num_free_pages == cache.num_pages
    assert lengths_of(cache, a) == [0]


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", np.float32])
def test_dtypes(any_isa, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    cache = make_cache(dtype=dtype, backend=any_isa.name)
    a = cache.add_sequence()
    k, v = (x.astype(cache.k_cache.dtype) for x in tokens_of([0, 1], 1))
    cache.append(a, k, v)
    np.testing.assert_array_equal(gather(cache, a)[0], k)
    assert cache.k_cache.dtype == cache.v_cache.dtype == np.dtype(dtype)
