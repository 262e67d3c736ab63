"""Seconds of moves from one state to another, by arithmetic over many pairs of states at once.

The order of steps is that in which a good route goes, axis by axis: cut what is whole, reduce into pieces, swap,
gather, and sum. It is exact on one axis and an estimate on several; planning the routes themselves takes a thousand
times as long, and only those of the plan that wins are needed.
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...placement import Placement
from ...placement.links import Links, blocks
from ..layout import Layout
from ..state import Factors, State, local_numel, overlap
from .demands import EncodedWay
from .problem import Vector

__all__ = ["crossed", "distinct", "each_moved", "encoded_seconds", "local_bytes", "moved", "seen_seconds"]


def distinct(items: Sequence[Hashable]) -> tuple[list[Any], list[int]]:
    """Each of these once, and the place of each among them: equal ends of moves are priced once."""
    numbers: dict[Hashable, int] = {}
    at = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), at


def local_bytes(states: Sequence[State], shape: tuple[int, ...], itemsize: int, sizes: tuple[int, ...]) -> Vector:
    """Bytes that the fullest rank holds in each state."""
    return np.array([local_numel(state.dims, shape, sizes) * itemsize for state in states], dtype=np.float64)


def moved(src: Sequence[State], dst: Sequence[State], shape: tuple[int, ...], itemsize: int, links: Links) -> Vector:
    """Seconds of a tensor from each state of `src` (a row) to each of `dst` (a column)."""
    local = local_bytes(src, shape, itemsize, links.sizes)[:, None].repeat(len(dst), 1)
    ndim = len(links.sizes)
    codes = _codes(src, ndim)[:, None], _codes(dst, ndim)[None, :]
    time = _seconds(*codes, local, links)
    if links.fine is not None:
        even = [
            np.array([_evenly_stepped(state, shape, links.sizes, links.parts) for state in states])
            for states in (src, dst)
        ]
        if not all(map(np.all, even)):  # routes do not go in steps there
            time = np.where(even[0][:, None] & even[1], time, _seconds(*codes, local, links._replace(fine=None)))
    rows, columns = ([k for k, state in enumerate(states) if state.windows] for states in (src, dst))
    for i, j in {*product(rows, range(len(dst))), *product(range(len(src)), columns)}:
        time[i, j] += seen_seconds(src[i], dst[j], shape, itemsize, links)
    return time


def _evenly_stepped(
    state: State, shape: tuple[int, ...], sizes: tuple[int, ...], parts: Sequence[tuple[int, ...]]
) -> bool:
    """Whether axes of several parts cut dims into the pieces that steps would: those without remainders."""
    return all(
        n % prod(-f if f < 0 else sizes[f] for f in factors) == 0
        for n, factors in zip(shape, state.dims, strict=True)
        if any(f >= 0 and len(parts[f]) > 1 for f in factors)
    )


def each_moved(moves: Sequence[tuple[State, State, float]], links: Links) -> Vector:
    """Seconds of each of these moves, from a state to a state, where a rank holds so many bytes before."""
    src, dst, local = zip(*moves, strict=True)
    ndim = len(links.sizes)
    return _seconds(_codes(src, ndim), _codes(dst, ndim), np.array(local, dtype=np.float64), links)


def seen_seconds(src: State, dst: State, shape: tuple[int, ...], itemsize: int, links: Links) -> float:
    """Seconds in which ranks get what their windows see, or give its gradient back; none where it is whole there."""
    wide = dst if dst.windows else src
    over = {*wide.seen_over}
    free = over <= {*dst.partial} if wide is src else over.isdisjoint({*src.split, *src.partial})
    if src == dst or free:
        return 0.0
    return links.seconds("halo", wide.seen_over, float(halo_numel(wide, shape, links.sizes) * itemsize))


@lru_cache(maxsize=1 << 12)
def halo_numel(state: State, shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Elements that a rank has of others in a state with windows: the most of any."""
    each = product(*(range(n) if a in state.seen_over else range(1) for a, n in enumerate(sizes)))
    most = 0
    for at in each:
        wide, own = state.spans(shape, at, sizes), state.plain.spans(shape, at, sizes)
        held = prod(sum(hi - lo for lo, hi in dim) for dim in wide)
        kept = prod(sum(n for _, _, n in overlap(a, b)) for a, b in zip(own, wide, strict=True))
        most = max(most, held - kept)
    return most


