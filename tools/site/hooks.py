"""What MkDocs does not do by itself for this site; ``mkdocs.yml`` names this file.

Pages from outside of ``docs`` join it, links that lead out of it are resolved, pictures are drawn from
traces, the page of the simulator and the texts of the command line are made by the program itself, and
formulas are drawn, so that a reader needs no network.
"""

from __future__ import annotations

import argparse
import functools
import html
import os
import posixpath
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import figures
import formulas
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

#: Files of the repository that are pages of the site, by the page's name.
BORROWED = {"overview.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

SIMULATOR = "simulator/page.html"

#: What the reader has to have for a block of code, by the word behind "python".
NEEDS = {
    "cuda": "needs an NVIDIA GPU",
    "torch": "needs PyTorch",
    "onnx": "needs onnx",
    "jax": "needs JAX",
    "mpi": "needs mpi4py and MPI",
    "generate": "needs the extra generate and the model",
}

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_FIGURE = re.compile(r'<p><img alt="(?P<alt>[^"]*)" src="[^"]*figures/(?P<name>[a-z0-9-]+)\.svg" ?/?></p>')
_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages and files that do not lie in ``docs``."""
    for name, source in BORROWED.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for name in figures.FIGURES:
        files.append(File.generated(config, f"figures/{name}.svg", content=figures.svg(name)))
    files.append(File.generated(config, SIMULATOR, content=_simulator_page()))
    return files


def _simulator_page() -> str:
    """Return the page that ``pyflash simulate`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "page.html"
        command = [sys.executable, "-m", "pyflash", "simulate", "--no-open", "--output", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not output.exists():
            raise PluginError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return output.read_text(encoding="utf-8")


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Resolve links that leave ``docs``, title the blocks of code, fill in what the program makes."""
    name = page.file.src_uri
    source = Path(BORROWED.get(name, f"docs/{name}"))
    if name == "reference/command-line.md":
        markdown = markdown.replace("<!-- commands -->", _commands())
    if name == "simulator.md":
        markdown = markdown.replace(
            "\n", f"\n\n[Open the simulator]({SIMULATOR}){{ .md-button .md-button--primary }}\n", 1
        )
    code: list[str] = []
    told: set[str] = set()

    def keep(match: re.Match[str]) -> str:
        code.append(_dressed(match, told))
        return f"\0{len(code) - 1}\0"

    def link(match: re.Match[str]) -> str:
        return _link(match, name, source)

    markdown = _LINK.sub(link, _FENCE.sub(keep, markdown))
    return re.sub("\0(\\d+)\0", lambda match: code[int(match[1])], markdown)


def _dressed(fence: re.Match[str], told: set[str]) -> str:
    """Return a block of code as the site has it: without the words that tell a test how to run it.

    The first block of a page that needs something says so in a title; `told` are those needs that are said.
    """
    language, *rest = fence["info"].split()[:2] or [""]
    head = language or "text"
    if rest == ["output"]:
        head = "{ .text .output }"
    elif rest and rest[0] not in told:
        told.add(rest[0])
        head += f' title="{NEEDS[rest[0]]}"'
    return f"```{head}\n{fence['body']}```"


def _link(match: re.Match[str], name: str, source: Path) -> str:
    """Return a link as this site has it; what the site does not have is named instead."""
    target, _, anchor = match["target"].partition("#")
    if not target or "://" in target:
        return match[0]
    path = posixpath.normpath(posixpath.join(source.parent.as_posix(), target))
    pages = {path: page for page, path in BORROWED.items()}
    on_site = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    if on_site is None:
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: there is no {path}")
        return f"{match['text']} (`{path}` in the repository)"
    relative = posixpath.relpath(on_site, posixpath.dirname(name) or ".")
    return f"{match['image']}[{match['text']}]({relative}{'#' if anchor else ''}{anchor})"


@functools.cache
def _commands() -> str:
    """Return the help texts of the command and of its subcommands."""
    from pyflash.__main__ import _parser

    os.environ.update(COLUMNS="92", NO_COLOR="1")
    parser = _parser()
    texts = [("pyflash", parser.format_help())]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts += [(f"pyflash {name}", sub.format_help()) for name, sub in action.choices.items()]
    return "\n".join(f"## {title}\n\n```text\n{text}```\n" for title, text in texts)


def on_page_content(content: str, **_: Any) -> str:
    """Put pictures into the page, where they take its colours, and draw formulas."""
    content = _FIGURE.sub(lambda match: figures.inline(match["name"], html.unescape(match["alt"])), content)
    return _FORMULA.sub(_formula, content)


def _formula(match: re.Match[str]) -> str:
    tex, block = html.unescape(match["tex"]), match["tag"] == "div"
    drawn = formulas.svg(tex, block=block)
    return f'<div class="formula">{drawn}</div>' if block else drawn


def on_post_build(*, config: MkDocsConfig) -> None:
    """Refuse a site that would load anything from elsewhere."""
    for page in Path(config.site_dir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for loaded in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", text):
            found = re.search(r'(?:src|href)="?((?:https?:)?//[^"\s>]+)', loaded)
            if found and 'rel="canonical"' not in loaded:
                raise PluginError(f"{page}: loads {found[1]}")
