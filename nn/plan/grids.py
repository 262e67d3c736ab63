"""Grids: the placement that a plan's first line asks for, on the ranks that there are.

grid (data=*, tensor=4) on 16 ranks               cpu:[0-15] as (data=4, tensor=4)
grid (data=8, expert=4 folds data)                the same, and cpu:[0-7] as (data=2, expert=4), the same ranks
"""

from math import prod

from torch import nn

from ...placement import placement
from ...placement.device import card_here, card_of
from ...placement.errors import PlacementError, SbpflowError
from ...placement.world import world
from .language.axes import GridAxis, Grids
from .language.plan_text import PlanText
from .language.statements import Grid

__all__ = ["Grids", "grids_of"]


def grids_of(plan: PlanText, ranks: int | None = None, model: nn.Module | None = None) -> Grids:
    """A plan's grids on so many ranks: by default those of the launcher, or as many as the plan names.

    Where it names no kind of device, that is the card on which weights of the `model` lie, then the one that a launched
    process has, then the CPU.
    """
    lines = [s for s in plan.statements if isinstance(s, Grid)]
    if not lines:
        raise PlacementError(
            f"{plan.name or 'the plan'} has no grid\n  begin it with one, as in grid (data=2, tensor=4)"
        )
    (grid,) = lines
    launched = world().size
    if grid.placement is not None:
        try:
            whole = placement(grid.placement)
        except SbpflowError as error:
            raise plan.wrong(grid, "placement", str(error).partition("\n")[0]) from None
        return _checked(plan, grid, Grids(whole, {}), launched)
    card = card_here() if launched is not None else None
    kind = grid.type or (card_of(model.parameters()) if model else None) or (card.name if card else "cpu")
    shape = _shape(plan, grid, ranks or launched)
    whole = placement(kind, range(prod(shape.values()))).reshape(tuple(shape.values()), tuple(shape))
    folds = {axis.name: axis for axis in grid.axes if axis.folds is not None}
    for axis in folds.values():
        _check_fold(plan, grid, axis, shape)
    return _checked(plan, grid, Grids(whole, folds), ranks or launched)


def _shape(plan: PlanText, grid: Grid, ranks: int | None) -> dict[str, int]:
    """The sizes of the axes that fold no others."""
    own = [axis for axis in grid.axes if axis.folds is None]
    stars = [axis for axis in own if axis.size == "*"]
    for axis in own:
        if axis.size == "?":
            raise plan.wrong(
                grid,
                f"axis:{axis.name}",
                f"the size of {axis.name} is left to the planner, and a step needs it\n"
                f"  find it first, found = flow.find_plan(model, batch, plan=...), and give plan=found\n"
                f"  or write a number, or * for what the launcher has left, as in {axis.name}=*",
            )
    if len(stars) > 1:
        raise plan.wrong(
            grid, f"axis:{stars[1].name}", "one axis can have what is left\n  write a number for the other"
        )
    if not own:
        raise plan.wrong(
            grid, "axes", "all axes fold others\n  name the ranks first, as in grid (data=8, expert=8 folds data)"
        )
    known = prod(int(axis.size) for axis in own if axis.size != "*")
    if stars and (ranks or known) % known:
        raise plan.wrong(
            grid,
            f"axis:{stars[0].name}",
            f"{ranks} ranks cannot be shared out over axes of {known}\n"
            f"  start {(ranks or known) // known * known or known} of them, or make the axes smaller",
        )
    left = (ranks or known) // known
    return {axis.name: left if axis.size == "*" else int(axis.size) for axis in own}


def _check_fold(plan: PlanText, grid: Grid, axis: GridAxis, shape: dict[str, int]) -> None:
    part = f"axis:{axis.name}"
    if axis.folds not in shape:
        raise plan.wrong(
            grid, part, f"{axis.name} folds {axis.folds}, which is no axis\n  the axes are {', '.join(shape)}"
        )
    size = shape[axis.folds]
    if not isinstance(axis.size, int) or size % axis.size:
        fit = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise plan.wrong(
            grid, part, f"{axis.name}={axis.size} does not divide {axis.folds}, which is {size}\n  it may be {fit}"
        )


def _checked(plan: PlanText, grid: Grid, grids: Grids, ranks: int | None) -> Grids:
    """The grids, unless they are not of the ranks that there are. One that is named may leave some out."""
    size = grids.whole.size
    if ranks is not None and grid.placement is not None and size <= ranks:
        missing = max(grids.whole.flat)
        if missing >= ranks:
            raise plan.wrong(
                grid, "axes", f"there is no rank {missing}: {ranks} were started, 0 to {ranks - 1}\n  name others"
            )
        return grids
    if ranks is not None and size != ranks:
        fix = f"start {size} of them" + ("" if grid.placement else ", or give one axis what is left, as in data=*")
        raise plan.wrong(grid, "axes", f"a grid of {size} on {ranks} ranks\n  {fix}")
    return grids
