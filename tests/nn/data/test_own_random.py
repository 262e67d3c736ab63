"""A dataset draws from a state of its own; the program's numbers are as they would be without it."""

import random

import numpy as np
import torch

from sbpflow.nn.data.own_random import OwnRandom, drawn, seeded


def numbers() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_numbers_go_on_from_block_to_block_beside_those_of_the_program() -> None:
    seeded(7)
    wanted = numbers(), numbers()
    torch.manual_seed(1)
    first = numbers()[0]
    torch.manual_seed(1)
    own = OwnRandom(7)
    with own():
        mine = [numbers()]
    assert numbers()[0] == first
    with own():
        mine.append(numbers())
    assert tuple(mine) == wanted


def test_it_is_told_whether_a_block_drew() -> None:
    for draw in (lambda: torch.rand(()), random.random, np.random.rand, lambda: 0):
        before = torch.get_rng_state(), random.getstate()
        with drawn() as told:
            draw()
        assert told == [draw() != 0]
        with drawn():
            pass
        assert before[0].shape == torch.get_rng_state().shape
