"""Numbers of parameter groups from a checkpoint, such as learning rates: by the parameters that a group has now."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ....placement.errors import FileError, some_of
from ..trees import Json
from .owners import HeldParameter

__all__ = ["check_optimizers", "put_options"]


def check_optimizers(
    folder: Path,
    said: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Optimizer],
    held: Sequence[Sequence[HeldParameter]],
    known: Mapping[str, str],
) -> list[list[dict[str, Json]]]:
    """The options that each group of each optimizer is to have, as JSON; an error where others were saved."""
    if not said:
        raise FileError(
            f"flow.load: {folder} was saved without an optimizer\n"
            "  leave optimizer= out; it begins anew then, with the numbers that it was made with"
        )
    by_name = {
        name: (each["class"], group["options"]) for each in said for group in each["groups"] for name in group["names"]
    }
    found = []
    for optimizer, mine in zip(optimizers, held, strict=True):
        kind = type(optimizer).__name__
        names = [known.get(each.name, each.name) for each in mine]
        lost = [name for name in names if name not in by_name]
        if lost and len(lost) == len(names):
            raise FileError(
                f"flow.load: {folder} has no states of {kind} for {some_of(lost)}\n"
                f"  it has those of {some_of(list(by_name)) or 'nothing'}\n  pass the optimizer of these parameters"
            )
        if lost:
            raise FileError(
                f"flow.load: {some_of(lost)} of {len(names)} parameters of {kind} "
                f"{'was' if len(lost) == 1 else 'were'} in no optimizer that was saved in {folder}\n"
                "  make it of the same parameters, or leave optimizer= out"
            )
        others = {by_name[name][0] for name in names} - {kind}
        if others:
            raise FileError(
                f"flow.load: {folder} has states of {some_of(sorted(others))}, and {kind} was passed\n"
                "  make the same optimizer, or leave optimizer= out: it begins anew then"
            )
        found.append(_options(folder, optimizer, mine, names, by_name))
    return found


def _options(
    folder: Path,
    optimizer: Optimizer,
    held: Sequence[HeldParameter],
    names: Sequence[str],
    by_name: Mapping[str, tuple[str, dict[str, Json]]],
) -> list[dict[str, Json]]:
    found: list[dict[str, Json]] = []
    for at in range(len(optimizer.param_groups)):
        mine = [name for each, name in zip(held, names, strict=True) if each.group == at]
        first = by_name[mine[0]][1] if mine else {}
        other = next((name for name in mine if by_name[name][1] != first), None)
        if other is not None:
            key = next((key for key in first if by_name[other][1].get(key) != first[key]), "params")
            raise FileError(
                f"flow.load: {mine[0]} and {other} were saved with different {key}, and are in one group now\n"
                f"  {first.get(key)} and {by_name[other][1].get(key)} in {folder}\n"
                "  make the groups of the optimizer as they were"
            )
        _check_numbers(folder, mine, optimizer.param_groups[at], first)
        found.append(first)
    return found


def _check_numbers(folder: Path, names: Sequence[str], group: Mapping[str, Any], saved: Mapping[str, Json]) -> None:
    """Refuse texts and lists in the place of what is a number in a group."""
    for key, value in saved.items():
        held = group.get(key)
        number = isinstance(held, Tensor | float) or type(held) is int
        if number and isinstance(value, str | bool | list | None):
            raise FileError(
                f"flow.load: {key} of the group of {names[0]} is {str(value)[:60]!r} in {folder}\n"
                "  it is to be a number\n"
                "  load another checkpoint; flow.newest(folder) names the newest that is whole"
            )


def put_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a group its numbers; one that is a tensor stays the same tensor, which graphs may have seen."""
    for name, value in options.items():
        held = group.get(name)
        if isinstance(held, Tensor):
            held.fill_(float(value))
        else:
            group[name] = float(value) if isinstance(value, Tensor) and isinstance(held, float) else value
