"""Layers of a pipeline are cut where the step is shortest, whatever the links and devices of its stages are."""

import copy
import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.explanations.step_report import explained
from sbpflow.nn.graph.choose.stage_work import NEAR, LayerCost, StageWork, shape_on
from sbpflow.nn.graph.step import Step
from sbpflow.nn.plan.check import planned_step
from sbpflow.placement import Cluster, Device, Level, RankDevice, RankLink

QUICK = Device("quick", {"float32": 4e12}, 1e10, 1e12)
SLOW = Device("slow", {"float32": 1.5e12}, 1e10, 0.6e12)
MICRO_BATCHES = 8


class Layer(nn.Module):
    def __init__(self, taken: int, made: int) -> None:
        super().__init__()
        self.inner = nn.Linear(taken, made)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x).relu()
        return y


class Net(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


class Case:
    """Six layers of unequal sizes on stages of unequal devices, joined by unequal links."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.stages = (4, 4, 3, 2)[seed % 4]
        self.schedule = draw.choice(["1f1b", "gpipe", "zb_h1"])
        self.widths = [draw.choice([64, 256, 512, 1024]) for _ in range(7)]
        links = [RankLink((n, n + 1), 2e-6, draw.choice([1e9, 4e9, 2e10, 1e11])) for n in range(self.stages - 1)]
        slow = tuple(n for n in range(self.stages) if draw.random() < 0.35)
        devices = (RankDevice(slow, SLOW),) if slow else ()
        self.cluster = Cluster("unequal", (Level("net", 64, 1e-6, 1e11),), QUICK, tuple(links), devices)
        with torch.device("meta"):
            self.model, self.x = Net(self.widths), torch.empty(1024, self.widths[0])

    def found(self) -> Step:
        """As it is cut by cost."""
        pipe = f"pipe layers over pipe by {self.schedule}, {MICRO_BATCHES} micro-batches"
        plan, optimizer = (
            flow.Plan.read(f"grid (pipe={self.stages})\n{pipe}"),
            torch.optim.AdamW(self.model.parameters()),
        )
        return planned_step(plan, self.model, self.x, loss_fn=loss_fn, optimizer=optimizer)

    def cut(self, inner: tuple[int, ...]) -> Step:
        """With runs that end there."""
        model = copy.deepcopy(self.model)
        for number, (first, end) in enumerate(pairwise([0, *inner, 6])):
            flow.nn.place(list(model.layers)[first:end], flow.placement("cpu", [number]))
        graph = flow.compile(
            model, loss_fn, torch.optim.AdamW(model.parameters()), schedule=self.schedule, micro_batches=MICRO_BATCHES
        )
        return graph.step_for(self.x)


def seconds(step: Step) -> float:
    return explained(step).predicted or 0.0


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(40))
def test_the_cut_that_is_found_is_about_the_best_of_all(seed: int) -> None:
    case = Case(seed)
    with flow.use_cluster(case.cluster):
        every = [seconds(case.cut(inner)) for inner in combinations(range(1, 6), case.stages - 1)]
        assert (1 - 1e-6) * min(every) <= seconds(case.found()) <= (1 + NEAR) * min(every)


def test_a_slow_link_is_where_little_is_sent_and_a_slow_device_has_few_layers() -> None:
    case = Case(0)
    case.stages, case.schedule = 2, "1f1b"
    with torch.device("meta"):
        case.model, case.x = Net([256, 256, 256, 16, 256, 256, 256]), torch.empty(1024, 256)
    level = (Level("net", 64, 1e-6, 1e11),)

    def runs(*more: tuple[RankLink, ...] | tuple[RankDevice, ...]) -> str:
        with flow.use_cluster(Cluster("two", level, QUICK, *more)):  # type: ignore[arg-type]  # as they stand there
            return explained(case.found()).cut.partition(" layers")[0]

    slow = Device("slow", {"float32": 0.8e12}, 1e10, 0.2e12)
    assert runs((RankLink((0, 1), 1e-6, 1e9),)) == "3 | 3"
    assert runs((), (RankDevice((0,), slow),)) == "1 | 5"
    assert runs((), (RankDevice((1,), slow),)) == "5 | 1"


def test_what_no_schedule_has_goes_by_the_formula() -> None:
    a, b = flow.placement("cpu", [0]), flow.placement("cpu", [1])
    one, both = flow.actors.published("1f1b"), flow.actors.published("zb_v")
    assert shape_on(one, [a, b], 4) is not None
    assert shape_on(flow.actors.published("interleaved"), [a, b, a, b], 4) is not None
    assert shape_on(one, [a, b, b], 4) is not None
    assert shape_on(both, [a, b, b], 4) is None
    assert shape_on(flow.actors.Schedule("pair", table=("F0 F1 B0 B1", "F0 B0 F1 B1")), [a, b], 4) is None
    each = [[LayerCost(1.0, 1.0, 1.0, 0.5, 2.0)] * 4] * 3
    work = StageWork(each, [a, b, b], both, 10, True)
    assert work.seconds([2, 3, 4]) == work.quick([2, 3, 4]) == 10 * 6 + 6 + 2 * 1.0 + 4
    assert work.best([1, 2, 4]) == [2, 3, 4]


def test_cuts_whose_busiest_stage_takes_longer_than_a_step_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[Sequence[int]] = []
    simulate = StageWork.seconds

    def counted(self: StageWork, ends: Sequence[int]) -> float:
        simulated.append(ends)
        return simulate(self, ends)

    monkeypatch.setattr(StageWork, "seconds", counted)
    a, b = flow.placement("cpu", [0]), flow.placement("cpu", [1])
    work = StageWork([[LayerCost(1.0, 1.0, 1.0)] * 8] * 2, [a, b], flow.actors.published("1f1b"), 32, True)
    assert work.best([3, 8]) == [4, 8]
    assert simulated == [[3, 8], [4, 8]]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "interleaved"])
def test_two_towers_are_cut_as_no_other_two_cuts_are_better(schedule: str) -> None:
    """Four and five layers, each list on both stages; a list that is held stays as it is."""
    draw = random.Random(schedule)
    a, b = flow.placement("cpu", [0]), flow.placement("cpu", [1])
    places = [a, b, b, a] if schedule == "zb_v" else [a, b, a, b]
    layers = [LayerCost(x := draw.uniform(1, 9), x, x, draw.uniform(0, 1)) for _ in range(9)]
    work = StageWork([layers] * 4, places, flow.actors.published(schedule), 6, True, [(4, 2), (5, 2)])
    every = [[i, 4, j, 9] for i in range(1, 4) for j in range(5, 9)]
    assert work.seconds(work.best([2, 4, 6, 9])) == min(map(work.seconds, every))
    assert all(work.at_least(ends) < work.seconds(ends) for ends in every)
    assert work.best([1, 4, 6, 9], held=[0])[:2] == [1, 4]
    assert work.seconds(work.best([1, 4, 6, 9], held=[0])) == min(map(work.seconds, every[:4]))


def test_a_good_cut_stays_where_another_is_hardly_quicker_and_no_stage_has_less_to_do() -> None:
    """Of layers in a vee both stages have as many, whether their runs are alike or not."""
    a, b = flow.placement("cpu", [0]), flow.placement("cpu", [1])
    first, last = LayerCost(1.06, 1.08, 1.18), LayerCost(1.36, 1.32, 1.1)
    layers = [first, *([LayerCost(1.0, 1.0, 1.0)] * 6), last]
    work = StageWork([layers] * 4, [a, b, b, a], flow.actors.published("zb_v"), 64, True)
    even, uneven = [2, 4, 6, 8], [3, 5, 7, 8]
    assert work.busy(even) == pytest.approx(work.busy(uneven))
    assert 0.995 < work.seconds(uneven) / work.seconds(even) < 1
    assert work.best(even) == even
    plain = StageWork([[LayerCost(1.001, 1.001, 1.001), *layers[1:4]]] * 2, [a, b], work.schedule, 64, True)
    assert plain.best([1, 4]) == [2, 4]