def encoded_seconds(
    plain: Vector,
    by: EncodedWay,
    dtype: torch.dtype,
    src: Sequence[State],
    dst: Sequence[State],
    shape: tuple[int, ...],
    place: Placement,
    links: Links,
) -> Vector:
    """The same with seconds of the payloads' moves, where a gradient goes encoded from a state to another."""
    found = plain.copy()
    for (i, a), (j, b) in product(enumerate(src), enumerate(dst)):
        moves = by.moves(Layout(place, a, shape, dtype), Layout(place, b, shape, dtype)) if a != b else ()
        if moves:
            each = (moved([x.state], [y.state], x.shape, x.dtype.itemsize, links) for x, y in moves)
            found[i, j] = sum(float(one[0, 0]) for one in each)
    return found


Codes: TypeAlias = npt.NDArray[np.int64]
WHOLE, SUM, MAX, MIN, SPLIT = range(5)  # what an axis does; splits have numbers from here on
_PARTIAL = {"sum": SUM, "max": MAX, "min": MIN}
STAY, CUT, SCATTER, SWAP, GATHER, ADD = range(6)  # what an axis has to do, in this order
_STEPS = np.array([
    # to whole  sum      max      min      split
    [STAY,      STAY,    STAY,    STAY,    CUT],
    [ADD,       STAY,    SCATTER, SCATTER, SCATTER],
    [ADD,       SCATTER, STAY,    SCATTER, SCATTER],  # a maximum, reduced in pieces, is an addend of each
    [ADD,       SCATTER, SCATTER, STAY,    SCATTER],
    [GATHER,    STAY,    STAY,    STAY,    SWAP],
])  # fmt: skip
_COLLECTIVES = {SCATTER: "reduce_scatter", SWAP: "all_to_all", GATHER: "all_gather"}


def _codes(states: Sequence[State], ndim: int) -> Codes:
    """A row a state: for each axis what it does, and then for each axis which others cut its dim before."""
    return np.array([_code(state, ndim) for state in states], dtype=np.int64).reshape(len(states), 2 * ndim)


@lru_cache(maxsize=1 << 14)
def _code(state: State, ndim: int) -> tuple[int, ...]:
    """Splits of one dim differ where other holes stand before them; axes before them are bits."""
    codes, outer = [WHOLE] * ndim, [0] * ndim
    for dim, factors in enumerate(state.dims):
        seen = 0
        for at, f in enumerate(factors):
            if f >= 0:
                codes[f] = SPLIT + _number(dim, tuple(g for g in factors[:at] if g < 0))
                outer[f] = seen
                seen |= 1 << f
    for axis in state.partial:
        codes[axis] = _PARTIAL[state.reduction]
    return (*codes, *outer)


_known: dict[tuple[int, Factors], int] = {}


def _number(dim: int, holes: Factors) -> int:
    return _known.setdefault((dim, holes), len(_known))


