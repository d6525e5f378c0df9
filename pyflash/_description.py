"""The frozen descriptions that pass between the checks, the backends and nobody else.

``_args`` builds them, a backend executes them. Arrays are the caller's own memory, seen with
their axes in one canonical order; everything else is a plain Python value in its final form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

#: A window side or a key bound without limit.
UNLIMITED = -1

#: A sequence with at most so many query rows per kv head (seqlen_q * num_heads / num_kv_heads)
#: belongs to the decode family, a longer one to the prefill family.
DECODE_MAX_ROWS = 16


class CFunction(NamedTuple):
    """A C function that a kernel calls for each element: where it is, and what keeps it there."""

    address: int
    owner: object


#: NumPy functions on the NumPy backend, C functions on the C backend, on CUDA a C++ expression in the
#: variables ``score`` (float or double), ``batch``, ``head``, ``query`` and ``key`` (64-bit integers).
UserFunction = Callable[..., Any] | CFunction | str


class AttentionArgs(NamedTuple):
    """One attention call, checked.

    The keys have one of three addresses: dense (``cu_seqlens_kv`` and ``block_table`` None),
    packed (``cu_seqlens_kv``) or paged (``block_table``). Queries are dense or packed
    (``cu_seqlens_q``), independently of the keys. Packed arrays carry a leading axis of 1, so
    that every array has four axes.

    On the CUDA backend arrays may be `DeviceArray`, described like all others but out of the host's
    reach: q, k, v, out, lse, bias, mask, workspace and scales per token all together or none of them;
    everything else may lie on either side. What lies on the device is as the caller gave it:

    * index arrays (lengths, tables, offsets, spans, parents) are int32 or int64 and unchecked: whatever
      is wrong in them is for the kernel to bound;
    * `alibi_slopes`, `sinks` and scales per head are of any float type and any strides;
    * `tree` is bool as on the host, of any strides, or the parents, (batch, num_draft) integers.
    """

    q: Array  # (batch, seqlen_q, num_heads, head_dim) | (1, total_q, num_heads, head_dim)
    k: Array  # (batch, seqlen_kv, num_kv_heads, head_dim) | (1, total_kv, ...) | (num_pages, page_size, ...)
    v: Array  # as k, with head_dim_v; both as stored: codes of float8, int8, packed int4
    out: Array  # as q, with head_dim_v; to be filled, holds rubbish before
    lse: Array | None  # (batch, num_heads, seqlen_q) | (1, num_heads, total_q); to be filled
    kv_dtype: str  # registry name of the stored type; int4 packs two elements a byte along head_dim
    k_scale: Array | None  # k's shape without head_dim, float32, zero strides: value = stored * scale
    v_scale: Array | None  # as k_scale
    scale: float
    softcap: float  # scores become softcap * tanh(score / softcap); 0: off
    score_mod: UserFunction | None  # (score, batch, head, query position, key) -> score
    alibi_slopes: Array | None  # (batch, num_heads) float64: -slope * |i + offset - j| is added
    bias: Array | None  # (batch, num_heads, rows, keys) of any float type, zero strides; added; -inf hides
    causal: bool  # key j is visible to row i only if j <= i + offset
    window: tuple[int, int]  # and i + offset - left <= j <= i + offset + right; UNLIMITED
    sink_tokens: int  # but keys j < sink_tokens are exempt from the window
    spans: tuple[Array, Array] | None  # lo, hi, (batch, seqlen_q) | (1, total_q) integers: lo <= j < hi
    mask: Array | None  # as bias, bool: True may be seen
    mask_mod: UserFunction | None  # (batch, head, query position, key) -> may be seen
    tree: Array | None  # (batch, num_draft, num_draft) bool: which of the last num_draft keys each sees
    sinks: Array | None  # (num_heads,) float64: logits that enter the denominator alone
    lse_includes_sinks: bool
    q_offset: Array | None  # (batch,) int64; None means seqlen_kv - seqlen_q of each sequence
    cu_seqlens_q: Array | None  # (batch + 1,) integers
    cu_seqlens_kv: Array | None  # (batch + 1,) integers
    seq_lens: Array | None  # (batch,) integers; valid keys, None means all of them
    block_table: Array | None  # (batch, max_pages) integers
    num_splits: int | None  # cut the keys of each sequence into so many parts
    tile: int | None  # keys per tile; None is the kernel's own choice
    family: str | None  # "prefill", "decode" or None: chosen from the shape
    isa: str | None
    num_threads: int | None
    workspace: Array | None  # contiguous bytes that the caller keeps for the kernels
    #: Query rows of the longest sequence; with cu_seqlens_q on a device a bound on them.
    max_seqlen_q: int
    batch_invariant: bool = False  # CUDA: bits that don't depend on other sequences, pages and rows
    #: CUDA, float8 q: a number, or (batch, seqlen_q, num_heads) | (1, total_q, num_heads) float32, zero
    #: strides. None: 1.
    q_scale: float | Array | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        for array in (self.cu_seqlens_q, self.cu_seqlens_kv):
            if array is not None:
                return int(array.shape[0]) - 1
        return int(self.q.shape[0])


class MergeArgs(NamedTuple):
    """Partial results to be merged along the fixed binary tree of their indices."""

    parts: Array  # (num_parts, batch, seqlen, num_heads, head_dim_v)
    part_lse: Array  # (num_parts, batch, num_heads, seqlen)
    sinks: Array | None  # (num_heads,) float64, on a device of any float type
    lse_includes_sinks: bool
    out: Array  # (batch, seqlen, num_heads, head_dim_v); to be filled
    lse: Array  # (batch, num_heads, seqlen); to be filled


class AppendArgs(NamedTuple):
    """New keys and values and the places in a cache where they go.

    A place is a slot, page * page_size + place in the page. Where slots are None, lengths, table or
    prefix sums lie on a device and are here as given, unchecked: the token t of a sequence b has the
    position ``seq_lens[b] + t`` and the slot that the table says; without a table, page b is the sequence.
    The sequences are ``cu_seqlens``, or equally long parts of the tokens. A token without a place in the
    cache, or without a row in cos and sin, is not written, nor any other of its sequence.
    """

    k: Array  # (num_tokens, num_kv_heads, head_dim)
    v: Array  # (num_tokens, num_kv_heads, head_dim_v)
    k_cache: Array  # (num_pages, page_size, num_kv_heads, head_dim); written
    v_cache: Array  # as k_cache, with head_dim_v; written
    kv_dtype: str  # registry name of the type of the caches
    k_scale: Array | None  # (num_pages, page_size, num_kv_heads) float32, or zero strides; None: 1
    v_scale: Array | None
    writes_scales: bool  # k_scale and v_scale are chosen per token and head, and written
    slots: Array | None  # (num_tokens,) int64, on a device also int32; -1: skipped
    cos: Array | None  # (num_tokens, rotary_dim / 2) float32 or float64: rotation of each token
    sin: Array | None
    interleaved: bool  # rotate neighbouring pairs instead of the two halves
    #: (num_tokens,) int64: cos and sin, on a device, are tables and these the rows of the tokens.
    positions: Array | None = None
    block_table: Array | None = None  # (batch, max_pages) integers; only where slots is None, as all below
    seq_lens: Array | None = None  # (batch,) integers, before the append; cos and sin are tables then
    cu_seqlens: Array | None = None  # (batch + 1,) integers


class StatsArgs(NamedTuple):
    """What a second pass over queries and keys, with the log-sum-exp known, is to find out.

    The arrays with names of results are to be filled; those that nobody asked for are None. Rows
    and keys that do not exist (past a length) are left as the checks have filled them.
    """

    attention: AttentionArgs  # its v is k, its out is never touched, its lse is None
    lse: Array  # (batch, num_heads, seqlen_q) | (1, num_heads, total_q) of the type of computation
    last_queries: int | None  # key_mass counts the last so many rows of each sequence only
    max_logit: Array | None  # as lse; largest final score, -inf without a visible key
    entropy: Array | None  # as lse; in nats, 0 without a visible key
    key_mass: Array | None  # (batch, num_heads, keys): sum of the probabilities over the rows
    top_k_values: Array | None  # (*lse.shape, k): largest probabilities, falling; 0 behind the last
    top_k_indices: Array | None  # int64 keys, of equal ones the first one first; -1 behind the last
    rows: Array | None  # (num_rows,) int64, on a device also int32: row numbers inside each sequence
    row_probabilities: Array | None  # (batch, num_heads, num_rows, keys)


#: The index arrays of a call, whose contents are checked every time, in the order of `Repeat`.
INDEX_NAMES = ("cu_seqlens_q", "cu_seqlens_kv", "seq_lens", "block_table")

#: Index arrays as a caller gave them: none at all, or one or None for each of `INDEX_NAMES`.
IndexArrays = tuple["Array | None", ...]


class Arrays(NamedTuple):
    """The arrays of a call as the caller gave them."""

    q: Array
    k: Array
    v: Array
    out: Array
    index_arrays: IndexArrays
    #: On CUDA, of each option that is an array: the field of the kernels' arguments for its place; its place.
    others: tuple[tuple[str, int], ...] = ()


#: Makes a call again with other arrays q, k, v, out, lse and index arrays as callers give them. False:
#: nothing was done, check the arguments.
#: On CUDA it takes their places and a stream (`pyflash._device_calls.Launch`).
Repeat = Callable[..., bool]


class Explanation(NamedTuple):
    """What a call would do, as `pyflash.explain` says it.

    Attributes
    ----------
    backend, kernel : str
        Who computes it, and the kernel of the family.
    family : str
        "prefill", "decode", "prefill+decode" (sequences of both kinds) or "none" (no rows).
    isa : str
        Instruction set.
    tile : int
        Keys per tile of the recurrence; of the prefill family where both are in use.
    rows_per_item : int
        Query rows that one work item covers, in a prefill at most: threads take fewer towards its end. Of the
        prefill family where both are in use.
    num_splits : int
        Parts of the longest sequence's keys whose states are merged.
    num_items, num_threads : int
        Work items of so many rows, and the threads that share them out.
    tiles_total, tiles_skipped : int
        Key tiles of all work items, and those of them that no row of the item sees.
    workspace_bytes : int
        Scratch memory beside the output; what ``workspace=`` has to hold.
    reasons : tuple of str
        Why this family, these splits and this instruction set.
    """

    backend: str
    kernel: str
    family: str
    isa: str
    tile: int
    rows_per_item: int
    num_splits: int
    num_items: int
    num_threads: int
    tiles_total: int
    tiles_skipped: int
    workspace_bytes: int
    reasons: tuple[str, ...]


class Backend(Protocol):
    """What a backend offers; ``_backends`` knows them by name."""

    name: str

    def unavailable(self) -> str | None:
        """Return why the backend cannot be used here, None if it can."""

    def attention(self, args: AttentionArgs, *, again: Arrays | None = None) -> Repeat | None:
        """Fill ``args.out`` and ``args.lse``.

        Given the caller's arrays, return what makes such calls again, None if there is nothing to save.
        """

    def merge_states(self, args: MergeArgs) -> None:
        """Fill ``args.out`` and ``args.lse``."""

    def append_kv(self, args: AppendArgs) -> None:
        """Write the tokens into the caches."""

    def attention_stats(self, args: StatsArgs) -> None:
        """Fill the results in `args` that are not None."""

    def check(self, args: AttentionArgs) -> None:
        """Raise what `explain` would, in time that grows with neither rows nor keys."""

    def explain(self, args: AttentionArgs) -> Explanation:
        """Say what `attention` would do, without doing it."""


BackendLoader = Callable[[], Backend]
