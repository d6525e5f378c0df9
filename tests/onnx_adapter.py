"""ONNX's operator Attention (opset 23, 24, 25), computed by pyflash: attributes and inputs become calls.

What ONNX means where it differs from pyflash is translated here, and nowhere else:

* Without a cache, causal masking and windows are aligned at the top left: ``q_offset=0``. With ``past_key``
  the offset is the length of the past, whatever the number of new keys. With ``nonpad_kv_seqlen`` the
  alignment is pyflash's own, bottom right over the valid keys.
* Tensors of three axes hold heads and width in one: they are seen as ``bshd``. The cache is always ``bhsd``,
  so that keys appended to it are given as a strided view.
* A mask that is shorter than the keys hides the rest of them.
* The score matrix, which pyflash never materialises, is read from the probabilities that `attention_stats`
  gives: a score is ``ln p + lse``, of a call with only those options that come before the stage asked for.
* The type of the softmax: float32 is what pyflash computes in at least; for float64 the inputs are widened.

Softcap before the mask, groups of heads, rows that see nothing (0) and mask values of -inf need no
translation.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from calls import run
from oracle import Call

import pyflash

#: Names of the inputs and outputs, in the order of the operator's description.
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
ATTRIBUTES = {
    "is_causal",
    "kv_num_heads",
    "left_window_size",
    "q_num_heads",
    "qk_matmul_output_mode",
    "right_window_size",
    "scale",
    "softcap",
    "softmax_precision",
}

#: TensorProto.DOUBLE, the only type for the softmax that is wider than what pyflash computes in.
DOUBLE = 11

#: qk_matmul_output_mode -> the options that have had their effect at that stage; None: all of them.
STAGES: dict[int, set[str] | None] = {
    0: {"layout", "scale"},
    1: {"layout", "scale", "softcap"},
    2: None,
    3: None,
}
PROBABILITIES = 3


class Translation(NamedTuple):
    """A node in pyflash's words."""

    call: Call
    present: tuple[np.ndarray, np.ndarray]  # (batch, num_kv_heads, total length, width)


def evaluate(
    attributes: dict[str, Any], inputs: dict[str, np.ndarray], wanted: Collection[str], backend: Any
) -> dict[str, np.ndarray]:
    """Compute the wanted outputs of a node on a backend of the suite."""
    call, present = translate(attributes, inputs)
    out, lse = run(call, backend)
    results = {"Y": out, "present_key": present[0], "present_value": present[1]}
    if "qk_matmul_output" in wanted:
        mode = attributes.get("qk_matmul_output_mode", 0)
        results["qk_matmul_output"] = score_matrix(call, lse, mode, backend)
    dtype = inputs["Q"].dtype
    results = {name: results[name].astype(dtype, copy=False) for name in wanted}
    if inputs["Q"].ndim == 3:
        results["Y"] = results["Y"].reshape(*inputs["Q"].shape[:2], -1)
    return results


def translate(attributes: dict[str, Any], inputs: dict[str, np.ndarray]) -> Translation:
    """Express a node as one call of `flash_attention`."""
    unknown = (attributes.keys() - ATTRIBUTES) | (inputs.keys() - set(INPUTS))
    if unknown:
        raise NotImplementedError(f"Attention with {', '.join(sorted(unknown))}")
    packed = inputs["Q"].ndim == 3
    q, k, v = (inputs[name] for name in ("Q", "K", "V"))
    if packed:
        q, k, v = (
            x.reshape(*x.shape[:2], attributes[heads], -1)
            for x, heads in ((q, "q_num_heads"), (k, "kv_num_heads"), (v, "kv_num_heads"))
        )
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if "past_key" in inputs:
        k = np.concatenate([inputs["past_key"], k], axis=2)
        v = np.concatenate([inputs["past_value"], v], axis=2)
    present = (k, v)
    if packed:
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    arrays = {"q": q, "k": k, "v": v}
    if attributes.get("softmax_precision") == DOUBLE:
        arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
    options: dict[str, Any] = {"layout": "bshd" if packed else "bhsd"}
    options |= _of_scores(attributes) | _of_masks(attributes, inputs, present[0].shape[2])
    return Translation(Call("flash_attention", arrays, options), present)


def _of_scores(attributes: dict[str, Any]) -> dict[str, Any]:
    """The options that shape scores."""
    options = {}
    if "scale" in attributes:
        options["scale"] = attributes["scale"]
    if attributes.get("softcap", 0.0) != 0.0:
        options["softcap"] = attributes["softcap"]
    return options


def _of_masks(attributes: dict[str, Any], inputs: dict[str, np.ndarray], length: int) -> dict[str, Any]:
    """The options that say which keys a row sees, and what is added to their scores."""
    options: dict[str, Any] = {}
    if attributes.get("is_causal", 0):
        options["causal"] = True
    window = tuple(attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if window != (-1, -1):
        options["window"] = window
    if "nonpad_kv_seqlen" in inputs:
        options["seq_lens"] = inputs["nonpad_kv_seqlen"]
    elif options:
        options["q_offset"] = inputs["past_key"].shape[2] if "past_key" in inputs else 0
    if "attn_mask" in inputs:
        mask = inputs["attn_mask"]
        missing = [(0, 0)] * (mask.ndim - 1) + [(0, length - mask.shape[-1])]
        hidden = False if mask.dtype == bool else -np.inf
        options["mask" if mask.dtype == bool else "bias"] = np.pad(mask, missing, constant_values=hidden)
    return options


def score_matrix(call: Call, lse: np.ndarray, mode: int, backend: Any) -> np.ndarray:
    """The scores of a call (batch, num_heads, seqlen_q, keys) after a stage; `lse` is that of the call."""
    options, kept = call.options, STAGES[mode]
    if kept is not None:
        options = {name: value for name, value in options.items() if name in kept}
        lse = run(Call(call.function, call.arrays, options), backend)[1]
    rows = np.arange(lse.shape[2])
    q, k = call.arrays["q"], call.arrays["k"]
    stats = pyflash.attention_stats(q, k, lse, want=("rows",), rows=rows, **options, **backend.kwargs)
    if mode == PROBABILITIES:
        return stats.rows
    with np.errstate(divide="ignore"):
        return np.log(stats.rows) + lse[..., None]
