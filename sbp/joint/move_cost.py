"""Seconds of every move from one of these states to one of those, by arithmetic over all pairs at once.

The order of steps is that in which a good route goes, axis by axis: cut what is whole, reduce into pieces, swap,
gather, and sum. It is exact on one axis and an upper estimate on several; planning the routes themselves takes a
thousand times as long, and only those of the plan that wins are needed.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...placement import Cluster, Placement
from ..state import Factors, State
from .problem import Vector

__all__ = ["Lie", "PlacementLinks", "dual", "local_bytes", "local_numel", "moved", "network"]


class Lie(NamedTuple):
    """A state, and the B axes on which the gradient is partial."""

    state: State
    grads: tuple[int, ...] = ()


class PlacementLinks(NamedTuple):
    """The links of a placement, by which moves cost: its sizes, and for each axis latency and bandwidth."""

    placement: Placement
    sizes: tuple[int, ...]
    links: tuple[tuple[float, float], ...]
    level: Callable[[Placement, Placement], tuple[float, float]]  # the link between two placements

    @property
    def without_latency(self) -> "PlacementLinks":
        """The same where many moves go at once."""
        return self._replace(links=tuple((0.0, bandwidth) for _, bandwidth in self.links))


def network(placement: Placement, cluster: Cluster) -> PlacementLinks:
    """The network of a placement."""
    links = tuple(cluster.link(placement, (axis,)) for axis in range(placement.ndim))

    def between(p: Placement, q: Placement) -> tuple[float, float]:
        level = cluster.levels[cluster.level_of({*p.flat, *q.flat})]
        return level.latency, level.bandwidth

    return PlacementLinks(placement, placement.shape, links, between)


def dual(lie: Lie) -> Lie:
    """How the gradient lies; that of a maximum comes whole to all who may hold it."""
    state, grads = lie
    if state.reduction != "sum":
        return Lie(State(state.dims, tuple(sorted({*grads, *state.partial}))))
    return Lie(State(state.dims, grads), state.partial)


Codes: TypeAlias = npt.NDArray[np.int64]
WHOLE, SUM, MAX, MIN, SPLIT = 0, 1, 2, 3, 4
_PARTIAL = {"sum": SUM, "max": MAX, "min": MIN}


@lru_cache(maxsize=1 << 14)
def _codes(state: State, ndim: int) -> tuple[int, ...]:
    """For each axis what it does; splits of one dim differ where other holes stand before them."""
    codes = [WHOLE] * ndim
    for dim, factors in enumerate(state.dims):
        for at, f in enumerate(factors):
            if f >= 0:
                codes[f] = SPLIT + _number(dim, tuple(g for g in factors[:at] if g < 0))
    for axis in state.partial:
        codes[axis] = _PARTIAL[state.reduction]
    return tuple(codes)


_known: dict[tuple[int, Factors], int] = {}


def _number(dim: int, holes: Factors) -> int:
    return _known.setdefault((dim, holes), len(_known))


def local_bytes(states: Sequence[State], shape: tuple[int, ...], itemsize: int, sizes: tuple[int, ...]) -> Vector:
    """Bytes that the fullest rank holds in each state."""
    return np.array([local_numel(state, shape, sizes) * itemsize for state in states], dtype=np.float64)


@lru_cache(maxsize=1 << 15)
def local_numel(state: State, shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Elements that the fullest rank holds."""
    held = 1
    for size, factors in zip(shape, state.dims, strict=True):
        parts = prod(sizes[f] for f in factors if f >= 0)
        held *= -(-size // parts)
    return held


def moved(
    src: Sequence[Lie],
    dst: Sequence[Lie],
    shape: tuple[int, ...],
    itemsize: int,
    here: PlacementLinks,
    there: PlacementLinks,
) -> Vector:
    """Seconds from each state of `src` (a row) to each of `dst` (a column)."""
    if here.placement is not there.placement:
        return _between(src, dst, shape, itemsize, here, there)
    ndim = len(here.sizes)
    before: Codes = np.array([_codes(lie.state, ndim) for lie in src], dtype=np.int64).reshape(len(src), 1, ndim)
    after: Codes = np.array([_codes(lie.state, ndim) for lie in dst], dtype=np.int64).reshape(1, len(dst), ndim)
    local = local_bytes([lie.state for lie in src], shape, itemsize, here.sizes)[:, None].repeat(len(dst), 1)
    time = np.zeros_like(local)
    changed = before != after
    kinds = _kinds(before, after, changed)
    nested = _nested(src, dst, before, after)
    first = local.copy()
    for kind, step in _STEPS:
        for axis, n in enumerate(here.sizes):
            if n > 1:
                mask = kinds[..., axis] == kind
                if mask.any():
                    step(time, local, mask, n, *here.links[axis])
    if (kinds == ADD).any():
        _summed(time, local, kinds, here)
    if nested.any():
        latency, bandwidth = max(here.links, key=lambda link: link[0])
        time[nested] += latency + np.minimum(first, local)[nested] / bandwidth
    return time


@lru_cache(maxsize=1 << 14)
def _outer(state: State, ndim: int) -> tuple[int, ...]:
    """For each axis which others cut its dim before it does, as bits."""
    bits = [0] * ndim
    for factors in state.dims:
        seen = 0
        for f in factors:
            if f >= 0:
                bits[f] = seen
                seen |= 1 << f
    return tuple(bits)


def _nested(src: Sequence[Lie], dst: Sequence[Lie], before: Codes, after: Codes) -> npt.NDArray[np.bool_]:
    """Where an axis cuts the same dim before and after, but inside other cuts: its pieces are others then."""
    ndim = before.shape[-1]
    was = np.array([_outer(lie.state, ndim) for lie in src], dtype=np.int64).reshape(len(src), 1, ndim)
    now = np.array([_outer(lie.state, ndim) for lie in dst], dtype=np.int64).reshape(1, len(dst), ndim)
    found: npt.NDArray[np.bool_] = ((before == after) & (before >= SPLIT) & (was != now)).any(-1)
    return found


CUT, SCATTER, SWAP, GATHER, ADD = range(1, 6)


def _kinds(before: Codes, after: Codes, changed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    kinds = np.zeros(changed.shape, dtype=np.int8)
    was_split, is_split = before >= SPLIT, after >= SPLIT
    was_partial = (before > WHOLE) & ~was_split
    kinds[changed & (before == WHOLE) & is_split] = CUT
    kinds[changed & was_partial & is_split] = SCATTER
    kinds[changed & was_split & is_split] = SWAP
    kinds[changed & was_split & (after == WHOLE)] = GATHER
    kinds[changed & was_partial & ~is_split] = ADD
    return kinds


Mask: TypeAlias = npt.NDArray[np.bool_]


def _cut(time: Vector, local: Vector, mask: Mask, n: int, latency: float, bandwidth: float) -> None:
    local[mask] /= n


def _scatter(time: Vector, local: Vector, mask: Mask, n: int, latency: float, bandwidth: float) -> None:
    time[mask] += _hops(n) * latency + local[mask] * (n - 1) / n / bandwidth
    local[mask] /= n


def _swap(time: Vector, local: Vector, mask: Mask, n: int, latency: float, bandwidth: float) -> None:
    time[mask] += _hops(n) * latency + local[mask] * (n - 1) / n / bandwidth


def _gather(time: Vector, local: Vector, mask: Mask, n: int, latency: float, bandwidth: float) -> None:
    time[mask] += _hops(n) * latency + local[mask] * (n - 1) / bandwidth
    local[mask] *= n


_STEPS = ((CUT, _cut), (SCATTER, _scatter), (SWAP, _swap), (GATHER, _gather))


def _summed(time: Vector, local: Vector, kinds: npt.NDArray[np.int8], here: PlacementLinks) -> None:
    """All sums at once: reduced into pieces axis by axis, the quickest links first, and gathered back."""
    ring, held = np.zeros_like(time), local.copy()
    ranks = np.ones_like(time)
    slow_hop, slow_rate = np.zeros_like(time), np.full_like(time, np.inf)
    for axis in sorted(range(len(here.sizes)), key=lambda a: -here.links[a][1]):
        n, (latency, bandwidth) = here.sizes[axis], here.links[axis]
        mask = kinds[..., axis] == ADD
        ring[mask] += 2 * (_hops(n) * latency + held[mask] * (n - 1) / n / bandwidth)
        held[mask] /= n
        ranks[mask] *= n
        slow_hop[mask] = np.maximum(slow_hop[mask], latency)
        slow_rate[mask] = np.minimum(slow_rate[mask], bandwidth)
    # What is small is sent to everybody at once, and added up by everybody.
    hops = np.maximum(np.ceil(np.log2(ranks)), (ranks - 1) / 8)
    at_once = hops * slow_hop + 1.4 * local * (ranks - 1) / slow_rate
    time += np.minimum(ring, at_once)


def _hops(n: int) -> int:
    return (n - 1).bit_length()


def _between(
    src: Sequence[Lie],
    dst: Sequence[Lie],
    shape: tuple[int, ...],
    itemsize: int,
    here: PlacementLinks,
    there: PlacementLinks,
) -> Vector:
    """To another placement: addends are summed into pieces first, then every byte that is needed goes over once."""
    latency, bandwidth = here.level(here.placement, there.placement)
    first = np.zeros(len(src))
    for i, lie in enumerate(src):
        held = float(local_numel(lie.state, shape, here.sizes) * itemsize)
        for axis in lie.state.partial:
            n, (hop, rate) = here.sizes[axis], here.links[axis]
            first[i] += _hops(n) * hop + held * (n - 1) / n / rate
            held /= n
    last = np.zeros(len(dst))
    for j, lie in enumerate(dst):
        held = float(local_numel(lie.state, shape, there.sizes) * itemsize)
        split = lie.state.split
        repeats = prod(n for axis, n in enumerate(there.sizes) if axis not in split)
        last[j] = latency + held / repeats / bandwidth  # a piece each, then gathered inside
        if repeats > 1:
            links = [there.links[axis] for axis, n in enumerate(there.sizes) if n > 1 and axis not in split]
            hop, rate = max(links, key=lambda link: link[0])
            last[j] += _hops(repeats) * hop + held * (repeats - 1) / repeats / rate
    return first[:, None] + last[None, :]
