"""Text to token numbers and back: byte-level BPE as SmolLM2 uses it, and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import InvalidArgument
from . import _requirements
from ._gguf import Vocabulary

#: In `Vocabulary.token_types`: a token that stands for itself, such as <|im_end|>.
_CONTROL = 3
_REPLACEMENT = "\ufffd"

Message = Mapping[str, str]


class Tokenizer:
    """Tokenizer and chat template of one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizers = _requirements.load("tokenizers")
        numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
        merges = [tuple(merge.split(" ")) for merge in vocabulary.merges]
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, merges))
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        control = [
            token
            for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True)
            if kind == _CONTROL
        ]
        self._tokenizer.add_special_tokens(
            [tokenizers.AddedToken(token, special=True, normalized=False) for token in control]
        )
        self._template = _compile_template(vocabulary.chat_template)
        #: Tokens that end an answer: the end of a message, and the end of the text.
        self.stop_tokens: frozenset[int] = frozenset(
            {vocabulary.eos_token, numbers.get("<|endoftext|>", vocabulary.eos_token)}
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; nothing is added at either end."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of tokens; control tokens are left out unless `keep_special`."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=not keep_special)
        return text

    def render(self, messages: Sequence[Message]) -> str:
        """Return a conversation as the model was trained to see it, up to where the answer begins.

        Parameters
        ----------
        messages : sequence of {"role": ..., "content": ...}
            Roles are "system" (first, if at all), "user" and "assistant".
        """
        for message in messages:
            if set(message) != {"role", "content"}:
                raise InvalidArgument(f"messages: found keys {sorted(message)}, expected role and content")
        text: str = self._template.render(messages=messages, add_generation_prompt=True)
        return text


class TextStream:
    """Turns tokens that come one by one into text that can be shown at once.

    A character of several bytes may be spread over several tokens; it is held back until complete.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that `token` completes, often "" for a part of a character."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending)
        if text.endswith(_REPLACEMENT):
            return ""
        self._pending.clear()
        return text

    def finish(self) -> str:
        """Return what is left at the end, an incomplete character as U+FFFD."""
        text = self._tokenizer.decode(self._pending)
        self._pending.clear()
        return text


def _compile_template(source: str) -> Any:
    # The template comes out of a model file: it may format text and nothing else.
    sandbox = _requirements.load("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)
