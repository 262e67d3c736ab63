"""The cheapest way from one state of a tensor to another on one placement, as a list of collectives.

An A* search over states. Free steps slice or make partial; the others are collectives over any set of axes, and one
exchange of slices straight to the target. Most pairs need no state with holes, so these are tried only where the first
answer is dearer than a bound that no boxing can beat.
"""

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain, combinations, count, islice, permutations, product
from math import prod
from typing import NamedTuple

from ...placement.links import Links, Price
from ...sbp.state import Factors, State, drop, fill, local_numel, pieces
from .missing import missing, truly_missing

__all__ = ["Leg", "search"]

FREE = Price(0.0, 0.0)
REMAINDERS = 64  # ranks up to which remainders of splits are counted one by one
MANY = 5  # axes from which on there are too many states to search
ORDERS = 120  # ways of changing one axis after the other that are then looked at
PATIENCE = 60  # states with holes to look at before the answer without them will do; a count, so all ranks agree
FEMTO = 15  # digits of a second that count
MANY_BYTES = 2.0**40


class Leg(NamedTuple):
    """One collective (or free local change) over some axes, from one state to the next."""

    kind: str
    before: State
    after: State
    axes: tuple[int, ...]
    price: Price


def search(src: State, dst: State, shape: tuple[int, ...], itemsize: int, links: Links) -> tuple[Leg, ...]:
    """The steps of least time from `src` to `dst`; among equals the least bytes, then the fewest steps."""
    problem = _Problem(src, dst, shape, itemsize, links)
    if len(problem.axes) > MANY:
        return problem.settled(min(problem.few(), key=lambda steps: (*_cost(steps), len(steps))))
    found = problem.solve(holes=False, limit=Price(float("inf"), 0))
    if _cost(found).time > problem.bound(src) * (1 + 1e-9):
        found = problem.solve(holes=True, limit=_cost(found)) or found
        # The search with holes is cut short; ways that change one axis after the other are always looked at.
        found = min((found, *problem.orders()), key=lambda steps: (*_cost(steps), len(steps)))
    return problem.settled(found)


class _Level(NamedTuple):
    """The axes of one kind of link and all slower ones; ranks along the `faster` rest share the bytes that cross."""

    axes: tuple[int, ...]
    faster: tuple[int, ...]
    seconds_per_byte: float
    latency: float


def _levels(axes: tuple[int, ...], links: Links) -> list[_Level]:
    each = {a: links.ring((a,)) for a in axes}
    found = []
    for rate in sorted({bandwidth for _, bandwidth in each.values()}):
        slow = tuple(a for a in axes if each[a][1] <= rate)
        rest = tuple(a for a in axes if a not in slow)
        hop = min(each[a][0] for a in slow)
        found.append(_Level(slow, rest, 1 / rate / links.ranks(rest), hop))
    return found


def _price(step: Leg) -> Price:
    return step.price


def _cost(steps: tuple[Leg, ...]) -> Price:
    return Price(_even(sum(s.price.time for s in steps)), sum(s.price.bytes for s in steps))


def _even(seconds: float) -> float:
    """Seconds without their last digits: ways that take as long may be added up in another order."""
    return round(seconds, FEMTO)


