"""The documentation: its examples run, its links lead somewhere, and docstrings are doctests."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from conftest import CUDA_IS_EMULATED

import pyflash

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
#: Blocks of code that say "python" or, where they need a GPU, "python cuda".
EXAMPLES = [
    pytest.param(block, bool(cuda), id=f"{page.name}-{number}")
    for page in PAGES
    for number, (cuda, block) in enumerate(
        re.findall(
            r"^```python( cuda)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
    )
]
# Modules with a main program or with extras run nothing when they are looked through.
MODULES = [
    info.name
    for info in pkgutil.walk_packages(pyflash.__path__, "pyflash.")
    if not info.name.startswith(("pyflash.__main__", "pyflash.generate", "pyflash._demo", "pyflash.bench"))
]


@pytest.mark.parametrize(("block", "needs_gpu"), EXAMPLES)
def test_examples_run(block, needs_gpu):
    example = compile(block, "example", "exec")
    if needs_gpu:
        reason = "the GPU is emulated" if CUDA_IS_EMULATED else pyflash.available_backends()["cuda"]
        if reason is not None:
            pytest.skip(reason)
        for library in re.findall(r"^import (cupy|torch)\b", block, re.MULTILINE):
            pytest.importorskip(library)
    exec(example, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_is_an_example(page):
    """A block of a language that is written otherwise would never run."""
    languages = re.findall(
        r"^```([^\n]*)\n.*?^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert set(languages) <= {"", "python", "python cuda"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert failed == 0
