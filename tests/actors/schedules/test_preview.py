"""Previews say what runs when; schedules are written as text and read back; orders of one's own are checked."""

import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from sbpflow.actors import PUBLISHED, Costs, Schedule, published
from sbpflow.actors.schedules.formula import fault
from sbpflow.actors.schedules.pipeline import network_of
from sbpflow.actors.schedules.preview import ticks
from sbpflow.actors.timeline.diagram import drawn
from sbpflow.actors.timeline.preview_chart import KINDS, SHADES
from sbpflow.placement.errors import SbpError, ScheduleError

ROOT = Path(__file__).resolve().parents[3]
PICTURES = ROOT / "docs" / "pictures" / "schedules"
PAIR = ("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2")


def test_a_preview_says_what_runs_when() -> None:
    assert str(published("1f1b").show(2, 2, costs=Costs(bytes=2**20))) == (
        "1f1b p=2 m=2: 9 units, bubble 33.3 %\n"
        "  slots at most   2  1\n"
        "  memory at most  2 MiB  1 MiB\n"
        "  device 0   F0 F1 .  .  B0--- .  B1---\n"
        "  device 1   .  F0 B0--- F1 B1---"
    )


@pytest.mark.parametrize(
    "name", [name for name, schedule in PUBLISHED.items() if schedule.linear and not schedule.slices]
)
def test_chunks_that_share_a_device_do_everything_in_its_one_row(name: str, tmp_path: Path) -> None:
    drawn = published(name).show(m=4, devices=(0, 1, 1, 0))
    kinds = "FBW" if published(name).split else "FB"
    wanted = sorted(f"{kind}{k}" for kind in (*kinds, *kinds.lower()) for k in range(4))
    for row in drawn.rows:
        assert sorted(str(cell.op) for cell in row if cell.op.kind != "U") == wanted
        assert all(a.end <= b.start for a, b in pairwise(row))  # a device does one thing at a time
    assert drawn.draw(tmp_path / "x.svg").read_text().count("device ") == 2


def test_nothing_hops_between_chunks_of_one_device() -> None:
    apart, beside = (published("gpipe").show(m=1, costs=Costs(hop=5.0), devices=where) for where in ((0, 1), (0, 0)))
    assert apart.end - beside.end == 2 * 5.0


