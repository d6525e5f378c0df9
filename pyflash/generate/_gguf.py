"""Reading a GGUF file: hyperparameters, weights as float32 matrices, what the tokenizer needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._description import Array
from .._errors import unsupported
from . import _requirements


class Config(NamedTuple):
    """Sizes and constants of a model of the Llama architecture."""

    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rope_theta: float
    norm_epsilon: float


class Block(NamedTuple):
    """Weights of one layer; matrices are (out, in)."""

    attn_norm: Array  # (width,)
    attn_qkv: Array  # ((num_heads + 2 * num_kv_heads) * head_dim, width): one product instead of three
    attn_output: Array  # (width, num_heads * head_dim)
    ffn_norm: Array  # (width,)
    ffn_gate_up: Array  # (2 * ffn_width, width)
    ffn_down: Array  # (width, ffn_width)


class Weights(NamedTuple):
    """All weights, float32. The output matrix is the embedding."""

    token_embd: Array  # (vocabulary, width)
    blocks: list[Block]
    output_norm: Array  # (width,)


class Vocabulary(NamedTuple):
    """What a byte-level BPE tokenizer and a conversation need."""

    tokens: list[str]
    merges: list[str]  # pairs, divided by a space
    token_types: list[int]
    chat_template: str
    eos_token: int


class ModelFile(NamedTuple):
    """The content of a GGUF file."""

    config: Config
    weights: Weights
    vocabulary: Vocabulary


def read(path: Path) -> ModelFile:
    """Read a model file.

    Parameters
    ----------
    path : pathlib.Path
        A GGUF file of architecture "llama" with tied output matrix and the tokenizer of SmolLM.

    Raises
    ------
    UnsupportedError
        The file holds another architecture or tokenizer.
    """
    gguf = _requirements.load("gguf")
    reader = gguf.GGUFReader(path)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    for key, expected in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if field(key) != expected:
            raise unsupported(key, repr(field(key)), "pyflash.generate", f"it knows {expected!r}")
    config = _config(field)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def matrix(*names: str) -> Array:
        parts = [gguf.dequantize(tensors[name].data, tensors[name].tensor_type) for name in names]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    if "output.weight" in tensors:
        raise unsupported(
            "output.weight", "an output matrix of its own", "pyflash.generate", "it knows tied ones"
        )
    weights = Weights(
        token_embd=matrix("token_embd.weight"),
        blocks=[_block(matrix, f"blk.{layer}") for layer in range(config.num_layers)],
        output_norm=matrix("output_norm.weight"),
    )
    vocabulary = Vocabulary(
        tokens=field("tokenizer.ggml.tokens"),
        merges=field("tokenizer.ggml.merges"),
        token_types=field("tokenizer.ggml.token_type"),
        chat_template=field("tokenizer.chat_template"),
        eos_token=field("tokenizer.ggml.eos_token_id"),
    )
    return ModelFile(config, weights, vocabulary)


def _config(field: Any) -> Config:
    num_heads = field("llama.attention.head_count")
    width = field("llama.embedding_length")
    return Config(
        num_layers=field("llama.block_count"),
        width=width,
        ffn_width=field("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=field("llama.attention.head_count_kv"),
        head_dim=width // num_heads,
        context_length=field("llama.context_length"),
        rope_theta=field("llama.rope.freq_base"),
        norm_epsilon=field("llama.attention.layer_norm_rms_epsilon"),
    )


def _block(matrix: Any, prefix: str) -> Block:
    return Block(
        attn_norm=matrix(f"{prefix}.attn_norm.weight"),
        attn_qkv=matrix(*(f"{prefix}.attn_{name}.weight" for name in "qkv")),
        attn_output=matrix(f"{prefix}.attn_output.weight"),
        ffn_norm=matrix(f"{prefix}.ffn_norm.weight"),
        ffn_gate_up=matrix(f"{prefix}.ffn_gate.weight", f"{prefix}.ffn_up.weight"),
        ffn_down=matrix(f"{prefix}.ffn_down.weight"),
    )
