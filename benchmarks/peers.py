"""The peers: where each comes from, how it is held to an instruction set, and `make bench-peers`.

    python benchmarks/peers.py [NAME ...]     install them, each into build/peers/NAME

A peer that cannot be installed is reported, and the exit status says so; the others are installed still.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PEERS_DIR = Path(__file__).resolve().parents[1] / "build" / "peers"


class Peer(NamedTuple):
    """One library: what pip installs beside NumPy, and what holds it to an instruction set."""

    name: str  # also the module in calls/
    requirements: tuple[str, ...]
    #: Instruction set -> environment that the library reads when it is loaded; an instruction set that is not
    #: here cannot be asked for, and the result says that this peer was not held to it.
    held: dict[str, dict[str, str]]


def _onednn(isa: str) -> dict[str, str]:
    return {"ONEDNN_MAX_CPU_ISA": isa}


_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", **_onednn("AVX2")}

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "torch",
            ("torch==2.13.0",),
            {"avx2": _AVX2, "avx512": _onednn("AVX512_CORE_BF16"), "amx": {}},
        ),
        Peer("onnxruntime", ("onnxruntime==1.32.0", "onnx==1.23.2", "ml_dtypes"), {"amx": {}}),
        Peer("openvino", ("openvino==2026.4.1",), {"amx": {}}),
        # Its shared libraries are compiled for AVX2 and for nothing above.
        Peer("ggml", ("libggml-python==0.20.2.post1",), {"avx2": {}}),
        Peer(
            "jax",
            ("jax==0.10.2",),
            {
                "avx2": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
                "avx512": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX512_BF16"},
                "amx": {},
            },
        ),
    )
}


def interpreter(name: str) -> Path:
    """Return the Python of a peer's own environment, whether it exists or not."""
    return PEERS_DIR / name / "bin" / "python"


def installed() -> dict[str, Path]:
    """Return the peers that `install` has set up here, with their interpreters."""
    return {name: interpreter(name) for name in PEERS if (PEERS_DIR / name / "installed").exists()}


def install(peer: Peer) -> str:
    """Make the environment of a peer and load it there; return its version, or raise."""
    folder, python = PEERS_DIR / peer.name, interpreter(peer.name)

    def run(*command: str | Path) -> str:
        done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        return done.stdout.strip()

    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--only-binary=:all:")
    run(*pip, "numpy>=1.26", *peer.requirements)
    here = Path(__file__).parent
    version = run(
        python, "-c", f"import sys; sys.path.insert(0, {str(here)!r}); from calls import {peer.name} as m; "
        "print(m.VERSION)",
    ).splitlines()[-1]  # fmt: skip
    (folder / "installed").write_text(version + os.linesep, encoding="utf-8")
    return version


def main(names: list[str]) -> int:
    """Install the named peers, or all of them."""
    failed = 0
    for name in names or PEERS:
        if name not in PEERS:
            print(f"{name}: there are {', '.join(PEERS)}", file=sys.stderr)
            return 2
        try:
            print(f"{name:<12} {install(PEERS[name])}", flush=True)
        except RuntimeError as error:
            failed += 1
            print(f"{name:<12} NOT INSTALLED: {error}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
