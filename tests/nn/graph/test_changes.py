"""A training goes by what was changed between its steps, as plain torch does, however many changes there were."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow.sbp.trial import one_thread
from tests.nn.graph.changes import CHANGES, Change
from tests.nn.graph.trainings import WAYS, Training, Way, whole
from tests.ranks import Ranks

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 6e-2}
LINES = ("changes.py:", "trainings.py:")


@pytest.mark.sampled(6, sweep=150)
@pytest.mark.parametrize("seed", range(300))
def test_a_training_is_as_in_torch_whatever_is_changed_between_its_steps(seed: int, ranks4: Ranks) -> None:
    if way_of(seed).processes:
        ranks4(trained_alike, seed, timeout=300.0)
    else:
        trained_alike(seed)


@one_thread()
def trained_alike(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is captured and planned anew for the 4th time")
        trained(seed)


def trained(seed: int) -> None:
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


def way_of(seed: int) -> Way:
    return list(WAYS.values())[seed % len(WAYS)]


def both(seed: int) -> tuple[Training, Training]:
    way = way_of(seed)
    return Training(seed, Way(), way), Training(seed, way, way)


def changed(plain: Training, change: Change, made: Training, seed: float) -> None:
    """Both are changed alike; of a change that gives something that is so too."""
    found = []
    for each in (plain, made):
        torch.manual_seed(0)
        found.append(change(each, Random(seed)))
    if isinstance(found[0], Tensor):
        near(whole(found[1]), whole(found[0]), tolerance(plain), change.__name__)


def alike(plain: Training, made: Training, draw: Random, said: list[str]) -> None:
    """One step of both, what they hold behind it, and which random numbers come next."""
    x, y = plain.batch(draw, draw.choice([8, 8, 8, 6, 5]))
    grad, atol = draw.random() < 0.9, tolerance(plain)
    torch.manual_seed(len(said))
    wanted, after = plain.train(x, y, grad=grad), torch.rand(())
    torch.manual_seed(len(said))
    near(made.train(x, y, grad=grad), wanted, atol, f"the loss after {said}")
    if plain.beside.micro_batches == 1:
        near(torch.rand(()), after, 0.0, f"a random number after {said}")
    found, values = made.values(), plain.values()
    assert found.keys() == values.keys(), said
    for name, value in values.items():
        near(found[name], value, atol, f"{name} after {said}")


def tolerance(plain: Training) -> float:
    return 3e-2 if plain.autocast else TOLERANCES[plain.dtype]


def near(found: Tensor, wanted: Tensor, atol: float, said: str) -> None:
    torch.testing.assert_close(found, wanted, atol=atol, rtol=10 * atol, msg=lambda told: f"{said}\n{told}")
