"""The arrays that the page shows: random ones, or those of an ``.npz`` file, and their bounds.

A page holds a trace for every combination of its controls, so it can only be about few numbers.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import _dtypes
from .._checks import plain_array
from .._description import Array
from .._errors import PyflashError, invalid

#: What a page can show, and what a reader can take in.
MAX_QUERIES, MAX_KEYS, MAX_HEAD_DIM_V = 8, 24, 8
#: What NumPy and zipfile raise for files that are empty, pickled, damaged, encrypted, packed in a way that
#: Python does not know, or that claim to hold more than there is memory for.
_BROKEN = (EOFError, ValueError, RuntimeError, MemoryError, OverflowError, zipfile.BadZipFile, zlib.error)
#: Shape of the random arrays.
_QUERIES, _KEYS, _HEAD_DIM, _HEAD_DIM_V = 4, 16, 8, 4


class Inputs(NamedTuple):
    """The queries, keys and values of one head, and where they come from."""

    q: Array  # (seqlen_q, head_dim)
    k: Array  # (seqlen_kv, head_dim)
    v: Array  # (seqlen_kv, head_dim_v)
    source: str  # for the reader of the page
    prompt: Array | None = None  # (seqlen_kv, head_dim): a query for each key, where there are such

    @property
    def queries_of_keys(self) -> Array:
        """A query for each key: those of the prompt, or the queries in turn."""
        if self.prompt is not None:
            return self.prompt
        queries: Array = self.q[np.arange(len(self.k)) % len(self.q)]
        return queries


def random_inputs(seed: int) -> Inputs:
    """Return standard normal arrays; equal seeds give equal arrays.

    Raises
    ------
    InvalidArgument
        `seed` is negative.
    """
    if seed < 0:
        raise invalid("seed", seed, "an integer, at least 0")
    rng = np.random.default_rng(seed)
    shapes = ((_QUERIES, _HEAD_DIM), (_KEYS, _HEAD_DIM), (_KEYS, _HEAD_DIM_V), (_KEYS, _HEAD_DIM))
    q, k, v, prompt = map(rng.standard_normal, shapes)
    return Inputs(q, k, v, f"random numbers, seed {seed}", prompt)


def inputs_of_file(path: Path) -> Inputs:
    """Return the arrays q, k and v of an ``.npz`` file.

    Raises
    ------
    InvalidArgument
        There is no such file, it is no ``.npz``, lacks an array, or an array has a type, a shape
        or a number that the page cannot show.
    """
    arrays = _read(path)
    for name, array in arrays.items():
        plain_array(name, array, {2: "(seqlen, head_dim)"})
        if (dtype := _dtypes.lookup(array.dtype)) is None:
            raise invalid(name, f"dtype {array.dtype}", f"one of {_dtypes.NAMES}")
        if not np.isfinite(array).all():
            raise invalid(name, f"NaN or infinity ({dtype.name})", "finite numbers")
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    _bound("q", q, 0, "queries", MAX_QUERIES)
    _bound("k", k, 0, "keys", MAX_KEYS)
    _bound("v", v, 1, "columns", MAX_HEAD_DIM_V)
    if k.shape[1] != q.shape[1] or k.shape[1] == 0:
        raise invalid("k", f"shape {k.shape}", f"(seqlen_kv, head_dim), the head_dim of q, {q.shape}")
    if len(v) != len(k):
        raise invalid("v", f"shape {v.shape}", f"(seqlen_kv, head_dim_v) with the {len(k)} keys of k")
    # A name may hold bytes that are no text.
    return Inputs(q, k, v, source=path.name.encode("utf-8", "replace").decode())


def _read(path: Path) -> dict[str, Array]:
    """Return q, k and v of the file as they are stored."""
    expected = "an .npz file with arrays q, k and v"
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise invalid("npz", f"{path}, a single array", expected)
            missing = [name for name in "qkv" if name not in file.files]
            if missing:
                found = ", ".join(file.files) or "nothing"
                raise invalid("npz", f"{path} with {found}", f"{expected}: no {', '.join(missing)}")
            return {name: file[name] for name in "qkv"}
    except PyflashError:
        raise
    except OSError as error:
        raise invalid("npz", path, f"a file that can be read ({error.strerror or error})") from None
    except _BROKEN as error:
        raise invalid("npz", path, f"{expected} ({error})") from None


def _bound(name: str, array: Array, axis: int, what: str, most: int) -> None:
    """Refuse an array with none or too many of what lies along an axis."""
    count = array.shape[axis]
    if not 1 <= count <= most:
        raise invalid(name, f"{count} {what}", f"1 to {most}: a page holds every trace of them")
