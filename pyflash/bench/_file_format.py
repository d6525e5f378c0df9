"""Whether a file has what is shown of it: it may be cut off, edited, or of another program."""

from __future__ import annotations

import math
from typing import Any

from ._workloads import WORKLOADS

#: Numbers of a row that are above zero; `growth_bytes` may be anything.
_POSITIVE = ("median", "min", "ratio", "base_ratio")


class Malformed(ValueError):
    """Something is missing, or not what it should be; the text says where."""


def check(content: Any) -> None:
    """Raise Malformed where a result file lacks something, or has none of the workloads of this pyflash."""
    if isinstance(content, dict) and "runs" not in content:
        if {"rows", "peers"} <= content.keys():
            raise Malformed("this is a file of an older format, without 'runs'")
        if "groups" in content:
            raise Malformed("this is a file of benchmarks/options.py")
    _strings(_part(content, "machine", dict, ""), ("cpu",), "machine")
    _strings(content, ("isa", "first"), "")
    libraries = _part(content, "libraries", dict, "")
    for name in libraries:
        _part(_part(libraries, name, dict, "libraries"), "held", bool, f"libraries.{name}")
    if content["first"] not in libraries:
        raise Malformed(f"first is {content['first']!r}, which is not in libraries")
    runs = _part(content, "runs", list, "")
    if not runs:
        raise Malformed("runs is empty")
    for number, run in enumerate(runs):
        _check_run(run, f"runs[{number}]", libraries)
    names = {name for run in runs for name in run["rows"]}
    if not names & WORKLOADS.keys():
        raise Malformed(
            f"none of its workloads is known here: {', '.join(sorted(names)[:3]) or 'it has none'}"
        )


def _check_run(run: Any, where: str, libraries: dict[str, Any]) -> None:
    if _part(run, "threads", int, where) < 1:
        raise Malformed(f"{where}.threads is {run['threads']}")
    limits = _part(run, "limits", dict, where)
    _part(limits, "agree", bool, f"{where}.limits")
    before = _part(limits, "before", dict, f"{where}.limits")
    for of in ("before", "after") if "after" in limits else ("before",):
        found = _part(limits, of, dict, f"{where}.limits")
        for name in before:
            _check_positive(found, name, f"{where}.limits.{of}")
    rows = _part(run, "rows", dict, where)
    for workload in rows:
        for library in _part(rows, workload, dict, f"{where}.rows"):
            there = f"{where}.rows.{workload}"
            if library not in libraries:
                raise Malformed(f"{there} has {library!r}, which is not in libraries")
            _check_row(_part(rows[workload], library, dict, there), f"{there}.{library}")


def _check_row(row: dict[str, Any], where: str) -> None:
    for name in _POSITIVE:
        if name in row:
            _check_positive(row, name, where)
    for name in ("growth_bytes", "tolerance"):
        if name in row:
            _part(row, name, (int, float), where)
    if row.get("wrong") is not None:  # null is NaN
        _part(row, "wrong", (int, float), where)


def _check_positive(content: dict[str, Any], name: str, where: str) -> None:
    value = _part(content, name, (int, float), where)
    if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise Malformed(f"{where}.{name} is {value}, not a positive number")


def _strings(content: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in names:
        _part(content, name, str, where)


def _part(content: Any, name: str, kind: Any, where: str) -> Any:
    """Return a part of an object, if it is there and of a kind."""
    if not isinstance(content, dict):
        raise Malformed(f"{where or 'the whole'} is {type(content).__name__}, not an object")
    there = f"{where}.{name}" if where else name
    if name not in content:
        raise Malformed(f"{there} is missing")
    value = content[name]
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        words = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
        raise Malformed(f"{there} is {_short(value)}, not {words.get(kinds[0], 'a number')}")
    return value


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 30 else f"{text[:27]}..."
