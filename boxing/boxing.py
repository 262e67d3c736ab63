"""Plans: the moves from one layout to another, their cost and each rank's share; remembered on the source layout."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import ClassVar
from zlib import crc32

import torch

from ..placement import Cluster, Placement, default_cluster
from ..placement.errors import SbpError
from ..placement.links import Price
from ..placement.world import owned, world
from ..sbp import Layout
from .figures import duration, volume
from .html import paragraph, table
from .reductions import check_carried, check_reducible
from .routes.counts import received_by_rank
from .routes.even import Received, received_evenly
from .routes.moves import LOCAL, REDUCING, Move, moves
from .routes.program import RankProgram, collective, flat_gather, flat_reduce, local, transfer

__all__ = ["Boxing", "between"]


class Boxing:
    """A tensor's way from `src` to `dst`: its moves, what they cost, and each rank's program.

    >>> from ..placement import placement
    >>> from ..sbp import layout
    >>> p = placement("cpu:[0-3]")
    >>> print(between(layout(p, "P", (8, 8)), layout(p, "S(1)", (8, 8))))
    (P,) -> (S(1),): reduce_scatter over 0 -> (S(1),), 192 bytes a rank
    """

    drawn: ClassVar[Callable[["Boxing", str | Path], Path]]  # boxing/picture gives it

    def __init__(self, src: Layout, dst: Layout, way: tuple[Move, ...], cluster: Cluster) -> None:
        self.src, self.dst, self.moves, self.cluster = src, dst, way, cluster
        self.world = world()  # in another world this process would own other ranks
        self.price = Price(sum(m.price.time for m in way), sum(m.price.bytes for m in way))
        self._programs: dict[int, tuple[tuple[RankProgram, ...], ...]] = {}

    def __str__(self) -> str:
        there = "" if self.src.placement is self.dst.placement else f" on {self.dst.placement}"
        way = " then ".join(map(str, self.moves)) or "nothing to do"
        return f"{self.src.lie} -> {self.dst.lie}{there}: {way}, {self.bytes} bytes a rank"

    def _repr_html_(self) -> str:
        rows = [(str(move), volume(move.price.bytes), duration(move.price.time)) for move in self.moves]
        return paragraph(str(self)) + (table(("move", "a rank", "time"), rows, (1, 2)) if rows else "")

    def draw(self, path: str | Path) -> Path:
        """Write the boxing as a picture, a box a state, an arrow a move; the suffix says svg, png, pdf or dot."""
        return type(self).drawn(self, path)

    @property
    def route(self) -> str:
        """The kinds of the moves, such as `reduce_scatter, all_gather`; `view` where nothing is to be done."""
        return ", ".join(m.kind for m in self.moves) or "view"

    @cached_property
    def expected(self) -> tuple[tuple[int, tuple[int, ...], torch.dtype, str], ...]:
        """The shards to be passed in: for each source rank that this process owns its shape, dtype and device type."""
        src = self.src
        return tuple((r, src.local_shape(r), src.dtype, src.placement.type) for r in owned(src.placement))

    @cached_property
    def ours(self) -> tuple[tuple[Move, dict[int, tuple[RankProgram, ...]]], ...]:
        """Each move, with the programs of the ranks that this process owns and that take part in it."""
        here = dict.fromkeys((*owned(self.src.placement), *owned(self.dst.placement)))
        rows = {r: self.programs(r) for r in here}
        return tuple((move, {r: row[i] for r, row in rows.items() if row[i]}) for i, move in enumerate(self.moves))

    @cached_property
    def sends(self) -> bool:
        """Whether anything goes from rank to rank."""
        return any(move.kind not in LOCAL for move in self.moves)

    def is_view(self, rank: int) -> bool:
        """Whether what a rank has behind it is the memory of what it had."""
        if self.sends or not (rank in self.src.placement and rank in self.dst.placement):
            return False
        return all(program.view for parts in self.programs(rank) for program in parts)

    @cached_property
    def text(self) -> bytes:
        """The boxing as the ledger and errors call it."""
        return f"{self.src} -> {self.dst.lie} on {self.dst.placement}".encode()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of either placement."""
        return tuple(sorted({*self.src.placement.flat, *self.dst.placement.flat}))

    @cached_property
    def fingerprint(self) -> int:
        """A number that two ranks share only if they run the same boxing, for tags and for the ledger."""
        return crc32(f"{self.src!r}{self.dst!r}{[(m.kind, m.dst.state) for m in self.moves]}".encode())

    @cached_property
    def _evenly(self) -> list[Received] | None:
        """Elements that each move brings, where all ranks hold as much: then no rank has to be looked at."""
        found = [received_evenly(move) for move in self.moves]
        return None if None in found else [one for one in found if one is not None]

    @cached_property
    def _by_rank(self) -> list[dict[int, int]]:
        """Elements that each move brings to each rank, where ranks hold unequal parts."""
        return [received_by_rank(move) for move in self.moves]

    @cached_property
    def bytes(self) -> int:
        """Bytes that the busiest rank receives, exactly."""
        each = self._evenly
        if each is not None and sum(not one.alike for one in each) <= 1:  # else another rank may be busiest in each
            found = Counter[Placement]()  # where there are two, no rank is on both
            for move, one in zip(self.moves, each, strict=True):
                found[move.dst.placement] += one.most
            return max(found.values(), default=0) * self.src.dtype.itemsize
        ranks = Counter[int]()
        for received in self._by_rank:
            ranks.update(received)
        return max(ranks.values(), default=0) * self.src.dtype.itemsize

    @property
    def busiest(self) -> list[int]:
        """Bytes that the busiest rank receives in each move, exactly."""
        if self._evenly is not None:
            return [one.most * self.src.dtype.itemsize for one in self._evenly]
        return [max(received.values(), default=0) * self.src.dtype.itemsize for received in self._by_rank]

    @cached_property
    def total(self) -> int:
        """Bytes that all ranks send, exactly."""
        if self._evenly is not None:
            return sum(one.total for one in self._evenly) * self.src.dtype.itemsize
        return sum(sum(received.values()) for received in self._by_rank) * self.src.dtype.itemsize

    def sent(self, rank: int) -> int:
        """Bytes that one rank sends, exactly."""
        return sum(part.numel for program in self._all(rank) for part in program.sends) * self.src.dtype.itemsize

    def received(self, rank: int) -> int:
        """Bytes that one rank receives, exactly."""
        return _received(self._all(rank)) * self.src.dtype.itemsize

    def programs(self, rank: int) -> tuple[tuple[RankProgram, ...], ...]:
        """For each move, the rank's exchanges (an all_reduce is two); none where the rank has no part in the move."""
        known = self._programs.get(rank)
        if known is None:
            known = self._programs[rank] = tuple(_programs(move, rank) for move in self.moves)
        return known

    def _all(self, rank: int) -> Iterator[RankProgram]:
        return chain.from_iterable(self.programs(rank))


def between(src: Layout, dst: Layout) -> Boxing:
    """The boxing of least time by the cluster in use; looked up if it was made before."""
    known: Boxing | None = src.memo.get(dst)
    cluster = default_cluster(dst.placement)
    if known is not None and known.cluster is cluster and known.world is world():
        return known
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise SbpError(f"boxing changes where a tensor lies, not its shape or dtype\n  from {src}\n  to   {dst}")
    check_carried(src.dtype)
    made = Boxing(src, dst, moves(src, dst, cluster), cluster)
    if any(move.kind in REDUCING for move in made.moves):
        check_reducible(src.dtype, src.state.reduction)
    src.memo[dst] = made
    return made


def _received(exchanges: Iterable[RankProgram]) -> int:
    """Elements that a rank receives."""
    return sum(part.numel for exchange in exchanges for part in exchange.receives)


def _programs(move: Move, rank: int) -> tuple[RankProgram, ...]:
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
