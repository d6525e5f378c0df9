"""`make bench-peers`: install the libraries that pyflash is compared with, each into build/peers/NAME.

    python benchmarks/peers.py [NAME ...]

A peer that cannot be installed is reported, and the exit status says so; the others are installed still.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pyflash.bench import _server
from pyflash.bench._libraries import PEERS_FOLDER
from pyflash.bench._peers import ON_HOST, PEERS, Peer, interpreter

FOLDER = Path(__file__).resolve().parents[1] / PEERS_FOLDER
#: Loads the calls of a peer as its process does, and says its version.
PROBE = """\
import importlib, sys, types
package = types.ModuleType({name!r})
package.__path__ = [{folder!r}]
sys.modules[package.__name__] = package
print(importlib.import_module({name!r} + ".calls.{peer}").VERSION)
"""


def install(peer: Peer) -> str:
    """Make the environment of a peer and load it there; return its version, or raise."""
    folder, python = FOLDER / peer.name, interpreter(FOLDER, peer.name)

    def run(*command: str | Path) -> str:
        done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        return done.stdout.strip()

    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--only-binary=:all:")
    run(*pip, "numpy>=1.26", *peer.requirements)
    calls = str(Path(_server.__file__).parent)
    probe = PROBE.format(name=_server.STANDALONE, folder=calls, peer=peer.name)
    version = run(python, "-c", probe).splitlines()[-1]
    (folder / "installed").write_text(version + os.linesep, encoding="utf-8")
    return version


def main(names: list[str]) -> int:
    """Install the named peers, or all of them."""
    failed = 0
    for name in names or ON_HOST:
        if name not in ON_HOST:
            print(f"{name}: there are {', '.join(ON_HOST)}", file=sys.stderr)
            return 2
        try:
            print(f"{name:<12} {install(PEERS[name])}", flush=True)
        except RuntimeError as error:
            failed += 1
            print(f"{name:<12} NOT INSTALLED: {error}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
