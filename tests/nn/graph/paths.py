"""Paths of a step: straight or in micro-batches, on one stage or two, only forward or in training; and a step on one of
them beside plain torch.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.sbp.trial import one_thread

from .pipes import PAIRS, everywhere, whole

__all__ = ["PATHS", "TRAINING", "Case", "Path", "every_path", "same_on"]

Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Path:
    """A path of a step. Actors run one that has `micro_batches`, also where there is 1."""

    micro_batches: int | None
    stages: int
    trains: bool

    def __str__(self) -> str:
        pieces = "straight" if self.micro_batches is None else f"{self.micro_batches} pieces"
        return f"{pieces}, {self.stages} stages, {'training' if self.trains else 'forward'}"

    @property
    def options(self) -> dict[str, Any]:
        """The options of a graph that goes this path."""
        where: dict[str, Any] = {"placement": everywhere()} if self.stages == 1 else {}
        if self.micro_batches is None:
            return where
        return {**where, "micro_batches": self.micro_batches, "schedule": "1f1b"}

    def placed(self, model: nn.Module, first: Sequence[str] = ("0",)) -> nn.Module:
        """The model, of which layers of these names are the first stage where there are two."""
        if self.stages == 2:
            flow.nn.place(model, PAIRS[1])
            flow.nn.place([model.get_submodule(name) for name in first], PAIRS[0])
        return model

    def has(self, kinds: str) -> bool:
        """Whether it is all of this, as in "pieces, training"."""
        known = {
            "training": self.trains,
            "forward": not self.trains,
            "straight": self.micro_batches is None,
            "actors": self.micro_batches is not None,
            "pieces": (self.micro_batches or 1) > 1,
            "stages": self.stages > 1,
            "any": True,
        }
        return all(known[kind] for kind in kinds.split(", "))


PATHS = [Path(*each) for each in product([None, 1, 2], [1, 2], [False, True])]
TRAINING = [path for path in PATHS if path.trains]
every_path = pytest.mark.parametrize("path", TRAINING, ids=str)


@dataclass(frozen=True)
class Case:
    """A model, and a function of it and its arguments that returns the loss, or several results and the loss first.

    `first` names the layers of the first of two stages. `between` changes something before each step but the first.
    `refused` has the paths that cannot be, as `Path.has` takes them, with what is said of these.
    """

    model: Callable[[], nn.Module]
    run: Callable[..., Any]
    batch: Callable[[int], Given]
    first: Sequence[str] = ("0",)
    make: Callable[[nn.Module], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    between: Callable[[nn.Module, Any, int], Any] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-10
    steps: int = 3

    def refusal(self, path: Path) -> str | None:
        return next((says for kinds, says in self.refused.items() if path.has(kinds)), None)


class Plain:
    """A step in plain torch."""

    def __init__(self, case: Case, path: Path, model: nn.Module, optimizer: Any) -> None:
        self.case, self.path, self.model, self.optimizers = case, path, model, listed(optimizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.case.run(self.model, *args, **kwargs)
        if self.path.trains:
            loss = result
            while not isinstance(loss, Tensor):
                loss = next(iter(loss.values() if isinstance(loss, Mapping) else loss))
            loss.backward()  # type: ignore[no-untyped-call]
            if self.optimizers and "clip_grad_norm" in self.case.options:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.case.options["clip_grad_norm"])
            for each in self.optimizers:
                each.step()
                each.zero_grad()
        return result


def compiled(case: Case, path: Path, model: nn.Module, optimizer: Any) -> Any:
    options = {**path.options, **(case.options if path.trains else {})}
    return flow.compile(model, case.run, optimizer, **options)


@one_thread()
def same_on(path: Path, case: Case) -> None:
    """Results, arguments, gradients, weights, buffers and states of optimizers are those of torch on this path."""
    one = case.model()
    model = path.placed(copy.deepcopy(one), case.first)
    mine, ones = (case.make(each) if case.make and path.trains else None for each in (model, one))
    plain, step = Plain(case, path, one, ones), compiled(case, path, model, mine)
    with torch.set_grad_enabled(path.trains):
        for at in range(case.steps if path.trains else 2):
            if at and case.between is not None:
                case.between(model, mine, at)
                case.between(one, ones, at)
            found, wanted = (ran(each, case.batch(at), at) for each in (step, plain))
            near(found, wanted, case.tolerance, "result")
            near(held(model, mine), held(one, ones), case.tolerance, "model")


def ran(step: Any, given: Given, at: int) -> Any:
    """The result, and the arguments, which a step may write to, with their gradients."""
    torch.manual_seed(at)
    result = step(*given[0], **given[1])
    every = [*given[0], *given[1].values()]
    return result, every, [x.grad for x in every if isinstance(x, Tensor)]


def held(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All values that a step may change. Of several processes each keeps states of what it owns alone."""
    alone = flow.boxing.owned(everywhere()) == everywhere().flat
    return {
        "parameters": dict(model.named_parameters()),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "states": [
            [each.state.get(p, {}) for g in each.param_groups for p in g["params"]] for each in listed(optimizer)
        ]
        if alone
        else [],
    }


def listed(optimizer: Any) -> list[Any]:
    return optimizer if isinstance(optimizer, list) else [] if optimizer is None else [optimizer]


def near(found: Any, wanted: Any, tolerance: float, said: str) -> None:
    """The same structures of the same types, and the same values but for the order of sums."""
    kind = Tensor if isinstance(wanted, Tensor) else type(wanted)
    assert isinstance(found, kind), f"{said}: {type(found).__name__}, not {type(wanted).__name__}"
    if isinstance(wanted, Tensor):
        some = wanted.is_floating_point() or wanted.is_complex()
        bounds = {"rtol": tolerance, "atol": tolerance} if some else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(
            whole(found), whole(wanted), equal_nan=True, msg=lambda told: f"{said}: {told}", **bounds
        )
    elif isinstance(wanted, list | tuple | Mapping):
        assert len(found) == len(wanted), said
        for name in wanted if isinstance(wanted, Mapping) else range(len(wanted)):
            near(found[name], wanted[name], tolerance, f"{said} {name}")
    elif hasattr(wanted, "__dict__"):
        near(vars(found), vars(wanted), tolerance, said)
    else:
        assert found == wanted, said