class _Problem:
    """One search; the edges of a state, and a bound on what is left to pay from it."""

    def __init__(self, src: State, dst: State, shape: tuple[int, ...], itemsize: int, links: Links) -> None:
        self.src, self.dst, self.shape, self.itemsize, self.links = src, dst, shape, itemsize, links
        self.sizes = links.sizes
        self.axes = tuple(a for a in range(len(self.sizes)) if self.sizes[a] > 1)
        used = {d for state in (src, dst) for d, factors in enumerate(state.dims) if factors}
        if shape and src.partial:
            used.add(max(range(len(shape)), key=lambda d: (shape[d], -d)))
        self.levels = _levels(self.axes, links)
        if len(self.levels) > 1 and max(len(shape), len(self.axes)) <= 2:
            used.update(range(len(shape)))  # less may cross a slow link on a dim that neither end splits
        self.cut = tuple(sorted(used))  # the dims that a step may split
        self.stops = self.find_stops()
        self.bounds: dict[State, float] = {}
        self.rates: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}  # seconds to start, seconds a byte

    def solve(self, holes: bool, limit: Price) -> tuple[Leg, ...]:
        tie = count()
        start: tuple[Leg, ...] = ()
        best = {self.src: (0.0, 0.0, 0)}
        queue = [(_even(self.bound(self.src)), 0.0, 0, next(tie), self.src, 0.0, start)]
        looked = 0
        while queue and looked < PATIENCE:
            _, moved, n, _, state, time, steps = heappop(queue)
            looked += holes
            if state == self.dst:
                return steps
            if (_even(time), moved, n) > best[state]:
                continue
            for step in self.edges(state, holes):
                spent = time + step.price.time
                total, after = (_even(spent), moved + step.price.bytes, n + 1), step.after
                estimate = _even(spent + self.bound(after))
                if estimate > limit.time or total >= best.get(after, (float("inf"), 0.0, 0)):
                    continue
                best[after] = total
                heappush(queue, (estimate, total[1], total[2], next(tie), after, spent, (*steps, step)))
        return ()

    def orders(self) -> Iterator[tuple[Leg, ...]]:
        """The ways that change one axis after the other, in every order that ends at the target."""
        for order in permutations(self.axes):
            here, steps = self.src, list[Leg]()
            for axis in order:
                step = self.change(here, axis)
                if step is not None:
                    steps.append(step)
                    here = step.after
            if here == self.dst:
                yield tuple(steps)

    def few(self) -> Iterator[tuple[Leg, ...]]:
        """Routes that add up all at once and then move all at once, and routes axis by axis in some orders."""
        dst, here, steps = self.dst, self.src, list[Leg]()
        stays = here.reduction == dst.reduction
        adds = tuple(a for a in here.partial if not (stays and a in dst.partial))
        if adds:
            left = tuple(a for a in here.partial if a not in adds)
            size, after = self.local(here), State(here.dims, left, here.reduction if left else "sum")
            prices = [(self.links.price(kind, adds, size), kind) for kind in self.links.reductions]
            price, kind = min(prices)
            steps.append(Leg(kind, here, after, adds, price))
            here = after
        if here.dims != dst.dims:
            after, axes = here._replace(dims=dst.dims), moving(here.dims, dst.dims)
            gathers = all(f == g[: len(f)] for f, g in zip(dst.dims, here.dims, strict=True))
            kind = "all_gather" if gathers else "exchange"
            steps.append(self.step(kind, here, after, axes) if axes else Leg("slice", here, after, (), FREE))
            here = after
        for axis in dst.partial:
            if axis not in here.partial:
                after = State(here.dims, tuple(sorted((*here.partial, axis))), dst.reduction)
                steps.append(Leg("to_partial", here, after, (axis,), FREE))
                here = after
        assert here == dst
        yield tuple(steps)
        yield from islice(self.orders(), ORDERS)

    def change(self, state: State, axis: int) -> Leg | None:
        """The step that gives one axis alone the part that it has in the target; None where it has it."""
        dst = self.dst
        was = next((d for d, factors in enumerate(state.dims) if axis in factors), None)
        now = next((d for d, factors in enumerate(dst.dims) if axis in factors), None)
        adds = axis in state.partial
        if was == now and adds == (axis in dst.partial):
            return None
        if axis in dst.partial and state.partial and state.reduction != dst.reduction:
            return None  # a sum and a maximum at once: not this axis yet
        dims = list(_dropped(state.dims, (axis,), self.sizes))
        if now is not None:
            dims[now] = (*dims[now], axis)
        partial = tuple(sorted({*state.partial} - {axis} | ({axis} & {*dst.partial})))
        after = State(tuple(dims), partial, dst.reduction if axis in partial else state.reduction if partial else "sum")
        if axis in partial or (was is None and not adds):
            return Leg("to_partial" if axis in partial else "slice", state, after, (axis,), FREE)
        if not adds:
            return self.step("all_gather" if now is None else "all_to_all", state, after, (axis,))
        kinds = self.links.reductions if now is None else ("reduce_scatter",)
        size = self.local(state if now is None else after)
        return min((Leg(k, state, after, (axis,), self.links.price(k, (axis,), size)) for k in kinds), key=_price)

    def settled(self, found: tuple[Leg, ...]) -> tuple[Leg, ...]:
        """The way found, or one exchange where splits leave remainders, if that is cheaper once they are counted."""
        ranks = prod(self.sizes)
        direct = next((s for s in self.exchange(self.src) if s.after == self.dst and s.kind == "exchange"), None)
        uneven = any(n % ranks for n in self.shape) and ranks <= REMAINDERS
        if not uneven or self.src.partial or direct is None or not any(step.price.bytes for step in found):
            return found
        exact = [self.with_remainders(step) for step in (direct, *found)]
        return (direct,) if exact[0] < sum(exact[1:]) else found

    def with_remainders(self, step: Leg) -> float:
        if step.price == FREE:
            return 0.0
        size = truly_missing(self.shape, step.before.dims, step.after.dims, self.sizes) * self.itemsize
        return self.links.seconds(step.kind, step.axes, size)

    def bound(self, state: State) -> float:
        """Seconds any boxing from here must still take: `bound.py` in closed form for even splits, level by level."""
        known = self.bounds.get(state)
        if known is None:
            known = self.bounds[state] = max((self.bound_of(state, level) for level in self.levels), default=0.0)
        return known

    def bound_of(self, state: State, level: "_Level") -> float:
        """The same for one level of the network, where ranks that differ only on faster axes are one."""
        dst, sizes, axes = self.dst, self.sizes, level.axes
        have, need = (_dropped(s.dims, level.faster, sizes) for s in (state, dst))
        partial = [a for a in state.partial if a in axes]
        kept = [a for a in partial if state.reduction == dst.reduction and a in dst.partial]
        terms = prod(sizes[a] for a in partial) // prod(sizes[a] for a in kept)
        made = prod(sizes[a] for a in dst.partial if a in axes and a not in kept)
        if terms > 1:
            ranks = prod(sizes[a] for a in axes) // prod(sizes[a] for a in kept)
            needers = ranks // made // prod(pieces(f, sizes) for f in need)
            moved = (terms - 1 + max(0, needers - 1)) / ranks * prod(self.shape)
            moved = max(moved, local_numel(need, self.shape, sizes) if made == 1 else 0)
        else:
            moved = missing(self.shape, have, need, sizes) if made == 1 else 0.0
        return float(moved * self.itemsize * level.seconds_per_byte + (level.latency if moved else 0.0))

    def edges(self, state: State, holes: bool) -> Iterator[Leg]:
        split = state.split
        idle = tuple(a for a in self.axes if a not in split and a not in state.partial)
        yield from self.slices(state, idle, holes)
        yield from self.to_partial(state, split)
        yield from self.gathers(state, split, holes)
        yield from self.all_to_alls(state, split, holes)
        yield from self.reductions(state, holes)
        yield from self.exchange(state)  # last, so that among equals a step is called by its own name

    def slices(self, state: State, idle: tuple[int, ...], holes: bool) -> Iterator[Leg]:
        for axis in idle:
            for after in self.filled(state, (axis,), holes):
                yield Leg("slice", state, after, (axis,), FREE)

    def to_partial(self, state: State, split: frozenset[int]) -> Iterator[Leg]:
        if state.partial and state.reduction != self.dst.reduction:
            return
        for axis in self.dst.partial:
            if axis not in state.partial:
                dims = _dropped(state.dims, (axis,), self.sizes) if axis in split else state.dims
                after = State(dims, tuple(sorted((*state.partial, axis))), self.dst.reduction)
                yield Leg("to_partial", state, after, (axis,), FREE)

    def exchange(self, state: State) -> Iterator[Leg]:
        """Slices straight from the ranks that have them to those that need them, at one of the stops worth going to.

        Axes still partial leave holes there, which a reduce_scatter then fills.
        """
        later = tuple(a for a in self.axes if a in state.partial)
        for stop in self.stops:
            dims = _dropped(stop, later, self.sizes)
            axes = moving(state.dims, dims)
            if axes:
                yield self.step("exchange", state, State(dims, state.partial, state.reduction), axes)
            elif dims != state.dims and stop == self.dst.dims:
                yield Leg("slice", state, State(dims, state.partial, state.reduction), (), FREE)

    def find_stops(self) -> tuple[tuple[Factors, ...], ...]:
        """The states that an exchange may go to: the target, also with axes cutting it further that are made partial
        later.

        Where links differ, axes that are gathered later may cut it too, and every plain signature is a stop, since less
        may cross a slow link from there.
        """
        dst, uneven = self.dst, len(self.levels) > 1
        if len(self.axes) > MANY:
            return (dst.dims,)
        stops = {dst.dims: None}
        for axes in _subsets(tuple(a for a in self.axes if a in dst.partial or (uneven and a not in dst.split))):
            stops.update(dict.fromkeys(_filled(dst.dims, axes, self.cut, self.sizes, False)))
        if uneven:
            for where in product((None, *self.cut), repeat=len(self.axes)):
                at = dict(zip(self.axes, where, strict=True))
                stops[tuple(tuple(a for a in self.axes if at[a] == dim) for dim in range(len(self.shape)))] = None
        return tuple(stops)

    def gathers(self, state: State, split: frozenset[int], holes: bool) -> Iterator[Leg]:
        for axes in _subsets(tuple(sorted(split))):
            after = state._replace(dims=_dropped(state.dims, axes, self.sizes))
            if holes or not _has_holes(after):
                yield self.step("all_gather", state, after, axes)

    def all_to_alls(self, state: State, split: frozenset[int], holes: bool) -> Iterator[Leg]:
        for axis in split:
            freed = state._replace(dims=_dropped(state.dims, (axis,), self.sizes))
            if holes or not _has_holes(freed):
                for after in self.filled(freed, (axis,), holes=False):
                    if after != state:
                        yield self.step("all_to_all", state, after, (axis,))

    def step(self, kind: str, state: State, after: State, axes: tuple[int, ...]) -> Leg:
        """A collective that adds nothing up: it moves the elements that ranks need and do not hold."""
        size = missing(self.shape, state.dims, after.dims, self.sizes) * self.itemsize
        rate = self.rates.get((kind, axes))
        if rate is None:
            start = self.links.seconds(kind, axes, 0.0)
            # Of many bytes: those of one are lost in the digits of what it takes to start.
            rate = self.rates[kind, axes] = start, (self.links.seconds(kind, axes, MANY_BYTES) - start) / MANY_BYTES
        return Leg(kind, state, after, axes, Price(rate[0] + rate[1] * size, size))

    def reductions(self, state: State, holes: bool) -> Iterator[Leg]:
        same = state.reduction == self.dst.reduction
        open_ = tuple(a for a in state.partial if not (same and a in self.dst.partial))
        for axes in _subsets(open_):
            left = tuple(a for a in state.partial if a not in axes)
            freed = State(state.dims, left, state.reduction if left else "sum")
            size = self.local(state)
            for kind in self.links.reductions:
                yield Leg(kind, state, freed, axes, self.links.price(kind, axes, size))
            for after in self.filled(freed, axes, holes):
                price = self.links.price("reduce_scatter", axes, self.local(after))
                yield Leg("reduce_scatter", state, after, axes, price)

    def filled(self, state: State, axes: tuple[int, ...], holes: bool) -> list[State]:
        """Every state in which these idle axes cut what the ranks hold further."""
        ways = _filled(state.dims, axes, self.cut, self.sizes, holes)
        return [State(dims, state.partial, state.reduction) for dims in ways]

    def local(self, state: State) -> int:
        """Bytes of the largest local buffer."""
        return local_numel(state.dims, self.shape, self.sizes) * self.itemsize


