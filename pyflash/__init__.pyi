"""Types of the public functions: what `**options` of ``_api.py`` are, and what comes out for what goes in.

At run time ``__init__.py`` counts; `tests/test_stubs.py` compares the two, name by name.
"""

from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, overload

from numpy.typing import NDArray
from typing_extensions import Unpack

from . import spans as spans
from ._api_cache import append_kv as append_kv
from ._api_cache import merge_states as merge_states
from ._api_stats import AttentionStats as AttentionStats
from ._backends import available_backends as available_backends
from ._backends import use_backend as use_backend
from ._cache import PagedKVCache as PagedKVCache
from ._description import Explanation as Explanation
from ._errors import BackendUnavailable as BackendUnavailable
from ._errors import InvalidArgument as InvalidArgument
from ._errors import OutOfPages as OutOfPages
from ._errors import PyflashError as PyflashError
from ._errors import UnsupportedError as UnsupportedError
from ._runtime import available_isas as available_isas
from ._runtime import show_runtime as show_runtime
from ._trace import trace as trace
from ._version import __version__ as __version__

class _AnyArray(Protocol):
    """An array of NumPy, CuPy, PyTorch or of anything else that speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_Kind = TypeVar("_Kind", bound=_AnyArray)
_Array: TypeAlias = NDArray[Any]
_Index: TypeAlias = int | _AnyArray
_Layout: TypeAlias = Literal["bshd", "bhsd"]

class _ScoreOptions(TypedDict, total=False):
    causal: bool | Literal["top_left"]
    window: tuple[int | None, int | None] | None
    spans: tuple[_Index, _Index] | None
    scale: float | None
    softcap: float | None
    alibi_slopes: _AnyArray | None
    bias: _AnyArray | None
    mask: _AnyArray | None
    sink_tokens: int
    q_offset: _Index | None
    tree: _AnyArray | None
    score_mod: Any  # what a backend takes: a function of arrays, a pointer, a C++ expression
    mask_mod: Any
    kv_dtype: str | None
    max_seqlen_q: int | None
    backend: str | None

class _StatsOptions(_ScoreOptions, total=False):
    want: tuple[str, ...]
    top_k: int
    rows: _AnyArray | None
    last_queries: int | None
    cu_seqlens_q: _AnyArray | None
    cu_seqlens_kv: _AnyArray | None
    block_table: _AnyArray | None
    seq_lens: _AnyArray | None
    k_scale: float | _AnyArray | None
    layout: _Layout
    cache_layout: str
    num_threads: int | None
    isa: str | None

class _OutOptions(_ScoreOptions, total=False):
    sinks: _AnyArray | None
    k_scale: float | _AnyArray | None
    v_scale: float | _AnyArray | None
    lse_includes_sinks: bool
    out: _AnyArray | None
    out_dtype: Any
    batch_invariant: bool
    q_scale: float | _AnyArray | None
    check_indices: bool

class _NaiveOptions(_OutOptions, total=False):
    seq_lens: _AnyArray | None
    layout: _Layout

class _SplitOptions(_OutOptions, total=False):
    num_threads: int | None
    isa: str | None
    tile: int | None
    family: Literal["prefill", "decode"] | None

class _DecodingOptions(_SplitOptions, total=False):
    seq_lens: _AnyArray | None
    layout: _Layout
    workspace: _AnyArray | None

class _VarlenOptions(_SplitOptions, total=False):
    num_splits: int | None
    workspace: _AnyArray | None

class _DenseOptions(_VarlenOptions, total=False):
    seq_lens: _AnyArray | None
    layout: _Layout

class _PagedOptions(_VarlenOptions, total=False):
    cu_seqlens_q: _AnyArray | None
    layout: _Layout
    cache_layout: str

class _CascadeOptions(_SplitOptions, total=False):
    num_splits: int | None
    block_table: _AnyArray | None
    seq_lens: _AnyArray | None
    cu_seqlens_q: _AnyArray | None
    cu_seqlens_kv: _AnyArray | None
    shared_block_table: _AnyArray | None
    shared_len: int | None
    k_scale_shared: float | _AnyArray | None
    v_scale_shared: float | _AnyArray | None
    layout: _Layout
    cache_layout: str

class _ExplainOptions(_DenseOptions, total=False):
    cu_seqlens_q: _AnyArray | None
    cu_seqlens_kv: _AnyArray | None
    block_table: _AnyArray | None
    cache_layout: str
    return_lse: bool

@overload
def flash_attention(
    q: _Array,
    k: _AnyArray,
    v: _AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_DenseOptions],
) -> _Array: ...
@overload
def flash_attention(
    q: _Array, k: _AnyArray, v: _AnyArray, *, return_lse: Literal[True], **options: Unpack[_DenseOptions]
) -> tuple[_Array, _Array]: ...
@overload
def flash_attention(
    q: _Kind,
    k: _AnyArray,
    v: _AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_DenseOptions],
) -> _Kind: ...
@overload
def flash_attention(
    q: _Kind, k: _AnyArray, v: _AnyArray, *, return_lse: Literal[True], **options: Unpack[_DenseOptions]
) -> tuple[_Kind, _Kind]: ...
@overload
def flash_attention(
    q: _Kind, k: _AnyArray, v: _AnyArray, *, return_lse: bool, **options: Unpack[_DenseOptions]
) -> _Kind | tuple[_Kind, _Kind]: ...
@overload
def naive_attention(
    q: _Array,
    k: _AnyArray,
    v: _AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_NaiveOptions],
) -> _Array: ...
@overload
def naive_attention(
    q: _Array, k: _AnyArray, v: _AnyArray, *, return_lse: Literal[True], **options: Unpack[_NaiveOptions]
) -> tuple[_Array, _Array]: ...
@overload
def naive_attention(
    q: _Kind,
    k: _AnyArray,
    v: _AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_NaiveOptions],
) -> _Kind: ...
@overload
def naive_attention(
    q: _Kind, k: _AnyArray, v: _AnyArray, *, return_lse: Literal[True], **options: Unpack[_NaiveOptions]
) -> tuple[_Kind, _Kind]: ...
@overload
def naive_attention(
    q: _Kind, k: _AnyArray, v: _AnyArray, *, return_lse: bool, **options: Unpack[_NaiveOptions]
) -> _Kind | tuple[_Kind, _Kind]: ...
@overload
def flash_attention_varlen(
    q: _Array,
    k: _AnyArray,
    v: _AnyArray,
    cu_seqlens_q: _AnyArray,
    cu_seqlens_kv: _AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_VarlenOptions],
) -> _Array: ...
@overload
def flash_attention_varlen(
    q: _Array,
    k: _AnyArray,
    v: _AnyArray,
    cu_seqlens_q: _AnyArray,
    cu_seqlens_kv: _AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[_VarlenOptions],
) -> tuple[_Array, _Array]: ...
@overload
def flash_attention_varlen(
    q: _Kind,
    k: _AnyArray,
    v: _AnyArray,
    cu_seqlens_q: _AnyArray,
    cu_seqlens_kv: _AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_VarlenOptions],
) -> _Kind: ...
@overload
def flash_attention_varlen(
    q: _Kind,
    k: _AnyArray,
    v: _AnyArray,
    cu_seqlens_q: _AnyArray,
    cu_seqlens_kv: _AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[_VarlenOptions],
) -> tuple[_Kind, _Kind]: ...
@overload
def flash_attention_varlen(
    q: _Kind,
    k: _AnyArray,
    v: _AnyArray,
    cu_seqlens_q: _AnyArray,
    cu_seqlens_kv: _AnyArray,
    *,
    return_lse: bool,
    **options: Unpack[_VarlenOptions],
) -> _Kind | tuple[_Kind, _Kind]: ...
@overload
def paged_attention(
    q: _Array,
    k_cache: _AnyArray,
    v_cache: _AnyArray,
    block_table: _AnyArray,
    seq_lens: _AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_PagedOptions],
) -> _Array: ...
@overload
def paged_attention(
    q: _Array,
    k_cache: _AnyArray,
    v_cache: _AnyArray,
    block_table: _AnyArray,
    seq_lens: _AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[_PagedOptions],
) -> tuple[_Array, _Array]: ...
@overload
def paged_attention(
    q: _Kind,
    k_cache: _AnyArray,
    v_cache: _AnyArray,
    block_table: _AnyArray,
    seq_lens: _AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_PagedOptions],
) -> _Kind: ...
@overload
def paged_attention(
    q: _Kind,
    k_cache: _AnyArray,
    v_cache: _AnyArray,
    block_table: _AnyArray,
    seq_lens: _AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[_PagedOptions],
) -> tuple[_Kind, _Kind]: ...
@overload
def paged_attention(
    q: _Kind,
    k_cache: _AnyArray,
    v_cache: _AnyArray,
    block_table: _AnyArray,
    seq_lens: _AnyArray,
    *,
    return_lse: bool,
    **options: Unpack[_PagedOptions],
) -> _Kind | tuple[_Kind, _Kind]: ...
@overload
def flash_decoding(
    q: _Array,
    k: _AnyArray,
    v: _AnyArray,
    *,
    num_splits: int,
    return_lse: Literal[False] = False,
    **options: Unpack[_DecodingOptions],
) -> _Array: ...
@overload
def flash_decoding(
    q: _Array,
    k: _AnyArray,
    v: _AnyArray,
    *,
    num_splits: int,
    return_lse: Literal[True],
    **options: Unpack[_DecodingOptions],
) -> tuple[_Array, _Array]: ...
@overload
def flash_decoding(
    q: _Kind,
    k: _AnyArray,
    v: _AnyArray,
    *,
    num_splits: int,
    return_lse: Literal[False] = False,
    **options: Unpack[_DecodingOptions],
) -> _Kind: ...
@overload
def flash_decoding(
    q: _Kind,
    k: _AnyArray,
    v: _AnyArray,
    *,
    num_splits: int,
    return_lse: Literal[True],
    **options: Unpack[_DecodingOptions],
) -> tuple[_Kind, _Kind]: ...
@overload
def flash_decoding(
    q: _Kind,
    k: _AnyArray,
    v: _AnyArray,
    *,
    num_splits: int,
    return_lse: bool,
    **options: Unpack[_DecodingOptions],
) -> _Kind | tuple[_Kind, _Kind]: ...
@overload
def cascade_attention(
    q: _Array,
    k_shared: _AnyArray,
    v_shared: _AnyArray,
    k: _AnyArray,
    v: _AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_CascadeOptions],
) -> _Array: ...
@overload
def cascade_attention(
    q: _Array,
    k_shared: _AnyArray,
    v_shared: _AnyArray,
    k: _AnyArray,
    v: _AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[_CascadeOptions],
) -> tuple[_Array, _Array]: ...
@overload
def cascade_attention(
    q: _Kind,
    k_shared: _AnyArray,
    v_shared: _AnyArray,
    k: _AnyArray,
    v: _AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_CascadeOptions],
) -> _Kind: ...
@overload
def cascade_attention(
    q: _Kind,
    k_shared: _AnyArray,
    v_shared: _AnyArray,
    k: _AnyArray,
    v: _AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[_CascadeOptions],
) -> tuple[_Kind, _Kind]: ...
@overload
def cascade_attention(
    q: _Kind,
    k_shared: _AnyArray,
    v_shared: _AnyArray,
    k: _AnyArray,
    v: _AnyArray,
    *,
    return_lse: bool,
    **options: Unpack[_CascadeOptions],
) -> _Kind | tuple[_Kind, _Kind]: ...
def attention_stats(
    q: _AnyArray, k: _AnyArray, lse: _AnyArray, **options: Unpack[_StatsOptions]
) -> AttentionStats: ...
def explain(q: _AnyArray, k: _AnyArray, v: _AnyArray, **options: Unpack[_ExplainOptions]) -> Explanation: ...
