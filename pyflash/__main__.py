"""The `pyflash` command: arguments in, exit status out; what it does lies elsewhere."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import pyflash

#: Exit status after an error of the caller, as argparse uses it.
_REFUSED = 2
_INTERRUPTED = 130  # 128 + SIGINT, what a shell expects


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Command line without the program name; by default that of the process.

    Returns
    -------
    int
        Exit status: 0, what the subcommand returned, or 2 after an error that pyflash explains in
        one line on stderr.
    """
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
    try:
        status = command(**options)
        sys.stdout.flush()  # here, where a closed pipe is handled, and not at exit
    except pyflash.PyflashError as error:
        print(f"pyflash: {error}", file=sys.stderr)
        return _REFUSED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`). Python would complain about stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _INTERRUPTED
    return int(status or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyflash", description="Exact FlashAttention on CPUs and NVIDIA GPUs."
    )
    parser.add_argument("--version", action="version", version=f"pyflash {pyflash.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="show in the terminal what FlashAttention does")
    demo.set_defaults(command=_demo)

    _add_simulate(commands)

    info = commands.add_parser("info", help="show versions, CPU, instruction sets, threads, GPUs, backends")
    info.add_argument("--json", action="store_true", dest="as_json", help="as one JSON object")
    info.set_defaults(command=_info)

    _add_bench(commands)

    generate = commands.add_parser(
        "generate",
        help="answer prompts with a small language model over the paged cache",
        description="Answer prompts with SmolLM2-135M-Instruct; answers go to stdout, counts and rates to "
        "stderr. Prompts that begin alike share the pages of their beginning.",
    )
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest answer (256)")
    generate.add_argument(
        "--backend",
        metavar="NAME",
        help="backend of the attention: c, numpy or cuda. With cuda, keys, values and attention are on the "
        "GPU; the matrix products of the model stay in NumPy on the CPU",
    )
    generate.add_argument(
        "--threads",
        type=int,
        metavar="N",
        dest="num_threads",
        help="threads of attention and matrix products (each library's own default)",
    )
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="continue the text as it is, no chat template")
    form.add_argument("--chat", action="store_true", help="each prompt continues one conversation")
    generate.add_argument(
        "--temperature", type=float, metavar="T", help="draw tokens instead of the likeliest"
    )
    generate.add_argument("--seed", type=int, metavar="N", help="makes --temperature repeatable")
    generate.set_defaults(command=_generate)
    return parser


def _add_bench(commands: Any) -> None:
    from pyflash.bench import _cli

    _cli.add_to(commands)


def _add_simulate(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="write a page that shows FlashAttention step by step, and open it in the browser",
        description="Write one page that needs no network: every tile of the recurrence, with the numbers of "
        "pyflash.trace().",
    )
    source = simulate.add_mutually_exclusive_group()
    source.add_argument(
        "--npz", metavar="FILE", help="show q, k and v of this file: one head, at most 8 queries and 24 keys"
    )
    source.add_argument("--seed", type=int, default=0, metavar="N", help="of the random arrays (0)")
    simulate.add_argument(
        "--output",
        default="pyflash-simulator.html",
        metavar="FILE",
        help="where the page goes (pyflash-simulator.html in this folder)",
    )
    simulate.add_argument("--no-open", action="store_false", dest="open_it", help="only write the page")
    simulate.set_defaults(command=_simulate)


def _demo() -> int:
    from pyflash._demo import run  # says what to install where rich is missing: so it comes first

    from rich.console import Console  # isort: skip

    return run(Console())


def _info(as_json: bool) -> None:
    from pyflash import _runtime

    if as_json:
        print(json.dumps({label.strip(): value for label, value in _runtime.runtime_report()}, indent=1))
    else:
        pyflash.show_runtime()


def _simulate(**options: Any) -> None:
    from pyflash.simulate import _command

    _command.run(**options)


def _generate(temperature: float | None, seed: int | None, **options: Any) -> None:
    from pyflash.generate import _terminal, temperature_sampler

    sampler = None if temperature is None else temperature_sampler(temperature, seed)
    _terminal.run(sampler=sampler, **options)


if __name__ == "__main__":
    sys.exit(main())
