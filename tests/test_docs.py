"""The documentation: examples run and print what it says, links and names exist, nothing public is missing.

Blocks of a page run one after the other in one namespace. A word behind ``python`` says what a block needs;
such blocks run, together with those that need nothing, where it is there.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib
import importlib.util
import inspect
import io
import os
import pkgutil
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import CUDA_IS_EMULATED

import pyflash
from pyflash.generate import MissingPackage, _requirements

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
LIBRARIES = {"torch", "onnx", "jax"}
#: What a block may say behind "python".
NEEDS = {"cuda", "generate", "mpi", *LIBRARIES}
#: Above a table in which both cells of a row are code with the same result.
COMPARED = "<!-- compared -->"
#: The first words of paths in this repository.
FOLDERS = ("pyflash/", "c_src/", "gpu/", "tests/", "tools/", "benchmarks/", "docs/", ".ci/")
#: Files of the site that the build makes: tools/site/hooks.py.
MADE = re.compile(r"figures/([a-z0-9-]+)\.svg|simulator/page\.html")
# Modules with a main program or with extras run nothing when they are looked through.
MODULES = [
    info.name
    for info in pkgutil.walk_packages(pyflash.__path__, "pyflash.")
    if not info.name.startswith(("pyflash.__main__", "pyflash.generate", "pyflash._demo", "pyflash.bench"))
]


class Block(NamedTuple):
    """A fenced block: the words behind the fence, what is in it, and where it begins."""

    words: tuple[str, ...]
    text: str
    line: int


@functools.cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@functools.cache
def blocks(page: Path) -> list[Block]:
    text = read(page)
    return [
        Block(tuple(match[1].split()), match[2], text.count("\n", 0, match.start()) + 2)
        for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def cases() -> list[Any]:
    """Every page with what some of its blocks need: nothing, and each word that stands there."""
    found = []
    for page in PAGES:
        needs = {(*block.words, "")[1] for block in blocks(page) if block.words[:1] == ("python",)}
        found += [pytest.param(page, need, id=f"{name_of(page)}[{need}]") for need in sorted(needs)]
    return found


def skip_without(need: str) -> None:
    if need == "cuda":
        reason = "the GPU is emulated" if CUDA_IS_EMULATED else pyflash.available_backends()["cuda"]
        if reason is not None:
            pytest.skip(reason)
    if need == "mpi":
        pytest.importorskip("mpi4py.MPI", reason="needs mpi4py and MPI", exc_type=ImportError)
    if need == "jax":
        # On a GPU it multiplies float32 in TF32, and pages compare what agrees in float32.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if need in LIBRARIES:
        pytest.importorskip(need)
    if need == "generate":
        try:
            _requirements.check(model=True)
        except MissingPackage as error:
            pytest.skip(str(error))


def run(page: Path, need: str) -> dict[str, Any]:
    """Run the blocks that need nothing or `need`, compare what they print, and return their names."""
    names: dict[str, Any] = {}
    printed = None
    for block in blocks(page):
        if block.words in (("python",), ("python", need)):
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                exec(code, names)
            printed = stream.getvalue()
        elif block.words[:1] == ("python",):
            printed = None
        elif block.words == ("text", "output") and printed is not None:
            assert printed == block.text, f"{name_of(page)}:{block.line} prints something else"
    return names


@pytest.mark.parametrize(("page", "need"), cases())
def test_examples(page, need):
    skip_without(need)
    if need == "cuda":
        for library in re.findall(
            r"^import (cupy|torch)\b", "".join(b.text for b in blocks(page)), re.MULTILINE
        ):
            pytest.importorskip(library)
    run(page, need)


def compared_rows(page: Path) -> list[list[str]]:
    """The rows of the tables that are compared, each a pair of expressions."""
    rows = []
    for part in read(page).split(f"\n{COMPARED}\n")[1:]:
        table = part.strip().split("\n\n")[0].splitlines()[2:]
        rows += [re.findall(r"`([^`]+)`", line) for line in table]
    return rows


@pytest.mark.parametrize("page", [page for page in PAGES if compared_rows(page)], ids=name_of)
def test_other_libraries_agree(page):
    """Both sides of each row are computed and compared."""
    (need,) = {block.words[1] for block in blocks(page) if block.words[0] == "python"}
    skip_without(need)
    names = run(page, need)
    for theirs, ours in compared_rows(page):
        a, b = (np.asarray(eval(side, names)) for side in (theirs, ours))
        assert a.dtype == b.dtype, (theirs, ours)
        atol = 1e-5 if a.dtype == np.float32 else 1e-13
        np.testing.assert_allclose(b, a, rtol=0, atol=atol, err_msg=f"{theirs} is not {ours}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_kinds_of_blocks(page):
    """A block of an unknown language would never run, an output behind nothing would never be read."""
    python = {("python",), *(("python", need) for need in NEEDS)}
    before: tuple[str, ...] = ()
    for block in blocks(page):
        assert block.words in {(), ("text",), ("text", "output"), *python}, block
        assert block.words != ("text", "output") or before[:1] == ("python",), block
        before = block.words
    fences = len(re.findall(r"^```", read(page), re.MULTILINE))
    assert fences == 2 * len(blocks(page)), "a fence that is not closed, or that is indented"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    figures = read(ROOT / "tools" / "site" / "figures.py")
    pictures = re.findall(r'^    "([a-z0-9-]+)": \w+,$', figures, re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)", read(page)):
        made = MADE.fullmatch(target)
        if made:
            assert made[1] is None or made[1] in pictures, target
        else:
            assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=name_of)
def test_files_of_the_repository_exist(page):
    """A changelog may name what is no more."""
    for path in re.findall(r"`([\w./-]+)`", read(page)):
        if path.startswith(FOLDERS) and not path.startswith("benchmarks/results/"):
            assert (ROOT / path).exists(), path


def test_names_in_tables_of_files_exist():
    """The tables of docs/extending.md: files, names in each of them, and what to do there."""
    rows = 0
    for line in read(ROOT / "docs" / "extending.md").splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        if not line.startswith("| `") or len(cells) != 3:
            continue
        rows += 1
        for path in cells[0]:
            text = read(ROOT / path)
            assert all(name in text for name in cells[1]), line
    assert rows > 40


def reference() -> set[str]:
    return {name for page in REFERENCE for name in re.findall(r"^::: (\S+)$", read(page), re.MULTILINE)}


@pytest.mark.parametrize(
    "module",
    ["pyflash", "pyflash.spans", "pyflash.generate", "pyflash.distributed", "pyflash.distributed.scaling"],
)
def test_every_public_name_is_in_the_reference(module):
    found = importlib.import_module(module)
    public = {name for name in found.__all__ if not inspect.ismodule(getattr(found, name))}
    assert public
    assert {f"{module}.{name}" for name in public} <= reference()


def test_the_reference_names_what_exists():
    for name in reference():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_every_public_keyword_is_described():
    """Each parameter of a public function is named in its docstring, where the reference takes it from."""
    for name in reference():
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        if not inspect.isroutine(found):
            continue
        heads = re.findall(r"^([\w*, ]+?)(?: : .*)?$", found.__doc__, re.MULTILINE)
        described = set(re.findall(r"\w+", " ".join(heads)))
        assert set(inspect.signature(found).parameters) <= described, name


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert failed == 0
