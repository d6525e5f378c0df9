"""Refusals of the options about scores, masks and storage: more data of `test_errors`, as in `refusals`."""

from __future__ import annotations

from typing import Any

import numpy as np
from refusals import F4, F8, UNSPACED, K, Q, V, arrays, packed, paged

BYTES = K.view(np.uint8)[..., :8]
PAGES = paged()["k_cache"]


def overlapping(name: str) -> dict[str, Any]:
    """An option and an output in one place."""
    memory = np.zeros(2000, np.uint8)
    views = {
        "bias": memory[:60].view(F4).reshape(3, 5),
        "mask": memory[:15].view(bool).reshape(3, 5),
        "k_scale": memory[:80].view(F4).reshape(2, 5, 2),
        "spans": (0, memory[:12].view("i4")),
    }
    return {name: views[name], "out": memory[: 2 * 3 * 4 * 6 * 4].view(F4).reshape(2, 3, 4, 6)}


#: name -> (arguments, words)
DENSE_OPTIONS = {
    "softcap a string": (arrays(softcap="1"), "softcap: found '1' (str), expected a finite number"),
    "softcap a bool": (arrays(softcap=True), "softcap: found True (bool), expected a finite number"),
    "softcap below 0": (
        arrays(softcap=-1.0),
        "softcap: found -1.0, expected a number above 0, or 0 or None for none",
    ),
    "softcap NaN": (arrays(softcap=np.nan), "softcap: found nan, expected a finite number"),
    "softcap Inf": (arrays(softcap=np.inf), "softcap: found inf, expected a finite number"),
    "softcap an array": (
        arrays(softcap=np.ones(1)),
        "softcap: found an array of shape (1,) and dtype float64, expected a finite number",
    ),
    "slopes a list": (
        arrays(alibi_slopes=[1.0] * 4),
        "alibi_slopes: found [1.0, 1.0, 1.0, 1.0] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "slopes a number": (
        arrays(alibi_slopes=0.5),
        "alibi_slopes: found 0.5 (float), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "slopes 0-d": (
        arrays(alibi_slopes=np.zeros(())),
        "alibi_slopes: found shape (), expected shape (num_heads,) or (batch, num_heads)",
    ),
    "slopes of kv heads": (
        arrays(alibi_slopes=np.ones(2, F4)),
        "alibi_slopes: found shape (2,), expected shape (num_heads,) = (4,) or (batch, num_heads) = (2, 4)",
    ),
    "slopes of one sequence": (
        arrays(alibi_slopes=np.ones((1, 4), F4)),
        "alibi_slopes: found shape (1, 4), expected shape (num_heads,) = (4,) or (batch, num_heads) = (2, 4)",
    ),
    "slopes of integers": (
        arrays(alibi_slopes=np.ones(4, "i4")),
        "alibi_slopes: found dtype int32, expected one of float64, float32, float16, bfloat16",
    ),
    "slopes of three axes": (
        arrays(alibi_slopes=np.ones((2, 4, 1), F4)),
        "alibi_slopes: found shape (2, 4, 1), expected shape (num_heads,) or (batch, num_heads)",
    ),
    "slopes masked": (
        arrays(alibi_slopes=np.ma.ones(4)),
        "alibi_slopes: found a masked array, expected a plain array: its mask would be lost",
    ),
    "bias a list": (
        arrays(bias=[[0.0]]),
        "bias: found [[0.0]] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "bias a number": (
        arrays(bias=1.0),
        "bias: found 1.0 (float), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "bias 0-d": (
        arrays(bias=np.zeros((), F4)),
        "bias: found shape (), expected shape (seqlen_kv,) or (seqlen_q, seqlen_kv) or "
        "(num_heads, seqlen_q, seqlen_kv) or (batch, num_heads, seqlen_q, seqlen_kv)",
    ),
    "bias of integers": (
        arrays(bias=np.ones((3, 5), "i4")),
        "bias: found dtype int32, expected one of float64, float32, float16, bfloat16",
    ),
    "bias of bool": (
        arrays(bias=np.ones((3, 5), bool)),
        "bias: found dtype bool, expected one of float64, float32, float16, bfloat16",
    ),
    "bias complex": (
        arrays(bias=np.ones((3, 5), "c8")),
        "bias: found dtype complex64, expected one of float64, float32, float16, bfloat16",
    ),
    "bias masked": (
        arrays(bias=np.ma.ones((3, 5))),
        "bias: found a masked array, expected a plain array: its mask would be lost",
    ),
    "bias of foreign byte order": (
        arrays(bias=np.ones((3, 5), F4.newbyteorder())),
        f"bias: found dtype {F4.newbyteorder()} in foreign byte order, expected native byte order",
    ),
    "bias of five axes": (
        arrays(bias=np.zeros((1, 1, 1, 3, 5), F4)),
        "bias: found shape (1, 1, 1, 3, 5), expected shape (seqlen_kv,) or (seqlen_q, seqlen_kv) or "
        "(num_heads, seqlen_q, seqlen_kv) or (batch, num_heads, seqlen_q, seqlen_kv)",
    ),
    "bias of too many keys": (
        arrays(bias=np.zeros((3, 6), F4)),
        "bias: found shape (3, 6), expected a shape that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_kv) = (2, 4, 3, 5)",
    ),
    "bias of too few rows": (
        arrays(bias=np.zeros((2, 5), F4)),
        "bias: found shape (2, 5), expected a shape that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_kv) = (2, 4, 3, 5)",
    ),
    "bias of kv heads": (
        arrays(bias=np.zeros((2, 3, 5), F4)),
        "bias: found shape (2, 3, 5), expected a shape that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_kv) = (2, 4, 3, 5)",
    ),
    "bias of another batch": (
        arrays(bias=np.zeros((3, 1, 1, 5), F4)),
        "bias: found shape (3, 1, 1, 5), expected a shape that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_kv) = (2, 4, 3, 5)",
    ),
    "bias with strides between items": (
        arrays(bias=np.ndarray((3, 5), F4, UNSPACED, 0, (25, 5))),
        "bias: found strides (25, 5), expected multiples of the item size 4",
    ),
    "bias neither cache nor longest": (
        arrays(bias=np.zeros((3, 4), F4), seq_lens=np.array([3, 2])),
        "bias: found shape (3, 4), expected a shape that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_kv) = (2, 4, 3, 5 or 3)",
    ),
    "mask a list": (
        arrays(mask=[[True]]),
        "mask: found [[True]] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "mask True": (
        arrays(mask=True),
        "mask: found True (bool), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "mask of integers": (
        arrays(mask=np.ones((3, 5), np.uint8)),
        "mask: found dtype uint8, expected bool, True where a key may be seen: of zeros and ones, "
        "mask.astype(bool)",
    ),
    "mask of floats": (
        arrays(mask=np.ones((3, 5), F4)),
        "mask: found dtype float32, expected bool, True where a key may be seen; numbers go to bias",
    ),
    "mask of objects": (
        arrays(mask=np.ones((3, 5), object)),
        "mask: found dtype object, expected bool, True where a key may be seen; numbers go to bias",
    ),
    "mask masked": (
        arrays(mask=np.ma.ones((3, 5), bool)),
        "mask: found a masked array, expected a plain array: its mask would be lost",
    ),
    "mask of five axes": (
        arrays(mask=np.ones((1, 1, 1, 3, 5), bool)),
        "mask: found shape (1, 1, 1, 3, 5), expected shape (seqlen_kv,) or (seqlen_q, seqlen_kv) or "
        "(num_heads, seqlen_q, seqlen_kv) or (batch, num_heads, seqlen_q, seqlen_kv)",
    ),
    "mask of too few keys": (
        arrays(mask=np.ones((3, 4), bool)),
        "mask: found shape (3, 4), expected a shape that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_kv) = (2, 4, 3, 5)",
    ),
    "mask 0-d": (
        arrays(mask=np.ones((), bool)),
        "mask: found shape (), expected shape (seqlen_kv,) or (seqlen_q, seqlen_kv) or "
        "(num_heads, seqlen_q, seqlen_kv) or (batch, num_heads, seqlen_q, seqlen_kv)",
    ),
    "sinks a list": (
        arrays(sinks=[0.0] * 4),
        "sinks: found [0.0, 0.0, 0.0, 0.0] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "sinks a number": (
        arrays(sinks=0.0),
        "sinks: found 0.0 (float), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "sinks of kv heads": (
        arrays(sinks=np.zeros(2, F4)),
        "sinks: found shape (2,), expected shape (num_heads,) = (4,)",
    ),
    "sinks of integers": (
        arrays(sinks=np.zeros(4, "i8")),
        "sinks: found dtype int64, expected one of float64, float32, float16, bfloat16",
    ),
    "sinks of two axes": (
        arrays(sinks=np.zeros((1, 4), F4)),
        "sinks: found shape (1, 4), expected shape (num_heads,)",
    ),
    "lse_includes_sinks": (
        arrays(lse_includes_sinks=1),
        "lse_includes_sinks: found 1 (int), expected True or False",
    ),
    "sink_tokens below 0": (arrays(sink_tokens=-1), "sink_tokens: found -1, expected an integer, at least 0"),
    "sink_tokens a float": (arrays(sink_tokens=1.0), "sink_tokens: found 1.0 (float), expected an integer"),
    "sink_tokens None": (arrays(sink_tokens=None), "sink_tokens: found None (NoneType), expected an integer"),
    "sink_tokens a bool": (arrays(sink_tokens=True), "sink_tokens: found True (bool), expected an integer"),
    "sink_tokens an array": (
        arrays(sink_tokens=np.ones(4, F4)),
        "sink_tokens: found an array of shape (4,) and dtype float32, expected an integer",
    ),
    "spans a number": (
        arrays(spans=3),
        "spans: found 3 (int), expected a pair (lo, hi): row i sees lo[i] <= j < hi[i]",
    ),
    "spans of one": (
        arrays(spans=(3,)),
        "spans: found (3,) (tuple), expected a pair (lo, hi): row i sees lo[i] <= j < hi[i]",
    ),
    "spans an array": (
        arrays(spans=np.zeros((2, 3), "i4")),
        "spans: found an array of shape (2, 3) and dtype int32, expected a pair (lo, hi): row i "
        "sees lo[i] <= j < hi[i]",
    ),
    "span of None": (arrays(spans=(None, 3)), "spans[0]: found None (NoneType), expected an integer"),
    "span of a float": (arrays(spans=(0, 3.0)), "spans[1]: found 3.0 (float), expected an integer"),
    "span of a list": (arrays(spans=(0, [1, 2, 3])), "spans[1]: found [1, 2, 3] (list), expected an integer"),
    "span of floats": (
        arrays(spans=(np.zeros(3), 3)),
        "spans[0]: found dtype float64, expected int32 or int64",
    ),
    "span of unsigned": (
        arrays(spans=(0, np.zeros(3, "u4"))),
        "spans[1]: found dtype uint32, expected int32 or int64",
    ),
    "span of a wrong shape": (
        arrays(spans=(0, np.zeros(4, "i4"))),
        "spans[1]: found shape (4,), expected a shape that broadcasts to (batch, seqlen_q) = (2, 3)",
    ),
    "span of another batch": (
        arrays(spans=(np.zeros((3, 3), "i4"), 5)),
        "spans[0]: found shape (3, 3), expected a shape that broadcasts to (batch, seqlen_q) = (2, 3)",
    ),
    "span of three axes": (
        arrays(spans=(np.zeros((1, 2, 3), "i4"), 5)),
        "spans[0]: found shape (1, 2, 3), expected shape (seqlen_q,) or (batch, seqlen_q)",
    ),
    "span that falls": (
        arrays(spans=(np.array([0, 2, 1]), 5)),
        "spans[0][0, 2]: found 1, expected at least 2, that of the row before: masks that are no "
        "rising spans go to mask",
    ),
    "span that falls in one sequence": (
        arrays(spans=(0, np.array([[1, 2, 3], [4, 4, 2]]))),
        "spans[1][1, 2]: found 2, expected at least 4, that of the row before: masks that are no "
        "rising spans go to mask",
    ),
    "span too far": (
        arrays(spans=(-(2**60), 5)),
        "spans[0]: found -1152921504606846976, expected an integer, -281474976710656 to 281474976710656",
    ),
    "spans too far": (
        arrays(spans=(0, np.array([1, 2, 2**60]))),
        "spans[1][2]: found 1152921504606846976, expected -281474976710656 to 281474976710656 (a "
        "key position)",
    ),
    "tree a list": (
        arrays(tree=[[-1]]),
        "tree: found [[-1]] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "tree of one axis": (
        arrays(tree=np.array([-1, 0])),
        "tree: found shape (2,), expected shape (batch, num_draft) of parents or (batch, "
        "num_draft, num_draft) of ancestors",
    ),
    "tree of another batch": (
        arrays(tree=np.array([[-1, 0]])),
        "tree: found shape (1, 2), expected shape (2, num_draft)",
    ),
    "tree of floats": (
        arrays(tree=np.zeros((2, 2))),
        "tree: found dtype float64, expected int32 or int64 where it has two axes",
    ),
    "tree of integers with three axes": (
        arrays(tree=np.zeros((2, 2, 2), "i4")),
        "tree: found dtype int32, expected bool where it has three axes",
    ),
    "tree of bools with two axes": (
        arrays(tree=np.zeros((2, 2), bool)),
        "tree: found dtype bool, expected int32 or int64 where it has two axes",
    ),
    "tree not square": (
        arrays(tree=np.zeros((2, 2, 3), bool)),
        "tree: found shape (2, 2, 3), expected shape (2, num_draft, num_draft)",
    ),
    "tree larger than the keys": (
        arrays(tree=np.full((2, 6), -1)),
        "tree: found 6 draft tokens, expected at most 5, the keys of sequence 0",
    ),
    "tree larger than a length": (
        arrays(tree=np.full((2, 4), -1), seq_lens=np.array([5, 3])),
        "tree: found 4 draft tokens, expected at most 3, the keys of sequence 1",
    ),
    "tree with a later parent": (
        arrays(tree=np.array([[-1, 0, 1], [-1, 2, 0]])),
        "tree[1, 1]: found 2, expected -1 to 0: a parent comes before its children",
    ),
    "tree with itself as parent": (
        arrays(tree=np.array([[-1, 0, 1], [0, 0, 0]])),
        "tree[1, 0]: found 0, expected -1: a parent comes before its children",
    ),
    "tree below -1": (
        arrays(tree=np.array([[-1, 0, 1], [-2, 0, 0]])),
        "tree[1, 0]: found -2, expected -1: a parent comes before its children",
    ),
    "k_scale a string": (arrays(k_scale="1"), "k_scale: found '1' (str), expected a finite number"),
    "k_scale a bool": (arrays(k_scale=True), "k_scale: found True (bool), expected a finite number"),
    "k_scale NaN": (arrays(k_scale=np.nan), "k_scale: found nan, expected a finite number"),
    "v_scale Inf": (arrays(v_scale=np.inf), "v_scale: found inf, expected a finite number"),
    "v_scale beyond float32": (arrays(v_scale=1e39), "v_scale: found 1e+39, expected a finite float32"),
    "k_scale a list": (
        arrays(k_scale=[1.0, 1.0]),
        "k_scale: found [1.0, 1.0] (list), expected a finite number",
    ),
    "k_scale 0-d": (
        arrays(k_scale=np.ones((), F4)),
        "k_scale: found shape (), expected shape (num_kv_heads,) or (2, 5, 2)",
    ),
    "k_scale of query heads": (
        arrays(k_scale=np.ones(4, F4)),
        "k_scale: found shape (4,), expected a number, shape (num_kv_heads,) = (2,), or (2, 5, "
        "2), one per token and head",
    ),
    "k_scale of two axes": (
        arrays(k_scale=np.ones((2, 5), F4)),
        "k_scale: found shape (2, 5), expected shape (num_kv_heads,) or (2, 5, 2)",
    ),
    "v_scale with the last axis": (
        arrays(v_scale=np.ones((2, 5, 2, 6), F4)),
        "v_scale: found shape (2, 5, 2, 6), expected shape (num_kv_heads,) or (2, 5, 2)",
    ),
    "k_scale of integers": (
        arrays(k_scale=np.ones(2, "i4")),
        "k_scale: found dtype int32, expected one of float64, float32, float16, bfloat16",
    ),
    "k_scale of a head NaN": (
        arrays(k_scale=np.array([1, np.nan], F4)),
        "k_scale[1]: found nan, expected a finite float32",
    ),
    "v_scale of a head beyond float32": (
        arrays(v_scale=np.array([1, 1e39])),
        "v_scale[1]: found 1e+39, expected a finite float32",
    ),
    "v_scale per token float64": (
        arrays(v_scale=np.ones((2, 5, 2))),
        "v_scale: found dtype float64, expected float32 where there is a scale per token and head",
    ),
    "k_scale per token in another layout": (
        arrays(k_scale=np.ones((2, 2, 5), F4)),
        "k_scale: found shape (2, 2, 5), expected a number, shape (num_kv_heads,) = (2,), or (2, "
        "5, 2), one per token and head",
    ),
    "bytes without a name": (
        arrays(k=K.view(np.uint8)[..., :8], v=V.view(np.uint8)[..., :6]),
        "k: found dtype uint8, expected kv_dtype= beside it, which says what the bytes are",
    ),
    "kv_dtype unknown": (
        arrays(kv_dtype="int2"),
        "kv_dtype: found 'int2' (str), expected one of None, 'e4m3fn', 'e5m2', 'int4'",
    ),
    "kv_dtype int8 is a type of arrays": (
        arrays(kv_dtype="int8"),
        "kv_dtype: found 'int8' (str), expected one of None, 'e4m3fn', 'e5m2', 'int4'",
    ),
    "kv_dtype no name": (
        arrays(kv_dtype=np.int8),
        "kv_dtype: found <class 'numpy.int8'> (type), expected one of None, 'e4m3fn', 'e5m2', 'int4'",
    ),
    "kv_dtype of floats": (
        arrays(kv_dtype="int4"),
        "k: found dtype float32, expected int4 or uint8, as kv_dtype='int4' says",
    ),
    "kv_dtype of another type": (
        arrays(k=K.astype("i1"), v=V.astype("i1"), kv_dtype="e5m2"),
        "k: found dtype int8, expected float8_e5m2 or uint8, as kv_dtype='e5m2' says",
    ),
    "int4 of odd width": (
        arrays(q=Q[..., :7], k=BYTES[..., :4], v=BYTES[..., :3], kv_dtype="int4"),
        "k: found head_dim 8, expected head_dim 7, that of q",
    ),
    "int4 as wide as q": (
        arrays(k=BYTES, v=BYTES, kv_dtype="int4"),
        "k: found head_dim 16, expected head_dim 8, that of q",
    ),
    "int8 values beside float keys": (
        arrays(v=V.astype("i1")),
        "v: found dtype int8, expected float32, the dtype of k",
    ),
    "int8 beside float64": (
        arrays(q=Q.astype(F8), k=K.astype("i1"), v=V.astype("i1")),
        "k: found dtype int8, expected float64 beside a float64 q",
    ),
    "uint16": (
        arrays(k=K.astype("u2"), v=V.astype("u2")),
        "k: found dtype uint16, expected one of float64, float32, float16, bfloat16, "
        "float8_e4m3fn, float8_e5m2, int8, int4",
    ),
    "max_seqlen_q too small": (
        arrays(max_seqlen_q=2),
        "max_seqlen_q: found 2, expected at least 3, the queries of sequence 0",
    ),
    "max_seqlen_q a float": (
        arrays(max_seqlen_q=3.0),
        "max_seqlen_q: found 3.0 (float), expected an integer",
    ),
    "max_seqlen_q below 0": (
        arrays(max_seqlen_q=-1),
        "max_seqlen_q: found -1, expected an integer, at least 0",
    ),
    "out in the bias": (
        arrays(**overlapping("bias")),
        "out: found memory that it shares with bias, expected memory of its own",
    ),
    "out in the mask": (
        arrays(**overlapping("mask")),
        "out: found memory that it shares with mask, expected memory of its own",
    ),
    "out in the k_scale": (
        arrays(**overlapping("k_scale")),
        "out: found memory that it shares with k_scale, expected memory of its own",
    ),
    "out in a span": (
        arrays(**overlapping("spans")),
        "out: found memory that it shares with spans[1], expected memory of its own",
    ),
}

