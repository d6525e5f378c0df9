"""The public functions: docstrings, checks and the hand-over to a backend; no arithmetic."""

from __future__ import annotations

from typing import Any

from . import _args, _backends, _call_table, _device_calls
from ._description import Array, Arrays, Backend, Explanation, IndexArrays
from ._errors import invalid, unsupported
from ._options import attention_options

Result = Array | tuple[Array, Array]


def _run(
    call: _args.Call,
    backend: Backend,
    key: Any,
    inputs: tuple[Array, Array, Array],
    out: Any,
    index: IndexArrays,
    options: dict[str, Any],
) -> Result:
    """Make a checked call, and remember it under its key, if it has one, once it comes again."""
    remembers = key is not None and _call_table.comes_again(key)
    again = Arrays(*inputs, call.out, index, _device_calls.others(key, options)) if remembers else None
    repeat = backend.attention(call.args, again=again)
    lse = call.lse
    if repeat is not None and _device_calls.is_of_device(key):
        shape, dtype = (None, "") if lse is None else (lse.shape, lse.dtype.name)
        _device_calls.remember(
            key, _device_calls.Known(repeat, call.out.shape, call.out.dtype.name, shape, dtype)
        )
    elif repeat is not None:
        known = _call_table.Known(
            repeat,
            call.out.shape,
            None if options.get("out_dtype") is None else call.out.dtype,
            None if lse is None else lse.shape,
            None if lse is None else lse.dtype,
        )
        _call_table.remember(key, known)
    return call.result(_args.Caller.of(inputs[0], out))  # type: ignore[no-any-return]


@attention_options("``(batch, num_heads, seqlen_q)``, without the axes that `out` lacks")
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    seq_lens: Array | None = None,
    layout: str = "bshd",
    out: Array | None = None,
    backend: str | None = None,
    **options: Any,
) -> Result:
    """Exact attention ``softmax(scale * q k^T) v`` without the score matrix.

    One pass over the keys, tile by tile, with a running maximum and a running sum per row:
    O(N) memory, the arithmetic of textbook attention.

    Parameters
    ----------
    q : (batch, seqlen_q, num_heads, head_dim) ndarray
        Queries; float64, float32, float16 or bfloat16 (``ml_dtypes``), any strides. Without the
        batch axis, or without batch and heads, k and v go without them too.
    k : (batch, seqlen_kv, num_kv_heads, head_dim) ndarray
        Keys. ``num_kv_heads`` divides ``num_heads``: query head ``h`` reads key/value head
        ``h // (num_heads // num_kv_heads)``.
    v : (batch, seqlen_kv, num_kv_heads, head_dim_v) ndarray
        Values, of the dtype of `k`: that of `q`, or, unless `q` is float64, any of float32, float16,
        bfloat16, float8_e4m3fn, float8_e5m2, int8 and int4 (see `kv_dtype`). It may be a view of `k`.
    seq_lens : (batch,) int32 or int64 ndarray, optional
        Valid keys of each sequence; what lies behind them is never read.
    layout : {"bshd", "bhsd"}, default "bshd"
        Order of the axes of q, k, v and out: with "bhsd" heads come before seqlen.
    {parameters}

    Returns
    -------
    {returns}

    Raises
    ------
    {raises}

    Notes
    -----
    Arrays may be of NumPy, CuPy or PyTorch, or anything with DLPack or an array interface. They are
    used where they lie, without copies, and the result is of the kind of `q`. On a GPU all of them lie
    on that of `q`, but for index arrays and what is small, which may be NumPy's.

    The C backend computes float64 in float64 and everything else in float32, NumPy all in
    float64. A key that a row may not see does not reach it, even when it holds NaN. With the
    default options, the bits of a row do not depend on threads, on other sequences or, within
    a kernel family, on other rows.

    References
    ----------
    Dao, Fu, Ermon, Rudra, Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention with
    IO-Awareness", 2022, algorithm 1. Dao, "FlashAttention-2", 2023, section 3.1.
    Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.

    Examples
    --------
    >>> import numpy as np, pyflash
    >>> q = np.ones((1, 4, 2, 8), np.float32)
    >>> pyflash.flash_attention(q, q, q, causal=True).shape
    (1, 4, 2, 8)
    """
    index = () if seq_lens is None else (None, None, seq_lens, None)
    key, result = _call_table.attempt("dense", q, k, v, out, index, layout, "nhd", backend, options)
    if key is None:
        key, result = _device_calls.attempt("dense", (q, k, v, out), index, (layout,), backend, options)
    if result is not None:
        return result
    chosen = _backends.resolve(backend, q)
    call = _args.dense(q, k, v, backend=chosen.name, layout=layout, seq_lens=seq_lens, out=out, **options)
    return _run(call, chosen, key, (q, k, v), out, index, options)


