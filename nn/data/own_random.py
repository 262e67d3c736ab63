"""Random numbers of a dataset: drawn from a state of their own, so that a model's numbers do not depend on loading.

Ranks load different samples; if these drew from the numbers of the program, ranks would go apart.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .order import mixed

__all__ = ["OwnRandom", "drawn", "seeded"]


def seeded(*numbers: int) -> None:
    """Have torch, numpy and Python draw what follows from these numbers."""
    seed = mixed(*numbers)
    torch.default_generator.manual_seed(seed >> 1)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _state() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def _restore(state: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


class OwnRandom:
    """Numbers that begin with a seed and go on from block to block."""

    def __init__(self, *numbers: int) -> None:
        with drawn():
            seeded(*numbers)
            self.state = _state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, random numbers are these; behind it the program's are as they were."""
        with drawn():
            _restore(self.state)
            try:
                yield
            finally:
                self.state = _state()


@contextmanager
def drawn() -> Iterator[list[bool]]:
    """Put the program's random numbers back behind a block; the list tells then whether the block drew some."""
    before, told = _state(), list[bool]()
    try:
        yield told
    finally:
        after = _state()
        same = torch.equal(before[0], after[0]) and before[1] == after[1] and before[2][2] == after[2][2]
        told.append(not (same and bool((before[2][1] == after[2][1]).all())))
        if told[0]:
            _restore(before)
