"""The forward pass of a Llama-like model in plain NumPy, around `pyflash.paged_attention`.

Everything but attention is a matrix product or elementwise, so each token is on its own there and
the tokens of all sequences are packed into one axis; only attention knows about sequences.

With a cache on a GPU nothing but attention moves there. The matrix products stay NumPy's, on the host:
pyflash's extras for CUDA bring no library of matrix products. For each layer queries, keys and values go up
in one copy, keys are rotated and stored there, and the output comes down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import _arrays
from .._api import paged_attention
from .._cache import PagedKVCache
from .._description import Array
from .._errors import invalid
from .._reservation import StepArrays
from ._gguf import Block, Config, Weights

#: Called as `pyflash.paged_attention` is, with packed queries and ``causal=True``.
Attention = Callable[..., Any]


class Step(Protocol):
    """What a forward pass asks of a step of a cache: a `Reservation`, or what stands before one.

    The latter where sequences are spread over processes: new tokens then have other positions than the
    places that they take in the cache here, and some are stored elsewhere. ``host.positions`` and
    ``host.cu_seqlens`` are about the tokens that are computed; what is appended, and what attention sees, is
    the step's own affair.
    """

    cache: PagedKVCache
    block_table: Array
    seq_lens: Array
    cu_seqlens: Array
    max_seqlen_q: int
    host: StepArrays

    def append(
        self, layer: int, k: Array, v: Array, *, cos: Array, sin: Array, interleaved: bool
    ) -> tuple[Array, Array]:
        """Write the keys and values of a layer, and return its pools."""


class _Shared(NamedTuple):
    """What the layers of a step have in common."""

    cos: Array  # (total, head_dim / 2), in host memory
    sin: Array
    rotation: dict[str, Any]  # the same for the append, where the cache lies
    bound: dict[str, int]  # on the lengths that only the GPU knows


class Model:
    """A Llama-like model: RMSNorm, rotary embedding on neighbouring pairs, grouped heads, SwiGLU.

    Parameters
    ----------
    config : Config
        Sizes.
    weights : Weights
        float32 weights.
    dtype : {"float32", "float64"}, default "float32"
        Type of all activations and of the cache; the weights stay float32 in memory.
    attention : callable, default `pyflash.paged_attention`
        Replaces the attention function; takes the same arguments.
    **options
        Passed on to `attention`, for example ``backend`` or ``num_threads``. With ``backend="cuda"``
        the cache and attention are on the GPU, the matrix products remain on the CPU.

    References
    ----------
    Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, section 2.2.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        *,
        dtype: str = "float32",
        attention: Attention = paged_attention,
        **options: Any,
    ) -> None:
        if dtype not in ("float32", "float64"):
            raise invalid("dtype", repr(dtype), "'float32' or 'float64'")
        self.config = config
        self.weights = weights
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._attention = attention
        self._options = options

    def new_cache(self, num_pages: int, page_size: int) -> PagedKVCache:
        """Return an empty cache for this model."""
        config = self.config
        return PagedKVCache(
            num_pages,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            num_layers=config.num_layers,
            dtype=self.dtype,
            backend=self._options.get("backend"),
        )

    def forward(self, tokens: Array, step: Step, *, all_positions: bool = False) -> Array:
        """Compute new tokens of the sequences of a step, and put their keys into its cache.

        Parameters
        ----------
        tokens : numpy.ndarray
            ``(total,)`` integers, the new tokens of the sequences one after another, at least one each.
        step : Reservation
            From ``cache.reserve(seqs, num_tokens)``; or an object with the attributes that are used of it.
        all_positions : bool, default False
            Return logits for every token instead of the last one of each sequence.

        Returns
        -------
        numpy.ndarray
            Logits, ``(batch, vocabulary)`` or ``(total, vocabulary)``.
        """
        shared = self._shared(step)
        x = self.weights.token_embd[tokens].astype(self.dtype)
        for layer, block in enumerate(self.weights.blocks):
            x += self._attend(layer, block, self._norm(x, block.attn_norm), step, shared)
            x += self._feed_forward(block, self._norm(x, block.ffn_norm))
        if not all_positions:
            x = x[step.host.cu_seqlens[1:] - 1]
        logits: Array = self._norm(x, self.weights.output_norm) @ self.weights.token_embd.T
        return logits

    def _attend(self, layer: int, block: Block, x: Array, step: Step, shared: _Shared) -> Array:
        config = self.config
        borders = np.cumsum([config.num_heads, config.num_kv_heads])
        qkv = (x @ block.attn_qkv.T).reshape(len(x), -1, config.head_dim)
        q, k, v = np.split(qkv, borders, axis=1)
        q, k, v = step.cache.placed(_rotate_pairs(q, shared.cos, shared.sin), k, v)
        # The keys are rotated on their way into the cache.
        k_cache, v_cache = step.append(layer, k, v, **shared.rotation, interleaved=True)
        out = self._attention(
            q,
            k_cache,
            v_cache,
            step.block_table,
            step.seq_lens,
            cu_seqlens_q=step.cu_seqlens,
            causal=True,
            **shared.bound,
            **self._options,
        )
        projected: Array = _arrays.on_host(out).reshape(len(x), -1) @ block.attn_output.T
        return projected

    def _feed_forward(self, block: Block, x: Array) -> Array:
        gate, up = np.split(x @ block.ffn_gate_up.T, 2, axis=1)
        with np.errstate(over="ignore"):  # exp(-gate) = inf is right: the gate is closed
            hidden = gate / (1 + np.exp(-gate)) * up
        result: Array = hidden @ block.ffn_down.T
        return result

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean_square + self.config.norm_epsilon) * weight
        return normed

    def _shared(self, step: Step) -> _Shared:
        """Return what is computed, and copied to a GPU, once for all layers."""
        head_dim = self.config.head_dim
        frequencies = self.config.rope_theta ** (-np.arange(0, head_dim, 2) / head_dim)
        angles = step.host.positions[:, None] * frequencies  # float64: positions get large
        cos, sin = np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)
        on_device = _arrays.is_on_device(step.cu_seqlens)
        return _Shared(
            cos,
            sin,
            rotation=dict(zip(("cos", "sin"), step.cache.placed(cos, sin), strict=True)),
            bound={"max_seqlen_q": step.max_seqlen_q} if on_device else {},
        )


def _rotate_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate neighbouring pairs of x ``(total, heads, head_dim)`` by one angle per token and pair."""
    cos, sin = cos[:, None], sin[:, None]
    rotated = np.empty_like(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = odd * cos + even * sin
    return rotated
