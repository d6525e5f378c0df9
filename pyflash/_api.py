"""The public functions: docstrings, checks and the hand-over to a backend; no arithmetic."""

from __future__ import annotations

from typing import Any

from . import _args, _args_cache, _backends
from ._description import Array, Backend, Explanation
from ._errors import invalid, unsupported
from ._options import attention_options

Result = Array | tuple[Array, Array]


def _run(call: _args.Call, backend: Backend) -> Result:
    backend.attention(call.args)
    return call.result()


@attention_options("``(batch, num_heads, seqlen_q)``, without the axes that `out` lacks")
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    seq_lens: Array | None = None,
    layout: str = "bshd",
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
    chosen = _backends.resolve(backend)
    return _run(
        _args.dense(q, k, v, backend=chosen.name, layout=layout, seq_lens=seq_lens, **options), chosen
    )


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
    return call.result()


@attention_options("``(num_heads, total_q)``")
def flash_attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_kv: Array,
    *,
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
    chosen = _backends.resolve(backend)
    return _run(_args.varlen(q, k, v, cu_seqlens_q, cu_seqlens_kv, backend=chosen.name, **options), chosen)


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
    chosen = _backends.resolve(backend)
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
        **options,
    )
    return _run(call, chosen)


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
    chosen = _backends.resolve(backend)
    if block_table is not None:
        seq_lens = options.pop("seq_lens", None)
        call = _args.paged(
            q, k, v, block_table, seq_lens, backend=chosen.name, cu_seqlens_q=cu_seqlens_q, **options
        )
    elif cu_seqlens_kv is not None:
        call = _args.varlen(q, k, v, cu_seqlens_q, cu_seqlens_kv, backend=chosen.name, **options)
    else:
        call = _args.dense(q, k, v, backend=chosen.name, **options)
    return chosen.explain(call.args)


def merge_states(
    out: Array,
    lse: Array,
    *,
    layout: str = "bshd",
    sinks: Array | None = None,
    lse_includes_sinks: bool = False,
    out_dtype: Any = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Merge attention results over disjoint sets of keys into the result over their union.

    Parameters
    ----------
    out : (num_parts, batch, seqlen, num_heads, head_dim) ndarray
        Outputs of the parts (without sinks), stacked on axis 0; the axes behind it as `layout`
        says, without batch or heads where the parts lack them.
    lse : (num_parts, batch, num_heads, seqlen) ndarray
        Their log-sum-exp, float32 or float64. -inf is an empty part.
    layout : {"bshd", "bhsd"}, default "bshd"
        Order of the axes of the parts.
    sinks : (num_heads,) ndarray, optional
        Learned logits that enter the denominator once, here.
    lse_includes_sinks : bool, default False
        Whether they count in the merged `lse` too.
    out_dtype : dtype or str, optional
        Type of the result. Default: that of the parts.
    backend : {"auto", "numpy", "c", "cuda"}, optional
        As in `flash_attention`.

    Returns
    -------
    out : ndarray
        One part's shape.
    lse : ndarray
        Log-sum-exp over the union.

    Raises
    ------
    InvalidArgument, BackendUnavailable
        As in `flash_attention`.

    Notes
    -----
    The parts are merged along the fixed binary tree of their indices, ((0, 1), (2, 3)) and so on,
    in float32 or wider; parts computed with ``out_dtype="float32"`` lose nothing on the way.
    """
    chosen = _backends.resolve(backend)
    call = _args_cache.merge(
        out,
        lse,
        layout=layout,
        sinks=sinks,
        lse_includes_sinks=lse_includes_sinks,
        out_dtype=out_dtype,
    )
    chosen.merge_states(call.args)
    return call.out, call.lse


def append_kv(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    block_table: Array | None = None,
    seq_lens: Array | None = None,
    slots: Array | None = None,
    cu_seqlens: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    interleaved: bool = False,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    kv_dtype: str | None = None,
    cache_layout: str = "nhd",
    backend: str | None = None,
) -> None:
    """Write new keys and values into a cache, in place, rotating the keys on the way if asked.

    Parameters
    ----------
    k : ndarray
        ``(batch, seqlen, num_kv_heads, head_dim)``; ``(batch, num_kv_heads, head_dim)``: one token
        a sequence; ``(total, num_kv_heads, head_dim)`` with `cu_seqlens` or `slots`.
    v : ndarray
        As `k`, of width ``head_dim_v``.
    k_cache, v_cache : (num_pages, page_size, num_kv_heads, head_dim) ndarray
        The page pools, of any type that attention reads; values are converted to it. Without a
        `block_table` they are dense caches ``(batch, max_seqlen, num_kv_heads, head_dim)``.
    block_table : (batch, max_pages) int32 or int64 ndarray, optional
        Page number of each logical page.
    seq_lens : (batch,) int32 or int64 ndarray
        Length of each sequence *before* the append.
    slots : int32 or int64 ndarray, optional
        Instead of table and lengths, the place of each token: ``page * page_size + place``;
        tokens with -1 are skipped. Of two tokens for one place the later one stays.
    cu_seqlens : (batch + 1,) int32 or int64 ndarray, optional
        Prefix sums of packed tokens.
    cos, sin : (max_position, rotary_dim / 2) float32 or float64 ndarray, optional
        Rotary tables, looked up at each token's position; with `slots`, one row per token.
    interleaved : bool, default False
        Rotate neighbouring pairs ``(x[2i], x[2i+1])`` instead of ``(x[i], x[i + rotary_dim/2])``.
    k_scale, v_scale : float or ndarray, optional
        Scales of the caches; float8, int8 and int4 need them. A number or (num_kv_heads,) is what
        values are divided by before they are rounded (to nearest even) and saturated. A float32 array
        of the cache's shape without its last axis is *written*: each token and head gets the scale
        with which its largest number is the largest of the type (NaN where that is not finite).
    kv_dtype : {"e4m3fn", "e5m2", "int4"}, optional
        What caches of uint8 hold, as in `flash_attention`.
    cache_layout : {"nhd", "hnd"}, default "nhd"
        With "hnd" the caches have heads before places.
    backend : {"auto", "numpy", "c", "cuda"}, optional
        As in `flash_attention`.

    Raises
    ------
    InvalidArgument, BackendUnavailable
        As in `flash_attention`; nothing has been written then.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.2.
    """
    chosen = _backends.resolve(backend)
    args = _args_cache.append(
        k,
        v,
        k_cache,
        v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        slots=slots,
        cu_seqlens=cu_seqlens,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        cache_layout=cache_layout,
    )
    chosen.append_kv(args)
