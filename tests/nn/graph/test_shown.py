"""Views that a reader has of a step and its parts: names that they wrote, a map of a page, tables in notebooks."""

import re
import sys
import xml.etree.ElementTree as ET
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.boxing.graph.measures import Held
from sbpflow.boxing.graph.picture.dot import graph_dot, overview
from sbpflow.boxing.graph.report.facts import MemoryReport
from sbpflow.boxing.graph.report.map import PARTS
from sbpflow.boxing.graph.report.report import Report
from sbpflow.boxing.picture import draw as pictures
from sbpflow.boxing.picture.draw import picture, written
from tests.boxing.graph.gpt import gpt, piped, tiny

GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
LINE = flow.placement("cpu", range(4))
SPACE = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter(f"{SPACE}text")]


def test_a_map_has_a_row_for_each_kind_of_module_and_a_cell_for_each_axis() -> None:
    told = texts(Report(gpt(12)).map())
    assert {"data", "tensor", "blocks.*: attn.qkv, mlp.fc x 12", "S(0)  column parallel", "S(1)  row parallel"} <= set(
        told
    )
    assert told.count("B  data parallel") == 6  # embedding, norms in blocks, columns, rows, last norm, head
    assert len(told) == len(texts(Report(gpt(96)).map()))


def test_the_style_of_a_map_counts_for_no_other_picture_of_its_page() -> None:
    (style,) = re.findall("<style>(.*?)</style>", Report(gpt(3)).map())
    assert all(rule.startswith((".map ", "@media")) for rule in re.findall(r"[^{}]+(?=\{)", style))


@pytest.mark.parametrize("limit", [None, 8], ids=["known", "limited"])
@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_a_map_has_bars_of_memory_by_kind(ranks: int, limit: int | None) -> None:
    held = {rank: Held(1 + rank, 2, 3, 4, 10 + rank) for rank in range(ranks)}
    svg = Report(tiny(), memory=MemoryReport(held, limit)).map()
    bars = [node for node in ET.fromstring(svg).iter(f"{SPACE}rect") if node.get("height") == "15"]
    assert len(bars) == len(PARTS) * (ranks if ranks < 17 else 2)
    assert max(float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in bars) < 700
    assert ("of 8 B at most" in svg) == (limit is not None)


def test_a_map_of_what_has_no_parameters_is_no_error() -> None:
    step = flow.compile(nn.ReLU(), placement=LINE)
    assert "rank 3" in step.plan_for(torch.ones(4)).explain().map()


@pytest.mark.parametrize("graph", [tiny(), gpt(3), piped()], ids=lambda graph: graph.name)
def test_a_report_shows_itself_in_a_notebook(graph: Any) -> None:
    html = Report(graph)._repr_html_()
    assert "<pre>" in html
    assert "<svg" in html


def test_inputs_are_drawn_by_their_names(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, tokens: Tensor, batch: dict[str, Tensor], *more: Tensor) -> Any:
        return (model(tokens) * batch["mask"] + more[0]).sum()

    step = flow.compile(model, loss_fn, placement=LINE)
    step.plan_for(torch.ones(8, 4), {"mask": torch.ones(8, 4)}, torch.ones(4))
    drawn = step.draw(tmp_path / "step.svg").read_text()
    assert all(f">{name}</text>" in drawn for name in ("tokens", "batch.mask", "2"))
    assert {s.value.name for s in step.physical.sources if s.kind == "input"} == {"0", "1.mask", "2"}
    forward = flow.compile(model, placement=LINE)
    with torch.no_grad():
        assert ">input</text>" in forward.plan_for(torch.ones(8, 4)).draw(tmp_path / "forward.svg").read_text()


def test_inputs_of_build_are_drawn_by_their_names(tmp_path: Path) -> None:
    class Twice(flow.nn.Graph):
        def build(self, words: Tensor) -> Tensor:
            return words * 2

    assert ">words</text>" in Twice(placement=LINE).plan_for(torch.ones(4)).draw(tmp_path / "step.svg").read_text()


def test_placements_layouts_tensors_and_annotations_show_themselves_in_notebooks() -> None:
    cube = flow.placement("cpu", range(8)).reshape([2, 2, 2])
    x = flow.ones(5, 3, placement=GRID, sbp=(S(0), P))
    model = flow.nn.shard(flow.nn.place(nn.Linear(4, 4), GRID), {"*": S(0)})
    for shown in (cube, GRID, x._layout, x, flow.nn.annotations(model)):
        ET.fromstring(f"<div>{shown._repr_html_()}</div>")
    assert "axis 0 1, axis 1 0" in cube._repr_html_()
    assert x._layout._repr_html_().count("[0:3, 0:3] addend 1 (sum)") == 1
    whole = flow.ones(2, placement=LINE, sbp=B)._repr_html_()
    assert len(set(re.findall("background:(#[0-9a-f]+)", whole))) == 1  # all hold the same
    assert "hint S(0)" in flow.nn.annotations(model)._repr_html_()
    assert "ranks" in flow.placement("cpu", range(1000))._repr_html_()


def test_annotations_of_a_hint_for_every_axis_know_its_bytes() -> None:
    model = flow.nn.shard(flow.nn.place(nn.Linear(4, 4), GRID), {"*": S(0)})
    assert "at most 20 B on a rank" in str(flow.nn.annotations(model))


