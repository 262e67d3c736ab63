"""A pipelined step is said to take what its schedule takes with the costs of its chunks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.actors import Costs, published
from sbpflow.nn.plan.check import planned_step, priced_by
from sbpflow.placement.errors import SbpError

WIDTH, SAMPLES = 256, 4096


def model(*widths: int) -> nn.Sequential:
    """A layer for each, that so many are hidden in."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, n), nn.ReLU(), nn.Linear(n, WIDTH)) for n in widths))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def planned(layers: nn.Sequential, stages: int, schedule: str, m: int = 4) -> flow.nn.Graph:
    flow.nn.pipeline(layers, [flow.placement("cpu", [rank]) for rank in range(stages)], schedule)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    step = flow.compile(layers, loss_fn, optimizer, micro_batches=m, schedule=schedule)
    return step.plan_for(torch.zeros(SAMPLES, WIDTH))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("1f1b", 2), ("gpipe", 3), ("zb_h1", 4), ("interleaved", 2), ("zb_v", 2), ("chimera", 2), ("pipedream", 2)],
)
def test_explain_of_a_pipelined_step_is_of_the_step_and_not_of_one_micro_batch(schedule: str, stages: int) -> None:
    step = planned(model(2048, 256, 256, 1024), stages, schedule)
    report, costs = step.explain(), step.costs()
    drawn = published(schedule).show(stages, 4, v=max(1, len(costs) // stages), costs=costs)
    assert report.predicted is not None
    assert report.course is not None
    assert drawn.end < report.predicted <= (drawn.end + report.update) * (1 + 1e-9)  # stages update beside each other
    assert report.predicted - drawn.end > 0.9 * report.update / stages
    assert report.course.bubble == pytest.approx(drawn.bubble)
    assert sum(busy for _, busy in report.course.stages) == pytest.approx(
        sum(map(drawn.run.busy, drawn.run.network.queues))
    )
    assert f"4 micro-batches under {schedule}, bubble {drawn.bubble:.1%}" in str(report)
    assert report.dict()["time"]["predicted"] == report.predicted


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_the_costs_of_all_chunks_are_those_that_signatures_were_chosen_by(schedule: str) -> None:
    step = planned(model(2048, 256, 256, 1024), 2, schedule)
    costs = step.costs()
    assert sum(c.forward + c.backward + c.weight for c in costs) == pytest.approx(step.explain().compute)
    assert all(c.hop > 0 for c in costs[:-1])
    assert costs[0].forward > 1.5 * costs[-1].forward or schedule != "interleaved"  # 2048 against 1024 hidden
    ratios = [(c.backward + c.weight) / c.forward for c in costs]
    assert 1.4 < ratios[0] < 1.6  # a layer of samples, which want no gradient, and one like the others
    assert ratios[1:] == pytest.approx([2.0] * (len(costs) - 1), rel=0.05)


def test_a_stage_of_several_ranks_pays_for_its_own_moves_and_for_gradients_once() -> None:
    layers = model(256, 256)
    pair, one = flow.placement("cpu", [0, 1]), flow.placement("cpu", [2])
    flow.nn.place(layers[0], pair)
    flow.nn.place(layers[1], one)
    flow.nn.shard(layers, {"0.*": B})
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    step = flow.compile(layers, loss_fn, optimizer, micro_batches=4)
    step.plan_for(flow.tensor(torch.zeros(SAMPLES, WIDTH), placement=pair, sbp=S(0)))
    report, costs = step.explain(), step.costs()
    drawn = published("1f1b").show(2, 4, costs=costs)
    late = ("backward", "update")
    ends = [row for row in report.moves if row.direction in late and row.src.placement == pair and not row.free]
    assert ends
    assert report.predicted is not None
    assert report.predicted > drawn.end  # the gradients of weights are brought together behind all micro-batches
    assert report.predicted < drawn.end + report.update + 2 * sum(
        row.spent for row in ends
    )  # there parameter by parameter


def test_costs_are_for_trying_schedules() -> None:
    costs = planned(model(1024, 1024, 1024, 1024), 4, "1f1b", 8).costs()
    times = {name: published(name).show(4, 8, costs=costs).end for name in ("gpipe", "1f1b", "zb_h1", "chimera")}
    assert min(times, key=lambda name: times[name]) in ("zb_h1", "chimera")
    assert all(isinstance(cost, Costs) for cost in costs)
    alone = flow.compile(model(8), placement=flow.placement("cpu", [0])).plan_for(torch.zeros(2, WIDTH))
    with pytest.raises(SbpError, match="runs as one function, without chunks"):
        alone.costs()


def test_an_inference_is_told_without_backward() -> None:
    layers = model(64, 64)
    flow.nn.pipeline(layers, [flow.placement("cpu", [rank]) for rank in range(2)])
    with torch.no_grad():
        step = flow.compile(layers, micro_batches=4).plan_for(torch.zeros(SAMPLES, WIDTH))
    costs, report = step.costs(), step.explain()
    assert [(c.backward, c.weight) for c in costs] == [(0, 0)] * 2
    assert report.predicted == pytest.approx(costs[0].forward + costs[0].hop + 4 * costs[1].forward, rel=0.1)


def test_a_task_ends_no_sooner_than_its_copies_to_the_host() -> None:
    """A device of slow links to its host: seconds of both ways by the bytes that are stowed of each micro-batch."""
    plain, m = flow.cluster("h100x8"), 4
    bandwidth = 1e6
    slow = replace(plain, device=replace(plain.device, host_bandwidth=bandwidth))
    with torch.device("meta"):
        layers, x = model(256, 256), torch.empty(SAMPLES, WIDTH)
    grid = f"grid cuda (pipe=2)\npipe * over pipe by 1f1b, {m} micro-batches"
    found = [
        flow.Plan.read(text).check(layers, x, loss_fn=loss_fn, cluster=slow)
        for text in (grid, f"{grid}\noffload saved * to cpu")
    ]
    with priced_by(slow):
        step = planned_step(flow.Plan.read(f"{grid}\noffload saved * to cpu"), layers, x, loss_fn=loss_fn)
        stowed = [of.stowed[0] / bandwidth for _, of in sorted(step.memory().items())]  # of a stage each
        costs = step.plan.pieces.costs() if step.plan.pieces else ()
    assert min(stowed) > 0
    assert [one.forward for one in costs] == pytest.approx(stowed)
    assert [one.backward + one.weight for one in costs] == pytest.approx(stowed)
    assert found[1].seconds >= found[0].seconds + 2 * (m - 1) * max(stowed)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_no_task_is_shorter_than_the_host_takes_to_launch_its_kernels(schedule: str) -> None:
    """Each layer has a product, an activation and a product, and the last a loss in one kernel; the first needs no
    gradient of its samples."""
    preset = flow.cluster("h100x8")
    fitted = preset.device.fitted
    assert fitted is not None
    host = replace(preset, device=replace(preset.device, fitted=replace(fitted, host=1.0)))
    plan = f"grid cuda (pipe=2)\npipe * over pipe by {schedule}, 4 micro-batches"
    with priced_by(host):
        step = planned_step(flow.Plan.read(plan), model(256, 256), torch.zeros(SAMPLES, WIDTH), loss_fn=loss_fn)
        costs = step.plan.pieces.costs() if step.plan.pieces else ()
    assert [c.forward for c in costs] == pytest.approx([3, 4])
    assert [c.backward + c.weight for c in costs] == pytest.approx([6, 8])
    assert [c.weight for c in costs] == pytest.approx([3.5, 3])  # half of what a layer's backward launches for both
