"""Offload: what forwards keep for their backwards goes to the host behind its last use there, and comes back in time.

    run 3      ... -> saved 3           the forward of a segment whose modules are offloaded
    stow 3     saved 3 -> away          a copy to the host begins, on a queue of its own; then its memory is free
    ...
    fetch 3    away -> coming           the way back begins, so many segments ahead
    grad 4
    land 3     coming -> landed         and is waited for
    grad 3     landed, ... -> ...

So go what a segment saves, and values that it takes again, as what goes into a region that is run again. A value stays
if anybody else reads it behind the forward, or if nothing would run between its way there and its way back. In a
pipeline the way back begins in the task that reads it.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import replace

from ....placement.errors import SbpError
from ....placement.world import owned
from ....sbp import Layout
from ....sbp.logical import OffloadPlace, SavedOffload
from ..compiler.source_text import SourceText
from ..host.copies import Copies
from ..lower.registers import LocalRegister
from ..lower.segments import Segment, Stage
from .computing import SegmentWork
from .instruction import Instruction, Storages

__all__ = ["Fetch", "Land", "Stow", "offloaded", "offloads"]


class Stow(Instruction, word="stow"):
    """A copy to the host begins."""

    def place(self, stages: Sequence[Stage]) -> OffloadPlace:
        said = _offload_of(stages[self.number])
        assert said is not None
        return said.to

    def source(self, text: SourceText) -> None:
        (x,), to = self.reads, self.place(text.stages)
        value = x in text.layouts
        if not value:
            _check_saved(text, x.number)
        copies = text.bind(text.copies.setdefault(to, Copies(to, text.graph.name)), "host")
        for mine, away in zip(*map(text.all_names, self.registers), strict=True):
            text.line(f"{text.target(away)} = {copies}.stow({f'({mine},)' if value else mine})")

    def effect(self, memory: Storages) -> None:
        memory.hold(self.writes[0], memory.stow(self.reads[0], self.place(memory.stages)))


class Fetch(Instruction, word="fetch"):
    """The way back begins."""

    def source(self, text: SourceText) -> None:
        for at, away in enumerate(text.all_names(self.reads[0])):
            text.line(f"{text.target(text.name(self.writes[0], at))} = {away}.fetch()")

    def effect(self, memory: Storages) -> None:
        there = memory.held.get(self.reads[0], ())
        memory.hold(self.writes[0], [memory.new(memory.bytes[storage]) for storage in there])


class Land(Instruction, word="land"):
    """The way back is waited for."""

    def source(self, text: SourceText) -> None:
        comma = "," if self.writes[0] in text.layouts else ""
        for at, landed in enumerate(text.all_names(self.writes[0])):
            text.line(f"{text.target(landed)}{comma} = {text.name(self.reads[0], at)}.wait()")

    def effect(self, memory: Storages) -> None:
        memory.hold(self.writes[0], memory.held.get(self.reads[0], ()))
        memory.drop(self.reads[0])


def _check_saved(text: SourceText, number: int) -> None:
    """Refuse to offload what torch's autograd keeps to itself."""
    stage = text.stages[number]
    assert isinstance(stage, Segment)
    for made in (text.compiled[number, rank] for rank in owned(stage.placement)):
        if made.backend == "autograd":
            module = stage.ops[0].origin.module
            raise SbpError(
                f"what {module or text.graph.name} saves is to be offloaded, but autograd runs it and keeps that\n"
                f"  {made.reason or 'this is the backend that was asked for'}\n"
                f'  leave it on the device: flow.nn.offload(model, "{module or "*"}", "saved", to=None)'
            )


def _offload_of(stage: Stage) -> SavedOffload | None:
    """Where lies what a stage saves, if it is offloaded; the ops of a segment are alike in that."""
    return stage.ops[0].origin.offload if isinstance(stage, Segment) else None


def offloads(stages: Sequence[Stage]) -> bool:
    """Whether any stage is offloaded."""
    return any(_offload_of(stage) is not None for stage in stages)


def offloaded(
    parts: Sequence[Sequence[Instruction]],
    stages: Sequence[Stage],
    layouts: MutableMapping[str, Layout],
    stay: Collection[str],
    *,
    apart: bool,
) -> list[list[Instruction]]:
    """Lists of things to do, of which the first is the forward, with what is offloaded on its ways; `apart` says that
    each is a task of its own. Values to `stay` are not offloaded. Registers on their ways are put into `layouts`."""
    made = _Ways(parts, stages, layouts, stay, apart)
    for register, readers in made.readers().items():
        made.send(register, readers)
    return made.written()


