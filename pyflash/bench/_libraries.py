"""What is compared: backends of pyflash, other builds of it, and peers, each with the process it runs in."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from .. import _backends
from .._errors import BackendUnavailable, invalid
from ._peers import ON_HOST, PEERS, Peer, importable, installed
from ._workloads import UnknownWorkload, Workload, picked

#: What `--backends` takes: "naive" is `naive_attention`, the textbook's computation.
BACKENDS = ("c", "numpy", "cuda", "naive")
#: Where `make bench-peers` puts them, from the root of the repository.
PEERS_FOLDER = Path("build", "peers")


class Library(NamedTuple):
    """A library under test: its name in the results, its module in calls/ and option, and where it is."""

    name: str
    module: str
    python: str = sys.executable
    path: str = ""  # a folder to import from before all others
    option: str = ""

    @classmethod
    def parse(cls, argument: str, text: str, module: str = "", option: str = "") -> Library:
        """Read ``name=PYTHON``, or ``name=FOLDER`` with a package that this Python imports from there."""
        name, _, where = text.partition("=")
        if not name or not where:
            raise invalid(argument, repr(text), "NAME=PYTHON or NAME=FOLDER")
        if Path(where).is_dir():
            return cls(name, module or name, path=str(Path(where).resolve()), option=option)
        python = shutil.which(where)
        if python is None:
            raise invalid(argument, repr(text), "after '=' a Python that can be run, or a folder")
        return cls(name, module or name, python, option=option)

    @property
    def is_pyflash(self) -> bool:
        """Whether this is pyflash, in whatever build and backend."""
        return self.module == "pyflash" or (self.module == "cuda" and self.option == "pyflash")

    @property
    def on_device(self) -> bool:
        """Whether it computes on a GPU."""
        return self.module == "cuda"

    @property
    def process(self) -> str:
        """The name of its process: libraries on a GPU share one, and the tensors in it."""
        return f"cuda:{self.python}:{self.path}" if self.on_device else self.name

    @property
    def imported(self) -> str:
        """The name of what its process imports."""
        return PEERS[self.module].modules[0] if self.module in PEERS else "pyflash"

    def takes(self, w: Workload) -> bool:
        """Return whether a workload is for this library at all; single calls it may still refuse."""
        if w.device and not self.on_device and not self.is_pyflash:
            return False
        if w.memory and self.on_device:
            return False
        return self.is_pyflash or not (w.alone or w.variant)

    def held_to(self, isa: str) -> bool:
        """Whether the library can be held to an instruction set."""
        if self.module == "pyflash":
            return self.option == "c"
        return not self.on_device and isa in PEERS[self.module].held

    def environment(self, isa: str, threads: int) -> dict[str, str]:
        """Return the variables of its process."""
        found = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_PROC_BIND="true", OMP_DYNAMIC="false")
        folders = [self.path] if self.path else []
        if self.python == sys.executable:  # the packages that this process has
            folders += [folder or os.getcwd() for folder in sys.path]
        found.pop("PYTHONPATH", None)
        if folders:
            found["PYTHONPATH"] = os.pathsep.join(folders)
        if self.module not in ("pyflash", "cuda"):
            return found | PEERS[self.module].held.get(isa, {})
        found.pop("PYFLASH_BACKEND", None)
        return found | {"PYFLASH_NUM_THREADS": str(threads)} | ({"PYFLASH_ISA": isa} if isa else {})


def backends(names: Sequence[str] | None) -> list[Library]:
    """Return pyflash with each of these backends; by default with those that can run here.

    Raises
    ------
    InvalidArgument
        A name is none of `BACKENDS`.
    BackendUnavailable
        One that was asked for cannot run here; the message says why.
    """
    reason = no_device()
    if names is None:
        names = [*(["cuda"] if reason is None else []), "c", "numpy", "naive"]
    found = []
    for name in dict.fromkeys(names):
        if name not in BACKENDS:
            raise invalid("--backends", repr(name), f"any of {', '.join(BACKENDS)}{_misplaced(name)}")
        if name == "cuda":
            if reason is not None:
                raise BackendUnavailable(f"--backends: 'cuda' cannot be measured: {reason}")
            found.append(Library("cuda", "cuda", option="pyflash"))
            continue
        if name == "c":
            _backends.resolve("c")
        found.append(Library(name, "pyflash", option=name))
    return found


def _misplaced(name: str) -> str:
    """Return a hint where what an option got is the name of a workload."""
    try:
        picked([name])
    except UnknownWorkload:
        return ""
    return "; workloads stand before the options"


def no_device() -> str | None:
    """Return why nothing can be measured on a GPU here, None if it can."""
    if (reason := _backends.available_backends()["cuda"]) is not None:
        return reason
    if importlib.util.find_spec("torch") is None:
        return "PyTorch makes the arrays there, and is not installed: pip install 'pyflash-attention[torch]'"
    return None


def peers(names: Iterable[str] | None, folder: Path, on_device: bool) -> list[Library]:
    """Return peers: those with environments of their own in a folder, and those that this Python has.

    Parameters
    ----------
    names : iterable of str, optional
        Names or shell patterns, each of which has to fit, or ``NAME=PYTHON``; by default all that are found.
    folder : Path
        Environments as `make bench-peers` makes them.
    on_device : bool
        Whether those on a GPU are among the default.

    Raises
    ------
    InvalidArgument
        A name fits no peer, or one that is not installed; the message says how to install it.
    """
    own = {name: Library(name, name, str(python)) for name, python in installed(folder).items()}
    if names is None:
        wanted = [name for name in PEERS if name in ON_HOST or on_device]
        return [own.get(name) or here(name) for name in wanted if name in own or _found(PEERS[name])]
    found: dict[str, Library] = {}
    for text in names:
        if "=" in text:
            peer = Library.parse("--peers", text)
            if peer.module not in ON_HOST:
                raise invalid("--peers", repr(text), f"before '=' one of {', '.join(ON_HOST)}")
            found[peer.name] = peer
            continue
        fitting = [name for name in PEERS if fnmatchcase(name, text)]
        if not fitting:
            expected = f"any of {', '.join(PEERS)}, or NAME=PYTHON{_misplaced(text)}"
            raise invalid("--peers", repr(text), expected)
        there = [name for name in fitting if name in own or _found(PEERS[name])]
        if not there:
            raise _not_installed(text, fitting[0])
        found |= {name: own.get(name) or here(name) for name in there if name not in found}
    return list(found.values())


def _found(peer: Peer) -> bool:
    return importable(peer) and (not peer.on_device or no_device() is None)


def _not_installed(text: str, name: str) -> Exception:
    peer = PEERS[name]
    if peer.on_device and (reason := no_device()) is not None:
        return BackendUnavailable(f"--peers: {text!r} cannot be measured: {reason}")
    expected = f"a peer that this Python can import ({peer.how_to_install})"
    return invalid("--peers", repr(text), f"{expected}, or the Python that has it as {name}=PYTHON")


def here(name: str) -> Library:
    """Return a peer in this Python."""
    return Library(name, PEERS[name].call, option=PEERS[name].on_device)
