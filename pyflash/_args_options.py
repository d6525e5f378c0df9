"""The options that every attention function takes: their defaults, who has them, and checks of plain ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import _checks
from ._checks import MAX_POSITION
from ._description import UNLIMITED, Array
from ._device_array import DeviceArray
from ._errors import invalid, unsupported

#: The options that every attention function takes, with their defaults.
DEFAULTS: dict[str, Any] = {
    "causal": False,
    "window": None,
    "spans": None,
    "scale": None,
    "softcap": None,
    "alibi_slopes": None,
    "bias": None,
    "mask": None,
    "sinks": None,
    "sink_tokens": 0,
    "q_offset": None,
    "tree": None,
    "score_mod": None,
    "mask_mod": None,
    "k_scale": None,
    "v_scale": None,
    "kv_dtype": None,
    "return_lse": False,
    "lse_includes_sinks": False,
    "out": None,
    "out_dtype": None,
    "num_splits": None,
    "num_threads": None,
    "isa": None,
    "workspace": None,
    "tile": None,
    "family": None,
    "max_seqlen_q": None,
    "batch_invariant": False,
    "q_scale": None,
    "check_indices": False,
}

#: Options that not all backends have; the others refuse whatever is not the default.
_OWNERS = {
    **dict.fromkeys(("isa", "num_threads"), ("c",)),
    **dict.fromkeys(("batch_invariant", "q_scale", "check_indices"), ("cuda",)),
    "workspace": ("c", "cuda"),
}


def refuse_foreign(given: dict[str, Any], backend: str) -> None:
    """Refuse options of other backends, by name."""
    for name, value in given.items():
        if backend not in _OWNERS.get(name, (backend,)) and value is not None and value is not DEFAULTS[name]:
            raise unsupported(name, _checks.describe(value), f"the {backend} backend", "leave it out")


def owned_flag(name: str, given: dict[str, Any], backend: str) -> bool:
    """Return a flag that the backend has, False where it refuses whatever is given."""
    if backend not in _OWNERS[name] or name not in given:
        return False
    return _checks.flag(name, given[name])


def alignment(
    causal: Any, q_offset: Any, batch: int, contents: Callable[[str, Array], Array | None]
) -> tuple[bool, Array | None]:
    """Return whether the call is causal and the offset of each sequence, None for bottom-right."""
    if not isinstance(causal, (bool, np.bool_, str)) or (isinstance(causal, str) and causal != "top_left"):
        raise invalid("causal", _checks.describe(causal), "False, True or 'top_left'")
    if isinstance(causal, str):
        if q_offset is not None:
            raise invalid(
                "q_offset", _checks.describe(q_offset), "None beside causal='top_left', which is q_offset=0"
            )
        return True, np.zeros(batch, np.int64)
    if q_offset is None:
        return bool(causal), None
    if isinstance(q_offset, np.ndarray):
        offsets = _checks.index_array("q_offset", q_offset, (batch,), f"(batch,) = ({batch},)")
        values = contents("q_offset", offsets)
        if values is not None:
            _checks.index_range("q_offset", values, -MAX_POSITION, MAX_POSITION, "a position")
        return bool(causal), offsets if isinstance(offsets, DeviceArray) else offsets.astype(np.int64)
    offset = _checks.integer("q_offset", q_offset, -MAX_POSITION, MAX_POSITION)
    return bool(causal), np.full(batch, offset, np.int64)


def window(value: Any) -> tuple[int, int]:
    """Return both sides of the window, UNLIMITED for none; huge sides are as good as unlimited."""
    if value is None:
        return UNLIMITED, UNLIMITED
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        expected = (
            "a pair (left, right), both inclusive: a single number would not say whether the query counts"
        )
        raise invalid("window", _checks.describe(value), expected)
    left, right = (
        UNLIMITED if side is None else _checks.integer(f"window[{i}]", side, UNLIMITED)
        for i, side in enumerate(value)
    )
    return min(left, MAX_POSITION), min(right, MAX_POSITION)


def scale(value: Any, head_dim: int) -> float:
    """Return the factor on all scores."""
    return 1.0 / math.sqrt(head_dim) if value is None else _checks.number("scale", value)


def positive(name: str, value: Any) -> int | None:
    """Return a count, None where none was given."""
    return None if value is None else _checks.integer(name, value, 1, 2**31 - 1)


def isa(value: Any) -> str | None:
    """Return the name of an instruction set, which only the backend can judge."""
    if value is not None and not isinstance(value, str):
        raise invalid(
            "isa", _checks.describe(value), "the name of an instruction set (pyflash.available_isas())"
        )
    return value
