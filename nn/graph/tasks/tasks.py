"""Tasks: what is done for one micro-batch, by chunk: F (forward), B (gradients of what came in), W (those of weights).
And what each hands to others, and what is done once a step, before and after all micro-batches.

    edge     values that one task makes and another of its group reads
    hop      a value that goes to another group: the ranks of the first send, those of the second receive
    before   weights that other groups need, sent there
    sums     gradients of weights: the parts of all micro-batches are added up, by register
    after    these brought home, where that was not done with each
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ....boxing.boxing import between
from ....boxing.graph.buckets import gathered
from ....boxing.graph.physical import Box, Physical
from ....placement.errors import SbpError
from ..instructions.computing import AddPart, Backward, FirstHalf, Forward, Parts, SecondHalf, SeedGradient
from ..instructions.eager_parts import PartBackward
from ..instructions.instruction import Instruction
from ..instructions.moves import DecodeHop, EncodeHop
from ..instructions.offload import offloaded, offloads
from ..instructions.order import Writer, bucketed
from ..lower.recompute import recomputed
from ..lower.registers import Contents, LocalRegister
from ..lower.segments import PartStage, Segment, Stage, kept, made_by
from .chunks import Chunks
from .gradient_homes import brought_each_time
from .task import Hop, Name, Task, TaskKind, Tasks

__all__ = ["derived", "tasks"]


def tasks(
    graph: Physical,
    stages: Sequence[Stage],
    where: Chunks,
    again: Mapping[int, Sequence[str]],
    *,
    apart: Mapping[int, tuple[Sequence[str], Sequence[str]]] | None,
    regather: bool,
) -> Tasks:
    """The tasks of a graph. `apart` says of segments what each half of their backward takes again; None: no W tasks."""
    return _Tasks(graph, stages, where, again, apart, regather).made()


class _Tasks:
    def __init__(
        self,
        graph: Physical,
        stages: Sequence[Stage],
        where: Chunks,
        again: Mapping[int, Sequence[str]],
        apart: Mapping[int, tuple[Sequence[str], Sequence[str]]] | None,
        regather: bool,
    ) -> None:
        self.graph, self.stages, self.where = graph, stages, where
        self.split, self.apart = apart is not None, apart or {}
        regions = recomputed(graph, stages, where.of, where.once | where.given | where.hops)
        stay = {name for at in where.once for name in made_by(stages[at])} if where.gathers else ()
        self.writer = Writer(graph, stages, again, regather, regions, numbered=not where.alone, stay=stay)
        self.makers = {y: n for n, stage in enumerate(stages) for y in made_by(stage)}
        self.derived = derived(stages, where)
        self.todo: dict[Name, list[Instruction]] = defaultdict(list)
        self.before: list[Instruction] = []
        self.hops: list[Hop] = []
        self.after: list[Instruction] = []
        self.parts = Parts(self.writer.layouts)
        self.each_time = self.writer.ends.keys() if where.alone else brought_each_time(graph, stages, where).keys()
        self.homeward: dict[str, Instruction] = {}  # the moves home of these
        self.sums: dict[LocalRegister, LocalRegister] = {}

    def made(self) -> Tasks:
        backward = list(self.writer.backward())
        for n, do in enumerate(self.writer.forward()):
            self.forward(n, do)
        for do in backward:
            self.backward(do)
        for chunk in range(len(self.where.group)):
            self.todo[Name("F", chunk)]
        for task, todo in self.todo.items():
            moves = bucketed(self.homed(todo), self.writer)
            made = self.parts.added(moves) if self.where.alone else moves
            self.todo[task] = [coded for do in made for coded in self.writer.coded(do)]
        if self.where.gathers:
            self.before = self.gathered()
        if not self.where.alone:
            self.ends()
        if offloads(self.stages):
            self.offload()
        done = {name: self.task(name, todo) for name, todo in self.todo.items()}
        transfers = tuple(self.writer.transfers)
        edges = self.edges(done)
        layouts = self.writer.layouts
        before, after, grads = tuple(self.before), tuple(self.after), self.writer.grads
        return Tasks(done, edges, tuple(self.hops), before, after, self.sums, grads, transfers, layouts)

    def offload(self) -> None:
        """In every chunk, what its modules save on its way to the host and back."""
        stay = {*kept(self.graph), *self.writer.lasting}
        for chunk in range(len(self.where.group)):
            names = [Name("F", chunk), *(name for kind in ("B", "W") if (name := Name(kind, chunk)) in self.todo)]
            parts = [self.todo[name] for name in names]
            made = offloaded(parts, self.stages, self.writer.layouts, stay, apart=not self.where.alone)
            self.todo.update(zip(names, made, strict=True))

    def forward(self, n: int, do: Instruction) -> None:
        """A stage, done in its chunk; or a hop from one chunk to another, or once."""
        stage, chunk = self.stages[n], self.where.of[n]
        if n in self.where.once:
            self.before.append(do)
        elif n in self.where.given:
            pass  # the caller's own, and cut for each group
        elif n in self.where.hops:
            assert isinstance(stage, Box)
            name = stage.output.name
            if do.writes[1:] or name not in self.where.home:
                raise SbpError(
                    f"{stage.source} goes to {stage.output.layout.placement} in a way that a pipeline does not have yet"
                    f"\n  it is moved at {stage.origin.line or 'no line'}; place what makes it and what uses it on one "
                    "placement"
                )
            source = Name("F", self.where.home[stage.source])
            self.hopped(source, Name("F", self.where.home[name]), do)
        else:
            assert chunk is not None
            self.todo[Name("F", chunk)].append(self.stashed(do))

    def stashed(self, do: Instruction) -> Instruction:
        """A forward whose backward is in two keeps something for each half."""
        halved = isinstance(do, Forward) and do.number in self.apart and any(y.kind == "saved" for y in do.writes)
        return replace(do, writes=(*do.writes, LocalRegister("stash", number=do.number))) if halved else do

    def hopped(self, source: Name, target: Name, do: Instruction) -> None:
        """A move from one task to another; with an encoder the one encodes what the other decodes."""
        if self.writer.transfers[do.number].encoder is None:
            return self.hop(source, target, do.reads[0], do.writes[0])
        leave, arrive = self.writer.code(do)
        self.todo[source].append(EncodeHop(do.number, do.reads[:1], (leave,)))
        self.hop(source, target, leave, arrive)
        self.todo[target].append(DecodeHop(do.number, (arrive,), do.writes))
        return None

    def hop(self, source: Name, target: Name, reads: LocalRegister, writes: LocalRegister) -> None:
        """A value sent: what is done to it before it leaves its group, and behind its arrival."""
        src, dst = self.writer.layouts[reads], self.writer.layouts[writes]
        moves = between(src, dst).moves
        at = next(n for n, move in enumerate(moves) if move.kind == "transfer")
        pair = moves[at].src, moves[at].dst
        sent = reads if pair[0] is src else LocalRegister("sent", writes)
        come = writes if pair[1] is dst else LocalRegister("come", writes)
        self.writer.layouts.update({sent: pair[0], come: pair[1]})
        if sent != reads:
            self.todo[source].append(self.writer.move([(src, pair[0])], [reads], [sent]))
        if come != writes:
            self.todo[target].append(self.writer.move([(pair[1], dst)], [come], [writes]))
        self.hops.append(Hop(source, target, sent, come, pair))
        for name in (source, target):
            self.todo.setdefault(name, [])  # there may be nothing else to do there

    def backward(self, do: Instruction) -> None:
        if isinstance(do, Backward | PartBackward):
            self.gradient(do)
        elif isinstance(do, SeedGradient):
            self.put(Name("B", self.where.home[do.writes[0].of]), do)
        elif do.writes[0].kind == "again":
            self.put(self.name(do.writes[0].number, "B"), self.stashed(do))
        elif do.reads[-1].kind != "d":  # a loss's gradient that the graph makes
            self.put(Name("B", self.where.home[do.writes[0].of]), do)
        else:
            self.moved(do)

    def moved(self, do: Instruction) -> None:
        """A gradient that goes on to another layout."""
        name, into = do.reads[-1].of, do.writes[0].of
        n = self.makers[name]
        if name in self.each_time:
            self.homeward[name] = do
        elif n in self.where.once:
            self.after.append(do)
        elif n in self.where.hops:
            source, target = Name("B", self.where.home[name]), Name("B", self.where.home[into])
            self.todo[source] += self.parts.summed(do.reads)
            self.hopped(source, target, replace(do, writes=(self.part(do.writes[0]),)))
        else:
            self.put(self.name(n, "W" if name in self.derived else "B"), do)

    def gradient(self, do: Instruction) -> None:
        """A segment's backward: in one, or that of what came in before that of its weights."""
        stage = self.stages[do.number]
        assert isinstance(stage, Segment | PartStage)
        weights = [name in self.derived for name in stage.wants]
        if do.number not in self.apart:
            self.put(self.name(do.number, "W" if all(weights) else "B"), do)
            return
        rest, stash = (LocalRegister(kind, number=do.number) for kind in REST)
        many = len(stage.returns)
        taken = dict(zip(self.writer.again[do.number], do.reads[1:-many], strict=False))
        first, second = ([taken[name] for name in names] for names in self.apart[do.number])
        into = [y for y, weight in zip(do.writes, weights, strict=True) if not weight]
        theirs = [y for y, weight in zip(do.writes, weights, strict=True) if weight]
        reads = (do.reads[0], *first, *do.reads[-many:])
        self.put(self.name(do.number, "B"), FirstHalf(do.number, reads, (*into, rest)))
        self.put(self.name(do.number, "W"), SecondHalf(do.number, (stash, *second, rest), (*theirs,)))

    def name(self, stage: int, kind: TaskKind) -> Name:
        chunk = self.where.of[stage]
        assert chunk is not None
        return Name(kind if self.split or kind == "F" else "B", chunk)

    def put(self, name: Name, do: Instruction) -> None:
        """Put an instruction into a task, behind the sums that it reads. Each part that it writes has a register of its
        own."""
        self.todo[name] += self.parts.summed(do.reads)
        self.todo[name].append(replace(do, writes=tuple(map(self.part, do.writes))))

    def part(self, slot: LocalRegister) -> LocalRegister:
        """The register of one more part of a gradient. Those of weights are added up over micro-batches, unless they
        are brought home with each."""
        if self.where.alone:  # gradients added where they are made get parts when moves are in their buckets
            return slot
        register = self.parts.part(slot)
        if slot.is_gradient and slot.of in self.where.weights and not self.is_homed(slot):
            self.sums[register] = slot
        return register

    def is_homed(self, slot: LocalRegister) -> bool:
        return slot.kind == "d" and slot.of in self.each_time

    def homed(self, todo: Sequence[Instruction]) -> Iterator[Instruction]:
        """The things to do in a task, with the moves home behind the last part that it makes of a gradient."""
        parts: dict[str, dict[LocalRegister, None]] = defaultdict(dict)
        last: dict[str, int] = {}
        for at, do in enumerate(todo):
            for part in filter(self.is_homed, do.writes):
                parts[part.of][part] = None
                last[part.of] = at
        ended: dict[int, list[str]] = defaultdict(list)
        for name, at in last.items():
            ended[at].append(name)
        for at, do in enumerate(todo):
            yield do
            for name in ended.get(at, ()):
                first, *others = parts[name]
                for number, other in enumerate(others, 2):
                    yield AddPart(number, (first, other), (first,))
                if name not in self.homeward:
                    self.homeward[name] = self.writer.back(self.writer.ends[name])
                move = self.homeward[name]
                yield replace(move, reads=(first,), writes=(self.part(move.writes[0]),))

    def gathered(self) -> list[Instruction]:
        """The moves of weights before all micro-batches, with those of a part of a chunk's weights as one."""
        home, many = self.where.homeward(self.stages), self.where.gathers
        alike: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
        made: list[Instruction] = []
        seen: Counter[int] = Counter()
        for do in self.before:
            (pair,) = self.writer.transfers[do.number].pairs
            source = do.reads[-1]
            if source in self.writer.sources and source in home and between(*pair).sends:
                alike[home[source], seen[home[source]] % many].append(do)
                seen[home[source]] += 1
            else:
                made.append(do)
        for listed in alike.values():
            pairs = [self.writer.transfers[do.number].pairs[0] for do in listed]
            for numbers in gathered(pairs):
                of = [listed[number] for number in numbers]
                reads, writes = [x for do in of for x in do.reads], [y for do in of for y in do.writes]
                made.append(of[0] if len(of) == 1 else self.writer.move([pairs[n] for n in numbers], reads, writes))
        return made

    def ends(self) -> None:
        """Behind all micro-batches: gradients of weights back from where these were sent, and home."""
        for s in self.graph.sources:
            if s.kind == "input" and any(slot.of == s.value.name for slot in self.parts.come):
                raise SbpError(
                    f"the argument {s.value.name} requires grad, which a step in micro-batches does not give\n"
                    "  leave micro_batches= and schedule= out, or pass it detached"
                )
        slots = dict.fromkeys(self.sums.values())
        after, self.after = self.after, []
        for number, do in enumerate(after):
            (slot,) = do.writes
            if slot in slots:
                part = slot.part(number + 2)
                self.writer.layouts[part] = self.writer.layouts[slot]
                self.after += [replace(do, writes=(part,)), AddPart(2, (slot, part), (slot,))]
            else:
                slots[slot] = None
                self.after.append(do)
        self.after += [home for slot in slots for home in self.writer.homeward(slot)]
        read = {register for do in self.after for register in do.reads}
        goes_on = [do for do in self.after if not read.isdisjoint(do.writes)]
        last = [do for do in self.after if read.isdisjoint(do.writes)]
        self.after = [*goes_on, *bucketed(last, self.writer)]

    def task(self, name: Name, todo: Sequence[Instruction]) -> Task:
        wanted = kept(self.graph)
        written = [register for do in todo for register in do.writes]
        values = tuple(dict.fromkeys(r for r in written if r in wanted)) if name.kind == "F" else ()
        return Task(name, tuple(todo), values, tuple(dict.fromkeys(r for r in written if r in self.sums)))

    def edges(self, done: Mapping[Name, Task]) -> dict[tuple[Name, Name], tuple[LocalRegister, ...]]:
        """The registers that tasks hand to each other."""
        arrive = {hop.come: hop.target for hop in self.hops}
        makers = dict(arrive)
        for name, task in done.items():
            for do in task.todo:
                if not isinstance(do, AddPart):
                    makers.update(dict.fromkeys(do.writes, name))
        found: dict[tuple[Name, Name], dict[LocalRegister, None]] = defaultdict(dict)
        for name, task in done.items():
            needed = [*_read(task.todo), *(hop.sent for hop in self.hops if hop.source == name)]
            for register in needed:
                maker = makers.get(register)
                if maker is not None and maker != name:
                    if maker.kind == "F" != name.kind:
                        # Its own chunk's forward has it too; only its own ranks know what a backward takes again.
                        maker = Name("F", name.chunk)
                    found[maker, name][register] = None
        return {pair: tuple(registers) for pair, registers in found.items()}


REST: tuple[Contents, Contents] = "rest", "stash"


def derived(stages: Sequence[Stage], where: Chunks) -> frozenset[str]:
    """The values that are weights, or made of weights alone."""
    found = set(where.weights)
    for stage in stages:
        if stage.inputs and found.issuperset(stage.inputs):
            found.update(made_by(stage))
    return frozenset(found)


def _read(todo: Sequence[Instruction]) -> Iterator[LocalRegister]:
    for do in todo:
        yield from do.reads
