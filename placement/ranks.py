"""Ranks, axis names and device types as users give them, read into tuples or refused; ranks as notebooks show them."""

import keyword
import operator
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import product
from typing import Protocol, SupportsIndex, TypeAlias

from .device import FAMILIES
from .errors import PlacementError, did_you_mean

__all__ = ["COLOURS", "Array", "Nested", "check_name", "check_names", "check_type", "grid_table", "read_ranks"]

MOST = 1 << 20  # ranks of a placement
COLOURS = ("#cfe3ff", "#ffe0bd", "#d3f3d0", "#e3d8ff", "#ffd3d3", "#fff3b8", "#c9f0e2", "#f6d5ec")  # who holds the same
MOST_CELLS = 256  # ranks of which each has a cell

Nested: TypeAlias = "SupportsIndex | Sequence[Nested]"


class Array(Protocol):
    """The interface that numpy arrays and torch tensors share, so that neither need be imported here."""

    def tolist(self) -> object: ...


def check_type(type: str) -> None:
    """Refuse a device type that is not known, and name the nearest.

    >>> check_type("cuda")
    """
    if type in FAMILIES:
        return
    if isinstance(type, str) and ":" in type:
        raise PlacementError(f"ranks are given twice: in the text {type!r} and as an argument\n  keep one of them")
    # "gpu" is spelled like "cpu" but never meant so.
    cards = [row.name for row in FAMILIES.values() if row.card and "gpu" in str(type).lower()]
    meant = did_you_mean(cards[0] if cards else str(type), FAMILIES, "write one of them")
    raise PlacementError(f"unknown device type {type!r}\n  known are {', '.join(FAMILIES)}\n  {meant}")


def number(text: str) -> int:
    """A rank or a size of an axis; a text of many digits is neither.

    >>> number("12")
    12
    """
    if len(text.lstrip("0")) > len(str(MOST)):
        raise PlacementError(f"a number of {len(text)} digits is no rank and no size\n  there are {MOST} ranks at most")
    return int(text)


def check_count(ranks: int) -> None:
    """Refuse more ranks than any machine has, before they are written down one by one."""
    if ranks > MOST:
        raise PlacementError(f"a placement holds at most {MOST} ranks\n  these are {ranks}")


def read_ranks(ranks: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks row-major and the shape of their grid, from an int, a range, nested lists, or an array.

    >>> read_ranks([[0, 1], [4, 5]])
    ((0, 1, 4, 5), (2, 2))
    """
    flat: list[int] = []
    shape = _walk(ranks, flat) or (1,)
    if not flat:
        raise PlacementError(f"a placement needs at least one rank\n  found ranks {ranks!r}")
    if min(flat) < 0:
        raise PlacementError(f"ranks count from 0\n  found {min(flat)} in {ranks!r}")
    if len(set(flat)) != len(flat):
        twice = next(rank for k, rank in enumerate(flat) if rank in flat[:k])
        raise PlacementError(f"a placement holds each rank once\n  found rank {twice} twice in {ranks!r}")
    return tuple(flat), shape


def _walk(node: object, flat: list[int]) -> tuple[int, ...]:
    """Append the ranks below `node` to `flat` and return the shape of that part."""
    if hasattr(node, "tolist"):
        node = node.tolist()
    if hasattr(node, "__index__") and not isinstance(node, bool):
        flat.append(operator.index(node))
        return ()
    if isinstance(node, str) or not isinstance(node, Sequence):
        raise PlacementError(
            f"ranks are whole numbers\n  found {node!r} of type {node.__class__.__name__}\n"
            "  give an int, a range, nested lists of ints, or an integer array"
        )
    check_count(len(flat) + (_count(node) if isinstance(node, range) else len(node)))
    shapes = {_walk(part, flat) for part in node}
    if len(shapes) > 1:
        found = " and ".join(sorted(map(str, shapes)))
        raise PlacementError(f"the ranks are ragged\n  parts of {node!r} have shapes {found}\n  make all parts alike")
    return len(node), *(shapes.pop() if shapes else ())


def _count(numbers: range) -> int:
    """Its length, also where that is more than `len` can tell."""
    return max(0, -((numbers.start - numbers.stop) // numbers.step))


def check_names(names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """The axis names as a tuple: one for each axis, all different, each fit to be a keyword.

    >>> check_names(["data", "tensor"], (2, 2))
    ('data', 'tensor')
    """
    if names is None:
        return None
    if isinstance(names, str):
        raise PlacementError(f"names are a tuple, one for each axis\n  found the text {names!r}\n  try ({names!r},)")
    for name in names:
        check_name(name)
    found = tuple(names)
    if len(set(found)) != len(found):
        raise PlacementError(f"axis names must differ\n  found {', '.join(found)}")
    if len(found) != len(shape):
        raise PlacementError(f"{len(shape)} axes of shape {shape} need as many names\n  found {len(found)}: {found}")
    return found


def check_name(name: str) -> None:
    """Refuse an axis name that could not be written as `p.at(name=0)`."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise PlacementError(f"an axis name is a Python identifier, as in p.at(data=0)\n  found {name!r}")


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
    if len(place.flat) > MOST_CELLS:
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
