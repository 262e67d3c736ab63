"""The page of a report, walked through in a headless browser: folds, search, clicks, keys, and a quiet console."""

import json
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from sbpflow.boxing.graph.move_table import MoveAccount
from sbpflow.boxing.graph.physical import GraphStep, Op, Physical, Source, Value, Var
from sbpflow.boxing.graph.report.page import embedded
from sbpflow.boxing.graph.report.page_data import page_data
from sbpflow.boxing.graph.report.page_diff import page_of_two
from sbpflow.boxing.graph.report.report import Report
from sbpflow.boxing.graph.report.vendored import VENDOR, libraries, scripts
from sbpflow.placement import placement
from sbpflow.sbp import layout
from tests.boxing.graph.gpt import gpt, piped, tiny
from tests.boxing.graph.report.walking import opened, walked_report

DETAILS = ".panel"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return walked_report(gpt(12, sharded=[5])).save(tmp_path_factory.mktemp("page") / "step.html")


def boxed(tab: Any, title: str) -> Any:
    return tab.locator(f".box:has(.title:text-is('{title}'))").first


def test_equal_layers_are_one_box_that_opens_and_folds(page: Path) -> None:
    with opened(page) as tab:
        assert tab.locator(".box.block").count() == 2  # before and behind the layer that lies otherwise
        boxed(tab, "▸ blocks.0 to 4 × 5").click()
        assert boxed(tab, "▸ attn").is_visible()
        boxed(tab, "▸ attn").click()
        assert boxed(tab, "qkv: linear").is_visible()
        tab.locator(".box.open:has(> .title:text-is('▾ blocks.0 to 4 × 5'))").click(position={"x": 30, "y": 10})
        assert boxed(tab, "qkv: linear").count() == 0


def test_an_op_tells_its_signatures_its_line_and_all_candidates(page: Path) -> None:
    with opened(page) as tab:
        boxed(tab, "head: linear").click()
        said = tab.locator(DETAILS).inner_text()
        assert "model.py:41" in said
        assert "the next, S(1) -> S(1), would take" in said
        rows = tab.locator(".candidates tbody tr")
        assert rows.count() == 14
        assert rows.nth(12).is_hidden()
        tab.get_by_role("button", name="show all 14").click()
        assert rows.nth(12).is_visible()
        assert tab.locator(".candidates tr.chosen").count() == 1


def test_a_move_tells_bytes_route_links_and_who_waits(page: Path) -> None:
    with opened(page) as tab:
        tab.locator(".box.move").first.click()
        said = tab.locator(DETAILS).inner_text()
        assert all(
            word in said for word in ("the busiest rank receives", "all ranks send", "GB/s a rank", "ranks inside")
        )
        waiting = tab.locator(f"{DETAILS} h3:text-is('Who waits for it') ~ .link").first
        name = waiting.inner_text()
        waiting.click()
        assert tab.locator(f"{DETAILS} h2").inner_text() in name


def test_a_move_tells_what_is_hidden_and_what_is_waited_for(tmp_path: Path) -> None:
    key = "fc", "forward"
    half = MoveAccount({key: 4e-3}, {}, known=("fc",), hides={key: 1e-3})
    report = replace(walked_report(tiny()), account=half, hidden=1e-3, exposed=3e-3)
    row = next(row for row in report.moves if row.of == ("fc",) and row.direction == "forward")
    assert (row.hidden, row.waited) == pytest.approx((1e-3, 3e-3))
    with opened(report.save(tmp_path / "step.html")) as tab:
        tab.keyboard.press("/")
        tab.keyboard.type(f"{row.name} {row.route}")
        tab.keyboard.press("Enter")
        figures = tab.locator(f"{DETAILS} .figures").inner_text().split("\n")
        assert [f for f in figures if f.strip()][-4:] == ["hidden beside computing", "1 ms", "waited for", "3 ms"]