@attention_options(
    "``(batch, num_heads, seqlen_q)``, without the axes that `out` lacks",
    without=("num_splits", "num_threads", "isa", "workspace", "tile", "family"),
)
def naive_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    seq_lens: Array | None = None,
    layout: str = "bshd",
    backend: str | None = None,
    **options: Any,
) -> Result:
    """Textbook attention that materialises the score matrix: the definition, and the oracle.

    Takes what `flash_attention` takes, but for the options of kernels, and needs O(N^2) memory. It
    exists in NumPy only, whatever `use_backend` says, and computes in float64; so `score_mod` and
    `mask_mod` are functions of arrays here.

    Parameters
    ----------
    q, k, v, seq_lens, layout
        As in `flash_attention`.
    {parameters}

    Returns
    -------
    {returns}

    Raises
    ------
    {raises}
    """
    if backend not in (None, _backends.AUTO, "numpy"):
        raise unsupported("backend", repr(backend), "naive_attention", "the textbook exists in NumPy only")
    from . import _reference

    for name in ("num_splits", "tile", "family"):
        if options.get(name) is not None:
            raise unsupported(name, repr(options[name]), "naive_attention", "it has no tiles; leave it out")
    call = _args.dense(q, k, v, backend="numpy", layout=layout, seq_lens=seq_lens, **options)
    _reference.naive(call.args)
    return call.result(_args.Caller.of(q, options.get("out")))  # type: ignore[no-any-return]


@attention_options("``(num_heads, total_q)``")
def flash_attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_kv: Array,
    *,
    out: Array | None = None,
    backend: str | None = None,
    **options: Any,
) -> Result:
    """Attention of sequences of different lengths, packed one behind the other.

    Parameters
    ----------
    q : (total_q, num_heads, head_dim) ndarray
        Queries of all sequences; types as in `flash_attention`.
    k : (total_kv, num_kv_heads, head_dim) ndarray
        Keys of all sequences.
    v : (total_kv, num_kv_heads, head_dim_v) ndarray
        Values of all sequences.
    cu_seqlens_q, cu_seqlens_kv : (batch + 1,) int32 or int64 ndarray
        Prefix sums of the lengths, from 0 to the totals; empty sequences are fine.
    {parameters}

    Returns
    -------
    {returns}

    Raises
    ------
    {raises}

    Examples
    --------
    >>> import numpy as np, pyflash
    >>> q = np.ones((5, 2, 8), np.float32)
    >>> lengths = np.array([0, 2, 5], np.int32)
    >>> pyflash.flash_attention_varlen(q, q, q, lengths, lengths, causal=True).shape
    (5, 2, 8)
    """
    index = (cu_seqlens_q, cu_seqlens_kv, None, None)
    key, result = _call_table.attempt("varlen", q, k, v, out, index, "packed", "nhd", backend, options)
    if key is None:
        key, result = _device_calls.attempt("varlen", (q, k, v, out), index, (), backend, options)
    if result is not None:
        return result
    chosen = _backends.resolve(backend, q)
    call = _args.varlen(q, k, v, cu_seqlens_q, cu_seqlens_kv, backend=chosen.name, out=out, **options)
    return _run(call, chosen, key, (q, k, v), out, index, options)


