"""Owners: the parameters of a model that optimizers hold, by the names that the model has for them.

An optimizer may hold a parameter itself, what it was before a graph made it global, or the piece of it that a graph
gave the optimizer in its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ....placement.errors import SbpError
from ...graph.choose.parameters import became
from ...model.slots import slots, tied

__all__ = ["HeldParameter", "held_by", "listed", "names_of"]


@dataclass(frozen=True, slots=True, eq=False)
class HeldParameter:
    """A parameter as an optimizer holds it: in which group, at which place, and whose it is."""

    name: str
    owner: Tensor
    value: Tensor
    group: int
    place: int


def listed(optimizer: Optimizer | Sequence[Optimizer] | None, asked: str) -> list[Optimizer]:
    """Optimizers, however many were given."""
    found: list[Any] = [optimizer] if optimizer is not None else []
    if isinstance(optimizer, Sequence):
        found = list(optimizer)
    for each in found:
        if not isinstance(each, Optimizer):
            raise SbpError(
                f"{asked}: optimizer={type(each).__name__}\n  give it one of torch.optim, or a list of them"
                + ("; a scheduler goes in extra=dict(scheduler=scheduler)" if hasattr(each, "optimizer") else "")
            )
    return found


def names_of(model: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """The first name of each parameter and buffer, and itself, by its id."""
    return {key: (group[0].full, group[0].value) for key, group in tied(slots({"": model})).items()}


def held_by(optimizers: Sequence[Optimizer], model: nn.Module, asked: str) -> list[list[HeldParameter]]:
    """The parameters that each optimizer holds."""
    names = names_of(model)
    seen: dict[str, int] = {}
    found = []
    for number, optimizer in enumerate(optimizers):
        mine = []
        for at, group in enumerate(optimizer.param_groups):
            for place, value in enumerate(group["params"]):
                name, owner = _owner(value, names, optimizer, asked)
                if seen.setdefault(name, number) != number:
                    raise SbpError(
                        f"{asked}: {name} is in two optimizers, and a checkpoint has one state of a parameter\n"
                        "  save them apart, each to a folder of its own"
                    )
                mine.append(HeldParameter(name, owner, value, at, place))
        found.append(mine)
    return found


def _owner(
    value: Tensor, names: Mapping[int, tuple[str, Tensor]], optimizer: Optimizer, asked: str
) -> tuple[str, Tensor]:
    now: Any = value if id(value) in names else getattr(value, "_piece_of", None)
    if now is None and value in became:
        now = became[value]()
    if id(now) not in names:
        raise SbpError(
            f"{asked}: {type(optimizer).__name__} holds a parameter {tuple(value.shape)} that {asked} was not given "
            "a model of\n  give both of the same model, as in AdamW(model.parameters()); a model that became global by "
            "flow.nn.to_global needs an optimizer made after it"
        )
    return names[id(now)]