def test_inputs_stand_at_the_top_of_their_stage(tmp_path: Path) -> None:
    report = Report(staged())
    assert [node["label"] for node in page_data(report)["nodes"] if node.get("top")] == ["x", "labels"]
    with opened(report.save(tmp_path / "step.html")) as tab:
        tab.get_by_role("button", name="Unfold a level").click()
        spots = {each.text_content(): each.bounding_box()["y"] for each in tab.locator(".box.node .title").all()}
        assert spots["labels"] < min(y for name, y in spots.items() if name.startswith("relu"))
        assert spots["x"] < min(y for name, y in spots.items() if name.endswith("linear"))


def staged() -> Physical:
    """Two stages, of which the last compares with labels at its end."""
    graph = piped()
    last = placement("cpu:[2-3] as (data=2)")
    labels = Source(Value("labels", layout(last, "S(0)", (8, 4))), "input")
    *before, loss, whole = graph.steps
    at = layout(last, "S(0)", (8, 4))
    off = Op(torch.ops.aten.sub.Tensor, (Var("stages.1.relu"), Var("labels")), {}, (Value("off", at, True),))
    assert isinstance(loss, Op)
    steps = (*before, off, replace(loss, args=(Var("off"),)), whole)
    return replace(graph, sources=(*graph.sources, labels), steps=steps)


def test_search_finds_and_opens_what_is_around(page: Path) -> None:
    with opened(page) as tab:
        tab.keyboard.press("/")
        tab.keyboard.type("blocks.5 scaled")
        assert tab.locator(".found li").count() == 1
        tab.keyboard.press("Enter")
        assert tab.locator(".box.selected .title").first.text_content() == "scaled_dot_product_attention"
        assert "scaled_dot_product_attention" in tab.locator(f"{DETAILS} h2").inner_text()
        tab.keyboard.press("/")
        tab.keyboard.type("no such thing")
        assert tab.locator(".found").inner_text() == "nothing of this name"
        tab.keyboard.press("Escape")
        assert tab.locator(".found").is_hidden()


def test_all_of_it_is_reached_by_keys(page: Path) -> None:
    with opened(page) as tab:
        tab.locator(".canvas").focus()
        tab.keyboard.press("ArrowDown")
        for _ in range(12):
            if "blocks.0 to 4" in (tab.locator(".box.selected .title").first.text_content() or ""):
                break
            tab.keyboard.press("ArrowDown")
        assert tab.locator(".box.selected").get_attribute("data-key")[0] == "g"
        tab.keyboard.press("Enter")
        assert tab.locator(".box.selected.open").count() == 1
        tab.keyboard.press("ArrowDown")
        inside = tab.locator(".box.selected").get_attribute("data-key")
        tab.keyboard.press("Enter")
        assert inside
        tab.keyboard.press("Escape")  # from the details, or one level up
        tab.locator(".canvas").focus()
        tab.keyboard.press("Escape")
        tab.keyboard.press("Escape")
        assert tab.locator(".box.block.open").count() == 0


def test_the_slider_goes_through_memory_and_marks_what_runs(page: Path) -> None:
    with opened(page) as tab:
        slider = tab.locator(".slider")
        assert "at the peak" in tab.locator(".said").inner_text()
        slider.focus()
        tab.keyboard.press("Home")
        said = tab.locator(".said").inner_text()
        assert said.startswith("63 MiB forward of op 0")
        assert "states 40 MiB" in said
        assert tab.locator(".box.now").count() == 1
        tab.get_by_role("button", name="to the peak").click()
        assert "at the peak" in tab.locator(".said").inner_text()


def test_a_task_of_a_schedule_finds_its_ops(page: Path) -> None:
    with opened(page) as tab:
        assert tab.locator(".lanes").count() == 2  # simulated and real
        tab.locator(".task").first.click()
        assert tab.locator(f"{DETAILS} h2").inner_text() == "F0"
        assert tab.locator(".box.now").count() > 0
        tab.keyboard.press("ArrowRight")
        assert tab.locator(f"{DETAILS} h2").inner_text() == "B2"  # the next of its device
        tab.locator(f"{DETAILS} .row").first.click()
        assert tab.locator(".box.selected").count() == 1