def resvg_with(*families: str) -> Any:
    """A stand-in takes its place where it is not installed, with these fonts; what it has no font for it leaves out."""

    def svg_to_bytes(*, svg_string: str, sans_serif_family: str, **how: Any) -> bytes:
        text = svg_string if sans_serif_family in families else re.sub(">[^<]*</text>", "></text>", svg_string)
        return b"\x89PNG" + text.encode()

    resvg = ModuleType("resvg_py")
    resvg.svg_to_bytes = svg_to_bytes  # type: ignore[attr-defined]
    return resvg


def test_a_png_needs_no_program_but_resvg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", resvg_with("DejaVu Sans"))
    monkeypatch.setattr("shutil.which", lambda program: None)
    drawn = "<svg><text>drawn</text></svg>"
    monkeypatch.setattr(pictures, "_by_wasm", lambda source: drawn.encode())
    assert picture("digraph {}", tmp_path / "a.png").read_bytes() == b"\x89PNG" + drawn.encode()
    assert written("<svg>map</svg>", tmp_path / "b.png").read_bytes() == b"\x89PNG<svg>map</svg>"
    assert written("<svg>map</svg>", tmp_path / "b.svg").read_text() == "<svg>map</svg>"


def test_a_png_is_never_without_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", resvg_with())
    with pytest.raises(flow.SbpflowError, match=r"(?s)text would be missing.*or ask for \.svg"):
        written("<svg><text>map</text></svg>", tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


def test_a_png_without_anything_that_can_make_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    makers: tuple[Any, ...] = (
        lambda: written("<svg/>", tmp_path / "b.png"),
        lambda: picture("digraph {}", tmp_path / "a.png"),
    )
    for make in makers:
        monkeypatch.setattr("shutil.which", lambda program: None)
        with pytest.raises(flow.SbpflowError, match=r"sbpflow\[draw\]"):
            make()
    with pytest.raises(flow.SbpflowError, match="svg or png"):
        written("<svg/>", tmp_path / "b.pdf")


def pipeline_of(layers: int, stages: int, odd: int | None = None, schedule: str = "1f1b") -> Any:
    """The graph of a pipeline of equal layers, of which one may be wider, between words and a loss."""
    wide = [6 if n == odd else 4 for n in range(layers)]
    made = (OrderedDict(up=nn.Linear(4, n), act=nn.Tanh(), down=nn.Linear(n, 4)) for n in wide)
    inner = nn.Sequential(*map(nn.Sequential, made))
    model = nn.Sequential(OrderedDict(words=nn.Embedding(8, 4), layers=inner, head=nn.Linear(4, 8)))
    placements = [flow.placement("cpu", [rank]) for rank in range(stages)]
    flow.nn.pipeline(inner, placements, schedule, costs=[1.0] * layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = flow.compile(model, lambda m, x: m(x).square().mean(), optimizer, micro_batches=8, schedule=schedule)
    return step.plan_for(torch.zeros(32, dtype=torch.long)).physical


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layers", "stages", "odd", "drawn"),
    [
        (8, 8, None, ["cpu:[0]", "cpu:[1] to cpu:[6]:  x 6", "cpu:[7]"]),
        (16, 8, None, ["cpu:[0]", "cpu:[1] to cpu:[6]:  x 6", "cpu:[7]"]),
        (8, 8, 4, ["cpu:[0]", "cpu:[1] to cpu:[3]:  x 3", "cpu:[4]", "cpu:[5]", "cpu:[6]", "cpu:[7]"]),
        (4, 4, None, ["cpu:[0]", "cpu:[1]", "cpu:[2]", "cpu:[3]"]),
    ],
    ids=["one_layer_each", "two_layers_each", "one_differs", "too_few"],
)
def test_equal_stages_of_a_pipeline_are_drawn_once(layers: int, stages: int, odd: int | None, drawn: list[str]) -> None:
    graph = pipeline_of(layers, stages, odd)
    scene = overview(graph)
    places = list(dict.fromkeys(node.place for node in scene.nodes.values() if node.place))
    assert [scene.titles.get(place, place) for place in places] == drawn
    assert len(re.findall(r'label="\s*cpu:', graph_dot(graph, full=False))) == len(drawn)
    assert len(re.findall(r'label="\s*cpu:', graph_dot(graph, full=True))) == stages  # opened
    assert len(re.findall(r'label="\s*cpu:', graph_dot(graph, 1, full=False))) <= len(drawn)
    assert all(edge.tail in scene.nodes and edge.head in scene.nodes for edge in scene.edges)


def test_layers_in_folded_stages_are_counted_to_the_last_of_them() -> None:
    text = graph_dot(pipeline_of(16, 8), full=False)
    assert "layers.2 to 13:  x 2 each" in text
    assert "in 7 moves" in text  # of hops, in the legend
    assert "layers.1 to 6:  one each" in graph_dot(pipeline_of(8, 8), full=False)


def test_stages_stand_in_the_order_in_which_they_run() -> None:
    row = re.search(r'rank=same; edge \[style=invis\]; ("abreast 0" .*?) }', graph_dot(pipeline_of(4, 4), full=False))
    assert row is not None  # inputs may stand between
    assert re.findall(r'"(abreast \d)"', row[1]) == [f"abreast {n}" for n in range(4)]


def test_interleaved_stages_that_are_alike_are_drawn_once() -> None:
    graph = pipeline_of(16, 8, schedule="interleaved")
    titles = overview(graph).titles
    assert "cpu:[1] to cpu:[6]:  x 6" in titles.values()
