"""Notebooks: the ranks of a placement in their grid, as an HTML table with a word and a colour for each."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import product
from typing import Protocol

__all__ = ["COLOURS", "grid_table"]

COLOURS = ("#cfe3ff", "#ffe0bd", "#d3f3d0", "#e3d8ff", "#ffd3d3", "#fff3b8", "#c9f0e2", "#f6d5ec")  # who holds the same
MOST = 256  # ranks of which each has a cell


class RankGrid(Protocol):
    """Ranks in a grid, as a placement is one."""

    @property
    def flat(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def names(self) -> Sequence[str] | None: ...


def grid_table(place: RankGrid, title: str, held: Callable[[int], str] | None = None) -> str:
    """A row of ranks for each place on all axes but the last; ranks that hold the same have one colour."""
    if len(place.flat) > MOST:
        return f"<div><code>{escape(title)}</code>: {len(place.flat)} ranks</div>"
    return f"<div><code>{escape(title)}</code><table>{''.join(_rows(place, held))}</table></div>"


def _rows(place: RankGrid, held: Callable[[int], str] | None) -> Iterator[str]:
    shape = place.shape or (1,)
    names = tuple(place.names or (f"axis {axis}" for axis in range(len(shape))))
    around, last = names[: len(shape) - 1], shape[-1]
    cells = [held(rank) if held else "" for rank in place.flat]
    colours = {cell: COLOURS[k % len(COLOURS)] for k, cell in enumerate(dict.fromkeys(cells))}
    yield f"<tr><td></td><th colspan='{last}' style='text-align:center'>{escape(names[-1])}</th></tr>"
    starts = range(0, len(place.flat), last)
    for start, at in zip(starts, product(*map(range, shape[:-1])), strict=False):
        where = ", ".join(f"{name} {k}" for name, k in zip(around, at, strict=True))
        yield f"<tr><th style='text-align:right'>{escape(where)}</th>"
        for rank, cell in zip(place.flat[start : start + last], cells[start : start + last], strict=True):
            look = f"background:{colours[cell]};color:#1f2328;text-align:center;border:1px solid #7d859066"
            said = f"<br/><code style='color:#1f2328;background:none'>{escape(cell)}</code>" if cell else ""
            yield f"<td style='{look}'>{rank}{said}</td>"
        yield "</tr>"
