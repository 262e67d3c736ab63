"""The cheapest way from one state of a tensor to another on one placement, as a list of collectives.

An A* search over states. Free steps slice or make partial; the others are collectives over any set of axes, and one
exchange of slices straight to the target. Most pairs need no state with holes, so these are tried only where the first
answer is dearer than a bound that no plan can beat.
"""

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain, combinations, count, permutations
from math import prod
from typing import NamedTuple

from ..sbp.state import Factors, State, drop, fill, pieces, trim
from .price import Network, Price, extent, missing

__all__ = ["Step", "search"]

FREE = Price(0.0, 0.0)


class Step(NamedTuple):
    """One collective (or free local change) over some axes, from one state to the next."""

    kind: str
    before: State
    after: State
    axes: tuple[int, ...]
    price: Price


def search(src: State, dst: State, shape: tuple[int, ...], itemsize: int, network: Network) -> tuple[Step, ...]:
    """The steps of least time from `src` to `dst`; among equals the least bytes, then the fewest steps."""
    problem = _Problem(src, dst, shape, itemsize, network)
    plain = problem.solve(holes=False, limit=Price(float("inf"), 0))
    bound = problem.bound(src)
    made = set(dst.partial) - set(src.partial)
    if not src.partial or made or _cost(plain).time <= bound * (1 + 1e-9):
        return plain
    return problem.solve(holes=True, limit=_cost(plain)) or plain


def _cost(steps: tuple[Step, ...]) -> Price:
    return Price(sum(s.price.time for s in steps), sum(s.price.bytes for s in steps))