@lru_cache(maxsize=1 << 14)
def _filled(
    dims: tuple[Factors, ...], axes: tuple[int, ...], cut: tuple[int, ...], sizes: tuple[int, ...], holes: bool
) -> tuple[tuple[Factors, ...], ...]:
    found: dict[tuple[Factors, ...], None] = {}
    for order in permutations(axes):
        ways = [dims]
        for axis in order:
            ways = [
                (*way[:d], after, *way[d + 1 :])
                for way in ways
                for d in cut
                for after in fill(way[d], axis, sizes)
                if holes or all(f >= 0 for f in after)
            ]
        found.update(dict.fromkeys(ways))
    return tuple(found)


@lru_cache(maxsize=1 << 14)
def moving(before: tuple[Factors, ...], after: tuple[Factors, ...]) -> tuple[int, ...]:
    """The axes over which ranks must talk to get from one state to another: those that split `before` and change place.

    Ranks that differ only on other axes hold the same or want the same, so each such set of ranks keeps to itself.
    """
    changed: set[int] = set()
    for f, g in zip(before, after, strict=True):
        same = 0
        while same < min(len(f), len(g)) and f[same] == g[same]:
            same += 1
        if g[:same] != g or len(f) > same:
            changed.update(f[same:])
            changed.update(g[same:])
    return tuple(sorted(a for a in changed if a >= 0 and any(a in f for f in before)))


@lru_cache(maxsize=1 << 14)
def _dropped(dims: tuple[Factors, ...], axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Factors, ...]:
    return tuple(drop(f, frozenset(axes), sizes) for f in dims)


def _has_holes(state: State) -> bool:
    return any(f < 0 for factors in state.dims for f in factors)


def _subsets(axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(axes, n) for n in range(1, len(axes) + 1))
