"""Puts the page together: one HTML file with its styles, its scripts and its data inside."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

from .._version import __version__
from ._arrays import Inputs
from ._data import payload

#: Files of the folder ``page``, in the order in which the page needs them.
STYLES = ("base.css", "stage.css", "views.css", "ring.css")
SCRIPTS = (
    *("data.js", "format.js", "dom.js"),
    *("strip.js", "state.js", "meters.js", "closeup.js"),
    *("views.js", "ledger.js", "pages.js", "decoding.js"),
    *("ringdata.js", "ringcards.js", "ringmap.js", "ring.js"),
    *("settings.js", "choices.js", "theme.js", "quiz.js", "player.js", "main.js"),
)


def page(inputs: Inputs) -> str:
    """Return the whole page, as HTML in UTF-8, for the arrays of one head.

    Raises
    ------
    InvalidArgument
        As `pyflash.simulate._data.payload`.
    """
    parts = {
        "@@STYLES@@": "\n".join(map(_source, STYLES)),
        "@@SCRIPTS@@": "\n".join(map(_source, SCRIPTS)),
        "@@QUESTIONS@@": _json(json.loads(_source("questions.json"))),
        "@@VERSION@@": html.escape(__version__),
        "@@DATA@@": _json(payload(inputs)),
    }
    text = _source("page.html")
    for name, content in parts.items():
        before, _, after = text.partition(name)
        text = before + content + after
    return text


def _source(name: str) -> str:
    """Return one file of the folder ``page``."""
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """Return JSON that can stand in a script element: no tag can end it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
