"""Running a boxing on the shards of the ranks this process owns, one move after the other."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.world import World, device, owned, world, world_so_far
from ...sbp import Layout
from ..boxing import Boxing
from ..reductions import identity
from ..routes.moves import EXCHANGES, FLAT, LOCAL, Move
from ..routes.program import RankProgram
from .buffer import part
from .slow_link import SlowTransport, open_link
from .transport import MANY, Errand, InProcess, Transport

if TYPE_CHECKING:
    from .watch import Watch

__all__ = [
    "Flight",
    "exchanges",
    "land",
    "run",
    "slow_now",
    "steps",
    "threads_exchange",
    "token",
    "transport",
    "waited",
]

Flight: TypeAlias = Generator[None, None, tuple[Tensor, ...]]


@dataclass
class Waited:
    """Seconds that this process has waited for exchanges."""

    seconds: float = 0.0


waited = Waited()
_transport: tuple[World, Transport] | None = None


def transport() -> Transport:
    """The transport of this process: memory where it owns every rank, torch.distributed where it owns one."""
    global _transport
    here = world()
    if _transport is None or _transport[0] is not here:
        if here.rank is None:
            _transport = here, InProcess()
        else:
            from .dist import Dist  # brings in torch.distributed, which one process has no need of

            _transport = here, Dist()
    link = open_link()
    return _transport[1] if link is None else SlowTransport(_transport[1], link)


def watch_so_far() -> "Watch | None":
    """The watch over this process's exchanges with others, if it had any in this world."""
    if _transport is None or _transport[0].rank is None or _transport[0] is not world_so_far():
        return None
    from .dist import Dist

    return _transport[1].watch if isinstance(_transport[1], Dist) else None


def slow_now() -> tuple[str, ...]:
    """Links to other hosts that were found slow while this process exchanged with them, in words."""
    watch = watch_so_far()
    beats = watch.ledger.heartbeats if watch is not None else None
    return beats.links.lines if beats is not None else ()


def threads_exchange(where: Placement) -> bool:
    """Whether several threads of a process may exchange among these ranks at once, each in a lane of its own.
    Collectives of a backend are refused, because they are of one communicator."""
    here = world()
    return here.rank is None or (where.type == "cpu" and here.native is None and where.size <= MANY)


def run(boxing: Boxing, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The target's shards of the ranks owned here (an empty token where there is none)."""
    return land(steps(boxing, shards))


def land(flight: Flight) -> tuple[Tensor, ...]:
    """Run what is left of a flight and return where it got to."""
    while True:
        try:
            next(flight)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def exchanges(boxing: Boxing) -> int:
    """The number of exchanges that a boxing waits for one behind the other; a transport may make two in one."""
    return sum(EXCHANGES.get(move.kind, 1) for move in boxing.moves if move.kind not in LOCAL)


def steps(boxing: Boxing, shards: Sequence[Tensor], background: bool = False) -> Flight:
    """The same as a generator that pauses whenever an exchange is under way, so that a caller may do other work."""
    values = dict(zip(owned(boxing.src.placement), shards, strict=False))
    if not boxing.src.numel:
        return _shards(boxing, {r: _empty(boxing.dst, r) for r in owned(boxing.dst.placement)})
    stage = 0
    for move, programs in boxing.ours:
        if move.kind in LOCAL:
            values = {r: _local(move, programs[r][0], r, value) for r, value in values.items() if r in programs}
            continue
        reduction = move.src.state.reduction
        for i in range(EXCHANGES.get(move.kind, 1)):
            stage += 1
            wire = transport()  # only now, because a local move needs no peers
            jobs = [
                Errand(r, own[i], values[r] if r in values else token(boxing.dst, r)) for r, own in programs.items()
            ]
            whole = wire.all_reduce(boxing, stage, jobs, reduction) if move.kind == "all_reduce" and i == 0 else None
            arrival = whole or wire.start(boxing, stage, jobs, reduction, background)
            yield
            start = perf_counter()
            values.update(zip(programs, arrival.wait(), strict=True))
            waited.seconds += perf_counter() - start
            if whole is not None:
                break
        if move.kind in FLAT:
            values = {r: v.reshape(move.dst.local_shape(r)) for r, v in values.items()}
    return _shards(boxing, values)


def _shards(boxing: Boxing, values: dict[int, Tensor]) -> tuple[Tensor, ...]:
    return tuple(values[r] for r in owned(boxing.dst.placement)) or (token(boxing.dst),)


def _empty(layout: Layout, rank: int) -> Tensor:
    return torch.empty(layout.local_shape(rank), dtype=layout.dtype, device=device(layout.placement, rank))


def token(layout: Layout, rank: int | None = None) -> Tensor:
    """The token of a tensor none of whose ranks this process owns: no values, but a place in the autograd graph."""
    where = "cpu" if rank is None else device(layout.placement, rank)
    return torch.empty(0, dtype=layout.dtype, device=where)


def _local(move: Move, program: RankProgram, rank: int, value: Tensor) -> Tensor:
    if move.kind == "to_device":
        target = device(move.dst.placement, rank)
        if target.type != "cpu":
            # From pinned memory the copy engine works beside host and compute; the stream keeps the order.
            return value.pin_memory().to(target, non_blocking=True)
        return value.to(target)
    if program.view:
        return part(value, program.keep[0], 0)
    if move.kind == "slice":
        out = value.new_empty(program.shape)
    else:
        out = value.new_full(program.shape, identity(value.dtype, move.dst.state.reduction))
    for box in program.keep:
        part(out, box, 1).copy_(part(value, box, 0))
    return out
