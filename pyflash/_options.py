"""The keywords that all attention functions share: documented once, shown in every signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from ._args_options import DEFAULTS

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PARAMETERS = """\
causal : bool or "top_left", default False
    True: row ``i`` sees keys ``j <= i + seqlen_kv - seqlen_q`` (bottom-right aligned, what a
    cache continues). "top_left": keys ``j <= i``, the same as ``q_offset=0``.
window : (left, right), optional
    Row ``i`` at position ``p = i + offset`` sees only ``p - left <= j <= p + right``; both ends
    are included; None or -1 on a side is no limit there.
spans : (lo, hi), optional
    Row ``i`` sees only keys ``lo[i] <= j < hi[i]``, within everything else that hides keys. Each end
    is an int or an int32 or int64 array that broadcasts to (batch, seqlen_q), packed (total_q,), and
    does not fall from row to row of a sequence. `pyflash.spans` builds them.
scale : float, optional
    Factor on ``q . k``; any finite number. Default ``1 / sqrt(head_dim)``.
softcap : float, optional
    Scores become ``softcap * tanh(score / softcap)``. 0 or None: off.
alibi_slopes : (num_heads,) or (batch, num_heads) ndarray, optional
    ``-slope * abs(i + offset - j)`` is added to the scores.
bias : ndarray, optional
    Added to the scores; any float type, broadcast (without copies) from any rank to (batch, num_heads,
    seqlen_q, seqlen_kv), whatever the layout; of packed arrays the last two are the longest lengths,
    row and key counted inside each sequence. -inf hides a key; a finite number never does.
mask : bool ndarray, optional
    True where a key may be seen; broadcast like `bias`.
sinks : (num_heads,) ndarray, optional
    Learned logits, in natural units: one more term in each row's denominator, without a value.
sink_tokens : int, default 0
    The first so many keys stay visible through the window, though not past a row's causal end.
q_offset : int or (batch,) int32 or int64 array, optional
    Position of row 0 of each sequence. Default ``seqlen_kv - seqlen_q`` of the sequence.
tree : (batch, num_draft) int or (batch, num_draft, num_draft) bool ndarray, optional
    Speculative decoding: the last num_draft keys are draft tokens of a tree. Integers are the parent of
    each, -1 for the end of the prefix, and a token sees itself and its ancestors; bools say which draft
    token (axis 1) sees which (axis 2). All other keys are seen as without it.
score_mod, mask_mod : function, optional
    Called elementwise: ``score_mod(score, batch, head, query, key)`` gives the score after `softcap`,
    ``mask_mod(batch, head, query, key)`` whether the key may be seen. ``query`` is the position
    ``i + offset``. On the NumPy backend functions of arrays that broadcast to (rows, keys); on C
    function pointers ``double (*)(double, int64_t, int64_t, int64_t, int64_t)`` and
    ``int32_t (*)(int64_t, int64_t, int64_t, int64_t)`` of cffi, ctypes or numba, called from any thread;
    on CUDA a str, a C++ expression in these variables such as ``"score * 0.5f"``, compiled into the kernel.
k_scale, v_scale : float or ndarray, optional
    What stored keys and values are multiplied by: a number, (num_kv_heads,), or one per token and head:
    float32 of the shape of `k` or `v` without its last axis. Default 1.
kv_dtype : {"e4m3fn", "e5m2", "int4"}, optional
    What keys and values in arrays of uint8 are. int4 packs two elements of two's complement a byte
    along head_dim, the even one in the low half.
return_lse : bool, default False
    Also return the log-sum-exp of each row's scores (natural logarithm; -inf for a row that
    sees no key), float32, or float64 for float64 queries.
lse_includes_sinks : bool, default False
    Whether `sinks` count in the log-sum-exp; they then are that of a row that sees no key.
out : ndarray, optional
    Where the result goes; any strides, no overlap with the inputs. Default: a new array.
out_dtype : dtype or str, optional
    Type of the result. Default: that of `q`, or of `out`.
num_splits : int, optional
    Cut the keys of each sequence into so many parts and merge their states (flash-decoding).
    Default: none in the prefill family; in the decode family every 512 keys, on CUDA what keeps the GPU busy.
num_threads : int, optional
    Threads of the C backend; no more than there are processors, or than 16 if that is more, and
    no more than there is work for. Default: ``PYFLASH_NUM_THREADS``, else what OpenMP would use,
    and one for small calls. The result does not depend on it.
isa : str, optional
    Instruction set of the C backend, one of `available_isas`. Default: ``PYFLASH_ISA``, else
    the best this machine has.
workspace : (num_bytes,) uint8 ndarray, optional
    Scratch memory the caller keeps for the C backend, or on the GPU for CUDA; `explain` says how much a
    call needs.
tile : int, optional
    Keys per tile of the recurrence. Default: a constant of the kernel.
family : {"prefill", "decode"}, optional
    Force a kernel family. Default: decode for sequences with at most 16 query rows per
    key/value head (``seqlen_q * num_heads / num_kv_heads``).
max_seqlen_q : int, optional
    A bound on the queries of a sequence; checked where lengths are known, of use where they lie on a
    device: a sequence with more is NaN.
batch_invariant : bool, default False
    CUDA only: bits of a row that do not depend on other rows, on other sequences or on pages.
q_scale : float or ndarray, optional
    CUDA only: what float8_e4m3fn queries are multiplied by, a number, (num_heads,) or one per token and
    head. Their output is bfloat16 unless `out_dtype` says otherwise.
check_indices : bool, default False
    CUDA only: read index arrays that lie on a device back and check what they contain.
backend : {"auto", "numpy", "c", "cuda"}, optional
    Default: `use_backend`, else ``PYFLASH_BACKEND``, else "cuda" where `q` lies on a GPU and "c"
    elsewhere."""

_RETURNS = """\
out : ndarray
    Shaped like `q` with the width of the values, an array of its kind; rows that see no key are 0.
lse : ndarray
    Only with ``return_lse=True``; {lse_shape}."""

_RAISES = """\
InvalidArgument
    An argument has a wrong type, shape, stride or value; the message names it.
UnsupportedError
    The backend cannot do what was asked for.
BackendUnavailable
    The backend cannot run here."""


def _first_name(entry: str) -> str:
    return re.split(r"[ ,]", entry, maxsplit=1)[0]


def _parameters(left_out: set[str]) -> str:
    """Return the shared text without the entries of some parameters."""
    entries = re.split(r"\n(?=\S)", _PARAMETERS)
    return "\n".join(entry for entry in entries if _first_name(entry) not in left_out)


def attention_options(lse_shape: str, without: tuple[str, ...] = ()) -> Callable[[_Function], _Function]:
    """Return a decorator that completes signature and docstring of an attention function.

    The docstring has the lines ``{parameters}``, ``{returns}`` and ``{raises}`` where the shared
    text goes; the signature gets the shared keywords in place of ``**options``. Left out are the
    keywords in `without`, which the function refuses, and those that it names and documents itself.
    `out` is a shared one also where a function names it, which is faster than to look for it.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name != "out"]
        names = {p.name for p in own}
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in DEFAULTS.items()
            if name not in names and name not in without
        ]
        function.__signature__ = signature.replace(parameters=own + shared)  # type: ignore[attr-defined]
        text = inspect.cleandoc(function.__doc__ or "")
        for mark, block in (
            ("{parameters}", _parameters((names | set(without)) - {"backend"})),
            ("{returns}", _RETURNS.format(lse_shape=lse_shape)),
            ("{raises}", _RAISES),
        ):
            text = text.replace(mark, block)
        function.__doc__ = text
        return function

    return decorate
