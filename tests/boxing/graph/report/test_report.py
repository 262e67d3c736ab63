"""What a graph costs, told: every figure of a tiny graph, repeats counted, and a page that stands alone."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sbpflow.boxing.graph.measures import Held
from sbpflow.boxing.graph.move_table import moves_of, totals
from sbpflow.boxing.graph.physical import Op, Physical
from sbpflow.boxing.graph.report.facts import Cost, MemoryReport, SearchReport, ops_of
from sbpflow.boxing.graph.report.page_data import page_data
from sbpflow.boxing.graph.report.report import Report
from tests.boxing.graph.gpt import deep, gpt, piped, tiny
from tests.counts import calls

GIB = 2**30


def told(graph: Physical) -> Report:
    """A report in which nothing is unknown."""
    costs = [Cost(at, 1e-4, "S(1), B -> P", 2e-5) for at, step in enumerate(graph.steps) if isinstance(step, Op)]
    memory = MemoryReport(
        {0: Held(GIB, GIB, 2 * GIB, 4 * GIB, 6 * GIB), 1: Held(GIB, GIB, 2 * GIB, 8 * GIB, 9 * GIB)}, 8 * GIB
    )
    return Report(graph, costs, memory, SearchReport(0.5, 0.75, 0.5, "elimination", 0.01), 1e-4)


def test_a_tiny_report_word_by_word() -> None:
    assert told(tiny()).full() == (
        """\
tiny: 3 ops, 2 moves on cpu:[0-3] as (data=2, tensor=2)
  time    400 us predicted: compute 300 us, moves 180 us, of which hidden 80.1 us
  choice  500 ms by elimination in 10 ms; op after op would give 750 ms (+50%); proved best

