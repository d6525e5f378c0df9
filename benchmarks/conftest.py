"""The options of `pyflash bench`, for pytest: what to measure and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyflash.bench._cli import add_arguments


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attention", "what is compared, and how")
    add_arguments(group, "addoption")
    group.addoption(
        "--results", type=Path, help="result file; by default one named after the machine in results/"
    )
