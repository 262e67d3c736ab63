"""API pages of the site: a directive that documents a module's names, and our docstrings as reStructuredText."""

import builtins
import importlib
import inspect
import re
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

__all__ = ["PUBLIC", "as_rst", "public_names", "setup"]

# Modules with a page in docs/reference/api/, in the order of the site.
PUBLIC = (
    "sbpflow", "sbpflow.nn", "sbpflow.data", "sbpflow.actors", "sbpflow.boxing", "sbpflow.sbp", "sbpflow.encoders",
)  # fmt: skip


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("public", Public)
    app.connect("autodoc-process-docstring", _process)
    app.connect("doctree-read", _unlinked)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Public(SphinxDirective):
    """`{public} sbpflow.nn`: what autodoc says of each name that the module hands out."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = named(self.arguments[0])
        asked = []
        for name in public_names(module):
            asked += [f".. {_kind(getattr(module, name))}:: {self.arguments[0]}.{name}", *_options(module, name), ""]
        # The page is Markdown, and autodoc writes reStructuredText.
        return self.parse_text_to_nodes("\n".join(["```{eval-rst}", *asked, "```"]))


def named(dotted: str) -> ModuleType:
    """A module by the name under which users reach it, such as sbpflow.data of sbpflow/nn/data."""
    room, _, name = dotted.partition(".")
    module = importlib.import_module(room)
    found = getattr(module, name) if name else module
    assert isinstance(found, ModuleType)
    return found


def public_names(module: ModuleType) -> list[str]:
    """Names of `__all__` that are values, functions or classes: modules have pages of their own."""
    names = [name for name in module.__all__ if not name.startswith("__")]
    return [name for name in names if not isinstance(getattr(module, name), ModuleType)]


def as_rst(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText: `x` is code, an indented part stands as written, nothing else is markup.

    >>> as_rst(["Rows of `x` and **kwargs:", "", "    a * b", "", "- one", "  more"])
    ['Rows of ``x`` and \\\\*\\\\*kwargs:', '', '::', '', '    a * b', '', '- one', '  more', '']
    """
    out: list[str] = []
    for part in _parts(lines):
        if part[0].startswith(">>>"):
            out += [*part, ""]
        elif part[0].startswith(" "):
            out += ["::", "", *("    " + line[_indent(part) :] if line else "" for line in part), ""]
        else:
            out += [*_prose(part), ""]
    return out


def _parts(lines: list[str]) -> list[list[str]]:
    """Runs of lines without an empty one between; indented runs that follow each other are one."""
    parts: list[list[str]] = []
    for text in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        part = text.split("\n")
        if parts and part[0].startswith(" ") and parts[-1][0].startswith(" "):
            parts[-1] += ["", *part]
        elif any(line.startswith(" ") for line in part) and not part[0].startswith((" ", "- ", ">>>")):
            cut = next(at for at, line in enumerate(part) if line.startswith(" "))
            parts += [part[:cut], part[cut:]]
        elif part != [""]:
            parts.append(part)
    return parts


def _indent(part: list[str]) -> int:
    return min(len(line) - len(line.lstrip()) for line in part if line.strip())


def _prose(part: list[str]) -> list[str]:
    """Lines of prose or of a list with `- ` at its head; what is between backticks is code."""
    out = []
    for line in "\n".join(part).split("\n"):
        head = "- " if line.startswith("- ") else line[: len(line) - len(line.lstrip())]
        out.append(head + _marked(line[len(head) :]))
    return out


def _marked(text: str) -> str:
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # code that goes on in the next line
        return re.sub(r"([\\*`|_])", r"\\\1", text)
    return "".join(
        f"``{piece}``" if at % 2 and piece.strip() == piece and piece else re.sub(r"([\\*|_])", r"\\\1", piece)
        for at, piece in enumerate(pieces)
    )


def _kind(value: Any) -> str:
    if inspect.isclass(value):
        return "autoclass"
    return "autofunction" if inspect.isroutine(value) else "autodata"


def _options(module: ModuleType, name: str) -> list[str]:
    value = getattr(module, name)
    if inspect.isclass(value):
        return ["   :members:"]
    return [] if inspect.isroutine(value) else ["   :no-value:"]


def _process(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_rst(lines)


def _unlinked(app: Sphinx, tree: nodes.document) -> None:
    """Types of Python in signatures are text: as links they would lead to an attribute of ours, such as Moves.bytes."""
    for link in [*tree.findall(pending_xref)]:
        if hasattr(builtins, link.get("reftarget", "")):
            link.replace_self(link.children)
