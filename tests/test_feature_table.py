"""The feature table: every "yes" of pyflash stands on tests that exist, and the pages are not stale."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import feature_table


def test_data_is_sound():
    assert not list(feature_table.problems())


def test_pages_are_not_stale():
    for path, text in feature_table.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python tools/feature_table.py"


def test_check_writes_nothing_and_says_what_is_wrong(monkeypatch, capsys):
    missing = feature_table.Feature("flight", ("test_masks.py::test_flight",), " ".join(["no"] * 10))
    monkeypatch.setattr(feature_table, "FEATURES", (missing,))
    before = {path: path.read_text(encoding="utf-8") for path in feature_table.pages()}
    assert feature_table.main(["--check"]) == 1
    assert {path: path.read_text(encoding="utf-8") for path in before} == before
    said = capsys.readouterr().err
    assert "no test test_masks.py::test_flight" in said
    assert "README.md is stale" in said
    assert "features.md is stale" in said


@pytest.mark.parametrize("others", ["no", " ".join(["maybe"] * 10)])
def test_a_row_needs_a_known_cell_for_each_system(monkeypatch, others):
    monkeypatch.setattr(feature_table, "FEATURES", (feature_table.Feature("flight", (), others),))
    assert list(feature_table.problems())
