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

from ....sbp import Layout
from ....sbp.logical import SavedOffload
from .instructions import Instruction, LocalRegister
from .overlap import WORK
from .segments import Segment, Stage

__all__ = ["backward_begins", "offload_of", "offloaded", "offloads"]


def offload_of(stage: Stage) -> SavedOffload | None:
    """Where lies what a stage saves, if it is offloaded; the ops of a segment are alike in that."""
    return stage.ops[0].origin.offload if isinstance(stage, Segment) else None


def offloads(stages: Sequence[Stage]) -> bool:
    """Whether any stage is offloaded."""
    return any(offload_of(stage) is not None for stage in stages)


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


def backward_begins(todo: Sequence[Instruction]) -> int:
    """Where the backward begins in a list of both."""
    at = (n for n, do in enumerate(todo) if do.what in ("seed", "grad") or _again(do))
    return next(at, len(todo))


def _again(do: Instruction) -> bool:
    """Whether it is done again for the backward; of what only its own backward reads it writes nothing."""
    return do.what in ("run", "draw") and (not do.writes or do.writes[0].kind == "again")


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
        self.work = [at for at, do in enumerate(self.todo) if do.what in WORK]
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
        last = {x: at for at in range(self.ends[0]) for x in (*self.todo[at].reads, *self.todo[at].writes)}
        may = [x for x in found if x in last and x not in others and self.may_go(x)]
        return {x: [last[x], *found[x]] for x in sorted(may, key=last.__getitem__)}

    def may_go(self, x: LocalRegister) -> bool:
        return x.kind in ("saved", "stash") or (x.kind == "value" and x not in self.stay and x in self.layouts)

    def reads_offloaded(self, at: int) -> int | None:
        """The stage of an instruction whose modules are offloaded; that of the next where it moves or draws anew what
        that takes again."""
        do = self.todo[at]
        if do.what not in WORK and (do.what in ("box", "start", "draw") and do.writes and do.writes[0].kind == "again"):
            next_one = bisect_left(self.work, at)
            do = self.todo[self.work[next_one]] if next_one < len(self.work) else do
        mine = do.what in WORK and offload_of(self.stages[do.number]) is not None
        return do.number if mine else None

    def send(self, x: LocalRegister, places: Sequence[int]) -> None:
        """Put a register on its ways: `places` are that of its last use in the forward, and those of its readers."""
        gone, *readers = places
        first, fetched = None, -1
        for n, at in enumerate(readers):
            number = self.reads_offloaded(at)
            assert number is not None
            said = offload_of(self.stages[number])
            assert said is not None
            begin = self.begin(gone, at, said.ahead)
            if first is None:
                if not self.between(gone, begin):
                    return
                first = LocalRegister("away", str(x), x.number)
                self.name(first, x)
                self.behind[gone].append(Instruction("stow", number, (x,), (first,)))
            if fetched < 0 or begin > readers[n - 1] or self.part(at) != self.part(readers[n - 1]):
                fetched = n
                number_of = x.number if x not in self.layouts else n
                coming, landed = (LocalRegister(kind, str(x), number_of) for kind in ("coming", "landed"))
                self.name(landed, x)
                self.before[begin].append((at, Instruction("fetch", number, (first,), (coming,))))
                self.landing[at].append(Instruction("land", number, (coming,), (landed,)))
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
        yield do._replace(reads=tuple(instead.get(x, x) for x in do.reads)) if instead else do
        yield from self.behind.get(at, ())
