"""Global tensors as text: the value where this process can know it, a table of who holds what, a picture for notebooks.

Nothing is sent to print a tensor. A process that owns every rank, or a rank that holds the whole, shows the value;
others show their own shard and say so.
"""

from html import escape

import torch

from ...boxing import gather
from ...placement.world import owned, world
from ...sbp import Layout
from .handle import Handle

__all__ = ["html", "table", "text"]

MOST_RANKS = 16
MOST_SHOWN = 1000  # elements of a tensor that a notebook prints


def text(x: Handle) -> str:
    """As torch prints a tensor, with placement and sbp."""
    of = x._layout
    where = f"placement={x.placement}, sbp={of.lie}"
    grad = ", requires_grad=True" if x.is_leaf and x.requires_grad else ""
    if x.grad_fn is not None:
        grad = f", grad_fn=<{x.grad_fn.name()}>"
    here = owned(x.placement)
    if not here:
        return f"tensor(on other ranks, shape={of.shape}, dtype={of.dtype}, {where}{grad})"
    with torch.no_grad():
        if world().rank is None:
            value, note = gather([shard.detach() for shard in x._shards], of), ""
        else:
            value, note = x._shards[0].detach(), _note(of, here[0])
    body = repr(value)
    return f"{body[:-1]}, {note}{where}{grad})"


def _note(of: Layout, rank: int) -> str:
    """A note on a rank's own shard, where it is not the value."""
    if of.state.partial:
        return f"only rank {rank}'s addend ({of.state.reduction}), shape={of.shape}, "
    return f"only the piece of rank {rank}, shape={of.shape}, " if of.state.split else ""


def rows(x: Handle) -> list[tuple[str, str, str, str]]:
    """For each rank: its place on the grid, the indices it holds, their shape, and if these are values or addends."""
    of, found = x._layout, []
    for rank in x.placement.flat:
        held = ", ".join("+".join(f"{lo}:{hi}" for lo, hi in dim) or "-" for dim in of.spans(rank))
        place = ", ".join(map(str, x.placement.coords(rank)))
        kind = f"addend ({of.state.reduction})" if of.state.partial else "values"
        found.append((f"{rank} ({place})", f"[{held}]", str(of.local_shape(rank)), kind))
    return found


def table(x: Handle) -> str:
    """A table of who holds what, a line a rank."""
    found = rows(x)
    head = ("rank", "holds", "shape", "as")
    shown = [head, *found[:MOST_RANKS]]
    wide = [max(len(row[c]) for row in shown) for c in range(4)]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, wide, strict=True)).rstrip() for row in shown]
    if len(found) > MOST_RANKS:
        lines.append(f"... and {len(found) - MOST_RANKS} ranks more")
    return "\n".join([repr(x._layout), *lines])


def html(x: Handle) -> str:
    """Ranks in their grid with what each holds, for notebooks, and what a process may know of the value."""
    of = x._layout
    return of._repr_html_() + (f"<pre>{escape(text(x))}</pre>" if of.numel <= MOST_SHOWN else "")
