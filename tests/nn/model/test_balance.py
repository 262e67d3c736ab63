"""Layers are cut where the longest run of them is as short as can be, by what a planned step has them take."""

import copy
import pickle
import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.model.annotate import placement_of
from sbpflow.nn.model.balance import balanced
from sbpflow.placement.errors import PlacementError, SbpError
from tests.ranks import Ranks


def by_trying(costs: Sequence[float], parts: int) -> list[int]:
    def key(ends: Sequence[int]) -> tuple[float, float, list[int]]:
        runs = [sum(costs[a:b]) for a, b in pairwise([0, *ends])]
        return max(runs), sum(run * run for run in runs), [-end for end in ends]

    every = ([*ends, len(costs)] for ends in combinations(range(1, len(costs)), parts - 1))
    return min(every, key=key)


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_is_better(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        costs = [draw.choice([0.0, 1.0, 1.0, 2.0, 5.0]) for _ in range(draw.randint(1, 8))]
        parts = draw.randint(1, len(costs))
        assert balanced(costs, parts) == by_trying(costs, parts)


def heavy() -> nn.Sequential:
    """One heavy layer and seven light ones."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, n), nn.Linear(n, 64)) for n in [1024, *[128] * 7]))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def stages_of(many: int = 2) -> list[flow.Placement]:
    return [flow.placement("cpu", [rank]) for rank in range(many)]


def ranks_of(model: nn.Module, many: int = 8) -> list[int]:
    return [placement_of({"": model})[str(n)].flat[0] for n in range(many)]


class Often(nn.Module):
    """A layer that takes more than its weights say."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner, self.times = nn.Linear(64, 64), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.inner(x))
        return x


def deep(first: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Often(times) for times in [first, *[1] * 7]))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_heavy_layer_and_seven_light_ones_are_cut_after_the_heavy_one() -> None:
    """By weights before anything is known: half of the model in each stage, where a cut by count had 73 % in one."""
    model, counted = heavy(), heavy()
    flow.nn.pipeline(model, stages_of())
    assert ranks_of(model) == [0, 1, 1, 1, 1, 1, 1, 1]
    flow.nn.pipeline(counted, stages_of(), costs=[1.0] * 8)
    assert ranks_of(counted) == [0, 0, 0, 0, 1, 1, 1, 1]
    x = torch.randn(4096, 64)
    report, other = (flow.compile(m, loss_fn, sgd(m), micro_batches=16).plan_for(x).explain() for m in (model, counted))
    assert report.course is not None
    assert other.course is not None
    most, more = (max(busy for _, busy in course.stages) for course in (report.course, other.course))
    assert most < 0.74 * more
    assert report.course.bubble < 0.12 < 0.28 < other.course.bubble
    assert "cut in 1 | 7 layers by their weights: stages have 48% | 52% of the computing" in str(report)
    assert report.dict()["cut"] == report.cut
    assert other.cut == ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "runs"),
    [("1f1b", "1 | 7"), ("gpipe", "2 | 6"), ("interleaved", "1 | 2 | 1 | 4"), ("zb_v", "1 | 3 | 3 | 1")],
)
def test_a_planned_step_cuts_layers_by_what_they_take(schedule: str, runs: str) -> None:
    model, counted = deep(), deep()
    flow.nn.pipeline(model, stages_of(), schedule)
    guess = ranks_of(model)
    flow.nn.pipeline(counted, stages_of(), schedule, costs=[1.0] * 8)
    assert ranks_of(counted) == guess  # as weights are alike
    x = torch.randn(1024, 64)
    expected = loss_fn(model, x).item()
    step, other = (
        flow.compile(m, loss_fn, sgd(m), micro_batches=8, schedule=schedule).plan_for(x) for m in (model, counted)
    )
    assert f"cut in {runs} layers by what they take" in str(step.explain())
    assert (step.explain().predicted or 0) < 0.93 * (other.explain().predicted or 0)
    assert ranks_of(model) == guess  # a plan changes nothing
    assert step(x).item() == pytest.approx(expected, rel=1e-5)
    placed = ranks_of(model)
    assert placed != guess
    assert [p.placement.flat[0] for p in model.parameters() if p.ndim == 2] == placed  # type: ignore[attr-defined]
    assert step(x).item() < expected
    assert other(x).item() == pytest.approx(expected, rel=1e-5)
    assert step(x[:512]).item() > 0  # another plan
    assert ranks_of(model) == placed


