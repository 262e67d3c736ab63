"""A report as one HTML page to walk through: it needs nothing from elsewhere, and follows the reader into the dark.

The page has the data as JSON, libraries and its own script and style; all that is drawn is made from these.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from ...picture.palette import FAMILIES, SHORT, families
from .facts import GraphFacts
from .map import PARTS, drawn_map
from .page_data import page_data
from .vendored import scripts

__all__ = ["embedded", "page", "pages"]

STATIC = Path(__file__).parent / "static"
SCRIPT = ("words", "model", "shapes", "drawing", "details", "search", "charts", "tables", "start")
# What could end a script or a line of it, or be no XML.
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(facts: GraphFacts) -> str:
    """The whole page."""
    return pages(facts.graph.name, [facts])


def pages(title: str, plans: Sequence[GraphFacts], diff: Mapping[str, Any] | None = None) -> str:
    """The page of one plan, or of two side by side, with what differs."""
    data = {
        "plans": [page_data(facts) | {"map": _map(facts)} for facts in plans],
        "diff": diff,
        "families": {name: list(look.kinds) for name, look in FAMILIES.items()},
        "short": SHORT,
    }
    name = escape(title)
    colours = "".join(f"--{part}:{colour};" for part, colour in PARTS.items())
    style = f":root{{{colours}}}{_chips()}{_static('walk.css')}"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{name}</title><style>/*<![CDATA[*/{style}/*]]>*/</style></head>",
            f'<body><div id="app"><h1>{name}</h1><p>This page needs JavaScript, and nothing from elsewhere.</p></div>',
            f'<script type="application/json" id="data">{embedded(data)}</script>',
            f"<script>//<![CDATA[\n{scripts()}\n//]]></script>",
            f"<script>//<![CDATA[\n{_script()}\n//]]></script>",
            "</body></html>\n",
        ]
    )


def embedded(value: Any) -> str:
    """A value as JSON that can stand in a script.

    >>> embedded("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(sign): other for sign, other in ESCAPES.items()})


def _map(facts: GraphFacts) -> str:
    """The map of modules and axes; memory has a part of the page to itself."""
    return drawn_map(facts, memory=False)


def _chips() -> str:
    return families(lambda name, ink, fill: f".look-{name}{{--fill:{fill};--ink:{ink}}}")


def _script() -> str:
    """The page's own script: its parts, one behind the other, in a scope of their own."""
    return '"use strict";\n(() => {\n' + "\n".join(_static(f"{part}.js") for part in SCRIPT) + "})();"


@cache
def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
