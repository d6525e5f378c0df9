"""Attention calls that are refused, and the words of each refusal: data of `test_errors`."""

from __future__ import annotations

from typing import Any

import numpy as np
from calls import normal, numpy_dtype


def arrays(**changes: Any) -> dict[str, Any]:
    """Arguments of a dense call that is fine, with some changes."""
    fine = {"q": normal(1, (2, 3, 4, 8)), "k": normal(2, (2, 5, 2, 8)), "v": normal(3, (2, 5, 2, 6))}
    return {**fine, **changes}


def packed(**changes: Any) -> dict[str, Any]:
    """Arguments of a varlen call that is fine, with some changes."""
    fine = {
        "q": normal(1, (5, 4, 8)),
        "k": normal(2, (7, 2, 8)),
        "v": normal(3, (7, 2, 8)),
        "cu_seqlens_q": np.array([0, 2, 5], np.int32),
        "cu_seqlens_kv": np.array([0, 4, 7], np.int32),
    }
    return {**fine, **changes}


def paged(**changes: Any) -> dict[str, Any]:
    """Arguments of a paged call that is fine, with some changes."""
    fine = {
        "q": normal(1, (2, 4, 8)),
        "k_cache": normal(2, (6, 4, 2, 8)),
        "v_cache": normal(3, (6, 4, 2, 8)),
        "block_table": np.array([[5, 1, -1], [0, 2, 3]], np.int32),
        "seq_lens": np.array([8, 9], np.int32),
    }
    return {**fine, **changes}


def at(array: np.ndarray, place: Any, value: Any) -> np.ndarray:
    """A copy with one element changed."""
    array = array.copy()
    array[place] = value
    return array


F4, F8, F2, BF = (numpy_dtype(name) for name in ("float32", "float64", "float16", "bfloat16"))
Q, K, V = arrays().values()
UNSPACED = np.zeros(2 * 3 * 4 * 8 * 4 + 99, np.uint8)
ODD = np.ndarray(Q.shape, F4, UNSPACED, 0, (3 * 4 * 33, 4 * 33, 33, 4))
READ_ONLY = np.zeros((2, 3, 4, 6), F4)
READ_ONLY.flags.writeable = False
TYPES = "one of float64, float32, float16, bfloat16"
STORED = f"{TYPES}, float8_e4m3fn, float8_e5m2, int8, int4"
DENSE_AXES = "shape (batch, seqlen, heads, head_dim) or (seqlen, heads, head_dim) or (seqlen, head_dim)"
PAIR = "a pair (left, right), both inclusive: a single number would not say whether the query counts"