def test_tables_are_sorted_and_lead_to_the_graph(page: Path) -> None:
    with opened(page) as tab:
        table = tab.locator(".tables")
        heaviest = table.locator("tbody tr").first.inner_text()
        table.get_by_role("button", name="time", exact=True).click()
        assert table.locator("tbody tr").first.inner_text() != heaviest
        tab.get_by_role("tab", name=re.compile("^Ops")).click()
        table.locator("tbody tr").first.click()
        assert tab.locator(".box.selected").count() == 1
        tab.get_by_role("tab", name="Layouts of weights").click()
        assert tab.locator(".map text").count() > 4


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1440, False)], ids=["phone by night", "screen by day"])
def test_a_page_fits_its_screen_by_day_and_night(page: Path, width: int, *, dark: bool) -> None:
    with opened(page, width, dark=dark) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
        tab.locator(".box.move").first.click()
        assert tab.locator(f"{DETAILS} h2").is_visible()


@pytest.mark.parametrize("graph", [tiny(), piped()], ids=lambda graph: graph.name)
def test_a_page_opens_where_little_is_known(graph: Physical, tmp_path: Path) -> None:
    with opened(Report(graph).save(tmp_path / "step.html")) as tab:
        assert tab.locator(".box").count() > 3
        assert "Unknown." in tab.locator(".card:has(h2:text-is('Memory'))").inner_text()


def test_two_plans_stand_side_by_side_with_what_differs(tmp_path: Path) -> None:
    lines = [("same", "grid (data=2)", "grid (data=2)"), ("only b", "", "blocks: tensor=B")]
    page, plain = tmp_path / "two.html", walked_report(gpt(6))
    page.write_text(page_of_two(("a.plan", "b.plan"), lines, plain, walked_report(whole_gelu(plain.graph))))
    with opened(page) as tab:
        assert tab.locator(".canvas").count() == 2
        tab.get_by_role("tab", name="Lines (1 differ)").click()
        assert tab.locator("tr.only-b").inner_text().split() == ["+", "blocks:", "tensor=B"]
        tab.get_by_role("tab", name="Ops (2 lie otherwise)").click()
        tab.locator(".tables tbody tr").first.click()
        assert tab.locator(".box.selected").count() == 2  # one in each


def whole_gelu(graph: Physical) -> Physical:
    """The graph with what the gelus give of other signatures."""

    def other(step: GraphStep) -> GraphStep:
        if not isinstance(step, Op) or step.op is not torch.ops.aten.gelu.default:
            return step
        (made,) = step.outputs
        return replace(
            step, outputs=(replace(made, layout=layout(made.layout.placement, "(S(0), B)", made.layout.shape)),)
        )

    return replace(graph, steps=tuple(map(other, graph.steps)))


def test_no_text_of_a_user_ends_the_script(tmp_path: Path) -> None:
    name = "</script><b>&\u2028]]>"
    assert json.loads(embedded(name)) == name
    assert not re.search("[<>&\u2028]", embedded(name))
    page = walked_report(replace(tiny(), name=name)).save(tmp_path / "step.html")
    with opened(page) as tab:
        assert tab.locator("h1").text_content() == name
        assert tab.locator("#app b").first.text_content() != ""


def test_libraries_are_those_of_the_list_and_have_their_licences() -> None:
    for library in libraries():
        assert sha256(library.path.read_bytes()).hexdigest() == library.sha256, library.name
        assert (VENDOR / library.text).read_text().strip() in scripts()
    files = {path.name for path in VENDOR.iterdir()}
    assert files == {"vendored.toml", *(each.file for each in libraries()), *(each.text for each in libraries())}


def test_data_tells_equal_layers_once() -> None:
    few, many = (page_data(walked_report(gpt(n))) for n in (6, 24))
    assert len(few["nodes"]) == len(many["nodes"])
    assert max(times for *_, times in many["groups"]) == 24
    assert len(many["tables"]) == 1  # all ops have equal candidates here


def test_data_has_every_move_that_sends_with_where_it_is() -> None:
    report = walked_report(gpt(6, bucket=3))
    data = page_data(report)
    assert len(data["moves"]) == sum(not row.free for row in report.moves)
    shown = {at for node in data["nodes"] for at in node.get("moves", ())}
    assert shown == set(range(len(data["moves"])))
