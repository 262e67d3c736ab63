"""Plans: the whole way from one layout to another, on one placement or between two, remembered on the source layout.

Between placements the way is: reduce at the source if the tensor is partial there, one transfer, then finish at the
target. Where the target repeats what it holds, ranks fetch a piece each and gather among themselves, so that a byte
enters a host once; and two grids over the same ranks are first written on a common finer grid, where there may be
nothing to move.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import NamedTuple
from zlib import crc32

import torch

from ..placement import Cluster, Placement, default_cluster
from ..placement.errors import SbpError
from ..placement.grid import placement as make_placement
from ..placement.world import owned, world
from ..sbp import Layout, State
from .price import Network, Price
from .program import Program, collective, flat_gather, flat_reduce, local, transfer
from .route import search

__all__ = ["Move", "Plan", "plan"]

LOCAL = frozenset({"slice", "to_partial", "to_device"})  # nothing is sent
FLAT = frozenset({"all_reduce", "all_reduce_once"})  # boxes count the elements of the flattened buffer
EXCHANGES = {"all_reduce": 2}  # exchanges a move takes, where it is not one


class Move(NamedTuple):
    """One step of a plan: a collective over axes of a placement, a transfer to another, or a local change."""

    kind: str
    src: Layout
    dst: Layout
    axes: tuple[int, ...]
    price: Price

    def __str__(self) -> str:
        names = self.src.placement.names or tuple(map(str, range(self.src.placement.ndim)))
        over = " over " + ", ".join(names[a] for a in self.axes) if self.axes and self.kind not in LOCAL else ""
        return f"{self.kind}{over} -> {self.dst.lie}"


class Plan:
    """How a tensor gets from `src` to `dst`: its moves, what they cost, and each rank's program.

    >>> from ..placement import placement
    >>> from ..sbp import layout
    >>> p = placement("cpu:[0-3]")
    >>> print(plan(layout(p, "P", (8, 8)), layout(p, "S(1)", (8, 8))))
    (P,) -> (S(1),): reduce_scatter over 0 -> (S(1),), 192 bytes a rank
    """

    def __init__(self, src: Layout, dst: Layout, moves: tuple[Move, ...], cluster: Cluster) -> None:
        self.src, self.dst, self.moves, self.cluster = src, dst, moves, cluster
        self.world = world()  # in another world this process would own other ranks
        self.price = Price(sum(m.price.time for m in moves), sum(m.price.bytes for m in moves))
        self._programs: dict[int, tuple[tuple[Program, ...], ...]] = {}

    def __str__(self) -> str:
        there = "" if self.src.placement is self.dst.placement else f" on {self.dst.placement}"
        way = " then ".join(map(str, self.moves)) or "nothing to do"
        return f"{self.src.lie} -> {self.dst.lie}{there}: {way}, {self.bytes} bytes a rank"

    @property
    def route(self) -> str:
        """The kinds of the moves, as `reduce_scatter, all_gather`; `view` where nothing is to be done."""
        return ", ".join(m.kind for m in self.moves) or "view"

    @cached_property
    def expected(self) -> tuple[tuple[int, tuple[int, ...], torch.dtype, str], ...]:
        """What this process is to pass in: for each source rank that it owns its shape, dtype and device type."""
        src = self.src
        return tuple((r, src.local_shape(r), src.dtype, src.placement.type) for r in owned(src.placement))

    @cached_property
    def ours(self) -> tuple[tuple[Move, dict[int, tuple[Program, ...]]], ...]:
        """Each move, with the programs of the ranks that this process owns and that take part in it."""
        here = dict.fromkeys((*owned(self.src.placement), *owned(self.dst.placement)))
        rows = {r: self.programs(r) for r in here}
        return tuple((move, {r: row[i] for r, row in rows.items() if row[i]}) for i, move in enumerate(self.moves))

    @cached_property
    def text(self) -> bytes:
        """What the ledger and errors call this plan."""
        return f"{self.src} -> {self.dst.lie} on {self.dst.placement}".encode()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of either placement."""
        return tuple(sorted({*self.src.placement.flat, *self.dst.placement.flat}))

    @cached_property
    def fingerprint(self) -> int:
        """A number that two ranks share only if they run the same plan, for tags and for the ledger."""
        return crc32(f"{self.src!r}{self.dst!r}{[(m.kind, m.dst.state) for m in self.moves]}".encode())

    @cached_property
    def bytes(self) -> int:
        """Bytes that the busiest rank receives, exactly."""
        return max((self.received(rank) for rank in self.ranks), default=0)

    @cached_property
    def total(self) -> int:
        """Bytes that all ranks send, exactly."""
        return sum(self.sent(rank) for rank in self.ranks)

    def sent(self, rank: int) -> int:
        """Bytes that one rank sends, exactly."""
        return sum(part.numel for program in self._all(rank) for part in program.sends) * self.src.dtype.itemsize

    def received(self, rank: int) -> int:
        """Bytes that one rank receives, exactly."""
        return sum(part.numel for program in self._all(rank) for part in program.receives) * self.src.dtype.itemsize

    def programs(self, rank: int) -> tuple[tuple[Program, ...], ...]:
        """For each move, the rank's exchanges (an all_reduce is two); none where the rank has no part in the move."""
        known = self._programs.get(rank)
        if known is None:
            known = self._programs[rank] = tuple(_programs(move, rank) for move in self.moves)
        return known

    def _all(self, rank: int) -> Iterator[Program]:
        return chain.from_iterable(self.programs(rank))