def test_a_cut_that_was_said_is_never_changed() -> None:
    x = torch.randn(1024, 64)
    for said in ("costs", "place", "one"):
        model = deep()
        if said == "costs":
            flow.nn.pipeline(model, stages_of(), costs=[1.0] * 8)
        else:
            flow.nn.pipeline(model, stages_of())
            flow.nn.place([*model][:4] if said == "place" else model[0], stages_of()[0], chunk=0)
        step = flow.compile(model, loss_fn, sgd(model), micro_batches=8).plan_for(x)
        assert step.explain().cut == ""
        step(x)
        assert ranks_of(model) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_layers_that_are_global_stay_and_the_report_says_what_that_costs() -> None:
    model, x = deep(), torch.randn(1024, 64)
    flow.nn.pipeline(model, stages_of())
    flow.nn.materialise(model)
    step = flow.compile(model, loss_fn, sgd(model), micro_batches=8).plan_for(x)
    cut = "4 | 4 layers where their parameters are: stages have 69% | 31% of the computing"
    assert step.explain().cut == f"{cut}, and would have 48% | 52% if 1 | 7 had been cut before they were global"
    step(x)
    assert ranks_of(model) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_an_eager_pipeline_is_cut_by_weights() -> None:
    model, x = heavy(), torch.randn(8, 64)
    expected = loss_fn(model, x).item()
    flow.nn.pipeline(model, stages_of())
    flow.nn.materialise(model)
    first = flow.tensor(x, placement=stages_of()[0], sbp=flow.B)
    y = model[0](first).to_global(placement=stages_of()[1], sbp=flow.B)
    for layer in [*model][1:]:
        y = layer(y)
    assert y.square().mean().item() == pytest.approx(expected, rel=1e-5)


def test_a_cut_that_costs_more_to_send_than_it_saves_is_not_taken() -> None:
    """Cut by work alone, the first stage would end where an image is largest."""
    layers = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, stride=4, padding=1),
                           nn.Conv2d(32, 64, 3, stride=4, padding=1), nn.Conv2d(64, 128, 3, padding=1))  # fmt: skip
    flow.nn.pipeline(layers, stages_of())
    step = flow.compile(layers, loss_fn, sgd(layers), micro_batches=2).plan_for(torch.zeros(4, 3, 64, 64))
    assert "3 | 1 layers by their weights" in step.explain().cut


def test_what_lies_outside_of_the_layers_counts_for_the_stage_that_it_is_in() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
            self.head = nn.Linear(64, 64 * 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.layers(x))
            return y

    x = torch.zeros(1024, 64)
    for said in ("nothing", "last", "first"):
        model = Net()
        flow.nn.pipeline(model.layers, stages_of())
        if said != "nothing":
            flow.nn.place(model.head, stages_of()[-1 if said == "last" else 0])
        step = flow.compile(model, loss_fn, sgd(model), micro_batches=8).plan_for(x)
        assert f"{'7 | 1' if said != 'first' else '1 | 7'} layers by what they take" in step.explain().cut


def test_copies_of_a_model_are_cut_by_themselves() -> None:
    model, x = deep(), torch.randn(1024, 64)
    flow.nn.pipeline(model, stages_of())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        flow.compile(twin, loss_fn, sgd(twin), micro_batches=8)(x)
        assert ranks_of(twin) == [0, 1, 1, 1, 1, 1, 1, 1]
    assert ranks_of(model) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_layers_whose_weights_are_not_known_yet_are_cut_by_their_number() -> None:
    model = nn.Sequential(nn.LazyLinear(512), *(nn.Linear(512, 512) for _ in range(3)))
    flow.nn.pipeline(model, stages_of())
    assert ranks_of(model, 4) == [0, 0, 1, 1]


def learn() -> list[int]:
    model, x = deep(7), torch.arange(4096 * 64).reshape(4096, 64).remainder(13) / 13
    twin, flat = copy.deepcopy(model), stages_of(4)
    flow.nn.pipeline(model, flat)
    step, alone = flow.compile(model, loss_fn, sgd(model), micro_batches=8), sgd(twin)
    for _ in range(2):
        loss = loss_fn(twin, x)
        torch.autograd.backward(loss)
        alone.step()
        alone.zero_grad()
        assert step(x).item() == pytest.approx(loss.item(), rel=1e-5)
    return ranks_of(model)


def test_ranks_cut_alike_and_learn_as_one_device(ranks4: Ranks) -> None:
    assert ranks4(learn) == [[0, 1, 1, 1, 2, 2, 3, 3]] * 4


def test_a_pipeline_is_cut_by_costs_that_were_asked_for() -> None:
    torch.manual_seed(0)
    model, stages = heavy(), [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
    flow.nn.pipeline(model, stages, costs=[1.0] * 8)
    step = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=4)
    x = torch.randn(4096, 64)
    before = step.plan_for(x).explain()
    costs = step.layer_costs(model)
    assert sum(costs) == pytest.approx(before.compute)
    assert costs[0] > 5 * costs[1]
    flow.nn.pipeline(model, stages, costs=costs)
    after = step.plan_for(x).explain()
    assert [placement_of({"": model})[str(n)] for n in range(8)] == [stages[0]] + [stages[1]] * 7
    assert after.course is not None
    assert before.course is not None
    assert after.course.bubble < before.course.bubble
    assert after.predicted is not None
    assert before.predicted is not None
    assert after.predicted < before.predicted
    expected = loss_fn(model, x).item()
    assert step(x).item() == pytest.approx(expected, rel=1e-5)


def test_costs_that_do_not_fit_the_layers_are_refused() -> None:
    model, stages = heavy(), [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
    for wrong in ([1.0] * 7, [-1.0] * 8, [float("nan")] * 8):
        with pytest.raises(PlacementError, match="of 8 layers\n  give a number of 0 or more for each layer"):
            flow.nn.pipeline(model, stages, costs=wrong)
    flow.nn.pipeline(model, stages)
    step = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=4)
    with pytest.raises(SbpError, match="has no such module: Linear"):
        step.plan_for(torch.randn(8, 64)).layer_costs([nn.Linear(3, 3)])
