"""Words that have moved say where they are now, each where it once was."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.actors.timeline.timeline import Timeline
from sbpflow.placement.moved import MOVED


def holder(old: str) -> object:
    """The module or class that had a word."""
    path = old.rpartition(".")[0]
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name) if name[0].isupper() else import_module(path)


@pytest.mark.parametrize("old", MOVED)
def test_a_word_that_moved_says_where_it_is_now(old: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"it is {MOVED[old]} now")):
        getattr(holder(old), old.rpartition(".")[2])


@pytest.mark.parametrize("new", [new for new in MOVED.values() if new.startswith("flow.")])
def test_it_is_there(new: str) -> None:
    found: object = flow
    for name in new.split(".")[1:]:
        found = getattr(found, name)


def test_what_never_was_is_no_attribute() -> None:
    assert not hasattr(flow, "planet")
    assert not hasattr(flow.boxing, "planet")


def test_a_plan_of_two_layouts_and_a_page_with_a_path_name_what_does_it_now() -> None:
    p = flow.placement("cpu", range(2))
    lie = flow.layout(p, "B", (4,))
    with pytest.raises(flow.SbpError, match=r"flow\.boxing\.between\(src, dst\)"):
        flow.find_plan(lie, lie)  # type: ignore[arg-type]
    report = flow.Plan.read("grid cpu (data=2)").check(nn.Linear(4, 4), torch.zeros(2, 4)).report
    calls = flow.explain(torch.relu, flow.tensor(torch.zeros(4), placement=p, sbp=flow.B))
    for said in (report, calls):
        with pytest.raises(flow.SbpflowError, match=r"\.save\('said.html'\)"):
            said.html("said.html")  # type: ignore[arg-type]


def test_a_plan_that_is_called_names_what_plans_for_arguments() -> None:
    """`step.plan(x)` planned once, and `step.plan` was its text; the one is `step.plan_for(x)` now."""
    step = flow.compile(nn.Linear(4, 4), plan="grid cpu (data=2)")
    with pytest.raises(flow.SbpflowError, match=r"step\.plan_for\(\*arguments\)"):
        step.plan(torch.zeros(2, 4))  # type: ignore[operator]
    assert "data=2" in str(step.plan_for(torch.zeros(2, 4)).plan)


@pytest.mark.parametrize("path", ["shown.svg", Path("shown.svg")], ids=["text", "path"])
def test_a_preview_and_a_timeline_with_a_path_name_what_draws(path: Any, tmp_path: Path) -> None:
    """`show(4, 8, path)` wrote the picture once; these ended in Python's own words on < and *."""
    schedule = flow.actors.Schedule("mine", act="p-s+1")
    shows: tuple[Callable[[], object], ...] = (
        lambda: schedule.show(path),
        lambda: schedule.show(4, path),
        lambda: schedule.show(4, 8, path),
    )
    for show in shows:
        with pytest.raises(flow.SbpflowError, match=r"writes nothing\n  \.show\(.*\)\.draw\('shown.svg'\)"):
            show()
    assert schedule.show(4, 8).draw(tmp_path / path).exists()
    with pytest.raises(flow.SbpflowError, match=r"\.draw\(path\) writes the picture"):
        Timeline.text(object.__new__(Timeline), path)
