"""Overlap and lifetime: of a list of things to do, which moves go on beside the work, and when values are let go.

A move starts when what it moves is there, and is waited for when its result is needed, but both at most two segments
away, so that memory stays bounded. Where no segment lies between the two it is made at once, which is quicker.
"""

from bisect import bisect, bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from ....boxing.plan import Plan, plan
from ....sbp import Layout
from .registers import LocalRegister

__all__ = ["AHEAD", "Do", "Transfer", "freed", "overlapped"]

AHEAD = 2  # segments
WORK = ("run", "grad", "first", "second")

What: TypeAlias = Literal["run", "grad", "first", "second", "draw", "seed", "add", "box", "start", "wait", "free"]


class Do(NamedTuple):
    """One thing to do; `number` is that of the stage, transfer or loss, and of an add, the how manyth part it adds."""

    what: What
    number: int
    reads: tuple[LocalRegister, ...] = ()
    writes: tuple[LocalRegister, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} {self.number}: {', '.join(self.reads)} -> {', '.join(self.writes)}"


@dataclass(frozen=True)
class Transfer:
    """A move of one tensor, or of the gradients of one bucket, each from one layout to another.

    A maximum's gradient goes back to who held it: its move `saves` what that takes, and the way back is `saved`.
    """

    pairs: tuple[tuple[Layout, Layout], ...]
    saves: bool = False
    saved: bool = False

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(plan(src, dst) for src, dst in self.pairs)

    @cached_property
    def sends(self) -> bool:
        """Whether anything goes from rank to rank."""
        return any(way.sends for way in self.plans)

    @cached_property
    def pays(self) -> bool:
        """Whether somebody else than who computes carries it.

        With four ranks of one host on its two cores, starting it earlier took 1.1 to 2 times as long.
        """
        ways = self.plans
        return any(way.cluster.beside((way.src.placement.type, way.dst.placement.type), way.ranks) for way in ways)


def overlapped(todo: Sequence[Do], transfers: Sequence[Transfer], always: bool = False) -> list[Do]:
    """The list with moves started early and waited for late, where work lies between; `always` also where that does
    not pay."""
    work = [at for at, do in enumerate(todo) if do.what in WORK]
    there: dict[str, int] = {}  # from where on a register may be read
    starts: dict[int, list[Do]] = {}
    waits: dict[int, list[Do]] = {}
    at_once = set()
    readers = _first_uses(todo)
    for at, do in enumerate(todo):
        done = at + 1
        if do.what == "box":
            transfer = transfers[do.number]
            here = bisect(work, at)  # the first segment behind
            begin = max([0, *work[max(here - AHEAD, 0) : here][:1], *(there.get(name, 0) for name in do.reads)])
            end = min([readers[at], *(w + 1 for w in work[here + AHEAD - 1 : here + AHEAD])])
            beside = bisect_left(work, end) > bisect_left(work, begin)
            if beside and transfer.sends and (always or transfer.pays) and not (transfer.saves or transfer.saved):
                pending = LocalRegister("moving", number=do.number)
                starts.setdefault(begin, []).append(Do("start", do.number, do.reads, (pending,)))
                waits.setdefault(end, []).append(Do("wait", do.number, (pending,), do.writes))
                done = end
            else:
                at_once.add(at)
        there.update(dict.fromkeys(do.writes, done))
    out: list[Do] = []
    for at, do in enumerate(todo):
        out += [*waits.get(at, ()), *starts.get(at, ())]
        if do.what != "box" or at in at_once:
            out.append(do)
    return [*out, *waits.get(len(todo), ())]


def _first_uses(todo: Sequence[Do]) -> dict[int, int]:
    """For each thing to do, the first that reads or overwrites what it writes; the end of the list if none does."""
    next_use: dict[str, int] = {}
    found = {}
    for at in range(len(todo) - 1, -1, -1):
        do = todo[at]
        found[at] = min((next_use.get(name, len(todo)) for name in do.writes), default=len(todo))
        next_use.update(dict.fromkeys((*do.reads, *do.writes), at))
    return found


def freed(todo: Sequence[Do], stay: Collection[str]) -> Iterator[Do]:
    """The list with registers let go after their last use."""
    last = {name: at for at, do in enumerate(todo) for name in (*do.reads, *do.writes)}
    for at, do in enumerate(todo):
        yield do
        gone = tuple(n for n in dict.fromkeys((*do.reads, *do.writes)) if last[n] == at and n not in stay)
        if gone:
            yield Do("free", 0, gone)
