"""Puts a collection of bug-report cases, held outside this project, to the package by hand.

Such a collection calls ``run(case)`` with a dict of arrays and options in words of its own and compares
the answer itself. ``PYFLASH_BACKEND`` and ``PYFLASH_ISA`` choose what is tested. What pyflash does not
have yet raises the exception class ``Unsupported`` of the program that called.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import pyflash
from pyflash._dtypes import numpy_dtype

DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
#: Words of the collection -> keywords of pyflash.
OPTIONS = {
    "causal": "causal",
    "window": "window",
    "scale": "scale",
    "mask": "mask",
    "bias": "bias",
    "alibi": "alibi_slopes",
    "softcap": "softcap",
    "sink": "sinks",
    "k_scale": "k_scale",
    "v_scale": "v_scale",
}


def unsupported(what: str) -> Exception:
    """The caller's own exception for a feature that does not exist yet."""
    for name in ("__main__", "bug_cases"):
        kind = getattr(sys.modules.get(name), "Unsupported", None)
        if kind is not None:
            return kind(what)
    return NotImplementedError(what)


def typed(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array itself, or, for bfloat16 held in float32, its values in the same strides."""
    if dtype != "bf16":
        return array
    if array.size and any(s == 0 and n > 1 for s, n in zip(array.strides, array.shape, strict=True)):
        index = tuple(slice(0, 1) if s == 0 else slice(None) for s in array.strides)
        return np.broadcast_to(array[index].astype(numpy_dtype("bfloat16")), array.shape)
    return array.astype(numpy_dtype("bfloat16"))


def run(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """Answer one case: a dict with ``out`` and ``lse``."""
    if case.get("op", "fwd") not in ("fwd", "merge"):
        raise unsupported(case["op"])
    if case.get("op") == "merge":
        out, lse = pyflash.merge_states(np.stack(case["outs"]), np.stack(case["lses"]))
        return {"out": out, "lse": lse}
    dtype = case.get("dtype", "f32")
    options = {ours: case[name] for name, ours in OPTIONS.items() if case.get(name) is not None}
    options["return_lse"] = True
    if "sinks" in options:
        options["lse_includes_sinks"] = True
    if case.get("kv_dtype") == "e4m3":
        options["kv_dtype"] = "e4m3fn"
    q = typed(case["q"], dtype)
    if "page_table" in case:
        pools = [typed(case[name], dtype) for name in ("k_pages", "v_pages")]
        out, lse = pyflash.paged_attention(q, *pools, case["page_table"], case["kv_lens"], **options)
        return {"out": out, "lse": lse}
    k, v = typed(case["k"], dtype), typed(case["v"], dtype)
    if "cu_q" in case:
        out, lse = pyflash.flash_attention_varlen(q, k, v, case["cu_q"], case["cu_k"], **options)
        return {"out": out, "lse": lse}
    if case.get("kv_lens") is not None:
        options["seq_lens"] = np.asarray(case["kv_lens"])
    out, lse = pyflash.flash_attention(q, k, v, num_splits=case.get("num_splits"), **options)
    return {"out": out, "lse": lse}
