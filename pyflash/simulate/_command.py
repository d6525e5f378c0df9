"""The command: arrays in, a page written and opened."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

from .._errors import invalid
from ._arrays import inputs_of_file, random_inputs
from ._page import page


def run(*, output: str, npz: str | None = None, seed: int = 0, open_it: bool = True) -> None:
    """Write the page, say where, and open it in the browser.

    Parameters
    ----------
    output : str
        Where the page goes; a file that is there is replaced.
    npz : str, optional
        File with arrays q, k and v. Default: random ones.
    seed : int, default 0
        Of the random arrays.
    open_it : bool, default True
        Whether to open it. A browser that cannot be started is a line on stderr, not an error.

    Raises
    ------
    InvalidArgument
        The file cannot be read or written, or its arrays cannot be shown.
    """
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():  # found before seconds of work
        raise invalid("output", output, "a file name in a folder that exists")
    inputs = random_inputs(seed) if npz is None else inputs_of_file(Path(npz))
    content = page(inputs).encode("utf-8")
    try:
        _write(path.resolve(), content)
    except OSError as error:
        raise invalid("output", output, f"a file that can be written ({error.strerror or error})") from None
    shape = f"{_counted(len(inputs.q), 'query', 'queries')}, {_counted(len(inputs.k), 'key', 'keys')}"
    print(f"{path}: {len(content) / 1e6:.1f} MB, {inputs.source}, {shape}")
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        print(f"pyflash: found no browser to open {path} with: open it yourself", file=sys.stderr)


def _write(path: Path, content: bytes) -> None:
    """Write a file; one that is there stays whole until the new one is."""
    if path.exists() and not path.is_file():  # a device or a pipe
        path.write_bytes(content)
        return
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
