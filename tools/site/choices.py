"""A griffe extension: types like ``{"bshd", "bhsd"}`` are shown as they are written, with quotation marks.

They are words of a docstring, but griffe reads them as Python, in which a string is the name of a type, and
takes the first of them for the default.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class Choices(griffe.Extension):
    """Puts the written type and the real default in place of what was read, if there are quotation marks."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Go through the parameters and attributes that an object's docstring describes."""
        if obj.docstring is None:
            return
        written = dict(re.findall(r'^([\w, ]+) : (.*".*)$', obj.docstring.value, re.MULTILINE))
        types = {name: kind for names, kind in written.items() for name in names.split(", ")}
        for section in obj.docstring.parsed if types else ():
            if section.kind in (
                griffe.DocstringSectionKind.parameters,
                griffe.DocstringSectionKind.attributes,
            ):
                for item in section.value:
                    if item.name not in types:
                        continue
                    item.annotation = re.sub(r", (optional|default .*)$", "", types[item.name])
                    if isinstance(obj, griffe.Function):
                        item.value = obj.parameters[item.name].default