def plan(src: Layout, dst: Layout) -> Plan:
    """The plan of least time by the cluster in use; looked up if it was made before."""
    known: Plan | None = src.memo.get(dst)
    cluster = default_cluster(dst.placement)
    if known is not None and known.cluster is cluster and known.world is world():
        return known
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise SbpError(f"boxing changes where a tensor lies, not its shape or dtype\n  from {src}\n  to   {dst}")
    src.memo[dst] = made = Plan(src, dst, tuple(_merged(_moves(src, dst, cluster))), cluster)
    return made


def _programs(move: Move, rank: int) -> tuple[Program, ...]:
    src, dst = move.src, move.dst
    if move.kind == "transfer":
        return (transfer(src, dst, rank),) if rank in src.placement or rank in dst.placement else ()
    if rank not in src.placement:
        return ()
    if move.kind in LOCAL:
        return (local(src, dst, rank),)
    if move.kind == "all_reduce":
        numel, group = prod(src.local_shape(rank)), src.placement.group(move.axes, rank)
        return flat_reduce(numel, group, rank, whole=False), flat_gather(numel, group, rank)
    if move.kind == "all_reduce_once":
        numel, group = prod(src.local_shape(rank)), src.placement.group(move.axes, rank)
        return (flat_reduce(numel, group, rank, whole=True),)
    return (collective(src, dst, move.axes, rank),)


def _merged(moves: list[Move]) -> Iterator[Move]:
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


def _moves(src: Layout, dst: Layout, cluster: Cluster) -> list[Move]:
    p, q = src.placement, dst.placement
    if p is q:
        return _within(src, dst.state, cluster)
    if p.type != q.type:
        # Into CUDA memory first and out of it last, so that the network carries what CUDA holds.
        there = src if q.type == "cuda" else dst
        kind = "cuda"
        middle = Layout(_typed(there.placement, kind), there.state, there.shape, there.dtype)
        step = Move("to_device", src, middle, (), Price(0.0, 0.0))
        if there is src:
            return [step, *_moves(middle, dst, cluster)]
        return [*_moves(src, middle, cluster), step._replace(src=middle, dst=dst)]
    if p.flat == q.flat:
        fine = _common_grid(p, q)
        a, b = fine and _regrid(src, fine), fine and _regrid(dst, fine)
        if a and b:
            return _within(a, b.state, cluster)
    return _between(src, dst, cluster)


def _typed(p: Placement, kind: str) -> Placement:
    return Placement(kind, p.flat, p.shape, p.names)


def _within(src: Layout, state: State, cluster: Cluster) -> list[Move]:
    network = Network.of(src.placement, cluster)
    moves, here = [], src
    for step in search(src.state, state, src.shape, src.dtype.itemsize, network):
        there = src.with_state(step.after)
        moves.append(Move(step.kind, here, there, step.axes, step.price))
        here = there
    return moves


def _common_grid(p: Placement, q: Placement) -> Placement | None:
    """The coarsest grid of which both are blocks of neighbouring axes, or None where their cuts do not nest."""
    cuts = {prod(r.shape[: a + 1]) for r in (p, q) for a in range(r.ndim)}
    ends = sorted(cuts)
    if any(b % a for a, b in pairwise(ends)):
        return None
    shape = [b // a for a, b in zip([1, *ends], ends, strict=False) if b > a]
    return make_placement(p.type, p.flat).reshape(tuple(shape) or (1,))


def _regrid(layout: Layout, fine: Placement) -> Layout | None:
    """The layout on a finer grid; None where cutting in steps gives other pieces than cutting at once."""
    blocks: list[tuple[int, ...]] = []
    at = 0
    for size in layout.placement.shape:
        start = at
        while prod(fine.shape[start:at]) < size:
            at += 1
        blocks.append(tuple(range(start, at)))
    dims = tuple(tuple(chain.from_iterable(blocks[f] if f >= 0 else (f,) for f in d)) for d in layout.state.dims)
    partial = tuple(chain.from_iterable(blocks[a] for a in layout.state.partial))
    found = Layout(fine, State(dims, partial, layout.state.reduction), layout.shape, layout.dtype)
    return found if all(found.spans(r) == layout.spans(r) for r in fine.flat) else None


def _between(src: Layout, dst: Layout, cluster: Cluster) -> list[Move]:
    ways = []
    for first in _whole_sources(src, cluster):
        there = first[-1].dst if first else src
        for target in _targets(dst):
            price = _transfer_price(there, target, cluster)
            last = _within(target, dst.state, cluster)
            ways.append([*first, Move("transfer", there, target, (), price), *last])
    return min(
        ways, key=lambda moves: (sum(m.price.time for m in moves), sum(m.price.bytes for m in moves), len(moves))
    )


def _whole_sources(src: Layout, cluster: Cluster) -> Iterator[list[Move]]:
    """Ways to have no addends at the source: none to go, or a reduce_scatter along each dim, or an all_reduce."""
    if not src.state.partial:
        yield []
        return
    for state in (*_split_further(src, src.state.partial), State(src.state.dims)):
        yield _within(src, state, cluster)


def _targets(dst: Layout) -> Iterator[Layout]:
    """What to receive: the target itself, or a piece each where ranks are to hold the same (or addends)."""
    if not dst.state.partial:
        yield dst
    split = dst.state.split
    alike = tuple(a for a, n in enumerate(dst.placement.shape) if a not in split and n > 1)
    if alike:
        for state in _split_further(dst, alike):
            yield dst.with_state(state)
    if dst.state.partial and not any(dst.shape):
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
    else:
        received = prod(dst.local_shape(q.flat[0]))
        sent = received * q.size // p.size
    level = cluster.levels[cluster.level_of(ranks)]
    size = dst.dtype.itemsize
    peers = prod(p.shape[a] for a in src.state.split)
    return Price(peers * level.latency + max(received, sent) * size / level.bandwidth, float(received * size))
