"""A training goes by what was changed between its steps, as plain torch does, however many changes there were."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow.sbp.trial import one_thread
from tests.nn.graph.changes import CHANGES, Change
from tests.nn.graph.trainings import WAYS, Training, Way

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5}
LINES = ("changes.py:", "trainings.py:")


@pytest.mark.sampled(30)
@pytest.mark.filterwarnings("ignore:.*is captured and planned anew for the 4th time")
@pytest.mark.parametrize("seed", range(300))
@one_thread()
def test_a_training_is_as_in_torch_whatever_is_changed_between_its_steps(seed: int) -> None:
    draw = Random(seed)
    plain, made = both(seed)
    said: list[str] = []
    with named_lines(said):
        for _ in range(draw.randint(6, 10)):
            for each in draw.sample(CHANGES, draw.choice([0, 1, 1, 2, 3])) if said else ():
                said.append(each.__name__)
                changed(plain, each, made, draw.random())
            said.append("step")
            alike(plain, made, draw, said)


@contextmanager
def named_lines(said: list[str]) -> Iterator[None]:
    """A refusal ends a training, if its error names a line."""
    try:
        yield
    except flow.SbpError as error:
        if not any(line in str(error) for line in LINES):
            error.add_note(f"it names no line, after {said}")
            raise


def both(seed: int) -> tuple[Training, Training]:
    way = list(WAYS.values())[seed % len(WAYS)]
    return Training(seed, Way(), way), Training(seed, way, way)


def changed(plain: Training, change: Change, made: Training, seed: float) -> None:
    change(plain, Random(seed))
    change(made, Random(seed))


def alike(plain: Training, made: Training, draw: Random, said: list[str]) -> None:
    """One step of both, and what they hold behind it."""
    x, y = plain.batch(draw, draw.choice([8, 8, 8, 6, 5]))
    grad, atol = draw.random() < 0.9, TOLERANCES[plain.dtype] if not plain.autocast else 3e-2
    wanted = plain.train(x, y, grad=grad)
    near(made.train(x, y, grad=grad), wanted, atol, f"the loss after {said}")
    found, values = made.values(), plain.values()
    assert found.keys() == values.keys(), said
    for name, value in values.items():
        near(found[name], value, atol, f"{name} after {said}")


def near(found: Tensor, wanted: Tensor, atol: float, said: str) -> None:
    torch.testing.assert_close(found, wanted, atol=atol, rtol=10 * atol, msg=lambda told: f"{said}\n{told}")