#: name -> (arguments, words)
DENSE = {
    # arrays
    "list": (
        arrays(q=[[1.0]]),
        "q: found [[1.0]] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "None": (
        arrays(k=None),
        "k: found None (NoneType), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "masked array": (
        arrays(v=np.ma.masked_array(V, V > 0)),
        "v: found a masked array, expected a plain array: its mask would be lost",
    ),
    "0-d": (
        arrays(q=np.float32(1)),
        "q: found np.float32(1.0) (float32), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "0-d array": (arrays(q=np.zeros((), F4)), f"q: found shape (), expected {DENSE_AXES}"),
    "1-d": (arrays(k=np.zeros(8, F4)), f"k: found shape (8,), expected {DENSE_AXES}"),
    "5-d": (arrays(v=V[None]), f"v: found shape (1, 2, 5, 2, 6), expected {DENSE_AXES}"),
    "integers": (arrays(q=Q.astype("i4")), f"q: found dtype int32, expected {TYPES}"),
    "complex": (arrays(k=K.astype("c8")), f"k: found dtype complex64, expected {STORED}"),
    "objects": (arrays(v=V.astype(object)), f"v: found dtype object, expected {STORED}"),
    "bool": (arrays(v=V > 0), f"v: found dtype bool, expected {STORED}"),
    "longdouble": (arrays(q=Q.astype("g")), f"q: found dtype {np.dtype('g')}, expected {TYPES}"),
    "byte order": (
        arrays(q=Q.astype(F4.newbyteorder())),
        f"q: found dtype {F4.newbyteorder()} in foreign byte order, expected native byte order",
    ),
    "odd strides": (
        arrays(q=ODD),
        "q: found strides (396, 132, 33, 4), expected multiples of the item size 4",
    ),
    "float64 keys": (
        arrays(k=K.astype(F8), v=V.astype(F8)),
        "k: found dtype float64, expected no float64 beside a float32 q",
    ),
    "float64 queries": (
        arrays(q=Q.astype(F8)),
        "k: found dtype float32, expected float64 beside a float64 q",
    ),
    "float64 queries, half keys": (
        arrays(q=Q.astype(F8), k=K.astype(BF), v=V.astype(BF)),
        "k: found dtype bfloat16, expected float64 beside a float64 q",
    ),
    "k and v differ": (arrays(v=V.astype(F2)), "v: found dtype float16, expected float32, the dtype of k"),
    # shapes
    "axes differ": (
        arrays(k=K[0], v=V[0]),
        "k: found shape (5, 2, 8), expected 4 axes, as many as q (batch, seqlen, heads, head_dim)",
    ),
    "batch differs": (arrays(k=K[:1], v=V[:1]), "k: found batch 1, expected batch 2, that of q"),
    "head_dim differs": (arrays(k=K[..., :7]), "k: found head_dim 7, expected head_dim 8, that of q"),
    "head_dim 0": (
        arrays(q=Q[..., :0], k=K[..., :0]),
        "q: found head_dim 0, expected a head_dim of at least 1",
    ),
    "head_dim_v 0": (arrays(v=V[..., :0]), "v: found head_dim 0, expected a head_dim of at least 1"),
    "lengths of k and v": (
        arrays(v=V[:, :4]),
        "v: found shape (2, 4, 2, 6), expected shape (2, 5, 2) + (head_dim_v,), as k",
    ),
    "heads of k and v": (
        arrays(v=V[:, :, :1]),
        "v: found shape (2, 5, 1, 6), expected shape (2, 5, 2) + (head_dim_v,), as k",
    ),
    "no divisor": (
        arrays(k=normal(2, (2, 5, 3, 8)), v=normal(3, (2, 5, 3, 6))),
        "k: found 3 heads, expected a divisor of the 4 heads of q",
    ),
    "more kv heads": (
        arrays(k=normal(2, (2, 5, 8, 8)), v=normal(3, (2, 5, 8, 6))),
        "k: found 8 heads, expected a divisor of the 4 heads of q",
    ),
    "no kv heads": (
        arrays(k=K[:, :, :0], v=V[:, :, :0]),
        "k: found 0 heads, expected a divisor of the 4 heads of q",
    ),
    # numbers and names
    "scale NaN": (arrays(scale=np.nan), "scale: found nan, expected a finite number"),
    "scale Inf": (arrays(scale=-np.inf), "scale: found -inf, expected a finite number"),
    "scale beyond float": (arrays(scale=10**400), "scale: found inf, expected a finite number"),
    "scale a string": (arrays(scale="1"), "scale: found '1' (str), expected a finite number"),
    "scale a bool": (arrays(scale=True), "scale: found True (bool), expected a finite number"),
    "scale complex": (arrays(scale=1j), "scale: found 1j (complex), expected a finite number"),
    "scale an array": (
        arrays(scale=np.ones(1)),
        "scale: found an array of shape (1,) and dtype float64, expected a finite number",
    ),
    "causal 1": (arrays(causal=1), "causal: found 1 (int), expected False, True or 'top_left'"),
    "causal None": (arrays(causal=None), "causal: found None (NoneType), expected False, True or 'top_left'"),
    "causal unknown": (
        arrays(causal="bottom_right"),
        "causal: found 'bottom_right' (str), expected False, True or 'top_left'",
    ),
    "top left and offset": (
        arrays(causal="top_left", q_offset=0),
        "q_offset: found 0 (int), expected None beside causal='top_left', which is q_offset=0",
    ),
    "integer window": (arrays(window=3), f"window: found 3 (int), expected {PAIR}"),
    "window of three": (arrays(window=(1, 2, 3)), f"window: found (1, 2, 3) (tuple), expected {PAIR}"),
    "window below -1": (arrays(window=(-2, 0)), "window[0]: found -2, expected an integer, at least -1"),
    "float window": (arrays(window=(0, 1.0)), "window[1]: found 1.0 (float), expected an integer"),
    "bool window": (arrays(window=(True, 0)), "window[0]: found True (bool), expected an integer"),
    "float offset": (arrays(q_offset=1.5), "q_offset: found 1.5 (float), expected an integer"),
    "offset too large": (
        arrays(q_offset=2**60),
        f"q_offset: found {2**60}, expected an integer, {-(2**48)} to {2**48}",
    ),
    "float offsets": (arrays(q_offset=np.zeros(2)), "q_offset: found dtype float64, expected int32 or int64"),
    "offsets of a wrong shape": (
        arrays(q_offset=np.zeros(3, "i4")),
        "q_offset: found shape (3,), expected shape (batch,) = (2,)",
    ),
    "one offset out of range": (
        arrays(q_offset=np.array([0, 2**50])),
        f"q_offset[1]: found {2**50}, expected {-(2**48)} to {2**48} (a position)",
    ),
    "lengths as a list": (
        arrays(seq_lens=[1, 2]),
        "seq_lens: found [1, 2] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "lengths of a wrong shape": (
        arrays(seq_lens=np.array([[1], [2]])),
        "seq_lens: found shape (2, 1), expected shape (batch,) = (2,)",
    ),
    "float lengths": (arrays(seq_lens=np.ones(2)), "seq_lens: found dtype float64, expected int32 or int64"),
    "unsigned lengths": (
        arrays(seq_lens=np.ones(2, "u4")),
        "seq_lens: found dtype uint32, expected int32 or int64",
    ),
    "length below 0": (
        arrays(seq_lens=np.array([1, -1])),
        "seq_lens[1]: found -1, expected 0 to 5 (valid keys of the cache)",
    ),
    "length too large": (
        arrays(seq_lens=np.array([6, 1])),
        "seq_lens[0]: found 6, expected 0 to 5 (valid keys of the cache)",
    ),
    "layout": (arrays(layout="sbhd"), "layout: found 'sbhd' (str), expected one of 'bshd', 'bhsd'"),
    "return_lse": (arrays(return_lse=1), "return_lse: found 1 (int), expected True or False"),
    "num_splits 0": (
        arrays(num_splits=0),
        f"num_splits: found 0, expected an integer, 1 to {2**31 - 1}",
    ),
    "num_splits a float": (arrays(num_splits=2.0), "num_splits: found 2.0 (float), expected an integer"),
    "tile 0": (arrays(tile=0), f"tile: found 0, expected an integer, 1 to {2**31 - 1}"),
    "family": (
        arrays(family="both"),
        "family: found 'both' (str), expected one of None, 'prefill', 'decode'",
    ),
    "isa not a name": (
        arrays(isa=2),
        "isa: found 2 (int), expected the name of an instruction set (pyflash.available_isas())",
    ),
    "num_threads 0": (arrays(num_threads=0), f"num_threads: found 0, expected an integer, 1 to {2**31 - 1}"),
    "workspace of another type": (
        arrays(workspace=np.zeros(9)),
        "workspace: found an array of shape (9,) and dtype float64, "
        "expected a writable contiguous uint8 array",
    ),
    # output
    "out of another shape": (
        arrays(out=np.zeros((2, 3, 4, 8), F4)),
        "out: found shape (2, 3, 4, 8), expected shape (2, 3, 4, 6)",
    ),
    "out with fewer axes": (
        arrays(out=np.zeros((3, 4, 6), F4)),
        "out: found shape (3, 4, 6), expected shape (2, 3, 4, 6)",
    ),
    "out of integers": (
        arrays(out=np.zeros((2, 3, 4, 6), "i4")),
        f"out: found dtype int32, expected {TYPES}",
    ),
    "out and out_dtype": (
        arrays(out=np.zeros((2, 3, 4, 6), F4), out_dtype="float16"),
        "out: found dtype float32, expected float16, as out_dtype says",
    ),
    "out read-only": (arrays(out=READ_ONLY), "out: found a read-only array, expected a writable array"),
    "out in one place": (
        arrays(out=np.lib.stride_tricks.as_strided(np.zeros(6, F4), (2, 3, 4, 6), (0, 0, 0, 4))),
        "out: found strides (0, 0, 0, 4), expected an array whose elements have places of their own",
    ),
    "out_dtype": (arrays(out_dtype="int8"), f"out_dtype: found 'int8' (str), expected {TYPES}"),
    "out_dtype no type": (arrays(out_dtype="f33"), f"out_dtype: found 'f33' (str), expected {TYPES}"),
    "out_dtype no Python": (arrays(out_dtype="(2,"), f"out_dtype: found '(2,' (str), expected {TYPES}"),
    "out_dtype an array": (
        arrays(out_dtype=np.zeros(2)),
        f"out_dtype: found an array of shape (2,) and dtype float64, expected {TYPES}",
    ),
    "out_dtype a dict": (arrays(out_dtype={}), f"out_dtype: found {{}} (dict), expected {TYPES}"),
    "out_dtype in foreign byte order": (
        arrays(out_dtype=">f4"),
        f"out_dtype: found '>f4' (str), expected {TYPES}",
    ),
}

VARLEN = {
    "four axes": (packed(q=Q), "q: found shape (2, 3, 4, 8), expected shape (total, heads, head_dim)"),
    "sums as a list": (
        packed(cu_seqlens_q=[0, 5]),
        "cu_seqlens_q: found [0, 5] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "float sums": (
        packed(cu_seqlens_kv=np.array([0.0, 4.0, 7.0])),
        "cu_seqlens_kv: found dtype float64, expected int32 or int64",
    ),
    "no sums": (
        packed(cu_seqlens_q=np.zeros(0, "i4")),
        "cu_seqlens_q: found shape (0,), expected shape (batch + 1,)",
    ),
    "batches differ": (
        packed(cu_seqlens_kv=np.array([0, 7])),
        "cu_seqlens_kv: found shape (2,), expected shape (batch + 1,) = (3,)",
    ),
    "not from 0": (packed(cu_seqlens_q=np.array([1, 2, 5])), "cu_seqlens_q[0]: found 1, expected 0"),
    "falling": (
        packed(cu_seqlens_kv=np.array([0, 8, 7])),
        "cu_seqlens_kv[2]: found 7, expected at least cu_seqlens_kv[1] = 8",
    ),
    "too short": (
        packed(cu_seqlens_q=np.array([0, 2, 4])),
        "cu_seqlens_q[-1]: found 4, expected 5, the number of packed tokens",
    ),
    "too long": (
        packed(cu_seqlens_kv=np.array([0, 2, 2**40])),
        f"cu_seqlens_kv[-1]: found {2**40}, expected 7, the number of packed tokens",
    ),
}

TABLE, LENS = paged()["block_table"], paged()["seq_lens"]
PAGED = {
    "cache of three axes": (
        paged(k_cache=np.zeros((6, 4, 8), F4)),
        "k_cache: found shape (6, 4, 8), expected shape (num_pages, page_size, num_kv_heads, head_dim)",
    ),
    "cache layout": (
        paged(cache_layout="nhs"),
        "cache_layout: found 'nhs' (str), expected one of 'nhd', 'hnd'",
    ),
    "pools differ": (
        paged(v_cache=np.zeros((5, 4, 2, 8), F4)),
        "v_cache: found shape (5, 4, 2, 8), expected shape (6, 4, 2) + (head_dim_v,), as k_cache",
    ),
    "page size 0": (
        paged(k_cache=np.zeros((6, 0, 2, 8), F4), v_cache=np.zeros((6, 0, 2, 8), F4)),
        "k_cache: found page size 0, expected a page size of at least 1",
    ),
    "types of the pools": (
        paged(v_cache=np.zeros((6, 4, 2, 8), F2)),
        "v_cache: found dtype float16, expected float32, the dtype of k_cache",
    ),
    "float64 pools": (
        paged(k_cache=np.zeros((6, 4, 2, 8), F8), v_cache=np.zeros((6, 4, 2, 8), F8)),
        "k_cache: found dtype float64, expected no float64 beside a float32 q",
    ),
    "heads": (
        paged(k_cache=np.zeros((6, 4, 3, 8), F4), v_cache=np.zeros((6, 4, 3, 8), F4)),
        "k_cache: found 3 heads, expected a divisor of the 4 heads of q",
    ),
    "two axes": (
        paged(q=np.zeros((4, 8), F4)),
        "q: found shape (4, 8), expected shape (batch, heads, head_dim) or (batch, seqlen, heads, head_dim)",
    ),
    "packed with four axes": (
        paged(q=Q, cu_seqlens_q=np.array([0, 1, 2])),
        "q: found shape (2, 3, 4, 8), expected shape (total, heads, head_dim)",
    ),
    "packed too short": (
        paged(cu_seqlens_q=np.array([0, 1])),
        "cu_seqlens_q[-1]: found 1, expected 2, the number of packed tokens",
    ),
    "table of one axis": (
        paged(block_table=TABLE[0]),
        "block_table: found shape (3,), expected shape (batch, max_pages) = (2, ...)",
    ),
    "table of another batch": (
        paged(block_table=TABLE[:1]),
        "block_table: found shape (1, 3), expected shape (batch, max_pages) = (2, ...)",
    ),
    "float table": (
        paged(block_table=TABLE * 1.0),
        "block_table: found dtype float64, expected int32 or int64",
    ),
    "lengths of another batch": (
        paged(seq_lens=LENS[:1]),
        "seq_lens: found shape (1,), expected shape (batch,) = (2,)",
    ),
    "length below 0": (
        paged(seq_lens=np.array([-1, 1])),
        "seq_lens[0]: found -1, expected 0 to 12 (what the block table can hold)",
    ),
    "length beyond the table": (
        paged(seq_lens=np.array([1, 13])),
        "seq_lens[1]: found 13, expected 0 to 12 (what the block table can hold)",
    ),
    "page -1 inside the length": (
        paged(seq_lens=np.array([9, 9])),
        "block_table[0, 2]: found -1, expected 0 to 5: a page of the pool, since the sequence uses 3 pages",
    ),
    "page outside the pool": (
        paged(block_table=at(TABLE, (1, 0), 6)),
        "block_table[1, 0]: found 6, expected 0 to 5: a page of the pool, since the sequence uses 3 pages",
    ),
    "page far outside": (
        paged(block_table=at(TABLE.astype("i8"), (1, 1), 2**62)),
        f"block_table[1, 1]: found {2**62}, "
        "expected 0 to 5: a page of the pool, since the sequence uses 3 pages",
    ),
}
