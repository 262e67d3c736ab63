"""The parts of an explanation add up: moves in tables to moves in the headline, and these with the rest to the step."""

import re
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.boxing.graph.picture.dot import graph_dot, overview
from sbpflow.boxing.graph.picture.legend import legend_chips
from sbpflow.boxing.graph.picture.paint import paint
from sbpflow.boxing.graph.report.report import Report
from sbpflow.nn.plan.check import Checked
from tests.nn.plan.test_by_hand import Net, loss_fn

DATA = "input 0 <- data=S(0)\ninput 1 <- data=S(0)\n"
TENSOR = "layers.*.up.*: tensor=S(0)\nlayers.*.down.*: tensor=S(1)\n"
WAYS = {
    "data": "",
    "ZeRO-1": "states **: data=S(0)\n",
    "ZeRO-3": "**: data=S(0)\n",
    "tensor": TENSOR,
    "chosen": "{weights,grads,states} **: data=?, tensor=?\n",
}
TIMES = {
    "straight": "",
    **{f"{m} by 1f1b": f"pipe layers over pipe by 1f1b, {m} micro-batches\n" for m in (1, 8)},
}
PLANS = [
    pytest.param(f"grid {kind} (pipe={stages}, data=2, tensor=2)\n{TIMES[time]}{DATA}{WAYS[way]}", id=name)
    for kind, stages, time, way in product(("cpu", "cuda"), (1, 2), TIMES, WAYS)
    if time != "straight" or stages == 1
    for name in [f"{kind}, {stages} stages, {time}, {way}"]
]


def checked(plan: str, model: nn.Module | None = None) -> Checked:
    with torch.device("meta"):
        model = model or Net(2, 64, 256, 512)
    x = torch.zeros(32, 16, dtype=torch.long, device="meta")
    cluster = "cpu" if "grid cpu" in plan else "h100x8"
    return flow.Plan.read(plan).check(model, (x, x), cluster=cluster, loss_fn=loss_fn)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("plan", PLANS)
def test_the_parts_of_a_plan_add_up(plan: str) -> None:
    found = checked(plan)
    report, time = found.report, found.report.dict()["time"]
    assert sum(row.spent for row in report.moves) == pytest.approx(time["moves"] + time["once"])
    assert sum(total.seconds for total in found.moves) == pytest.approx(time["moves"] + time["once"])
    assert sum((row.seconds or 0.0) * row.count for row in report.ops) == pytest.approx(time["compute"])
    m, each = (report.course.micro_batches if report.course else 1), time["compute"] + time["moves"] - time["hidden"]
    assert report.solution is not None
    if report.course is None or len(report.course.stages) == 1:
        assert found.seconds == pytest.approx(m * each + time["update"] + time["once"])
        assert found.seconds == pytest.approx(report.solution.optimum)
    else:
        work = sum(busy for _, busy in report.course.stages)
        end = report.course.seconds - report.course.once
        assert work == pytest.approx((1 - report.course.bubble) * end * len(report.course.stages))
        assert m * time["compute"] * (1 - 1e-9) <= work <= m * each * (1 + 1e-9)
        assert report.course.once <= time["update"] + time["once"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("plan", PLANS)
def test_the_chips_of_a_picture_add_up_to_the_moves_of_the_headline(plan: str) -> None:
    """They showed the seconds of routes, each by itself, beside a table with those of the choice."""
    chips_add_up(checked(plan).report)


@pytest.mark.parametrize("way", WAYS)
def test_a_chip_stands_for_the_moves_of_all_blocks_that_are_alike(way: str) -> None:
    plan = f"grid cuda (pipe=4, data=2, tensor=2)\n{TIMES['8 by 1f1b']}{DATA}{WAYS[way]}"
    with torch.device("meta"):
        model = Net(16, 64, 256, 512)
    chips_add_up(checked(plan, model).report)


def chips_add_up(report: Report) -> None:
    graph, prices, moves = report.graph, report.prices, report.moving + report.once
    with graph.priced():
        legend = legend_chips(graph, prices)
        scenes = [paint(graph, depth, prices=prices) for depth in (None, 1)] + [overview(graph, prices)]
    in_buckets = sum(chip.seconds for chip in legend if chip.direction == "bucket")
    assert sum(chip.seconds for chip in legend) == pytest.approx(moves)
    for scene in scenes:
        parts = [part for node in scene.nodes.values() for part in node.parts]
        assert in_buckets + sum(part.seconds * part.times for part in parts) == pytest.approx(moves)


def test_the_legend_of_a_picture_says_what_is_hidden_as_the_summary_does() -> None:
    report = checked(f"grid cuda (data=2)\n{DATA}").report
    with report.graph.priced():
        text = graph_dot(report.graph, prices=report.prices)
    (said,) = re.findall(r"all: (.*?)\\l", text)
    assert f"moves {said}" in str(report)


def test_what_is_gathered_after_an_update_pays_for_one_exchange() -> None:
    """Each parameter's latency counted by itself: 140 us were told for moves that take 4."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(32)))
    plan = flow.Plan.read("grid cuda (data=4)\ninput 0 <- data=S(0)\nstates **: data=S(0)\n")
    found = plan.check(model, (torch.zeros(8, 8),), cluster="h100x8", loss_fn=lambda m, x: m(x).square().mean())
    with found.report.graph.priced():
        (gathers,) = [row for row in found.report.moves if row.direction == "update"]
        assert gathers.seconds == pytest.approx(gathers.boxing.price.time, rel=0.05)
    assert found.report.update < gathers.seconds


def test_a_gradient_that_does_not_come_back_is_not_paid_for() -> None:
    """A weight that is read detached sends nothing back: the way home of its gradient was in the price all the same."""
    up, down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = up(x)
        made: Tensor = (y + down(y).detach()).square().mean()
        return made

    plan = flow.Plan.read("grid cpu (tensor=2)\n0: tensor=S(0)\n1: tensor=S(0)\n")
    report = plan.check(nn.Sequential(up, down), (torch.zeros(8, 64),), loss_fn=loss).report
    assert sum(row.spent for row in report.moves) == pytest.approx(report.moving)


@pytest.mark.parametrize(
    "times", ["", "pipe 0 over pipe by 1f1b, 2 micro-batches\n"], ids=["straight", "in micro-batches"]
)
def test_updates_of_whole_matrices_are_in_the_headline(times: str) -> None:
    """Muon's gathers were in the table, and in no sum."""
    model = nn.Sequential(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2))))
    muon = torch.optim.Muon(model.parameters())
    plan = flow.Plan.read(f"grid cpu (pipe=1, data=2)\n{times}input 0 <- data=S(0)\nstates **: data=S(0)\n")
    report = plan.check(model, (torch.zeros(8, 32),), loss_fn=lambda m, x: m(x).square().mean(), optimizer=muon).report
    assert [row for row in report.moves if row.direction == "update" and row.seconds]
    assert sum(row.spent for row in report.moves) == pytest.approx(report.moving + report.once)
    m, each = (2 if times else 1), (report.compute or 0.0) + (report.exposed or 0.0)
    assert report.predicted == pytest.approx(m * each + report.update + report.once)
