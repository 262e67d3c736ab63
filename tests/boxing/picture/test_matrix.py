"""The matrix of moves: every pair has its cell, and the picture is well-formed whatever the names are."""

import xml.etree.ElementTree as ET
from itertools import product

from sbpflow.boxing import between
from sbpflow.boxing.picture.matrix import moves_matrix
from sbpflow.placement import placement
from sbpflow.sbp import layout

SVG = "{http://www.w3.org/2000/svg}"


def drawn(placed: str, kinds: tuple[str, ...], title: str = "") -> ET.Element:
    p = placement(placed)
    known = [layout(p, sbp, (8, 8)) for sbp in product(kinds, repeat=p.ndim)]
    return ET.fromstring(moves_matrix([between(src, dst) for src, dst in product(known, known)], title))


def test_every_pair_has_a_cell_with_its_whole_plan() -> None:
    cells = [title.text or "" for title in drawn("cpu:[0-3] as (2, 2)", ("S(0)", "S(1)", "B", "P")).iter(f"{SVG}title")]
    assert len(cells) == len(set(cells)) == 256
    assert any(cell.startswith("(S(0), B) -> (B, B): all_gather over 0 -> (B, B)") for cell in cells)


def test_a_cell_shows_collectives_and_bytes() -> None:
    texts = [text.text for text in drawn("cpu:[0-1]", ("S(0)", "B")).iter(f"{SVG}text")]
    assert texts.count("AG") == texts.count("128 B") == 1
    assert texts.count("free") == 1
    assert texts.count("same") == 2


def test_markup_in_names_and_titles_is_escaped() -> None:
    texts = [text.text for text in drawn("cpu:[0-1]", ('P("max")', "B"), 'a < "b" & c').iter(f"{SVG}text")]
    assert 'a < "b" & c' in texts
    assert 'P("max")' in texts