VARLEN_OPTIONS = {
    "spans of batches": (
        packed(spans=(np.zeros((2, 3), "i4"), 5)),
        "spans[0]: found shape (2, 3), expected shape (total_q,)",
    ),
    "span of too few rows": (
        packed(spans=(np.zeros(4, "i4"), 5)),
        "spans[0]: found shape (4,), expected a shape that broadcasts to (total_q,) = (5,)",
    ),
    "span that falls inside a sequence": (
        packed(spans=(np.array([0, 1, 2, 1, 3]), 9)),
        "spans[0][3]: found 1, expected at least 2, that of the row before: masks that are no "
        "rising spans go to mask",
    ),
    "bias of all rows": (
        packed(bias=np.zeros((5, 7), F4)),
        "bias: found shape (5, 7), expected a shape that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_kv) = (2, 4, 3, 4)",
    ),
    "mask of another longest key": (
        packed(mask=np.ones((3, 3), bool)),
        "mask: found shape (3, 3), expected a shape that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_kv) = (2, 4, 3, 4)",
    ),
    "slopes of three sequences": (
        packed(alibi_slopes=np.ones((3, 4), F4)),
        "alibi_slopes: found shape (3, 4), expected shape (num_heads,) = (4,) or (batch, num_heads) = (2, 4)",
    ),
    "tree larger than a sequence": (
        packed(tree=np.full((2, 4), -1)),
        "tree: found 4 draft tokens, expected at most 3, the keys of sequence 1",
    ),
    "k_scale per token and batch": (
        packed(k_scale=np.ones((1, 7, 2), F4)),
        "k_scale: found shape (1, 7, 2), expected shape (num_kv_heads,) or (7, 2)",
    ),
    "max_seqlen_q of a pack": (
        packed(max_seqlen_q=2),
        "max_seqlen_q: found 2, expected at least 3, the queries of sequence 1",
    ),
}

