"""The planner against every plan of a small space: 4 layers on 4 ranks, in a line or two by two, 8 ways for each layer,
4,096 in all."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import compress, product
from math import inf
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.boxing.graph.buckets import bucketed
from sbpflow.nn.graph.memory.account import account
from sbpflow.nn.graph.step import Step
from sbpflow.nn.plan.assignment import assignment
from sbpflow.nn.plan.check import planned_step
from sbpflow.nn.plan.grids import grids_of
from sbpflow.nn.plan.notes import kept_notes, noted
from sbpflow.nn.plan.search.planner import FoundPlan
from sbpflow.placement.errors import SbpError

LINE, TWO_BY_TWO = "grid (data=4)", "grid (data=2, tensor=2)"
RESTS = {  # by grid
    LINE: {
        "whole": "",
        "gradients in pieces": "{{grads,states}} layers.{n}.**: data=S(0)\n",
        "rows": "layers.{n}.**: data=S(0)\n",
        "tensor parallel": "layers.{n}.up.*: data=S(0)\nlayers.{n}.down.*: data=S(1)\n",
    },
    TWO_BY_TWO: {
        "whole": "",
        "rows": "layers.{n}.**: data=S(0)\n",
        "tensor parallel": "layers.{n}.up.*: tensor=S(0)\nlayers.{n}.down.*: tensor=S(1)\n",
        "tensor parallel, rows": "layers.{n}.up.*: data=S(1), tensor=S(0)\nlayers.{n}.down.*: data=S(0), tensor=S(1)\n",
    },
}
LIMITS = [None, 0.9, 0.75, 0.6]  # of what the cheapest plan takes
NEAR = 1.03  # what the planner finds within a limit takes no more than so many times the seconds of the best that fits
SPACES = {  # by grid, widths of layers, and rows: what is computed, or what rests, takes most
    "equal": (LINE, (256,) * 4, 512),
    "equal, many rows": (LINE, (256,) * 4, 4096),
    "unequal": (LINE, (64, 512, 128, 256), 512),
    "unequal, many rows": (LINE, (512, 64, 256, 128), 4096),
    "unequal, many rows, two by two": (TWO_BY_TWO, (512, 64, 256, 128), 4096),
}
Combination = tuple[tuple[str, bool], ...]  # by layer how it rests, and whether it is run again


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, width, bias=False), nn.Linear(width, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).relu())
        return y


class Net(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


class Cost(NamedTuple):
    seconds: float
    memory: int


class Space:
    """A model's plans: what each costs, and what the planner finds within each limit."""

    def __init__(self, name: str) -> None:
        self.grid, widths, rows = SPACES[name]
        with torch.device("meta"):
            self.model, self.x = Net(widths), torch.empty(rows, 64)

    def limit(self, share: float | None) -> float:
        return inf if share is None else int(share * self.found(None).checked.memory)

    def answers(self) -> dict[float, float]:
        """By limit the seconds that are found; of one that nothing meets there are none."""
        found: dict[float, float] = {}
        for share in LIMITS:
            try:
                found[self.limit(share)] = self.found(share).checked.seconds
            except SbpError:
                found[self.limit(share)] = inf
        return found

    @cache  # noqa: B019  # as long as the session
    def found(self, share: float | None) -> FoundPlan:
        limit = None if share is None else self.limit(share)
        return flow.find_plan(self.model, self.x, plan=self.grid, memory=limit, loss_fn=loss_fn)

    def checked(self, ways: Combination) -> Cost:
        """As `check` has it of the text."""
        found = flow.Plan.read(self.text(ways)).check(self.model, self.x, loss_fn=loss_fn)
        return Cost(found.seconds, found.memory)

    def cost(self, ways: Combination) -> Cost:
        """The same by the choice and the account of memory alone, of what was captured once."""
        captured = self.captured(tuple(again for _, again in ways)).plan
        with self.said(tuple((rest, False) for rest, _ in ways)):
            decided = captured.passes.decided(captured.logical, {"0": self.x}, None)
        held = account(bucketed(decided.graph), captured.passes.states)
        return Cost(decided.solution.cost, max(rank.total for rank in held.values()))

    @cache  # noqa: B019
    def captured(self, again: tuple[bool, ...]) -> Step:
        plan = flow.Plan.read(self.text(tuple(("whole", each) for each in again)))
        return planned_step(plan, self.model, self.x, loss_fn=loss_fn)

    @contextmanager
    def said(self, ways: Combination) -> Iterator[None]:
        plan = flow.Plan.read(self.text(ways))
        with kept_notes(self.model):
            noted(assignment(plan, self.model, grids_of(plan)), self.model)
            yield

    def text(self, ways: Combination) -> str:
        rests = "".join(RESTS[self.grid][rest].format(n=n) for n, (rest, _) in enumerate(ways))
        again = "".join(f"recompute layers.{n}\n" for n, (_, again) in enumerate(ways) if again)
        return f"{self.grid}\n{rests}{again}"

    def drawn(self, seed: str, many: int) -> list[Combination]:
        draw, ways = random.Random(seed), [*product(RESTS[self.grid], (False, True))]
        return [tuple(draw.choice(ways) for _ in range(4)) for _ in range(many)]


@cache
def space(name: str) -> Space:
    return Space(name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", range(10))
@pytest.mark.parametrize("name", SPACES)
def test_a_combination_costs_what_its_text_does(name: str, at: int) -> None:
    of = space(name)
    (ways,) = of.drawn(f"{name} {at}", 1)
    found, checked = of.cost(ways), of.checked(ways)
    assert found.seconds == pytest.approx(checked.seconds, rel=1e-9)
    assert found.memory == checked.memory


def test_no_combination_of_a_sample_that_fits_takes_less() -> None:
    of = space("equal, many rows")
    limit, found = of.limit(0.75), of.found(0.75)
    assert found.checked.memory <= limit
    costs = [of.cost(ways) for ways in of.drawn("sample", 8)]
    assert all(found.checked.seconds <= cost.seconds * NEAR for cost in costs if cost.memory <= limit)
    assert 0 < found.gap < 0.2
    assert f"{found.gap:.1%} less" in found.table()
    assert of.found(None).gap == pytest.approx(0)
    assert "no plan takes less" in of.found(None).table()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "first"), [(name, first) for name, (grid, *_) in SPACES.items() for first in RESTS[grid]]
)
def test_the_planner_is_as_good_as_all_combinations(name: str, first: str) -> None:
    of = space(name)
    answers = of.answers()
    for ways, cost in priced(of, first, max(answers.values())):
        for limit, seconds in answers.items():
            assert cost.memory > limit or seconds <= cost.seconds * NEAR, ways


def priced(of: Space, first: str, most: float) -> Iterator[tuple[Combination, Cost]]:
    """All combinations that may take less than so many seconds: to run a layer again takes the least where its rows are
    split over all ranks, and what else it moves again comes on top."""
    plain = of.cost((("whole", False),) * 4).seconds
    each = [of.cost(tuple(("whole", n == at) for n in range(4))).seconds - plain for at in range(4)]
    for rests in product([first], *[RESTS[of.grid]] * 3):
        least = 0.0
        for again in sorted(product((False, True), repeat=4), key=sum):
            if least + sum(compress(each, again)) < most:
                ways = tuple(zip(rests, again, strict=True))
                yield ways, (cost := of.cost(ways))
                least = least or cost.seconds