@attention_options("``(batch, num_heads)``, ``(batch, num_heads, seqlen_q)`` or ``(num_heads, total_q)``")
def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    cu_seqlens_q: Array | None = None,
    layout: str = "bshd",
    cache_layout: str = "nhd",
    out: Array | None = None,
    backend: str | None = None,
    **options: Any,
) -> Result:
    """Attention over keys that lie in pages behind a block table.

    Parameters
    ----------
    q : ndarray
        ``(batch, num_heads, head_dim)``: one token a sequence;
        ``(batch, seqlen_q, num_heads, head_dim)``: several;
        ``(total_q, num_heads, head_dim)`` with `cu_seqlens_q`: packed, so that prompt chunks and
        single tokens go into one call. The queries are the last tokens of their sequences.
    k_cache : (num_pages, page_size, num_kv_heads, head_dim) ndarray
        Page pool of the keys, any page size.
    v_cache : (num_pages, page_size, num_kv_heads, head_dim_v) ndarray
        Page pool of the values.
    block_table : (batch, max_pages) int32 or int64 ndarray
        Page number of each logical page; entries past the length are never read.
    seq_lens : (batch,) int32 or int64 ndarray
        Valid keys of each sequence, its queries' own keys included.
    cu_seqlens_q : (batch + 1,) int32 or int64 ndarray, optional
        Prefix sums of packed queries.
    layout : {"bshd", "bhsd"}, default "bshd"
        Order of the axes of a `q` with four of them, and of `out`.
    cache_layout : {"nhd", "hnd"}, default "nhd"
        With "hnd" the pools are ``(num_pages, num_kv_heads, page_size, head_dim)``.
    {parameters}

    Returns
    -------
    {returns}

    Raises
    ------
    {raises}

    Notes
    -----
    The result has the bits of dense attention over the same keys.

    References
    ----------
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023, section 4.1.
    """
    index = (cu_seqlens_q, None, seq_lens, block_table)
    key, result = _call_table.attempt(
        "paged", q, k_cache, v_cache, out, index, layout, cache_layout, backend, options
    )
    if key is None:
        key, result = _device_calls.attempt(
            "paged", (q, k_cache, v_cache, out), index, (layout, cache_layout), backend, options
        )
    if result is not None:
        return result
    chosen = _backends.resolve(backend, q)
    call = _args.paged(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        backend=chosen.name,
        cu_seqlens_q=cu_seqlens_q,
        layout=layout,
        cache_layout=cache_layout,
        out=out,
        **options,
    )
    return _run(call, chosen, key, (q, k_cache, v_cache), out, index, options)


@attention_options("``(batch, num_heads, seqlen_q)``, without the axes that `out` lacks")
def flash_decoding(
    q: Array,
    k: Array,
    v: Array,
    *,
    num_splits: int,
    seq_lens: Array | None = None,
    layout: str = "bshd",
    backend: str | None = None,
    **options: Any,
) -> Result:
    """Attention with the keys cut into `num_splits` parts whose states are merged.

    Each part runs the recurrence on its own and yields a state (maximum, sum, output); the states
    are combined along a fixed binary tree. `flash_attention` does so by itself in the decode family,
    at fixed borders, so that threads can share the keys of one query.

    Parameters
    ----------
    q, k, v, seq_lens, layout
        As in `flash_attention`.
    num_splits : int
        The number of parts, at least 1; part ``s`` holds keys ``[s * n // num_splits, ...)`` of
        each sequence's n, and more parts than keys are as many as keys.
    {parameters}

    Returns
    -------
    {returns}

    Raises
    ------
    {raises}

    References
    ----------
    Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023.
    """
    if num_splits is None:
        raise invalid("num_splits", "None", "the number of parts, at least 1")
    return flash_attention(
        q, k, v, num_splits=num_splits, seq_lens=seq_lens, layout=layout, backend=backend, **options
    )


def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    block_table: Array | None = None,
    backend: str | None = None,
    **options: Any,
) -> Explanation:
    """Say what a call would do: backend, kernel, family, instruction set, tiles, splits, memory.

    Parameters
    ----------
    q, k, v
        Arrays of the call; with `block_table` the page pools.
    cu_seqlens_q, cu_seqlens_kv, block_table
        As the call would be given: with `cu_seqlens_kv` it is `flash_attention_varlen`, with
        `block_table` `paged_attention`, otherwise `flash_attention`.
    backend, **options
        Every other keyword of the call.

    Returns
    -------
    Explanation
        A named tuple; nothing is computed.

    Raises
    ------
    InvalidArgument, UnsupportedError, BackendUnavailable
        Whatever the call would raise.
    """
    index = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv, "block_table": block_table}
    chosen, call = _described(q, k, v, backend=backend, **index, **options)
    return chosen.explain(call.args)


def check(q: Array, k: Array, v: Array, **options: Any) -> None:
    """Raise what `explain` would raise of a call, without counting anything of it."""
    chosen, call = _described(q, k, v, **options)
    chosen.check(call.args)


def _described(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    block_table: Array | None = None,
    backend: str | None = None,
    **options: Any,
) -> tuple[Backend, _args.Call]:
    """Return a call of any of the attention functions, checked, and the backend that would make it."""
    chosen = _backends.resolve(backend, q)
    if block_table is not None:
        seq_lens = options.pop("seq_lens", None)
        call = _args.paged(
            q, k, v, block_table, seq_lens, backend=chosen.name, cu_seqlens_q=cu_seqlens_q, **options
        )
    elif cu_seqlens_kv is not None:
        call = _args.varlen(q, k, v, cu_seqlens_q, cu_seqlens_kv, backend=chosen.name, **options)
    else:
        call = _args.dense(q, k, v, backend=chosen.name, **options)
    return chosen, call