PAGED_OPTIONS = {
    "bias of some keys": (
        paged(bias=np.zeros((1, 8), F4)),
        "bias: found shape (1, 8), expected a shape that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_kv) = (2, 4, 1, 9 or 12)",
    ),
    "mask of a page too many": (
        paged(mask=np.ones((2, 1, 1, 16), bool)),
        "mask: found shape (2, 1, 1, 16), expected a shape that broadcasts to (batch, num_heads, "
        "seqlen_q, seqlen_kv) = (2, 4, 1, 9 or 12)",
    ),
    "k_scale of tokens": (
        paged(k_scale=np.ones((2, 9, 2), F4)),
        "k_scale: found shape (2, 9, 2), expected a number, shape (num_kv_heads,) = (2,), or (6, "
        "4, 2), one per token and head",
    ),
    "k_scale in the other cache layout": (
        paged(k_scale=np.ones((6, 2, 4), F4)),
        "k_scale: found shape (6, 2, 4), expected a number, shape (num_kv_heads,) = (2,), or (6, "
        "4, 2), one per token and head",
    ),
    "bytes without a name": (
        paged(k_cache=PAGES.astype(np.uint8), v_cache=PAGES.astype(np.uint8)),
        "k_cache: found dtype uint8, expected kv_dtype= beside it, which says what the bytes are",
    ),
    "int8 values alone": (
        paged(v_cache=PAGES.astype("i1")),
        "v_cache: found dtype int8, expected float32, the dtype of k_cache",
    ),
    "spans of two rows": (
        paged(spans=(np.zeros((2, 2), "i4"), 5)),
        "spans[0]: found shape (2, 2), expected a shape that broadcasts to (batch, seqlen_q) = (2, 1)",
    ),
    "tree larger than a length": (
        paged(tree=np.full((2, 9), -1)),
        "tree: found 9 draft tokens, expected at most 8, the keys of sequence 0",
    ),
}
