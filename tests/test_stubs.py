"""The stubs say what the modules have: every name, every keyword, every function of the extension."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import pyflash

ROOT = Path(__file__).resolve().parents[1]
STUB = ast.parse((ROOT / "pyflash" / "__init__.pyi").read_text(encoding="utf-8"))
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = [node for node in STUB.body if isinstance(node, ast.FunctionDef)]


def keys(name: str) -> set[str]:
    """The keywords of a TypedDict and of those it extends."""
    node = CLASSES[name]
    own = {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
    return own.union(*(keys(base.id) for base in node.bases if base.id in CLASSES))


def keywords(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in function.args.kwonlyargs} | keys(
        function.args.kwarg.annotation.slice.id
    )


def test_every_public_name_is_there():
    imports = [node for node in STUB.body if isinstance(node, ast.ImportFrom) and node.level]
    imported = {alias.asname for node in imports for alias in node.names}
    assert imported | {function.name for function in FUNCTIONS} == set(pyflash.__all__)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: f"{function.name}-{function.lineno}")
def test_keywords_are_those_of_the_function(function):
    parameters = inspect.signature(getattr(pyflash, function.name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [argument.arg for argument in function.args.args] == positional
    taken = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    if function.name == "explain":  # which takes what any of these takes
        calls = [pyflash.flash_attention, pyflash.flash_attention_varlen, pyflash.paged_attention]
        taken |= {name for call in calls for name in inspect.signature(call).parameters} - set(positional)
        taken -= {"k_cache", "v_cache"}
    assert keywords(function) == taken


def test_each_way_to_return_is_typed():
    for name in {function.name for function in FUNCTIONS} - {"explain", "attention_stats"}:
        overloads = [function for function in FUNCTIONS if function.name == name]
        returned = [ast.unparse(function.returns) for function in overloads]
        assert returned == [
            "_Array",
            "tuple[_Array, _Array]",
            "_Kind",
            "tuple[_Kind, _Kind]",
            "_Kind | tuple[_Kind, _Kind]",
        ]


def test_the_extension_has_these_functions():
    header = (ROOT / "c_src" / "abi" / "pyflash_abi.h").read_text(encoding="utf-8")
    declared = {
        name: 0 if arguments == "void" else arguments.count(",") + 1
        for name, arguments in re.findall(r"^[a-z][\w ]*?\**(pf_\w+)\(([^)]*)\);", header, re.MULTILINE)
    }
    stub = ast.parse((ROOT / "pyflash" / "_pyflash_c.pyi").read_text(encoding="utf-8"))
    (library,) = (node for node in stub.body if isinstance(node, ast.ClassDef))
    assert len(declared) > 15
    assert {f.name: len([*f.args.posonlyargs, *f.args.args][1:]) for f in library.body} == declared
