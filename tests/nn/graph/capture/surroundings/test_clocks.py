"""Questions to clocks and to the system's chance in a capture are told with their line, as all steps have one."""

import datetime
import logging
import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
from itertools import count
from time import perf_counter as since
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow

OWN, NUMPY, NUMBERS = random.Random(3), np.random.default_rng(3), count()


class Asking(nn.Linear):
    """A layer that takes a number from elsewhere."""

    def __init__(self, number: Callable[[Any], float]) -> None:
        super().__init__(3, 3)
        self.number, self.own, self.steps = number, random.Random(4), iter(range(9))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.number(self)


def planned(*numbers: Callable[[Any], float], ranks: int = 2) -> flow.nn.Graph:
    model = nn.Sequential(*map(Asking, numbers))
    return flow.compile(model, placement=flow.placement("cpu", range(ranks))).plan_for(torch.ones(2, 3))


ASKED: dict[str, tuple[Callable[[Any], float], str]] = {
    "time": (lambda _: time.time(), "time.time()"),
    "by its own name": (lambda _: since(), "time.perf_counter()"),
    "now": (lambda _: float(datetime.datetime.now().microsecond), "datetime.now()"),
    "urandom": (lambda _: float(os.urandom(1)[0]), "chance of the system"),
    "uuid": (lambda _: float(uuid.uuid4().int % 9), "chance of the system"),
    "secrets": (lambda _: float(secrets.randbelow(9)), "chance of the system"),
    "the system's": (lambda _: random.SystemRandom().random(), "chance of the system"),
    "without a seed": (lambda _: random.Random().random(), "chance of the system"),
    "numpy's without a seed": (lambda _: float(np.random.default_rng().random()), "chance of the system"),
}
DRAWN: dict[str, Callable[[Any], float]] = {
    "a generator of the file": lambda _: OWN.random(),
    "of numpy": lambda _: float(NUMPY.random()),
    "of the layer": lambda layer: float(layer.own.randint(1, 9)),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_clock_that_is_asked_is_told_with_the_line(name: str) -> None:
    number, what = ASKED[name]
    with pytest.warns(
        UserWarning, match=rf"{what[:-2]}.* is asked at \S*test_clocks.py:\d+, while the step is captured"
    ):
        planned(number)


@pytest.mark.parametrize("name", DRAWN)
def test_a_generator_that_is_drawn_from_is_told_with_the_line_and_is_where_it_was(name: str) -> None:
    before = OWN.getstate(), NUMPY.bit_generator.state
    with pytest.warns(UserWarning, match=r"Python or numpy are drawn at \S*test_clocks.py:\d+, while the step"):
        planned(DRAWN[name])
    assert (OWN.getstate(), NUMPY.bit_generator.state) == before


@pytest.mark.parametrize("number", [lambda _: next(NUMBERS), lambda layer: next(layer.steps)], ids=["file", "layer"])
def test_an_iterator_that_goes_on_is_told_of(number: Callable[[Any], float]) -> None:
    with pytest.warns(UserWarning, match="an iterator .* goes on while the step is captured"):
        planned(number)


def test_layers_that_draw_alike_draw_each_their_own() -> None:
    layers = [lambda _: float(NUMPY.integers(1 << 30))] * 3
    with pytest.warns(UserWarning, match="are drawn at"):
        step = planned(*layers)
    numbers = [op.args[1] for op in step.planned.plan.logical.ops if "mul" in str(op.op)]
    assert len(set(numbers)) == 3


def test_logs_and_generators_with_a_seed_are_not_told_of() -> None:
    def number(_: Any) -> float:
        logging.getLogger("tests").error("a step")
        return random.Random(3).random() + float(np.random.default_rng(3).random())

    planned(number)
