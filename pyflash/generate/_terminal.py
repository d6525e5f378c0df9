"""`pyflash generate` on a terminal: the answer goes to stdout as it comes, all else to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from .. import _backends, _checks
from . import _requirements
from ._generator import Generation, Generator, Sampler


def run(
    prompts: Sequence[str],
    *,
    max_tokens: int,
    raw: bool,
    chat: bool,
    backend: str | None,
    num_threads: int | None,
    sampler: Sampler | None,
) -> None:
    """Answer prompts one after another.

    Parameters
    ----------
    prompts : sequence of str
        The prompts. Those of one conversation with `chat`, otherwise independent ones.
    max_tokens, raw, sampler
        As in `Generator.generate`.
    chat : bool
        Every prompt continues the conversation of the earlier ones.
    backend : str, optional
        Backend of the attention, as in `pyflash.paged_attention`. With "cuda" keys and values lie on the
        GPU; the matrix products stay NumPy's, on the CPU.
    num_threads : int, optional
        Threads of the attention, unless it is on a GPU, and of NumPy's matrix products; by default each
        decides for itself.
    """
    on_gpu = _backends.resolve(backend).name == "cuda"  # before the model is loaded, which takes seconds
    if num_threads is not None:
        num_threads = _checks.integer("num_threads", num_threads, 1)
        _requirements.check("threadpoolctl")
    _requirements.check()
    console = _requirements.load("rich.console").Console(stderr=True, highlight=False)
    with _blas_threads(num_threads):
        with console.status("Loading SmolLM2-135M-Instruct ..."):
            generator = Generator.load(backend=backend, num_threads=None if on_gpu else num_threads)
        messages: list[dict[str, str]] = []
        for prompt in prompts:
            console.print(f"> {prompt}", style="bold", markup=False, soft_wrap=True)
            messages = [*messages, _message("user", prompt)] if chat else [_message("user", prompt)]
            result = generator.generate(
                prompt if raw else messages, max_tokens=max_tokens, raw=raw, on_text=_write, sampler=sampler
            )
            messages.append(_message("assistant", result.text))
            _write("\n")
            console.print(summary(result), style="dim", soft_wrap=True)


def summary(result: Generation) -> str:
    """Return one line with the counts and rates of an answer."""
    computed = len(result.prompt_tokens) - result.num_reused
    cut = "" if result.stop == "end" else ", cut off"
    return (
        f"prompt: {len(result.prompt_tokens)} tokens, {result.num_reused} reused, {computed} computed at "
        f"{result.prompt_rate:.1f} tokens/s; answer: {len(result.tokens)} tokens{cut}, "
        f"{result.generate_rate:.1f} tokens/s"
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _blas_threads(num_threads: int | None) -> contextlib.AbstractContextManager[Any]:
    if num_threads is None:
        return contextlib.nullcontext()
    limits: contextlib.AbstractContextManager[Any] = _requirements.load("threadpoolctl").threadpool_limits(
        num_threads, user_api="blas"
    )
    return limits