class _Ways:
    def __init__(
        self,
        parts: Sequence[Sequence[Instruction]],
        stages: Sequence[Stage],
        layouts: MutableMapping[str, Layout],
        stay: Collection[str],
        apart: bool,
    ) -> None:
        self.todo = [do for part in parts for do in part]
        self.ends: list[int] = []  # of the parts
        for part in parts:
            self.ends.append((self.ends[-1] if self.ends else 0) + len(part))
        self.stages, self.layouts, self.stay, self.apart = stages, layouts, stay, apart
        self.work = [at for at, do in enumerate(self.todo) if isinstance(do, SegmentWork)]
        self.behind: dict[int, list[Instruction]] = defaultdict(list)  # what goes behind each
        # What begins to come back before each, and by whom it is read.
        self.before: dict[int, list[tuple[int, Instruction]]] = defaultdict(list)
        self.landing: dict[int, list[Instruction]] = defaultdict(list)  # what each waits for
        self.instead: dict[int, dict[LocalRegister, LocalRegister]] = defaultdict(dict)  # what each reads otherwise

    def readers(self) -> dict[LocalRegister, list[int]]:
        """The registers that may go, in the order in which the forward leaves them, and who reads them behind it."""
        found: dict[LocalRegister, list[int]] = defaultdict(list)
        others: set[LocalRegister] = set()
        for at in range(self.ends[0], len(self.todo)):
            for x in dict.fromkeys(self.todo[at].reads):
                if self.reads_offloaded(at) is None:
                    others.add(x)
                found[x].append(at)
        last = {x: at for at in range(self.ends[0]) for x in self.todo[at].registers}
        may = [x for x in found if x in last and x not in others and self.may_go(x)]
        return {x: [last[x], *found[x]] for x in sorted(may, key=last.__getitem__)}

    def may_go(self, x: LocalRegister) -> bool:
        return x.kind in ("saved", "stash") or (x.kind == "value" and x not in self.stay and x in self.layouts)

    def reads_offloaded(self, at: int) -> int | None:
        """The stage of an instruction whose modules are offloaded; that of the next where it moves or draws anew what
        that takes again."""
        do = self.todo[at]
        if not isinstance(do, SegmentWork) and do.again:
            next_one = bisect_left(self.work, at)
            do = self.todo[self.work[next_one]] if next_one < len(self.work) else do
        mine = isinstance(do, SegmentWork) and _offload_of(self.stages[do.number]) is not None
        return do.number if mine else None

    def send(self, x: LocalRegister, places: Sequence[int]) -> None:
        """Put a register on its ways: `places` are that of its last use in the forward, and those of its readers."""
        gone, *readers = places
        first, fetched = None, -1
        for n, at in enumerate(readers):
            number = self.reads_offloaded(at)
            assert number is not None
            said = _offload_of(self.stages[number])
            assert said is not None
            begin = self.begin(gone, at, said.ahead)
            if first is None:
                if not self.between(gone, begin):
                    return
                first = LocalRegister("away", str(x), x.number)
                self.name(first, x)
                self.behind[gone].append(Stow(number, (x,), (first,)))
            if fetched < 0 or begin > readers[n - 1] or self.part(at) != self.part(readers[n - 1]):
                fetched = n
                number_of = x.number if x not in self.layouts else n
                coming, landed = (LocalRegister(kind, str(x), number_of) for kind in ("coming", "landed"))
                self.name(landed, x)
                self.before[begin].append((at, Fetch(number, (first,), (coming,))))
                self.landing[at].append(Land(number, (coming,), (landed,)))
            self.instead[at][x] = landed

    def name(self, register: LocalRegister, x: LocalRegister) -> None:
        if x in self.layouts:
            self.layouts[register] = self.layouts[x]

    def begin(self, gone: int, at: int, ahead: int) -> int:
        """Before which instruction the way back begins of what is read at one."""
        here = bisect_left(self.work, at) - ahead
        task = self.ends[self.part(at) - 1] if self.apart else 0
        return max(self.work[here] if here >= 0 else 0, gone + 1, task)

    def part(self, at: int) -> int:
        return bisect_right(self.ends, at)

    def between(self, gone: int, begin: int) -> bool:
        """Whether a segment runs, or a task ends, meanwhile."""
        return self.apart or bisect_left(self.work, begin) > bisect_right(self.work, gone)

    def written(self) -> list[list[Instruction]]:
        lists: list[list[Instruction]] = []
        begin = 0
        for end in self.ends:
            lists.append([do for at in range(begin, end) for do in self.at(at)])
            begin = end
        return lists

    def at(self, at: int) -> Iterator[Instruction]:
        do, instead = self.todo[at], self.instead.get(at, {})
        for _, fetch in sorted(self.before.get(at, ()), key=lambda one: one[0]):
            yield fetch
        yield from self.landing.get(at, ())
        yield replace(do, reads=tuple(instead.get(x, x) for x in do.reads)) if instead else do
        yield from self.behind.get(at, ())
