"""Random numbers that are none of torch go into a step as they were drawn once, which is told with the line."""

import random
from collections.abc import Callable, Iterator
from random import random as drawn

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.graph.capture.surroundings.draws import Draws


class Noisy(nn.Linear):
    def __init__(self, number: Callable[[], float]) -> None:
        super().__init__(3, 3)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.number()


def forward(number: Callable[[], float]) -> flow.nn.Graph:
    return flow.compile(Noisy(number), placement=flow.placement("cpu", range(2)))


DRAWS: dict[str, Callable[[], float]] = {
    "a method": random.random,
    "by its own name": drawn,
    "of Python's code": lambda: random.choice([1.0, 2.0]),
    "numpy": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("number", DRAWS.values(), ids=list(DRAWS))
def test_numbers_that_are_frozen_into_a_step_are_told_with_their_line(number: Callable[[], float]) -> None:
    with pytest.warns(UserWarning, match=r"numpy are drawn at \S*test_draws.py:\d+, while the step is captured"):
        forward(number)(torch.ones(2, 3))


def test_a_step_that_draws_none_is_not_told_of() -> None:
    forward(lambda: 1.0)(torch.ones(2, 3))
    forward(lambda: random.Random(3).random())(torch.ones(2, 3))  # of a seed of its own: the same at each step


def halves() -> Iterator[float]:
    rate = 1000.0
    while True:
        yield rate
        rate = rate / 2


def test_a_generator_goes_on_though_its_next_number_lies_where_the_first_was() -> None:
    """From Python 3.13 on a frame no longer holds the values that somebody has looked at."""
    rates, draws = halves(), Draws()
    next(rates)
    first = id(rates.gi_frame.f_locals["rate"])  # type: ignore[attr-defined]
    draws.follow([rates])
    next(rates)
    at = next((at for at in range(50) if id(next(rates)) == first), None)
    draws.end()
    assert draws.iterators == [rates], at
