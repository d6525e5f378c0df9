"""The documentation: its examples run, its links lead somewhere, and docstrings are doctests."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import pyflash

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    )
]
# Modules with a main program or with extras run nothing when they are looked through.
MODULES = [
    info.name
    for info in pkgutil.walk_packages(pyflash.__path__, "pyflash.")
    if not info.name.startswith(("pyflash.__main__", "pyflash.generate", "pyflash._demo"))
]


@pytest.mark.parametrize("block", EXAMPLES)
def test_examples_run(block):
    exec(compile(block, "example", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert failed == 0
