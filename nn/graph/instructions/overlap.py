"""Overlap and lifetime: moves that go on beside the work, and the point where each value is let go.

A move starts when what it moves is there, and is waited for when its result is needed, but both at most two segments
away, so that memory stays bounded. Where no segment lies between the two it is made at once, which is quicker; but in a
task that takes turns with another, every move is started, then the other has its turn, and then it is waited for.
"""

from bisect import bisect, bisect_left
from collections.abc import Collection, Iterator, Sequence

from ..compiler.source_text import SourceText
from ..lower.registers import LocalRegister, Transfer
from .computing import SegmentWork
from .instruction import Instruction, Storages
from .moves import MoveNow, NextExchange, Pause, StartMove, WaitForMove

__all__ = ["AHEAD", "Free", "freed", "goes_on", "overlapped", "pausing"]

AHEAD = 2  # segments


class Free(Instruction, word="free"):
    """Registers that nobody needs any more."""

    def source(self, text: SourceText) -> None:
        names = [n for register in self.reads for n in text.all_names(register) if n in text.live]
        if names:
            text.live.difference_update(names)
            text.line(f"del {', '.join(names)}")

    def effect(self, memory: Storages) -> None:
        for register in self.reads:
            memory.drop(register)


def overlapped(todo: Sequence[Instruction], transfers: Sequence[Transfer], always: bool = False) -> list[Instruction]:
    """The list with moves started early and waited for late, where work lies between; `always` also where that does
    not pay."""
    work = [at for at, do in enumerate(todo) if isinstance(do, SegmentWork)]
    there: dict[str, int] = {}  # from where on a register may be read
    starts: dict[int, list[Instruction]] = {}
    waits: dict[int, list[Instruction]] = {}
    at_once: dict[int, int] = {}  # moves that are waited for right there, and where the next begins that is not one
    readers = _first_uses(todo)
    for at, do in enumerate(todo):
        done = at + 1
        if isinstance(do, MoveNow):
            transfer = transfers[do.number]
            here = bisect(work, at)  # the first segment behind
            begin = max([0, *work[max(here - AHEAD, 0) : here][:1], *(there.get(name, 0) for name in do.reads)])
            first = begin
            while begin < at and begin in at_once:  # a move that is waited for right there goes first
                begin = at_once[begin]
            if first in at_once:
                at_once[first] = begin
            end = min([readers[at], *(w + 1 for w in work[here + AHEAD - 1 : here + AHEAD])])
            beside = bisect_left(work, end) > bisect_left(work, begin)
            if beside and transfer.sends and (always or transfer.pays) and not transfer.at_once:
                pending = LocalRegister("moving", number=do.number)
                starts.setdefault(begin, []).append(StartMove(do.number, do.reads, (pending,)))
                waits.setdefault(end, []).append(WaitForMove(do.number, (pending,), do.writes))
                done = end
            else:
                at_once[at] = at + 1
        there.update(dict.fromkeys(do.writes, done))
    out: list[Instruction] = []
    for at, do in enumerate(todo):
        out += [*waits.get(at, ()), *starts.get(at, ())]
        if not isinstance(do, MoveNow) or at in at_once:
            out.append(do)
    return [*out, *waits.get(len(todo), ())]


def goes_on(do: Instruction, transfers: Sequence[Transfer]) -> bool:
    """Whether something else can be done while a move goes on."""
    return isinstance(do, MoveNow | StartMove) and transfers[do.number].exchanges > 0


def pausing(todo: Sequence[Instruction], transfers: Sequence[Transfer]) -> list[Instruction]:
    """The list with a pause before every exchange is waited for: moves that are next to each other go on together.

    It has the same pauses on all ranks, those that take no part in a move too. A list without any move begins with one,
    so that the moves of another task go on under all of it.
    """
    out: list[Instruction] = []
    waiting: list[Instruction] = []
    coming: set[LocalRegister] = set()

    def land() -> None:
        for n in range(max((transfers[do.number].exchanges for do in waiting), default=0)):
            out.append(Pause(0))
            more = [do for do in waiting if transfers[do.number].exchanges > n + 1]
            out.extend(NextExchange(do.number, do.reads) for do in more)
        out.extend(waiting)
        waiting.clear()
        coming.clear()

    for do in todo:
        moves = isinstance(do, WaitForMove) or goes_on(do, transfers)
        if not moves or not coming.isdisjoint(do.registers):
            land()
        if isinstance(do, MoveNow) and moves:
            under_way = LocalRegister("moving", number=do.number)
            out.append(StartMove(do.number, do.reads, (under_way,)))
            do = WaitForMove(do.number, (under_way,), do.writes)
        if isinstance(do, WaitForMove):
            waiting.append(do)
            coming.update(do.writes)
        else:
            out.append(do)
    land()
    return out if any(isinstance(do, Pause) for do in out) else [Pause(0), *out]


def _first_uses(todo: Sequence[Instruction]) -> dict[int, int]:
    """For each thing to do, the first that reads or overwrites what it writes; the end of the list if none does."""
    next_use: dict[str, int] = {}
    found = {}
    for at in range(len(todo) - 1, -1, -1):
        do = todo[at]
        found[at] = min((next_use.get(name, len(todo)) for name in do.writes), default=len(todo))
        next_use.update(dict.fromkeys(do.registers, at))
    return found


def freed(todo: Sequence[Instruction], stay: Collection[str]) -> Iterator[Instruction]:
    """The list with registers let go after their last use."""
    last = {name: at for at, do in enumerate(todo) for name in do.registers}
    for at, do in enumerate(todo):
        yield do
        gone = tuple(n for n in dict.fromkeys(do.registers) if last[n] == at and n not in stay)
        if gone:
            yield Free(0, gone)