def _seconds(src: Codes, dst: Codes, local: Vector, links: Links) -> Vector:
    """The seconds of moves between pairs of rows, where each rank has `local` bytes of the source."""
    ndim = len(links.sizes)
    before, after = src[..., :ndim], dst[..., :ndim]
    changed = before != after
    steps = _STEPS[np.minimum(before, SPLIT), np.minimum(after, SPLIT)] * changed
    first, local, time = local, local.copy(), np.zeros_like(local)
    every = np.bincount((steps * ndim + np.arange(ndim)).ravel())
    for step, axis in (divmod(at, ndim) for at in every.nonzero()[0].tolist()):
        n, mask = links.sizes[axis], steps[..., axis] == step
        if step in _COLLECTIVES:
            received = local * (n - 1) if step == GATHER else local * (n - 1) / n
            kind = _COLLECTIVES[step]
            spent = links.seconds(kind, (axis,), received) if step == SWAP else links.stepwise(kind, axis, received)
            np.add(time, spent, out=time, where=mask)
        if step in (CUT, SCATTER):
            np.divide(local, n, out=local, where=mask)
        elif step == GATHER:
            np.multiply(local, n, out=local, where=mask)
    adds = steps == ADD
    if adds.any():
        time += _summed(adds, local, links)
    # Where an axis cuts the same dim before and after, but inside other cuts, its pieces are others then.
    nested = (~changed & (src[..., ndim:] != dst[..., ndim:])).any(-1)
    if nested.any():
        latency, bandwidth = max((links.link((axis,), "pairs") for axis in range(ndim)), key=lambda link: link[0])
        time[nested] += latency + np.minimum(first, local)[nested] / bandwidth
    return time


def _summed(adds: npt.NDArray[np.bool_], local: Vector, links: Links) -> Vector:
    """Seconds of all sums at once: reduced into pieces axis by axis, the quickest links first, and gathered back. Where
    that is quicker, everybody gets all addends and adds them up."""
    time, held = np.zeros_like(local), local.copy()
    axes = range(len(links.sizes))
    for axis in sorted(axes, key=lambda a: -links.ring((a,))[1]):
        n, mask = links.sizes[axis], adds[..., axis]
        np.add(time, 2 * links.stepwise("reduce_scatter", axis, held * (n - 1) / n), out=time, where=mask)
        np.divide(held, n, out=held, where=mask)
    together = adds @ (1 << np.arange(len(axes)))  # a bit an axis
    for bits in np.bincount(together.ravel())[1:].nonzero()[0] + 1:
        mask, over = together == bits, tuple(a for a in axes if bits >> a & 1)
        at_once = links.seconds("all_reduce_once", over, local * (links.ranks(over) - 1))
        np.minimum(time, at_once, out=time, where=mask)
    return time


def regridded(
    states: Sequence[State], shape: tuple[int, ...], coarse: tuple[int, ...], fine: tuple[int, ...]
) -> dict[int, State]:
    """The states, by their numbers, as a finer grid of the same ranks has them; those are left out whose pieces are
    others where a dim is cut in steps.

    >>> regridded([State(((0,), ())), State(((), (0,)))], (8, 6), (4,), (2, 2))
    {0: State(dims=((0, 1), ()), partial=(), reduction='sum', windows=())}
    """
    parts = list(blocks(coarse, fine))
    return {
        number: state.refined(parts)
        for number, state in enumerate(states)
        if not state.windows and _evenly_stepped(state, shape, coarse, parts)
    }


def crossed(
    src: Sequence[State],
    dst: Sequence[State],
    shape: tuple[int, ...],
    itemsize: int,
    here: Links,
    there: Links,
    across: tuple[float, float],
) -> Vector:
    """Seconds to another placement over a link whose latency and bandwidth are `across`. Addends are summed into pieces
    first, then every byte that is needed goes over once."""
    latency, bandwidth = across
    first = np.zeros(len(src))
    for i, state in enumerate(src):
        held = float(local_numel(state.dims, shape, here.sizes) * itemsize)
        for axis in state.partial:
            n = here.sizes[axis]
            first[i] += here.seconds("reduce_scatter", (axis,), held * (n - 1) / n)
            held /= n
    last = np.zeros(len(dst))
    for j, state in enumerate(dst):
        held = float(local_numel(state.dims, shape, there.sizes) * itemsize)
        over = tuple(axis for axis, n in enumerate(there.sizes) if n > 1 and axis not in state.split)
        repeats = there.ranks(over)
        last[j] = latency + held / repeats / bandwidth  # a piece each, then gathered inside
        if repeats > 1:
            last[j] += there.seconds("all_gather", over, held * (repeats - 1) / repeats)
    return first[:, None] + last[None, :]
