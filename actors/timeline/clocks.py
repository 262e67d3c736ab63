"""Clocks of ranks: how much each differs from that of the first, and the records of all on the first.

Clocks of one host are mostly the same; those of two hosts are not, by any amount.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ...boxing.exchange.value_message import packed, unpacked
from ...placement.errors import TransportError
from ...placement.world import process_group, world
from ..protocol.simulate import Ran

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["clock_offsets", "collect", "offset"]

ROUNDS = 16
TAG = 4021  # of these messages only


def offset(exchanges: Iterable[tuple[float, float, float]]) -> float:
    """The lead of the other clock, from `(sent, there, back)`: sent and back by ours, there by the other.

    Of several exchanges the one of the shortest way says it; it is off by half of that way at most.

    >>> offset([(0.0, 107.0, 10.0), (20.0, 121.5, 21.0)])
    101.0
    """
    sent, there, back = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return there - (sent + back) / 2


def clock_offsets(
    ranks: Sequence[int], *, clock: Callable[[], float] = perf_counter, rounds: int = ROUNDS
) -> dict[int, float]:
    """The offset of each rank's clock to that of the first; all of them call this. The others get an empty dict."""
    here, first = world().rank, min(ranks)
    if here is None:
        return dict.fromkeys(ranks, 0.0)
    try:
        if here != first:
            _answer(first, clock, rounds)
            return {}
        others = [rank for rank in sorted(ranks) if rank != first]
        return {first: 0.0, **{rank: offset(_ask(rank, clock, rounds)) for rank in others}}
    except RuntimeError as error:
        raise _failed(f"the clocks of ranks {sorted(ranks)} could not be compared", here, error) from error


def collect(ranks: Sequence[int], records: tuple[Ran, ...]) -> Mapping[int, tuple[Ran, ...]]:
    """The records of all ranks on the first; all of them call this. The others get an empty dict."""
    here, first = world().rank, min(ranks)
    if here is None:
        return {first: records}
    try:
        if here == first:
            return {rank: records if rank == here else _records(rank) for rank in sorted(ranks)}
        for part in packed(records):
            _send(part, first)
    except RuntimeError as error:
        raise _failed(f"the records of ranks {sorted(ranks)} could not be brought together", here, error) from error
    return {}


def _records(rank: int) -> tuple[Ran, ...]:
    sizes = torch.zeros(2, dtype=torch.int64, device="cpu")
    _receive(sizes, rank)
    data = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
    _receive(data, rank)
    return tuple(unpacked(sizes, data))


def _failed(what: str, here: int, error: RuntimeError) -> TransportError:
    said = str(error).partition("\n")[0]
    return TransportError(
        f"{what} on rank {here}\n  torch.distributed said: {said}\n"
        "  all of these ranks must take part, within flow.init(timeout=...)"
    )


def _ask(rank: int, clock: Callable[[], float], rounds: int) -> list[tuple[float, float, float]]:
    exchanges = []
    said = torch.zeros(1, dtype=torch.float64, device="cpu")
    for _ in range(rounds):
        sent = clock()
        _send(torch.zeros(1, dtype=torch.float64, device="cpu"), rank)
        _receive(said, rank)
        exchanges.append((sent, said.item(), clock()))
    return exchanges


def _answer(rank: int, clock: Callable[[], float], rounds: int) -> None:
    asked = torch.zeros(1, dtype=torch.float64, device="cpu")
    for _ in range(rounds):
        _receive(asked, rank)
        _send(torch.tensor([clock()], dtype=torch.float64, device="cpu"), rank)


def _send(tensor: torch.Tensor, rank: int) -> None:
    import torch.distributed as dist

    work = dist.isend(tensor, rank, group=_everybody(), tag=TAG)
    if work is not None:
        work.wait()


def _receive(tensor: torch.Tensor, rank: int) -> None:
    import torch.distributed as dist

    work = dist.irecv(tensor, rank, group=_everybody(), tag=TAG)
    if work is not None:
        work.wait()


def _everybody() -> "ProcessGroup":
    return process_group(range(world().size or 0))
