"""Folds: modules that see the ranks of an axis as another axis, such as experts over the ranks of data.

    flow.nn.fold(model.layers[0].experts, "data", "expert", 4)

Where the module around lives on (data=8, tensor=2), the experts live on (data=2, expert=4, tensor=2): the same ranks.
"""

from collections.abc import Iterable

from torch import nn

from ...placement import Placement
from ...placement.errors import PlacementError

__all__ = ["FOLD", "fold", "folded"]

FOLD = "_sbpflow_fold"  # the axis that is seen as another, its name then, and its size


def fold(modules: nn.Module | Iterable[nn.Module], of: str, into: str, size: int) -> None:
    """Say that modules see `size` neighbours along the axis `of` as an axis called `into`.

    They live on the ranks of the module around them, wherever that is placed.
    """
    if type(size) is not int or size < 1:
        raise PlacementError(f"fold: size={size!r}\n  give it how many ranks the axis {into} is to have, as in 4")
    for module in [modules] if isinstance(modules, nn.Module) else modules:
        module.__dict__[FOLD] = (of, into, size)


def folded(around: Placement | None, how: tuple[str, str, int], path: str) -> Placement:
    """The placement of a module that folds, inside of one that lives there."""
    of, into, size = how
    if around is None:
        raise PlacementError(
            f"{path or 'the model'} sees {of} as {into}, and nothing around it has a placement\n"
            "  say where it lives, as in flow.nn.place(model, placement)"
        )
    return around.folded(of, into, size)