def test_devices_are_of_schedules_that_say_none_themselves() -> None:
    with pytest.raises(ScheduleError, match="zb_v says itself on which devices its chunks are"):
        published("zb_v").show(m=4, devices=(0, 1))
    for p, devices in ((3, (0, 1)), (0, (0, 2)), (0, (1, 1))):
        with pytest.raises(ScheduleError, match="give the device of each chunk, from 0 on"):
            published("1f1b").show(p, 4, devices=devices)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_picture_of_a_schedule_is_the_one_in_the_docs(name: str, tmp_path: Path) -> None:
    drawn = published(name).show(4, 8, n=2 if name == "terapipe" else 1)
    text = drawn.draw(tmp_path / "x.svg").read_text()
    assert (PICTURES / f"{name}.svg").read_text() == text, "draw it again: docs/reference/schedules.md has the command"
    titles = [node.text for node in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(str(title).split()[0] for title in titles) == sorted(
        str(cell.op) for row in drawn.rows for cell in row
    )


def test_a_notebook_draws_a_preview() -> None:
    drawn = published("zb_h1").show(2, 2)
    assert ET.fromstring(drawn._repr_svg_()).tag.endswith("svg")
    with pytest.raises(SbpError, match=r"line\.pdf.*is svg or png"):
        drawn.draw("line.pdf")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_schedule_is_read_back_from_its_text(name: str) -> None:
    assert Schedule.read(str(published(name))) == published(name)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h2", "v_half", "chimera"])
def test_the_order_of_a_schedule_is_one_s_own_table(name: str) -> None:
    """It takes as long and needs as much, and its text is read back."""
    drawn = published(name).show(4, 8)
    own = Schedule("own", way=published(name).way, table=drawn.order)
    assert Schedule.read(str(own)) == own
    again = own.show()
    assert (again.order, again.end, again.slots) == (drawn.order, drawn.end, drawn.slots)


def test_chunks_behind_the_second_are_numbered() -> None:
    order = Schedule("three", v=3, act="m").show(2, 2).order
    assert "F2.0" in order[0]
    assert Schedule("own", table=order).show().order == order


def test_an_order_keeps_its_numbers_where_tasks_take_no_time_and_weights_change() -> None:
    pair = Schedule("pair", table=("F0 F1+ B0 F2+ B1 B2", "F0 B0 F1 B1 F2 B2"))
    (first, *_), _ = pair.show(costs=Costs(0, 1, 0)).rows
    assert str(first.op) == "F1+"
    dated = Schedule("dated", table=("F0 F1 B0 B1", "F0 B0 F1 B1"), versions="2")
    assert dated.show(costs=Costs(update=1)).order == dated.table


def test_a_text_may_have_remarks() -> None:
    text = """
    schedule pair     # two devices
    table
        F0 F1 B0 F2 B1 B2

        F0 B0 F1 B1 F2 B2   # the last
    """
    assert Schedule.read(text) == Schedule("pair", table=PAIR)
    assert Schedule("pair", table=PAIR).show().end == 12


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("F0 F1 B0", "F0 B0 F1 B1"), "own: device 0 never does B1\n  F0 F1 B0\n  each device does F and B of each"),
        (("F0 B0", "F0 G0"), "own: device 1 has 'G0', which is no word of an order\n  F0 G0\n     ^\n  words are"),
        (("F0 F0 B0",), "own: device 0 does F0 twice\n  F0 F0 B0\n     ^"),
        (("F0 B0 f0 b0", "F0 B0"), "own: device 1 never does f0"),
        (("F0 B0 W0", "F0 B0"), "own: device 1 never does W0"),
        (("F0 B0", ""), "own: device 1 never does F0"),
    ],
)  # fmt: skip
def test_an_order_that_cannot_be_is_refused_at_its_word(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule("own", table=rows)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("p", [2, 4, 64])
def test_one_cheap_stage_makes_no_picture_of_half_a_million_pixels(p: int, tmp_path: Path) -> None:
    costs = [Costs(), Costs(1e-4, 1e-4, 1e-4), *[Costs()] * (p - 2)]
    shown = published("1f1b").show(p, 24, costs=costs)
    assert max(map(len, str(shown).splitlines())) < 200
    root = ET.fromstring(shown._repr_svg_())
    assert float(root.attrib["width"]) < 1800
    axis = [node.text for node in root if node.get("font-size") == "10"]
    assert axis[:2] == ["0", f"{ticks(shown.end)[1]:g}"]
    assert len(ticks(shown.end)) == len(axis) <= 11
    time = str(shown).splitlines()[-1].split()
    assert time[:3] == ["time", "0", axis[1]]
    cells = sum(len(row) for row in shown.rows)
    assert len([node for node in root.iter() if node.tag.endswith("title")]) == cells  # all are there to be pointed at


def test_a_kind_has_one_colour_in_every_picture() -> None:
    """B was green in one and orange in the other."""
    schedule = published("zb_h1")
    graph = drawn(network_of(schedule, schedule.shape(2, 2)))
    svg = schedule.show(2, 2)._repr_svg_()
    for kind, shades in SHADES.items():
        if kind != "U":
            assert f'"{kind}0" [label="{kind}0", fillcolor="{shades[0]}"]' in graph
            assert f'[label="{KINDS[kind]}", fillcolor="{shades[0]}"' in graph  # the legend
            assert f'fill="{shades[0]}"' in svg
            assert KINDS[kind] in svg


def test_an_order_that_comes_to_a_stop_says_who_waits() -> None:
    """Device 0 wants B0 before it begins F1; device 1 wants both forwards first."""
    with pytest.raises(ScheduleError) as caught:
        Schedule("own", table=("F0 B0 F1 B1", "F0 F1 B0 B1")).show()
    assert "stops after 2 firings" in str(caught.value)
    assert "order of 0 (fired 1) waits for dy.0" in str(caught.value)
    assert "order of 1 (fired 1) waits for x.1" in str(caught.value)
    assert str(caught.value).endswith("\n  do F0 of micro-batch 1 before B0 of micro-batch 0 in order of 0")
    assert Schedule("own", table=("F0 F1 B0 B1", "F0 F1 B0 B1")).show().run.finished  # as it says


def test_orders_that_wait_for_each_other_are_told_every_thing_to_do_sooner() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule("own", table=("F0 B0 F1 B1 F2 B2", "F0 F1 B0 F2 B1 B2")).show()
    line = str(caught.value).splitlines()[-1]
    assert line == (
        "  do F0 of micro-batch 1 before B0 of micro-batch 0 in order of 0; "
        "then F0 of micro-batch 2 before B0 of micro-batch 1 in order of 0"
    )
    assert Schedule("own", table=("F0 F1 B0 F2 B1 B2", "F0 F1 B0 F2 B1 B2")).show().run.finished


def test_an_order_is_for_its_own_size() -> None:
    own = Schedule("own", table=PAIR)
    with pytest.raises(ScheduleError, match=r"own is a table for p=2 m=3 v=1"):
        network_of(own, own.shape(2, 4))
    with pytest.raises(ScheduleError, match=r"it is for v=2 n=1"):
        published("zb_v").show(4, 8, n=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this text has no schedule"),
        ("act p", "a schedule begins with its name: schedule mine\n  act p\n  ^"),
        ("schedule x\nact p-\n", "this is no formula\n  2 | act p-\n"),
        ("schedule x\nact p-q\n", "a formula has no q\n  2 | act p-q\n            ^\n  the names are p devices"),
        ("schedule x\n  atc p\n", "a schedule has no 'atc'\n  2 |   atc p\n        ^\n  it has schedule, way"),
        ("schedule x\nsplit yes\n", "split has nothing behind it\n  2 | split yes\n            ^"),
        ("schedule x\nv\n", "v has a value behind it\n  2 | v\n      ^"),
        ("schedule x\nv two\n", "v is a whole number\n  2 | v two\n        ^"),
        ("schedule x\nact p\nact m\n", "act is given twice\n  3 | act m\n      ^"),
        ("schedule x\nact 2**p\n", "a formula has whole numbers, + - * // %"),
    ],
)
def test_a_text_that_cannot_be_read_is_marked(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.read(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"way": "zigzag"}, "x: way 'zigzag' is no way of placing chunks"),
        ({"first": "FB"}, "x: first 'FB' does not order F, B and W"),
        ({"order": "zb"}, "x: order 'zb' is not known"),
        ({"act": "p-t"}, "x: act: a formula has no t\n  p-t\n    ^"),
        ({"act": ""}, "x: act: this is no formula"),
        ({"way": "routes", "v": 3}, "x: v 3 is too much"),
        ({"versions": "2", "lifo": True}, "x: versions '2' are read in order"),
        ({"name": "a b"}, "a b: name 'a b' is no name"),
    ],
)
def test_a_field_that_cannot_be_is_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(**{"name": "x", **fields})  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["p+1", " min(p//2, p-s)", "-(p)%3", "2*(p-s)-1"])
def test_formulas_are_whole_numbers_and_names(text: str) -> None:
    assert fault(text) is None


@pytest.mark.parametrize(("text", "at"), [("p+True", 2), ("min(p)", 0), ("p/2", 0), ("  p.x", 2), ("p if s else m", 0)])
def test_anything_else_is_no_formula(text: str, at: int) -> None:
    found = fault(text)
    assert found is not None
    assert found[0] == at
