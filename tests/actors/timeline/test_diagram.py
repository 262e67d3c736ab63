"""The picture of the protocol is drawn from its table, and the one in the docs is of today's."""

import re
import xml.etree.ElementTree as ET
from itertools import product
from pathlib import Path

from sbpflow.actors.protocol.protocol import NEXT
from sbpflow.actors.timeline.diagram import diagram, table

DOCS = Path(__file__).resolve().parents[3] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def ways() -> dict[tuple[str, str], list[str]]:
    """Which messages lead from a phase to another."""
    phases = dict.fromkeys(phase for phase, _ in NEXT)
    found: dict[tuple[str, str], list[str]] = {}
    for a, b in product(phases, phases):
        found[a, b] = [kind for (at, kind), to in NEXT.items() if at == a and b in to]
    return {pair: kinds for pair, kinds in found.items() if kinds}


def test_the_diagram_has_every_way_of_the_table_and_no_other() -> None:
    drawn = re.findall(r'^  (\w+) -> (\w+) \[label="(.*)"\]$', diagram(), re.MULTILINE)
    assert {(a, b): kinds.split(", ") for a, b, kinds in drawn} == ways()


def test_the_picture_in_the_docs_is_of_this_table() -> None:
    root = ET.parse(DOCS / "pictures" / "actors" / "protocol.svg").getroot()
    drawn = {}
    for group in root.iter(f"{SVG}g"):
        title, words = group.findtext(f"{SVG}title") or "", [text.text or "" for text in group.findall(f"{SVG}text")]
        if "->" in title:
            start, _, end = title.partition("->")
            drawn[start, end] = ", ".join(words).split(", ")
    assert drawn == ways()


def test_the_table_as_text_has_a_row_for_each_entry() -> None:
    assert [tuple(row.split()[:2]) for row in table().splitlines()] == list(NEXT)