class _Problem:
    """One search; the edges of a state, and a bound on what is left to pay from it."""

    def __init__(self, src: State, dst: State, shape: tuple[int, ...], itemsize: int, network: Network) -> None:
        self.src, self.dst, self.shape, self.itemsize, self.network = src, dst, shape, itemsize, network
        self.sizes = network.sizes
        self.axes = tuple(a for a in range(len(self.sizes)) if self.sizes[a] > 1)
        self.nbytes = prod(shape) * itemsize
        fastest = max((network.link((a,))[1] for a in self.axes), default=1.0)
        self.seconds_per_byte = 1 / fastest
        used = {d for state in (src, dst) for d, factors in enumerate(state.dims) if factors}
        if shape and src.partial:
            used.add(max(range(len(shape)), key=lambda d: (shape[d], -d)))
        self.cut = tuple(sorted(used))  # the dims that a step may split

    def solve(self, holes: bool, limit: Price) -> tuple[Step, ...]:
        tie = count()
        start: tuple[Step, ...] = ()
        best = {self.src: (0.0, 0.0, 0)}
        queue = [(self.bound(self.src), 0.0, 0, next(tie), self.src, 0.0, start)]
        while queue:
            _, moved, n, _, state, time, steps = heappop(queue)
            if state == self.dst:
                return steps
            if (time, moved, n) > best[state]:
                continue
            for step in self.edges(state, holes):
                total = (time + step.price.time, moved + step.price.bytes, n + 1)
                after = step.after
                estimate = total[0] + self.bound(after)
                if estimate > limit.time or total >= best.get(after, (float("inf"), 0.0, 0)):
                    continue
                best[after] = total
                heappush(queue, (estimate, total[1], total[2], next(tie), after, total[0], (*steps, step)))
        return ()

    def bound(self, state: State) -> float:
        """Seconds that any plan from here must still take: `bound.py` for even splits, in closed form."""
        dst, sizes = self.dst, self.sizes
        same = state.reduction == dst.reduction
        kept = {a for a in state.partial if same and a in dst.partial}
        terms = prod(sizes[a] for a in state.partial if a not in kept)
        ranks = prod(sizes) // prod(sizes[a] for a in kept)
        made = prod(sizes[a] for a in dst.partial if a not in kept)
        needers = ranks // made // prod(pieces(f, sizes) for f in dst.dims)
        if terms > 1:
            moved = max((terms - 1 + max(0, needers - 1)) / ranks * self.nbytes, self.local(dst) if made == 1 else 0)
        elif made == 1:
            moved = missing(self.shape, state, dst, sizes) * self.itemsize
        else:
            moved = 0.0
        return moved * self.seconds_per_byte

    def edges(self, state: State, holes: bool) -> Iterator[Step]:
        split = state.split
        idle = tuple(a for a in self.axes if a not in split and a not in state.partial)
        yield from self.slices(state, idle, holes)
        yield from self.to_partial(state, split)
        yield from self.gathers(state, split, holes)
        yield from self.all_to_alls(state, split, holes)
        yield from self.reductions(state, holes)
        yield from self.exchange(state)  # last, so that among equals a step is called by its own name

    def slices(self, state: State, idle: tuple[int, ...], holes: bool) -> Iterator[Step]:
        for axis in idle:
            if axis not in self.dst.partial:
                for after in self.filled(state, (axis,), holes):
                    yield Step("slice", state, after, (axis,), FREE)

    def to_partial(self, state: State, split: frozenset[int]) -> Iterator[Step]:
        if state.partial and state.reduction != self.dst.reduction:
            return
        for axis in self.dst.partial:
            if axis not in state.partial:
                dims = _dropped(state.dims, (axis,), self.sizes) if axis in split else state.dims
                after = State(dims, tuple(sorted((*state.partial, axis))), self.dst.reduction)
                yield Step("to_partial", state, after, (axis,), FREE)

    def exchange(self, state: State) -> Iterator[Step]:
        """Straight to the target's splits.

        Axes still partial leave holes there, which a reduce_scatter then fills; axes that will become partial may split
        what they are to hold, since a split is made partial for nothing.
        """
        later = tuple(a for a in self.axes if a in state.partial)
        target = state._replace(dims=_dropped(self.dst.dims, later, self.sizes))
        made = tuple(a for a in self.dst.partial if a not in state.partial)
        for after in (target, *(self.filled(target, made, holes=False) if made else ())):
            axes = moving(state, after)
            if not axes:
                if after != state and not made:
                    yield Step("slice", state, after, (), FREE)
            else:
                size = missing(self.shape, state, after, self.sizes) * self.itemsize
                yield Step("exchange", state, after, axes, self.network.exchange(axes, size))

    def gathers(self, state: State, split: frozenset[int], holes: bool) -> Iterator[Step]:
        for axes in _subsets(tuple(sorted(split))):
            after = state._replace(dims=_dropped(state.dims, axes, self.sizes))
            if holes or not _has_holes(after):
                size = self.local(after)
                yield Step("all_gather", state, after, axes, self.network.price("all_gather", axes, size))

    def all_to_alls(self, state: State, split: frozenset[int], holes: bool) -> Iterator[Step]:
        for axis in split:
            freed = state._replace(dims=_dropped(state.dims, (axis,), self.sizes))
            if not holes and _has_holes(freed):
                continue
            for after in self.filled(freed, (axis,), holes):
                if after != state:
                    price = self.network.price("all_to_all", (axis,), self.local(after))
                    yield Step("all_to_all", state, after, (axis,), price)

    def reductions(self, state: State, holes: bool) -> Iterator[Step]:
        same = state.reduction == self.dst.reduction
        open_ = tuple(a for a in state.partial if not (same and a in self.dst.partial))
        for axes in _subsets(open_):
            left = tuple(a for a in state.partial if a not in axes)
            freed = State(state.dims, left, state.reduction if left else "sum")
            size = self.local(state)
            for kind in ("all_reduce", "all_reduce_once"):
                yield Step(kind, state, freed, axes, self.network.price(kind, axes, size))
            for after in self.filled(freed, axes, holes):
                price = self.network.price("reduce_scatter", axes, self.local(after))
                yield Step("reduce_scatter", state, after, axes, price)

    def filled(self, state: State, axes: tuple[int, ...], holes: bool) -> set[State]:
        """Every state in which these idle axes cut what the ranks hold further."""
        found: set[State] = set()
        for order in permutations(axes):
            states = {state}
            for axis in order:
                states = {
                    s._replace(dims=(*s.dims[:d], after, *s.dims[d + 1 :]))
                    for s in states
                    for d in self.cut
                    for after in fill(s.dims[d], axis, self.sizes)
                    if holes or all(f >= 0 for f in after)
                }
            found |= states
        return found

    def local(self, state: State) -> int:
        """Bytes of the largest local buffer."""
        return _local(self.shape, state.dims, self.sizes) * self.itemsize


@lru_cache(maxsize=1 << 14)
def _local(shape: tuple[int, ...], dims: tuple[Factors, ...], sizes: tuple[int, ...]) -> int:
    return prod(extent(n, f, sizes) for n, f in zip(shape, dims, strict=True))


def moving(before: State, after: State) -> tuple[int, ...]:
    """The axes over which ranks must talk to get from one state to another: those that split `before` and change place.

    Ranks that differ only on other axes hold the same or want the same, so each such set of ranks keeps to itself.
    """
    changed: set[int] = set()
    for f, g in zip(before.dims, after.dims, strict=True):
        same = 0
        while same < min(len(f), len(g)) and f[same] == g[same]:
            same += 1
        if g[:same] != g or len(f) > same:
            changed.update(f[same:])
            changed.update(g[same:])
    return tuple(sorted(a for a in changed if a in before.split))


def _dropped(dims: tuple[Factors, ...], axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Factors, ...]:
    gone = frozenset(axes)
    return tuple(drop(f, gone, sizes) if gone.intersection(f) else trim(f) for f in dims)


def _has_holes(state: State) -> bool:
    return any(f < 0 for factors in state.dims for f in factors)


def _subsets(axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(axes, n) for n in range(1, len(axes) + 1))
