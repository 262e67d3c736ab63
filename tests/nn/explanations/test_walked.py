"""Details for the page of a step: candidates, memory and schedules agree with what its report says of them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.boxing.graph.report.page_data import page_data
from sbpflow.boxing.graph.report.report import Report
from sbpflow.nn.explanations.step_report import explained
from sbpflow.nn.explanations.step_timeline import timeline
from sbpflow.nn.graph.compiled import CompiledGraph
from sbpflow.nn.graph.run.program import Program
from sbpflow.nn.plan.check import planned_step, stepped
from sbpflow.nn.plan.commands.model_source import model_called
from sbpflow.nn.plan.plan import Plan
from tests.boxing.graph.report.walking import opened
from tests.ranks import Ranks

LINE = flow.placement("cpu:[0-1]")
X = torch.ones(16, 32)
LAYERS = 32


class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def step_of(model: nn.Module, **how: Any) -> CompiledGraph[Any, ..., Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    return flow.compile(model, lambda model, x: model(x).square().mean(), optimizer, **how)


def report_of(plan: str) -> Report:
    return stepped(Plan.read(plan), Net(), torch.empty(16, 32))[1].report


PLANS = {
    "straight": "grid (data=2, tensor=2)\n**: data=S(0)\n",
    "pipeline": "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 4 micro-batches\n",
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_candidates_agree_with_costs_and_runners_up(plan: str) -> None:
    report = report_of(plan)
    walked, priced = report.walk(), [cost for cost in report.costs if cost.runner_up]
    assert priced
    for cost in report.costs:
        found = walked.candidates(str(cost.of))
        assert found is not None
        assert found.rows[found.chosen].own == pytest.approx(cost.seconds, abs=1e-12)
        others = {round(found.more(k), 12) for k in range(len(found.rows)) if k != found.chosen}
        assert not cost.runner_up or min(others) == pytest.approx(cost.extra, abs=1e-11)
    assert walked.candidates("no such value") is None


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_course_of_memory_has_the_peak_of_the_report(plan: str) -> None:
    report = report_of(plan)
    course, memory = report.walk().memory, report.memory
    assert course is not None
    assert memory is not None
    assert memory.ranks[course.rank].total == memory.fullest == course.most
    assert course.marks[0].gradients == 0
    assert course.marks[-1].gradients > 0


def test_a_simulated_schedule_takes_as_long_as_the_course_says() -> None:
    report = report_of(PLANS["pipeline"])
    walked, course = report.walk(), report.course
    assert course is not None
    (simulated,) = walked.schedules  # nothing has run
    assert max(task.end for task in simulated.tasks) == pytest.approx(course.seconds - course.once)
    assert [task.kind for task in simulated.tasks].count("F") == 2 * 4
    made = {name for values in walked.chunks for name in values}
    assert made >= {str(cost.of) for cost in report.costs}


def test_a_straight_step_has_a_simulated_schedule_of_computing_and_moves() -> None:
    report = report_of(PLANS["straight"])
    walked = report.walk()
    (simulated,) = walked.schedules
    assert {task.queue for task in simulated.tasks} == {"computing", "moves"}
    computing = [task for task in simulated.tasks if task.queue == "computing"]
    assert {"F", "B", "U"} == {task.kind for task in computing}
    assert report.compute is not None
    assert sum(task.end - task.start for task in computing) == pytest.approx(report.compute + report.update)
    for queue in ("computing", "moves"):
        tasks = [task for task in simulated.tasks if task.queue == queue]
        assert all(one.end <= other.start + 1e-12 for one, other in pairwise(tasks))
    made = {name for task in computing for chunk in task.chunks for name in walked.chunks[chunk]}
    assert made == {str(cost.of) for cost in report.costs}
    assert "no times of its own" in simulated.note


def test_hidden_seconds_of_moves_are_those_of_the_step() -> None:
    for plan in PLANS.values():
        report = report_of(plan)
        assert report.hidden == pytest.approx(sum(row.hidden * row.count for row in report.moves), abs=1e-12)
        assert all(0 <= row.hidden <= row.seconds + 1e-12 for row in report.moves)


def schedules_of_ranks() -> list[list[tuple[str, int, str]]]:
    """Schedules on the pages of a rank: before and after all ranks were asked for the timeline."""
    step = step_of(Net(), placement=LINE, micro_batches=2, schedule="1f1b")
    step(X)
    found = []
    for _ in range(2):
        schedules = explained(step.planned).walk().schedules
        found.append([(each.name, len(each.tasks), each.note) for each in schedules])
        pieces = step.planned.plan.pieces
        assert pieces is not None
        timeline(pieces.program)  # as step.timeline() does
    return found


def test_under_several_ranks_a_page_has_what_its_rank_knows(ranks4: Ranks) -> None:
    first, second, *_ = ranks4(schedules_of_ranks)
    for rank, (before, after) in enumerate((first, second)):
        assert before[1][0] == f"real, of rank {rank} alone"
        assert "step.timeline()" in before[1][2]
        assert before[1][1] > 0
        assert after[1][0] == ("real" if rank == 0 else "real, of rank 1 alone")
    assert first[1][1][1] > first[0][1][1]  # with the tasks of the other


def test_a_step_that_ran_has_its_real_schedule_beside_the_simulated_one() -> None:
    step = step_of(Net(), placement=LINE, micro_batches=2, schedule="1f1b")
    step(X)
    simulated, real = explained(step.planned).walk().schedules
    assert (simulated.name, real.name) == ("simulated", "real")
    tasks = [[(task.name, task.kind) for task in each.tasks if task.kind in "FB"] for each in (simulated, real)]
    assert sorted(tasks[0]) == sorted(tasks[1])
    assert min(task.start for task in real.tasks) == 0.0


def test_a_page_is_told_before_anything_runs_and_changes_no_report() -> None:
    step = planned_step(Plan.read(PLANS["straight"]), Net(), torch.empty(16, 32))
    report = explained(step)
    before = report.dict()
    assert json.loads(json.dumps(page_data(report), allow_nan=False))["nodes"]
    assert report.dict() == before


def test_the_page_of_a_llama_of_32_layers_is_small_and_has_them_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    how = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    config = transformers.LlamaConfig(num_hidden_layers=LAYERS, architectures=["LlamaForCausalLM"], **how)
    config.save_pretrained(tmp_path)
    of = model_called(str(tmp_path / "config.json"), 8, 32)
    plan = Plan.read("grid (data=2, tensor=2)\n**: data=S(0)\n")
    report = stepped(plan, of.model, of.batch, loss_fn=of.loss_fn)[1].report
    orders, scheduled = [], Program._scheduled

    def counted(self: Program, *args: Any) -> Any:
        orders.append(self)
        return scheduled(self, *args)

    monkeypatch.setattr(Program, "_scheduled", counted)
    page = report.save(tmp_path / "step.html")
    assert len(orders) < 5  # once a move, of which there are hundreds, would take a minute
    assert page.stat().st_size < 2_000_000
    groups = page_data(report)["groups"]
    layers = [times for _, path, *_, times in groups if path.rpartition(".")[0] == "model.layers"]
    assert sum(layers) == LAYERS
    assert len(layers) < 6
    with opened(page) as tab:
        assert tab.locator(".box").count() < 40
        tab.keyboard.press("/")
        tab.keyboard.type("q_proj linear")
        tab.keyboard.press("Enter")
        assert "q_proj: linear" in tab.locator(".panel h2").inner_text()