memory of a rank, of 8 GiB
  rank  parameters  gradients  states  activations  at most
     0       1 GiB      1 GiB   2 GiB        4 GiB    6 GiB  [##################      ] 75%
     1       1 GiB      1 GiB   2 GiB        8 GiB    9 GiB  [########################] 112%  too much

moves, the heaviest first (2 more send nothing)
     time  a rank            value      from -> to              route                        line
  60.1 us    96 B  forward   fc         (S(0), P) -> (S(0), B)  all_reduce_once over tensor  model.py:9
    60 us    48 B  backward  fc.weight  (P, S(1)) -> (B, S(1))  all_reduce_once over data    model.py:7
    60 us     4 B  forward   loss       (P, B) -> (B, B)        all_reduce_once over data    model.py:9

totals
     time  a rank                 route
  60.1 us    96 B  x 1  forward   all_reduce_once over tensor
    60 us    48 B  x 1  backward  all_reduce_once over data
    60 us     4 B  x 1  forward   all_reduce_once over data

ops
    time  module  op      signature                             runner-up              line
  100 us  fc      slice   (S(0), B) -> (S(0), S(1))             S(1), B -> P (+20 us)  model.py:7
  100 us  fc      linear  (S(0), S(1)), (B, S(1)) -> (S(0), P)  S(1), B -> P (+20 us)  model.py:7
  100 us          sum     (S(0), B) -> (P, B)                   S(1), B -> P (+20 us)  model.py:9"""
    )


def test_a_tiny_summary_word_by_word() -> None:
    assert str(told(tiny())) == (
        """\
tiny: 3 ops, 2 moves on cpu:[0-3] as (data=2, tensor=2)
  time    400 us predicted: compute 300 us, moves 180 us, of which hidden 80.1 us
  choice  500 ms by elimination in 10 ms; op after op would give 750 ms (+50%); proved best
  memory  9 GiB of 8 GiB at most on rank 1; on others from 6 GiB, too much
          parameters 1 GiB, gradients 1 GiB, states 2 GiB, activations 8 GiB

  module  weights  data           tensor
  fc      24       data parallel  row parallel

moves
     time  a rank            value      from -> to              route                        line
  60.1 us    96 B  forward   fc         (S(0), P) -> (S(0), B)  all_reduce_once over tensor  model.py:9
    60 us    48 B  backward  fc.weight  (P, S(1)) -> (B, S(1))  all_reduce_once over data    model.py:7
    60 us     4 B  forward   loss       (P, B) -> (B, B)        all_reduce_once over data    model.py:9
all of it: print(step.explain().full()), step.explain().save(path), .dict()"""
    )


@pytest.mark.parametrize(
    "make", [tiny, lambda: gpt(3), lambda: gpt(96, sharded=[2]), piped], ids=["tiny", "gpt", "deep", "piped"]
)
def test_what_is_printed_of_a_graph_is_30_lines_at_most(make: Callable[[], Physical]) -> None:
    graph = make()
    for report in (told(graph), Report(graph)):
        assert len(str(report).splitlines()) <= 30


def test_modules_have_what_room_the_rest_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbpflow.boxing.graph.report.summary.LINES", 20)
    text = str(told(gpt(3)))
    assert len(text.splitlines()) == 20
    assert re.search(r"  and \d more with fewer weights", text)
    assert "wte" in text  # the largest


def test_what_nobody_told_is_called_unknown() -> None:
    report = Report(tiny())
    text, known = report.full(), report.dict()
    assert str(report).count("unknown") == 4
    assert text.count("unknown") == 4  # compute, what is exposed, the choice, memory
    assert report.predicted is None
    assert known["memory"] is known["choice"] is known["time"]["compute"] is None
    assert page_data(report)["memory"] is None  # test_page.py looks at what the page makes of it
    assert ["computing", "unknown"] in page_data(report)["figures"]


@pytest.mark.parametrize(("bound", "words"), [(0.5, "proved best"), (0.4, "none is below 400 ms"), (None, "500 ms")])
def test_a_choice_is_best_only_if_it_meets_the_bound(bound: float | None, words: str) -> None:
    assert str(SearchReport(0.5, bound=bound)).endswith(words)


def test_equal_moves_of_repeated_blocks_are_one_row() -> None:
    rows = {(row.name, row.direction): row for row in moves_of(gpt(12, sharded=[5])) if not row.free}
    assert rows["blocks.*.attn.proj", "forward"].count == 12
    assert rows["blocks.*.mlp.proj", "forward"].count == 11
    assert rows["blocks.5.mlp.proj", "forward"].route == "reduce_scatter over tensor"
    assert rows["head.weight", "backward"].line == "model.py:41"


def test_rows_are_all_moves_and_their_bytes_those_of_the_plans() -> None:
    graph = gpt(3)
    rows = moves_of(graph)
    assert sum(row.count for row in rows) == len(graph.boxes) + len(graph.backs)
    plans = [*map(graph.boxing, graph.boxes), *(back.boxing for back in graph.backs)]
    assert sum(row.bytes * row.count for row in rows) == sum(plan.bytes for plan in plans)
    assert sum(row.total * row.count for row in rows) == sum(plan.total for plan in plans)
    assert sum(row.spent for row in rows) == pytest.approx(sum(plan.price.time for plan in plans))
    assert [row.spent for row in rows] == sorted((row.spent for row in rows), reverse=True)


def test_gradients_of_one_bucket_go_together_and_start_once() -> None:
    alone = [row for row in moves_of(gpt(3)) if row.direction == "backward" and "weight" in row.name]
    (bucket,) = (row for row in moves_of(gpt(3, bucket=7)) if "more" in row.name)
    assert bucket.name.endswith("and 34 more")
    assert max(row.seconds for row in alone) < bucket.seconds < sum(row.spent for row in alone)
    assert len(bucket.boxing.moves) <= 2


def test_what_the_optimizer_changes_in_pieces_is_gathered_after_the_update() -> None:
    (row,) = (row for row in moves_of(piped()) if row.direction == "update")
    assert (row.name, row.route, row.bytes) == ("stages.1.fc.weight", "all_gather over data", 32)


def test_totals_count_everything_once() -> None:
    rows = moves_of(gpt(4, sharded=[1]))
    summed = totals(rows)
    assert sum(total.seconds for total in summed) == pytest.approx(sum(row.spent for row in rows if not row.free))
    assert len({(total.direction, total.route) for total in summed}) == len(summed)


def test_costs_are_found_by_place_and_by_name() -> None:
    graph = tiny()
    rows = ops_of(graph, [Cost(0, 1.0), Cost("loss", 2.0, "B -> B", 3.0)])
    assert [row.seconds for row in rows] == [1.0, None, 2.0]
    assert rows[2].runner_up == "B -> B"


def test_ops_of_repeated_blocks_are_one_row() -> None:
    rows = ops_of(gpt(12))
    assert sum(row.count for row in rows) == sum(isinstance(step, Op) for step in gpt(12).steps)
    assert {row.count for row in rows} == {1, 12, 36}


@pytest.mark.parametrize("graph", [tiny(), gpt(4, sharded=[2]), piped()], ids=lambda graph: graph.name)
def test_a_report_goes_through_json(graph: Physical) -> None:
    known = told(graph).dict()
    assert json.loads(json.dumps(known, allow_nan=False)) == known
    told_of = {
        "name",
        "placements",
        "time",
        "cut",
        "eager",
        "idle",
        "devices",
        "flops",
        "links",
        "choice",
        "recomputed",
        "memory",
        "modules",
        "moves",
        "totals",
    }
    assert set(known) == {*told_of, "ops"}


@pytest.mark.parametrize("graph", [tiny(), gpt(3), piped()], ids=lambda graph: graph.name)
def test_a_page_is_well_formed_and_needs_nothing_from_elsewhere(graph: Physical, tmp_path: Path) -> None:
    page = told(replace(graph, name='<a "name">')).html()
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    for node in root.iter():
        assert node.tag.rpartition("}")[2] not in {"link", "iframe", "img", "image"}
        assert not node.get("src")
        assert node.get("href", "#").startswith("#")
    # A page names its own marks by url(#...), and its libraries where they come from.
    assert not re.search(r"url\((?!#)|@import|\bimport\(|fetch\(|XMLHttp|https?://(?!www\.w3\.org/|d3js\.org/)", page)


def test_a_page_has_each_rank_and_each_move_and_op() -> None:
    data = page_data(told(tiny()))
    assert {rank: held["total"] // GIB for rank, held in data["memory"]["ranks"].items()} == {"0": 6, "1": 9}
    assert [move["name"] for move in data["moves"]] == ["fc", "fc.weight", "loss"]
    assert [node["label"] for node in data["nodes"] if node["kind"] == "op"] == ["slice", "linear", "sum"]


def test_a_report_of_96_layers_is_short_and_takes_calls_that_grow_with_them() -> None:
    assert len(Report(deep()).full().splitlines()) < 100
    assert calls(lambda: Report(gpt(24)).full()) < 2.2 * calls(lambda: Report(gpt(12)).full())
    assert calls(lambda: str(Report(gpt(24)))) < 2.2 * calls(lambda: str(Report(gpt(12))))
