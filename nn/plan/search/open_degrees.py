"""Open degrees: axes of a plan's grid that are `?`, and all that its `seek` lists."""

from torch import nn

from ....placement.errors import SbpError
from ..language.plan_text import PlanText
from ..language.statements import Accumulate, Grid, Offload, Pipe, Recompute, Seek
from .candidates import layers_of
from .estimates.degrees import AXES, THINGS, Space
from .estimates.shorter_model import lists_of, mixtures_of

__all__ = ["leaves_degrees", "space_of"]

PARTS = "micro-batches"


def leaves_degrees(given: PlanText) -> bool:
    """Whether the planner is to look for degrees."""
    return any(
        isinstance(s, Seek) or (isinstance(s, Grid) and any(axis.size == "?" for axis in s.axes))
        for s in given.statements
    )


def space_of(given: PlanText, model: nn.Module, batch: int, kind: str, ranks: int, node: int, length: int = 0) -> Space:
    """The choices that a plan leaves open, for a batch of so many samples, of so many words if any, on so many
    ranks."""
    seek = next((s for s in given.statements if isinstance(s, Seek)), None)
    grid = next((s for s in given.statements if isinstance(s, Grid)), None)
    named = set(seek.what) if seek is not None else set()
    if seek is not None and (other := next((thing for thing in seek.what if thing not in THINGS), None)):
        fix = f"it looks for {', '.join(THINGS)}; signatures are left open by ?, as in **: ?"
        raise given.wrong(seek, f"what:{other}", f"the planner does not look for {other}", fix)
    sizes = _sizes(given, grid, named, ranks)
    named |= {name for name, size in sizes.items() if size is None}
    blocks = layers_of(model)
    lists, count = lists_of(model, blocks)
    mixtures = mixtures_of(model)
    if "pipe" in named and PARTS not in named and Space.said_of(given) is None:
        named.add(PARTS)  # a pipeline has some
    _checked(given, seek)
    kind = (grid.type if grid is not None else None) or kind
    space = Space(given, kind, ranks, node, batch, blocks, lists, count, sizes, frozenset(named), *mixtures, length)
    if next(space.every(), None) is None:
        raise SbpError(
            f"a batch of {batch} samples is cut evenly by no choice of degrees on {ranks} ranks\n"
            f"  give a multiple of {ranks * (space.said or 1)}, or of fewer: what tensor and pipe do not take is data's"
        )
    return space


def _sizes(given: PlanText, grid: Grid | None, named: set[str], ranks: int) -> dict[str, int | None]:
    """The sizes of the axes; None where one is looked for, or has what is left."""
    if grid is None:
        return {**{name: None for name in AXES if name in named}, "data": None}
    if grid.placement is not None:
        what = "axes of a placement are said"
        raise given.wrong(grid, "placement", what, "write the grid as axes, as in grid (pipe=?, data=?, tensor=8)")
    sizes: dict[str, int | None] = {"data": 1}
    known = 1
    for axis in (axis for axis in grid.axes if axis.folds is None):
        if axis.name not in AXES:
            fix = f"degrees are looked for in grids of {', '.join(AXES)}; write numbers, and leave out seek"
            raise given.wrong(grid, f"axis:{axis.name}", f"the planner does not look around an axis {axis.name}", fix)
        sizes[axis.name] = axis.size if isinstance(axis.size, int) else None
        known *= axis.size if isinstance(axis.size, int) else 1
        if axis.name in named and axis.size != "?":
            fix = f"write {axis.name}=?, or leave {axis.name} out of seek"
            raise given.wrong(grid, f"axis:{axis.name}", f"{axis} is said, and seek asks for {axis.name}", fix)
    if ranks % known or (known != ranks and None not in sizes.values()):
        fix = f"give numbers that divide {ranks}, or leave one open, as in data=?"
        raise given.wrong(grid, "axes", f"axes of {known} on {ranks} ranks", fix)
    lost = next((name for name in AXES if name in named and name not in sizes), None)
    if lost is not None:
        raise given.wrong(grid, "axes", f"seek asks for {lost}, and the grid has no such axis", f"write {lost}=?")
    return sizes


def _checked(given: PlanText, seek: Seek | None) -> None:
    """Refuse what is looked for and said."""
    said = {
        PARTS: next((s for s in given.statements if isinstance(s, Accumulate)), None)
        or next((s for s in given.statements if isinstance(s, Pipe) and s.micro_batches is not None), None),
        "recompute": next((s for s in given.statements if isinstance(s, Recompute)), None),
        "offload": next((s for s in given.statements if isinstance(s, Offload)), None),
    }
    for thing, line in said.items():
        if seek is not None and thing in seek.what and line is not None:
            raise given.conflict(line, seek, f"{thing}: said, and looked for", "leave one of both out")
