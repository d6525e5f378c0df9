"""The options of bench.py, for pytest: what to measure and how."""

from __future__ import annotations

import pytest
from bench import add_arguments


def pytest_addoption(parser: pytest.Parser) -> None:
    add_arguments(parser.getgroup("attention", "what is compared, and how"), "addoption")
