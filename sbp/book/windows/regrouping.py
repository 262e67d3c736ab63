"""Views of a dim that is cut where the view's dims do not end: ranks take the rows of a neighbour that they lack.

7 windows of 4 rows over 2 ranks    rows 0-13 | 14-27    as (7, 4): windows 0-3 | 4-6; rank 0 takes rows 14 and 15

A place of a dim whose places are S elements each sees the places of another, R elements each, that have them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from ...call import Piece, Rewritten, Way
from ...state import Factors, Spans, State, Window

__all__ = ["Block", "seen_regrouped"]


class Block(NamedTuple):
    """Dims of a tensor and those of its view that hold the same elements; dims of one place are in none."""

    dims: Sequence[int]
    into: Sequence[int]


def seen_regrouped(
    shape: Sequence[int],
    target: Sequence[int],
    state: State,
    block: Block,
    rest: Sequence[Factors],
    sizes: tuple[int, ...],
) -> Way | None:
    """The way of a view whose dims, but for those of a block, lie as `rest` says; None if no window says it."""
    before = _cut([(d, shape[d], state.dims[d]) for d in block.dims], sizes)
    if before is None:
        return None
    after = _laid([(d, target[d]) for d in block.into], (*before.lead, *before.factors), sizes)
    if after is None or (before.lead and after.lead not in ((), before.lead)):
        return None
    # Of the places that the window runs over a rank has those behind the input's first dims, of one place each.
    all_places, apart = after.size * prod(sizes[a] for a in after.lead), prod(sizes[a] for a in before.lead)
    if all_places % apart:
        return None
    count = all_places // apart
    per = prod(shape[d] for d in block.dims if d > before.dim)
    step = prod(target[d] for d in block.into if d > after.dim)
    windows: list[Window | None] = [None] * len(shape)
    windows[before.dim] = Window(count, 1 - per, step - 1, step, per)
    out = list(rest)
    for d, factors in after.dims:
        out[d] = factors
    run = Rewritten(partial(_regrouped, block, before, after, (per, step)))
    seen = state._replace(windows=tuple(windows))
    return Way((seen,), (State(tuple(out), state.partial, state.reduction),), run)


class _Cut(NamedTuple):
    """Dims that are cut from the first on: in places, one a rank, by the axes `lead`; then `dim` by `factors`."""

    lead: Factors
    dim: int
    size: int
    factors: Factors
    dims: tuple[tuple[int, Factors], ...]


def _cut(dims: Iterable[tuple[int, int, Factors]], sizes: tuple[int, ...]) -> _Cut | None:
    lead: Factors = ()
    found: _Cut | None = None
    for d, size, factors in dims:
        if any(f < 0 for f in factors) or (found and factors):
            return None
        if found:
            continue
        if size == prod(sizes[f] for f in factors):
            lead += factors
        elif factors:
            found = _Cut(lead, d, size, factors, ())
        else:
            return None
    return found


def _laid(dims: Sequence[tuple[int, int]], factors: Factors, sizes: tuple[int, ...]) -> _Cut | None:
    """The cut of other dims by these axes in this order."""
    lead: Factors = ()
    laid: list[tuple[int, Factors]] = []
    for d, size in dims:
        at = next((n for n in range(1, len(factors)) if prod(sizes[f] for f in factors[:n]) == size), 0)
        if not at:
            return _Cut(lead, d, size, factors, (*laid, (d, factors)))
        lead, factors = lead + factors[:at], factors[at:]
        laid.append((d, lead[-at:]))
    return None


def _regrouped(
    block: Block, before: _Cut, after: _Cut, elements: tuple[int, int], piece: Piece, x: Any, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The elements that are wanted of those that a rank has, in a row, and these in the view's dims."""
    per, step = elements
    shape, target = piece.inputs[0].shape, piece.outputs[0].shape
    held = _first([(shape[d], piece.spans(0, d)) for d in block.dims if d <= before.dim])
    wanted = _first([(target[d], piece.out_spans(0, d)) for d in block.into if d <= after.dim])
    many = sum(hi - lo for lo, hi in piece.out_spans(0, after.dim)) * step
    mine = piece.inputs[0].local_shape(piece.rank)
    flat = (prod(mine[: block.dims[0]]), -1, prod(mine[block.dims[-1] + 1 :]))
    return _part, (x, flat, wanted * step - held * per, many, piece.shape())


def _first(dims: Iterable[tuple[int, Spans]]) -> int:
    """The first place of a rank in some dims in a row."""
    at = 0
    for size, held in dims:
        at = at * size + (held[0][0] if held else 0)
    return at


def _part(x: Tensor, flat: tuple[int, int, int], first: int, many: int, shape: tuple[int, ...]) -> Tensor:
    if not x.numel() or not many:
        return x.reshape(-1)[:0].reshape(shape)
    return x.reshape(flat).narrow(1, first, many).reshape(shape)
