"""The moves from one layout to another, on one placement or between two. Pure: values in, moves out.

Between placements the way is: reduce at the source if the tensor is partial there, one transfer, then finish at the
target. Where the target repeats what it holds, ranks fetch a piece each and gather among themselves, so that a byte
enters a host once; and two grids over the same ranks are first written on a common finer grid, where there may be
nothing to move.
"""

from collections.abc import Iterable, Iterator
from itertools import combinations
from math import prod
from typing import NamedTuple

from ...placement import Cluster, Placement
from ...placement.device import family
from ...placement.links import Links, Price, blocks, common_grid
from ...sbp import Layout, State
from ...sbp.state import overlap
from .program import collective, transfer
from .route import search

__all__ = ["EXCHANGES", "FLAT", "LOCAL", "REDUCING", "Move", "moves"]

LOCAL = frozenset({"slice", "to_partial", "to_device"})  # nothing is sent
FLAT = frozenset({"all_reduce", "all_reduce_once"})  # boxes count the elements of the flattened buffer
REDUCING = frozenset({"reduce_scatter", "all_reduce", "all_reduce_once"})  # addends become sums
SOME = 256  # ranks that are looked at for a price
EXCHANGES = {"all_reduce": 2}  # exchanges a move takes, where it is not one


class Move(NamedTuple):
    """One step of a boxing: a collective over axes of a placement, a transfer to another, or a local change."""

    kind: str
    src: Layout
    dst: Layout
    axes: tuple[int, ...]
    price: Price

    def __str__(self) -> str:
        names = self.src.placement.names or tuple(map(str, range(self.src.placement.ndim)))
        over = " over " + ", ".join(names[a] for a in self.axes) if self.axes and self.kind not in LOCAL else ""
        return f"{self.kind}{over} -> {self.dst.lie}"


def moves(src: Layout, dst: Layout, cluster: Cluster) -> tuple[Move, ...]:
    """The moves of least time by this cluster; none where every rank holds already what it is to hold."""
    return tuple(_merged(_way(src, dst, cluster)))


def _merged(moves: Iterable[Move]) -> Iterator[Move]:
    """Slices in a row are one slice."""
    held: Move | None = None
    for move in moves:
        if held is not None and held.kind == move.kind == "slice":
            held = held._replace(dst=move.dst, axes=held.axes + move.axes)
            continue
        if held is not None:
            yield held
        held = move
    if held is not None:
        yield held


def _way(src: Layout, dst: Layout, cluster: Cluster) -> list[Move]:
    p, q = src.placement, dst.placement
    if src.state.windows or dst.state.windows:
        return _through_windows(src, dst, cluster)
    if p is q:
        return _over_levels(src, dst, cluster)
    if p.type != q.type:
        # Into a card's memory first and out of it last, so that the network carries what cards hold.
        there, kind = (src, q.type) if family(q.type).card else (dst, p.type)
        middle = Layout(_typed(there.placement, kind), there.state, there.shape, there.dtype)
        step = Move("to_device", src, middle, (), Price(0.0, 0.0))
        if there is src:
            return [step, *_way(middle, dst, cluster)]
        return [*_way(src, middle, cluster), step._replace(src=middle, dst=dst)]
    fine = common_grid(p, q)
    a, b = fine and _regrid(src, fine), fine and _regrid(dst, fine)
    if a and b:
        return _within(a, b.state, cluster)
    return _between(src, dst, cluster)


def _through_windows(src: Layout, dst: Layout, cluster: Cluster) -> list[Move]:
    """Moves to, or from, pieces that overlap, by way of pieces that do not: neighbours send each other the rest.

    A whole tensor is cut, without any sending; and addends that are wanted as addends of the whole stay where they are.
    """
    if src is dst or (src.placement is dst.placement and src.state == dst.state):
        return []
    if src.placement is dst.placement:
        if _covers(src, dst):
            return [Move("slice", src, dst, (), Price(0.0, 0.0))]
        if _stays_addend(src, dst):
            return [Move("to_partial", src, dst, src.state.seen_over, Price(0.0, 0.0))]
    if src.state.windows:
        pieces = src.with_state(src.state.plain)
        first = [_halo("halo_sum", src, pieces, cluster)]
        assert src.state.adds, "what windows saw goes nowhere else"
        return [*first, *_way(pieces, dst, cluster)]
    pieces = dst.with_state(dst.state.plain)
    return [*_way(src, pieces, cluster), _halo("halo", pieces, dst, cluster)]


def _halo(kind: str, src: Layout, dst: Layout, cluster: Cluster) -> Move:
    """One exchange between those that hold what others see; its price is exact for few ranks."""
    axes = (dst if dst.state.windows else src).state.seen_over
    ranks = src.placement.flat[:SOME]
    received = max(sum(part.numel for part in collective(src, dst, axes, r).receives) for r in ranks)
    size = received * src.dtype.itemsize
    seconds = Links.of(src.placement, cluster).seconds(kind, axes, float(size)) if size else 0.0
    return Move(kind, src, dst, axes, Price(seconds, float(size)))


