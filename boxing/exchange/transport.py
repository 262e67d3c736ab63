"""Transports: how the boxes of an exchange get from rank to rank. `InProcess` serves the ranks of one process.

Every transport counts what it is handed to send, so that a boxing's figures can be checked against it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from ...sbp.signature import Reduction
from ..boxing import Boxing
from ..routes.program import RankProgram
from .buffer import finish, pack

__all__ = [
    "MANY", "Arrival", "Arrived", "Errand", "Exchange", "Given", "InProcess", "Posting", "Sent", "Transport", "Turn",
    "lane", "lane_here", "waiting", "waits",
]  # fmt: skip

MANY = 16  # beyond so many ranks collectives send fewer messages than everybody to everybody

waiting: set[int] = set()  # the threads of this process that wait for another in the midst of what they do


class _Waits:
    """A thread inside waits for another process."""

    def __enter__(self) -> None:
        waiting.add(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        waiting.discard(threading.get_ident())


waits = _Waits()  # it holds nothing, so that all threads may enter it

Posting: TypeAlias = tuple[list[Any], Callable[[], Tensor]]  # what to wait for, and then how to make the result


class _Lane(threading.local):
    number = 0


_lane = _Lane()


@contextmanager
def lane(number: int) -> Iterator[None]:
    """Exchanges of this thread meet those of the same lane on other ranks, whatever other threads exchange meanwhile.

    The order of each lane is to be the same on all ranks; lane 0 is that of the program.
    """
    before, _lane.number = _lane.number, number
    try:
        yield
    finally:
        _lane.number = before


def lane_here() -> int:
    """The lane of this thread."""
    return _lane.number


class Errand(NamedTuple):
    """One rank's program of an exchange and the buffer it works on."""

    rank: int
    program: RankProgram
    buffer: Tensor


class Turn(NamedTuple):
    """One exchange as the ledger knows it: the n-th of this group of ranks, and what this rank takes it to be."""

    key: int
    number: int
    fingerprint: int
    group: tuple[int, ...]
    text: bytes  # the boxing, and below it the user's line

    @property
    def words(self) -> tuple[str, str]:
        """The exchange in words: the move that it is part of, and the line that asked for it."""
        what, _, where = self.text.decode().partition("\n")
        return what, where


class Exchange(NamedTuple):
    """A job whose turn has come."""

    rank: int
    program: RankProgram
    buffer: Tensor
    reduction: Reduction
    turn: Turn


class Sent:
    """Bytes and calls that each rank was made to send, since this counter began."""

    def __init__(self) -> None:
        self.bytes: Counter[int] = Counter()
        self.calls: Counter[int] = Counter()

    def add(self, rank: int, nbytes: int) -> None:
        self.bytes[rank] += nbytes
        self.calls[rank] += 1

    def __repr__(self) -> str:
        return f"{self.bytes.total()} bytes in {self.calls.total()} calls"


class Given(Protocol):
    """A boxing, or a bundle of several, that exchanges are part of; a fingerprint for the ledger, a text for errors."""

    @property
    def fingerprint(self) -> int: ...

    @property
    def text(self) -> bytes: ...


class Arrival(Protocol):
    """An exchange under way; `wait` returns the jobs' results, in their order."""

    def wait(self) -> list[Tensor]: ...


class Transport(Protocol):
    """Starts one exchange of a boxing for the ranks this process owns; all ranks of its group start the same one."""

    sent: Sent

    def start(
        self, boxing: Given, stage: int, jobs: list[Errand], reduction: Reduction, background: bool = False
    ) -> Arrival: ...

    def all_reduce(self, boxing: Given, stage: int, jobs: list[Errand], reduction: Reduction) -> Arrival | None:
        """Do both halves of an all_reduce in one, or None where this transport has no better way than the two."""

    def refuse(self, boxing: Boxing, error: Exception) -> None:
        """Tell the peers that this rank cannot take part in the boxing."""


class InProcess:
    """The ranks of one process; their messages are views of the sender's buffer."""

    def __init__(self) -> None:
        self.sent = Sent()

    def start(
        self, boxing: Given, stage: int, jobs: list[Errand], reduction: Reduction, background: bool = False
    ) -> "Arrived":
        mail: dict[tuple[int, int], Tensor] = {}
        for rank, program, buffer in jobs:
            source = buffer.reshape(-1) if program.flat else buffer
            for peer, boxes, _ in program.sends:
                mail[rank, peer] = piece = pack(source, boxes)
                self.sent.add(rank, piece.nbytes)
        results = []
        for rank, program, buffer in jobs:
            source = buffer.reshape(-1) if program.flat else buffer
            data = {part.peer: mail[part.peer, rank].to(buffer.device) for part in program.receives}
            results.append(finish(program, rank, source, data.__getitem__, reduction, None))
        return Arrived(results)

    def all_reduce(self, boxing: Given, stage: int, jobs: list[Errand], reduction: Reduction) -> None:
        return None

    def refuse(self, boxing: Boxing, error: Exception) -> None:
        pass  # the one process that owns every rank is about to raise the error itself


class Arrived(NamedTuple):
    """An exchange that is over."""

    results: list[Tensor]

    def wait(self) -> list[Tensor]:
        return self.results
