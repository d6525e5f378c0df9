"""The peers: where each comes from, where one is found, and how it is held to an instruction set."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """One library: what pip installs beside NumPy, what Python imports, and what holds it back."""

    name: str
    requirements: tuple[str, ...]
    #: What has to be importable.
    modules: tuple[str, ...]
    #: Instruction set -> environment that the library reads when it is loaded; an instruction set that is not
    #: here cannot be asked for, and the result says that this peer was not held to it.
    held: dict[str, dict[str, str]]
    #: Of a peer on a GPU, which of the calls of calls/cuda.py it is.
    on_device: str = ""

    @property
    def call(self) -> str:
        """The module in calls/."""
        return "cuda" if self.on_device else self.name

    @property
    def how_to_install(self) -> str:
        """The command that installs it here."""
        if self.on_device:
            return "pip install 'pyflash-attention[torch]', a build for CUDA"
        return f"pip install {' '.join(self.requirements)}"


def _onednn(isa: str) -> dict[str, str]:
    return {"ONEDNN_MAX_CPU_ISA": isa}


def _torch_on_device(name: str, backend: str) -> Peer:
    return Peer(f"torch-{name}", ("torch",), ("torch", "cupy"), {}, backend)


_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", **_onednn("AVX2")}

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "torch",
            ("torch==2.13.0",),
            ("torch",),
            {"avx2": _AVX2, "avx512": _onednn("AVX512_CORE_BF16"), "amx": {}},
        ),
        Peer(
            "onnxruntime",
            ("onnxruntime==1.32.0", "onnx==1.23.2", "ml_dtypes"),
            ("onnxruntime", "onnx", "ml_dtypes"),
            {"amx": {}},
        ),
        Peer("openvino", ("openvino==2026.4.1",), ("openvino",), {"amx": {}}),
        # Its shared libraries are compiled for AVX2 and for nothing above.
        Peer("ggml", ("libggml-python==0.20.2.post1",), ("libggml",), {"avx2": {}}),
        Peer(
            "jax",
            ("jax==0.10.2",),
            ("jax",),
            {
                "avx2": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
                "avx512": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX512_BF16"},
                "amx": {},
            },
        ),
        _torch_on_device("flash", "FLASH_ATTENTION"),
        _torch_on_device("cudnn", "CUDNN_ATTENTION"),
        _torch_on_device("efficient", "EFFICIENT_ATTENTION"),
    )
}
ON_HOST = [name for name, peer in PEERS.items() if not peer.on_device]


def importable(peer: Peer) -> bool:
    """Return whether this Python has a peer; nothing is imported."""
    return all(importlib.util.find_spec(module) is not None for module in peer.modules)


def interpreter(folder: Path, name: str) -> Path:
    """Return the Python of a peer's own environment in a folder of them, whether it exists or not."""
    return folder / name / "bin" / "python"


def installed(folder: Path) -> dict[str, Path]:
    """Return the peers that have environments of their own in a folder, with their interpreters."""
    return {name: interpreter(folder, name) for name in ON_HOST if (folder / name / "installed").exists()}
