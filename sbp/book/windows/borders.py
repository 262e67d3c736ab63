"""Paddings with what a tensor has itself: its other end, a mirror image, or its last place over and over; and rolls.

places of x     0 1 2 3 4 5        wraps      4 5|0 1 2 3 4 5|0 1
padded by two                      mirrors    2 1|0 1 2 3 4 5|4 3
                                   repeats    0 0|0 1 2 3 4 5|5 5

Each place of the result has one of the input. So where the dim is split a rank takes the places that its part wants,
which are those of a neighbour on the other side of the ring where it wraps round. A roll begins a ring elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...call import Call, Match, Piece, Rewritten
from ...rule import register
from ...state import Border, Spans, Window
from ..labels import labelled
from .reach import seen_by

__all__: list[str] = []

Runs = tuple[tuple[int, int, int], ...]  # of places one after the other: the first, how many, and the step to the next


@register("_pad_circular")
def circular(call: Call) -> Match:
    """Dims that lose places at one end wrap round what is left, and stay whole."""
    return _padded(call, "wraps", call.bound["pad"], hollow=True)


@register("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflected(call: Call) -> Match:
    return _padded(call, "mirrors", call.bound["padding"])


@register("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replicated(call: Call) -> Match:
    return _padded(call, "repeats", call.bound["padding"])


@register("roll")
def rolled(call: Call) -> Match | None:
    """Ranks take as many places of a neighbour as the roll is long."""
    x, shifts, dims = call.inputs[0], call.bound["shifts"], call.bound["dims"]
    if not dims and x.dim() != 1:
        return None  # rolls through all elements in a row
    by = dict[int, int]()
    for d, shift in zip(dims or [0], shifts, strict=True):
        by[d % x.dim()] = by.get(d % x.dim(), 0) + shift
    starts = {d: -shift % x.shape[d] for d, shift in by.items() if x.shape[d]}
    return _seen(call, {d: Window(x.shape[d], at, at, beyond="wraps") for d, at in starts.items()}, hollow=True)


def _padded(call: Call, border: Border, amounts: Sequence[int], *, hollow: bool = False) -> Match:
    x, y = call.inputs[0], call.outputs[0]
    pairs = {x.dim() - 1 - at // 2: (amounts[at], amounts[at + 1]) for at in range(0, len(amounts), 2)}
    whole = {d for d, pair in pairs.items() if border == "wraps" and min(pair) < 0}
    windows = {
        d: Window(y.shape[d], -p, -p, beyond=border) for d, (p, q) in pairs.items() if (p or q) and d not in whole
    }
    return _seen(call, windows, whole, hollow=hollow)


def _seen(call: Call, windows: Mapping[int, Window], whole: Set[int] = frozenset(), *, hollow: bool = False) -> Match:
    """A sum passes through, since nothing comes from outside."""
    x = call.inputs[0]
    labels = [None if d in whole else d for d in range(x.dim())]
    match = labelled(call, [labels], [labels], linear=[(0,)], hollow=hollow)
    return seen_by(match, windows, Rewritten(partial(_near, call, windows, whole)))


def _near(
    call: Call, windows: Mapping[int, Window], whole: Set[int], piece: Piece, x: Any, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A rank's part of the result, dim by dim, from the places that it has; the op fills dims that stay whole."""
    runs = {
        d: tuple(_runs(_places(piece.out_spans(0, d), window, call.inputs[0].shape[d]), piece.spans(0, d)))
        for d, window in windows.items()
    }
    rest: list[int] = []
    if whole:
        amounts, ndim = list(call.bound["pad"]), call.inputs[0].dim()
        rest = [n if ndim - 1 - at // 2 in whole else 0 for at, n in enumerate(amounts)]
    return partial(_taken, call.op, tuple(sorted(runs.items())), tuple(rest)), (x,)


def _places(of: Spans, window: Window, length: int) -> list[int]:
    """The place of the input that each place of a part of the result has."""
    found = []
    for at in (o + window.first for lo, hi in of for o in range(lo, hi)):
        if window.beyond == "wraps":
            found.append(at % length)
        elif window.beyond == "mirrors":
            found.append(length - 1 - abs(length - 1 - abs(at)))
        else:
            found.append(min(max(at, 0), length - 1))
    return found


def _runs(places: Sequence[int], held: Spans) -> Iterator[tuple[int, int, int]]:
    """These places as runs within what is held: ascending, descending, or one over and over.

    >>> list(_runs([6, 7, 0, 1, 2], ((0, 3), (6, 8)))), list(_runs([2, 1, 0, 1, 2], ((0, 3),)))
    ([(3, 2, 1), (0, 3, 1)], [(2, 3, -1), (1, 2, 1)])
    >>> list(_runs([0, 0, 0, 1], ((0, 2),)))
    [(0, 3, 0), (1, 1, 1)]
    """
    local, before = dict[int, int](), 0
    for lo, hi in held:
        local.update((place, before + place - lo) for place in range(lo, hi))
        before += hi - lo
    mine = [local[place] for place in places]
    steps = [b - a for a, b in pairwise(mine)]
    at = 0
    while at < len(mine):
        step = steps[at] if at < len(steps) and abs(steps[at]) < 2 else 1
        end = at
        while end < len(steps) and steps[end] == step:
            end += 1
        yield mine[at], end - at + 1, step
        at = end + 1


def _taken(op: Any, runs: tuple[tuple[int, Runs], ...], rest: tuple[int, ...], x: Tensor) -> Tensor:
    for dim, each in runs:
        parts = [_run(x, dim, *run) for run in each]
        x = torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)
    made: Tensor = op(x, list(rest)) if any(rest) else x
    return made


def _run(x: Tensor, dim: int, first: int, many: int, step: int) -> Tensor:
    if step > 0:
        return x.narrow(dim, first, many)
    if step < 0:
        return x.narrow(dim, first - many + 1, many).flip(dim)
    return x.narrow(dim, first, 1).expand(*x.shape[:dim], many, *x.shape[dim + 1 :])
