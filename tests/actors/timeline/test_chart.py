"""The chart of a step has what was done and what was simulated, in one scale and on a page of one width."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from sbpflow.actors.protocol.simulate import Ran, simulate
from sbpflow.actors.schedules.pipeline import Costs, network_of
from sbpflow.actors.schedules.published import published
from sbpflow.actors.timeline.chart import TICKS, WIDE
from sbpflow.actors.timeline.timeline import Timeline
from sbpflow.boxing.picture.svg import LETTER

SPACE = "{http://www.w3.org/2000/svg}"


def timeline(forward: float, slower: float = 1.0) -> Timeline:
    """A step on two ranks, really slower than simulated."""
    schedule = published("1f1b")
    run = simulate(network_of(schedule, schedule.shape(2, 4), Costs(forward, 0.02)))
    found: dict[int, list[Ran]] = {}
    for ran in run.firings:
        real = replace(ran, start=ran.start * slower, end=ran.end * slower)
        found.setdefault(int(ran.queue.split()[-1]), []).append(real)
    return Timeline(run.network, {rank: tuple(each) for rank, each in found.items()}, {}, run)


@pytest.mark.parametrize("forward", [1e-9, 0.01, 1e4], ids=["nothing", "usual", "long"])
def test_a_chart_is_of_one_width_whatever_one_stage_takes(forward: float) -> None:
    root = ET.fromstring(timeline(forward)._repr_svg_())
    assert WIDE < float(root.get("width", 0)) < WIDE + 300
    for rect in root.iter(f"{SPACE}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= float(root.get("width", 0))


def test_a_chart_has_every_firing_of_the_step_and_of_the_simulation() -> None:
    made = timeline(0.01, slower=1.5)
    root = ET.fromstring(made._repr_svg_())
    told = [node.text for node in root.iter(f"{SPACE}title")]
    assert made.simulated is not None
    assert len(told) == 2 * len(made.simulated.firings)
    assert told.count("F0 of micro-batch 3") == 2
    words = ["".join(node.itertext()) for node in root.iter(f"{SPACE}text")]
    assert {"rank 0 device 0", "device 1", "forward", "backward", "0 s"} <= set(words)
    assert sum(word.startswith(("real ", "simulated ")) for word in words) == 2
    idle = [word for word in words if word.endswith("% idle")]
    assert idle[:2] == idle[2:] == ["20% idle", "20% idle"]
    assert len("rank 0 device 0") * LETTER < 150


@pytest.mark.parametrize(("slower", "unit"), [(1e-6, "us"), (1e-3, "ms"), (1.0, "s")])
def test_an_axis_has_one_unit_and_seconds_above_1000_ms(slower: float, unit: str) -> None:
    marks = [node.text or "" for node in ET.fromstring(timeline(1.0, slower)._repr_svg_()).iter(f"{SPACE}text")]
    axis = [mark for mark in marks if re.fullmatch(r"[\d.]+ (us|ms|s)", mark)]
    assert len(axis) == TICKS + 1
    assert {mark.split()[1] for mark in axis} == {unit}


def test_a_timeline_is_written_as_a_picture_by_its_suffix(tmp_path: Path) -> None:
    made = timeline(0.01)
    assert made.draw(tmp_path / "a" / "step.svg").read_text() == made._repr_svg_()
    assert made.save(tmp_path / "step.json").read_text().startswith("{")
