"""Formulas of the documentation as outlines: the same in every browser, with no script or font to load."""

from __future__ import annotations

import functools
import html

from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from mkdocs.exceptions import PluginError

#: Units of an em.
_EM = 1000
_LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}
_FONT = FontProperties(math_fontfamily="stix")


@functools.cache
def svg(tex: str, *, block: bool) -> str:
    """Return a formula as SVG in the colour and size of the text around it; it is read out as its TeX.

    Parameters
    ----------
    tex : str
        The formula, without dollars, in the TeX that matplotlib knows. What it does not know ends the build.
    block : bool
        Whether it stands on a line of its own, with large fractions.
    """
    tex = " ".join(tex.split())
    text = f"${tex.replace(chr(92) + 'frac', chr(92) + 'dfrac') if block else tex}$"
    try:
        # 72 dots an inch: a point is a unit.
        box = MathTextParser("path").parse(
            text, dpi=72, prop=FontProperties(math_fontfamily="stix", size=_EM)
        )
        outline = TextPath((0, 0), text, size=_EM, prop=_FONT)
    except ValueError as error:
        raise PluginError(f"not a formula: {tex}") from error
    parts = []
    for points, code in outline.iter_segments():
        letter = _LETTERS[code]
        numbers = () if letter == "Z" else (f"{x:.0f} {-y:.0f}" for x, y in points.reshape(-1, 2))
        parts.append(letter + " ".join(numbers))
    width, height, depth = (round(x) for x in (box.width, box.height, box.depth))
    style = f"width:{width / _EM:.3f}em;height:{height / _EM:.3f}em;vertical-align:{-depth / _EM:.3f}em"
    return (
        f'<svg class="formula" role="img" aria-label="{html.escape(tex)}" style="{style}" '
        f'viewBox="0 {depth - height} {width} {height}"><path d="{"".join(parts)}"/></svg>'
    )
