"""Choosing: of all signatures that the rules allow for a call, the one whose inputs cost least to move.

An axis of the grid does one thing in a call: it splits one factor, or carries addends of one linear group, or nothing
(everything is B on it). Only what an input suggests is tried, for all else would move more: the factor that the axis
splits now, the group that is partial now, and, where that is not allowed, the input's other factors.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, TypeAlias

from .call import NEVER, Call, LocalFunction, Match, Piece, Way
from .rule import RuleAnswer
from .signature import Reduction
from .state import Factors, State, Window, spans

__all__ = [
    "AxisUse",
    "Fits",
    "CutOrder",
    "PriceOf",
    "all_ways",
    "candidates",
    "choose",
    "divides",
    "everywhere",
    "way_by",
    "with_windows",
]

# Seconds of bringing this input into this state, and of bringing its gradient back.
PriceOf: TypeAlias = Callable[[int, State], tuple[float, float]]
AxisUse: TypeAlias = tuple[str, int]  # what an axis does: ("split", factor), ("linear", group) or NOTHING
CutOrder: TypeAlias = Callable[[int, list[int]], Factors]  # how these axes cut a factor
Fits: TypeAlias = Callable[[int, Sequence[int]], bool]  # whether a dim of this size may be cut by axes of such sizes
NOTHING: AxisUse = ("nothing", 0)


def everywhere(call: Call) -> Way:
    """Everything B on every axis: what any op may do."""
    return Way(
        tuple(State(((),) * x.ndim) for x in call.inputs),
        tuple(State(((),) * y.ndim) for y in call.outputs),
    )


def candidates(call: Call, answer: RuleAnswer) -> list[Way]:
    """The ways of a call that are worth a look, the one with nothing split last."""
    if answer is None:
        return [everywhere(call)]
    if not isinstance(answer, Match):
        near = [way for way in answer if any(state.windows for state in way.inputs)]
        return near or [*answer, everywhere(call)]
    options = tuple(tuple(_suggested(call, answer, axis)) for axis in range(len(call.sizes)))
    found = {}
    for chosen in dict.fromkeys((_near(call, answer, options), options)):
        for doing in product(*chosen):
            way = way_by(call, answer, doing, lambda factor, axes: _order(call, answer, factor, axes))
            if way is not None:
                found[way.inputs, way.outputs] = way
        if found:  # neighbours have what a rank lacks, so that nothing need be gathered for all to do the same
            break
    return [*found.values(), *answer.also]


def _near(call: Call, match: Match, options: tuple[tuple[AxisUse, ...], ...]) -> tuple[tuple[AxisUse, ...], ...]:
    """The options in which axes that split a dim which is seen through windows go on to split it."""

    def still(axis: int) -> set[AxisUse]:
        return {
            ("split", f)
            for i, f in match.windows
            for g, cut in zip(match.inputs[i], call.states[i].dims, strict=True)
            if f == g and axis in cut
        }

    each = [(still(axis), uses) for axis, uses in enumerate(options)]
    return tuple(tuple(use for use in uses if use in seen) or uses for seen, uses in each)


def all_ways(call: Call, answer: RuleAnswer, fits: Fits) -> list[Way]:
    """Every way of a call, whatever its inputs suggest; `fits` says whether axes of such sizes may cut a dim.

    No rank is left with nothing then, so that holes are kept but where a local function looks for places of a dim.
    Nor does one see what others have: factors with windows stay whole.
    """
    if isinstance(answer, Match) and answer.alone is not None:
        answer = answer.alone
    if not isinstance(answer, Match):
        return [*(way for way in answer or () if not any(state.windows for state in way.inputs)), everywhere(call)]
    groups: list[AxisUse] = [("linear", g) for g in range(len(answer.linear))]
    options: list[list[AxisUse]] = [
        [*(("split", f) for f, n in enumerate(answer.sizes) if fits(n, [size])), *groups, NOTHING]
        if size > 1
        else [NOTHING]
        for size in call.sizes
    ]
    seen = {f for _, f in answer.windows}
    options = [[use for use in uses if use[0] != "split" or use[1] not in seen] for uses in options]
    lengths = _lengths(call, answer)
    places = answer.reduced if answer.local is not None else ()  # of these factors it looks for
    found = {}
    for doing in product(*options):
        cut: dict[int, list[int]] = {}
        for axis, (what, f) in enumerate(doing):
            if what == "split":
                cut.setdefault(f, []).append(axis)
        orders = {f: _order(call, answer, f, axes, f not in places and len(lengths[f]) == 1) for f, axes in cut.items()}
        even = all(fits(n, [call.sizes[axis] for axis in axes]) for f, axes in cut.items() for n in lengths[f])
        if even and all(len(order) == 1 for f, order in orders.items() if f in places):
            way = way_by(call, answer, doing, lambda f, axes, orders=orders: orders[f])  # type: ignore[misc]
            if way is not None:
                found[way.inputs, way.outputs] = way
    return [*found.values(), *answer.also, everywhere(call)]


def _lengths(call: Call, match: Match) -> dict[int, set[int]]:
    """The length of each factor: one tensor may have more groups than another, such as those of a convolution."""
    found: dict[int, set[int]] = {f: {n} for f, n in enumerate(match.sizes)}
    for tensors, dims in ((call.inputs, match.inputs), (call.outputs, match.outputs)):
        for x, factors in zip(tensors, dims, strict=True):
            for n, f in zip(x.shape, factors, strict=True):
                if f != NEVER and f not in match.shared:  # which say themselves where they can be cut
                    found[f].add(n)
    return found


def divides(size: int, ranks: Sequence[int]) -> bool:
    """Whether a dim can be cut evenly by axes of such sizes."""
    return size > 0 and size % prod(ranks) == 0


def choose(call: Call, ways: Sequence[Way], price: PriceOf) -> tuple[Way, list[float]]:
    """The cheapest way and what each costs, forward and backward together.

    Prices within a percent are equal: an all-reduce costs what a reduce-scatter and the all-gather of its gradient
    do. Of those the way that moves fewest tensors comes first, then the one that sends less forward, that cuts evenly,
    and that shares the work. So a sum of partial and whole stays whole, as its author would have it.
    """
    prices = [[price(i, state) for i, state in enumerate(way.inputs)] for way in ways]
    costs = [sum(forward + backward for forward, backward in row) for row in prices]
    limit = min(costs) * 1.01

    def order(at: int) -> tuple[float, ...]:
        moved = sum(have != to for have, to in zip(call.states, ways[at].inputs, strict=True))
        forward = sum(forward for forward, _ in prices[at])
        return moved, forward, _ragged(call, ways[at]), -_work_shared(ways[at]), at

    best = min((at for at, cost in enumerate(costs) if cost <= limit), key=order)
    return ways[best], costs


def _ragged(call: Call, way: Way) -> int:
    """How many dims of inputs are cut into pieces of different sizes."""
    return sum(
        size % prod(call.sizes[a] for a in factors if a >= 0) > 0
        for x, state in zip(call.inputs, way.inputs, strict=True)
        for size, factors in zip(x.shape, state.dims, strict=True)
    )


def _work_shared(way: Way) -> int:
    """On how many axes ranks do different things."""
    return len({a for state in way.inputs + way.outputs for a in (*state.split, *state.partial)})


def _suggested(call: Call, match: Match, axis: int) -> list[AxisUse]:
    if call.sizes[axis] == 1:
        return [NOTHING]
    doings: dict[AxisUse, None] = {}
    for i, state in enumerate(call.states):
        mine = [f for f in match.inputs[i] if f != NEVER]
        if axis in state.partial:
            if state.reduction == "sum":
                doings.update({("linear", g): None for g in _groups(call, match, axis, i)})
            doings.update({("split", f): None for f in mine})
        for dim, factors in enumerate(state.dims):
            if axis in factors:
                here = match.inputs[i][dim]
                doings.update({("split", f): None for f in ([here] if here != NEVER else mine)})
    return [*doings, NOTHING]


def _groups(call: Call, match: Match, axis: int, i: int) -> list[int]:
    """The linear groups of an input that is P which the others may join.

    One that is split is padded with zeros, and one that is whole counts once, both for nothing; but it then has to be
    added up with the result. So only if it is small (a bias), for else it is better to add up what is P now.
    """

    def joins(member: int) -> bool:
        state = call.states[member]
        small = 2 * call.inputs[member].numel() <= call.inputs[i].numel()
        return axis in state.partial or small

    return [g for g, group in enumerate(match.linear) if i in group and all(map(joins, group))]


def way_by(call: Call, match: Match, doing: Sequence[AxisUse], order: CutOrder) -> Way | None:
    """The way in which each axis does this; None if that cannot be."""
    axes_of: dict[int, list[int]] = {}
    sums: list[int] = []
    extremes: dict[Reduction, list[int]] = {}
    partial_in: list[list[int]] = [[] for _ in call.inputs]
    whole: set[tuple[int, int]] = set()  # inputs and factors of theirs that are not split
    for axis, (what, which) in enumerate(doing):
        if what == "linear":
            sums.append(axis)
            for i in match.linear[which]:
                partial_in[i].append(axis)
        elif what == "split":
            axes_of.setdefault(which, []).append(axis)
            kind = match.reduced.get(which)
            if kind in ("sum", "avg"):
                sums.append(axis)
                for i in match.addends:
                    partial_in[i].append(axis)
            elif kind:
                extremes.setdefault("max" if kind == "max" else "min", []).append(axis)
    if len(extremes) + bool(sums) > 1:
        return None  # one tensor is partial in one way only
    splits = {}
    for factor, axes in axes_of.items():
        if match.sizes[factor] < (2 if not match.hollow else 1):
            return None
        if not match.hollow and match.sizes[factor] < prod(call.sizes[a] for a in axes):
            return None
        splits[factor] = order(factor, axes)
        if match.shared:
            kept = match.whole(factor, prod(call.sizes[f] if f >= 0 else -f for f in splits[factor]))
            if kept is None:
                return None
            whole.update((i, factor) for i in kept)
    reduction, partial_out = next(iter(extremes.items()), ("sum", sums))
    inputs = tuple(
        State(tuple(splits.get(f, ()) if (i, f) not in whole else () for f in dims), tuple(sorted(partial)))
        for i, (dims, partial) in enumerate(zip(match.inputs, partial_in, strict=True))
    )
    local = match.local
    if any(f in splits for _, f in match.windows):
        local = match.near
        shapes = [tuple(x.shape) for x in call.inputs]
        inputs = tuple(with_windows(match, i, state, shapes[i], call.sizes) for i, state in enumerate(inputs))
    outputs = tuple(
        State(tuple(splits.get(f, ()) for f in dims), tuple(sorted(partial_out)), reduction) for dims in match.outputs
    )
    means = [f for f in splits if match.reduced.get(f) == "avg"]
    return Way(inputs, outputs, _weighted(call, match, means, local) if means else local)


def with_windows(match: Match, i: int, state: State, shape: Sequence[int], sizes: tuple[int, ...]) -> State:
    """The state of an input with what windows see; without them where every rank has just that."""
    found = [match.windows.get((i, f)) if cut else None for f, cut in zip(match.inputs[i], state.dims, strict=True)]
    for d, (window, n) in enumerate(zip(found, shape, strict=True)):
        if window is not None and _sees_pieces(window, n, state.dims[d], sizes):
            found[d] = None
    return state._replace(windows=tuple(found)) if any(found) else state


@lru_cache(maxsize=1 << 12)
def _sees_pieces(window: Window, length: int, cut: Factors, sizes: tuple[int, ...]) -> bool:
    each = product(*(range(n) if a in cut else range(1) for a, n in enumerate(sizes)))
    return all(spans(length, cut, at, sizes) == window.seen(spans(window.size, cut, at, sizes), length) for at in each)


def _weighted(call: Call, match: Match, means: Sequence[int], inner: LocalFunction | None) -> LocalFunction:
    """The op, whose mean over a rank's part counts by that part's share of the whole."""
    places = [next((i, dims.index(f)) for i, dims in enumerate(match.inputs) if f in dims) for f in means]
    whole = prod(match.sizes[f] for f in means)
    run = inner or (lambda piece, *args, **kwargs: call.op(*args, **kwargs))

    def local(piece: Piece, *args: Any, **kwargs: Any) -> Any:
        held = prod(sum(hi - lo for lo, hi in piece.spans(i, dim)) for i, dim in places)
        out = run(piece, *args, **kwargs)
        return out * (held / whole)

    return local


def _order(call: Call, match: Match, factor: int, axes: list[int], holes: bool | None = None) -> Factors:
    """How these axes cut a factor: as the first input that they cut already has it, else in their own order.

    Holes are kept where the match may have them, unless it is said whether they are.
    """
    wanted = set(axes)
    for state, dims in zip(call.states, match.inputs, strict=True):
        for held, f in zip(state.dims, dims, strict=True):
            if f != factor or {a for a in held if a >= 0} != wanted:
                continue
            if all(a >= 0 for a in held) or (match.may_have_holes(f, held, call.sizes) if holes is None else holes):
                return held
    return tuple(sorted(axes))