def _covers(src: Layout, dst: Layout) -> bool:
    """Whether every rank holds already all that its windows see."""
    if src.state.partial != dst.state.partial or src.state.reduction != dst.state.reduction or src.state.adds:
        return False
    return dst.state.windows != () and all(
        sum(n for _, _, n in overlap(a, b)) == sum(hi - lo for lo, hi in b)
        for rank in src.placement.flat
        for a, b in zip(src.spans(rank), dst.spans(rank), strict=True)
    )


def _stays_addend(src: Layout, dst: Layout) -> bool:
    """Whether addends of what windows saw are wanted as addends of the whole: each fills what it lacks with zeros."""
    over, windows = {*src.state.seen_over}, src.state.windows
    if not src.state.adds or dst.state.windows or dst.state.reduction != "sum":
        return False
    whole = tuple(() if window else f for f, window in zip(src.state.dims, windows, strict=True))
    return dst.state.dims == whole and {*dst.state.partial} == {*src.state.partial, *over}


def _typed(p: Placement, kind: str) -> Placement:
    return Placement(kind, p.flat, p.shape, p.names)


def _within(src: Layout, state: State, cluster: Cluster) -> list[Move]:
    links = Links.of(src.placement, cluster)
    moves, here = [], src
    for step in search(src.state, state, src.shape, src.dtype.itemsize, links):
        there = src.with_state(step.after)
        moves.append(Move(step.kind, here, there, step.axes, step.price))
        here = there
    return moves


def _over_levels(src: Layout, dst: Layout, cluster: Cluster) -> list[Move]:
    """Moves on one placement. Where an axis of it crosses hosts, also in steps inside of hosts and between them: what
    goes over the slower links is added up before, and gathered behind. NCCL sees to that itself."""
    plain = _within(src, dst.state, cluster)
    p = src.placement
    fine = p if family(p.type).card else cluster.by_levels(p)
    if fine is p or not any(move.price.bytes for move in plain):
        return plain
    a, b = _regrid(src, fine), _regrid(dst, fine)
    if a is None or b is None:
        return plain
    return min((plain, _within(a, b.state, cluster)), key=_cost)


def _cost(way: list[Move]) -> tuple[float, float, int]:
    return sum(m.price.time for m in way), sum(m.price.bytes for m in way), len(way)


def _regrid(layout: Layout, fine: Placement) -> Layout | None:
    """The layout on a finer grid; None where cutting in steps gives other pieces than cutting at once."""
    state = layout.state.refined(list(blocks(layout.placement.shape, fine.shape)))
    found = Layout(fine, state, layout.shape, layout.dtype)
    same = fine is layout.placement or all(found.spans(r) == layout.spans(r) for r in fine.flat)
    return found if same else None


def _between(src: Layout, dst: Layout, cluster: Cluster) -> list[Move]:
    goal = _regrid(dst, cluster.by_levels(dst.placement)) or dst
    ways = []
    for first in _whole_sources(src, cluster):
        there = first[-1].dst if first else src
        for target in _targets(goal):
            price = _transfer_price(there, target, cluster)
            last = _within(target, goal.state, cluster)
            ways.append([*first, Move("transfer", there, target, (), price), *last])
    return min(ways, key=_cost)


def _whole_sources(src: Layout, cluster: Cluster) -> Iterator[list[Move]]:
    """Ways to have no addends at the source: none to go, or a reduce_scatter along each dim, or an all_reduce."""
    if not src.state.partial:
        yield []
        return
    for state in (*_split_further(src, src.state.partial), State(src.state.dims)):
        yield _within(src, state, cluster)


def _targets(dst: Layout) -> Iterator[Layout]:
    """The layout to receive: the target itself, or a piece each where ranks are to hold the same (or addends)."""
    if not dst.state.partial:
        yield dst
    split = dst.state.split
    alike = tuple(a for a, n in enumerate(dst.placement.shape) if a not in split and n > 1)
    for count in range(1, len(alike) + 1):
        for axes in combinations(alike, count):
            if set(dst.state.partial) <= set(axes):
                yield from map(dst.with_state, _split_further(dst, axes))
    if dst.state.partial and not dst.shape:
        yield dst.with_state(State(dst.state.dims))


def _split_further(layout: Layout, axes: tuple[int, ...]) -> Iterator[State]:
    dims = layout.state.dims
    for d in range(len(dims)):
        yield State((*dims[:d], dims[d] + axes, *dims[d + 1 :]))


def _transfer_price(src: Layout, dst: Layout, cluster: Cluster) -> Price:
    """Exact for few ranks; for many as if the target held nothing and the sources shared the sending evenly."""
    p, q = src.placement, dst.placement
    ranks = {*p.flat, *q.flat}
    if p.size * q.size <= 64:
        programs = [transfer(src, dst, r) for r in ranks]
        received = max(sum(part.numel for part in program.receives) for program in programs)
        sent = max(sum(part.numel for part in program.sends) for program in programs)
        messages = max(max(len(program.receives), len(program.sends)) for program in programs)
    else:
        received = prod(dst.local_shape(q.flat[0]))
        sent = received * q.size // p.size
        messages = max(prod(p.shape[a] for a in src.state.split), q.size // p.size)
    latency, bandwidth = cluster.between(p, q)
    size = dst.dtype.itemsize
    hops = max(1, messages / 8)  # all are on their way at once, as in an exchange
    return Price(hops * latency + max(received, sent) * size / bandwidth, float(received * size))
