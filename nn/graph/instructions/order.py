"""The writer: lists the forward and backward of a graph as things to do, the same on all ranks.

    run, grad     a segment, forward or backward            draw        random numbers
    part, part grad  an eager part, forward or backward
    first, second  a backward in two: that of what came in, and that of weights
    seed          a loss's gradient to start with           add         one gradient to another
    sum           parts of weights' gradients, to those of other micro-batches
    box           a move, done at once                      start, wait a move that goes on beside what lies between
    stow          what the backward needs, to the host      fetch, land   and back from there
    encode, decode  what hops in fewer bytes, before and behind that
    pause         the turn of another task, while moves are under way; on: their next exchange
    free          values that nobody needs any more

It is derived from the graph alone, never from what one rank holds, so that all ranks make the same moves in one order.
A parameter that was gathered for the forward is gathered again for the backward, a value that went round an axis goes
round once more, the other way, and a region that is recomputed is run again before it. Registers have the names of the
values in them; `d x` is x's gradient as its users leave it, `home p` a parameter's, brought together.
"""

from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ....boxing.boxing import between
from ....boxing.graph.physical import Back, Box, Physical
from ....sbp import Layout
from ..lower.recompute import Recomputed
from ..lower.registers import LocalRegister, Transfer, values_of
from ..lower.saved_inputs import read_again
from ..lower.segments import Draw, PartStage, Segment, Stage, made_by
from .computing import Backward, DrawNumbers, Forward, SeedGradient
from .eager_parts import PartBackward, RunPart
from .instruction import Instruction
from .moves import DecodeHop, EncodeHop, MoveInstruction, MoveNow
from .overlap import AHEAD

__all__ = ["Order", "Writer", "bucketed", "moved_again"]


@dataclass(frozen=True, eq=False)
class Order:
    """Things to do, in order. `layouts` says how each register lies; those saved for a backward have no layout."""

    todo: tuple[Instruction, ...]
    transfers: tuple[Transfer, ...]
    layouts: Mapping[str, Layout]
    values: Mapping[str, LocalRegister] = field(default_factory=dict)  # to return
    grads: Mapping[str, LocalRegister] = field(default_factory=dict)  # of sources that want a gradient

    def __str__(self) -> str:
        return "\n".join(map(str, self.todo))


Gathered: TypeAlias = dict[str, tuple[LocalRegister, int]]  # by value: where it lies, and how lately it was moved


def moved_again(todo: Iterable[Instruction]) -> tuple[str, ...]:
    """The values that are moved a second time for the backward, once for each time."""
    moves = (do for do in todo if isinstance(do, MoveInstruction))
    return tuple(y.of for do in moves for y in do.writes if y.kind == "again")


class Writer:
    """Writes down what to do in the order of the graph and in its reverse; a register may be written several times,
    which means that these are added up."""

    def __init__(
        self,
        graph: Physical,
        stages: Sequence[Stage],
        again: Mapping[int, Sequence[str]],
        regather: bool,
        regions: Recomputed,
        *,
        numbered: bool = False,
        stay: Collection[str] = (),
    ) -> None:
        self.graph, self.stages, self.again, self.regather = graph, stages, again, regather
        self.stay = stay  # values that were gathered once for all micro-batches
        self.regions, self.numbered = regions, numbered  # whether random numbers have a seed for each draw
        self.redone: dict[
            int, dict[str, LocalRegister]
        ] = {}  # by the stages of a region, the registers of values that were made again
        self.last = max((n for n, s in enumerate(stages) if isinstance(s, Segment)), default=-1)
        self.sources = {s.value.name: s for s in graph.sources}
        self.boxes = {stage.output.name: stage for stage in stages if isinstance(stage, Box)}
        self.backs = {move.of: move for move in graph.backs if move.of != move.into}
        self.ends = {move.of: move for move in graph.backs if move.of == move.into}
        for name, source in self.sources.items():  # an input's gradient comes home as a parameter's does
            dual = graph.gradient(name)
            if source.value.grad and dual is not source.home:
                self.ends.setdefault(name, Back(name, name, dual, source.home))
        self.next_turn = {self.boxes[name].source: name for name in turned(stages)}
        self.last_turn = {after: before for before, after in self.next_turn.items()}
        self.weights = {name for name, source in self.sources.items() if source.kind == "parameter"}
        for made in graph.steps:
            if made.inputs and self.weights.issuperset(made.inputs):
                self.weights.update(y.name for y in made.outputs)
        self.layouts: dict[str, Layout] = {name: value.layout for name, value in graph.values.items()}
        self.transfers: list[Transfer] = []
        self.written: set[LocalRegister] = set()  # gradients
        self.extremal: dict[
            str, LocalRegister
        ] = {}  # boxes of maxima that have a gradient: where the forward saves for it
        self.bucket: dict[int, int] = {}  # of transfers

    @property
    def lasting(self) -> set[str]:
        """The values that stay when those made of them are freed: sources, parts of sources, and values made of weights
        alone."""
        lie = self.layouts
        seen = ((y, between(lie[box.source], lie[y])) for y, box in self.boxes.items() if box.source in self.sources)
        parts = (y for y, way in seen if not way.sends)
        return {*self.sources, *self.weights, *parts}

    def move(
        self,
        pairs: Iterable[tuple[Layout, Layout]],
        reads: Iterable[LocalRegister],
        writes: Iterable[LocalRegister],
        **how: Any,
    ) -> MoveNow:
        self.transfers.append(Transfer(tuple(pairs), **how))
        return MoveNow(len(self.transfers) - 1, tuple(reads), tuple(writes))

    def coded(self, do: Instruction) -> Iterator[Instruction]:
        """A move, or what it is made of where it hops encoded: before it, itself, and behind it."""
        move = self.transfers[do.number] if isinstance(do, MoveNow) else None
        if move is None or move.encoder is None or move.filled:
            yield do
            return
        leave, arrive = self.code(do)
        ends = self.layouts[leave], self.layouts[arrive]
        yield EncodeHop(do.number, do.reads, (leave,))
        yield self.move([ends], [leave], [arrive])
        yield DecodeHop(do.number, (arrive,), do.writes)

    def code(self, do: Instruction) -> tuple[LocalRegister, LocalRegister]:
        """The registers of what hops as bytes."""
        transfer = self.transfers[do.number]
        assert transfer.encoder is not None
        leave, arrive = (LocalRegister("code", do.writes[0], end) for end in (0, 1))
        ends = transfer.encoder.hop(*transfer.pairs[0]).code
        self.layouts.update(zip((leave, arrive), ends, strict=True))
        return leave, arrive

    def forward(self) -> Iterator[Instruction]:
        for number, stage in enumerate(self.stages):
            if isinstance(stage, Segment | PartStage):
                saved = (
                    (LocalRegister("saved", number=number),) if stage.wants and number not in self.regions.of else ()
                )
                do = Forward if isinstance(stage, Segment) else RunPart
                yield do(number, values_of(stage.inputs), (*values_of(stage.outputs), *saved))
            elif isinstance(stage, Draw):
                yield DrawNumbers(number, values_of(stage.inputs), (*values_of(stage.outputs), *self.chance(number)))
            else:
                name, pair = stage.output.name, (self.layouts[stage.source], stage.output.layout)
                saved = (self.extremal[name],) if name in self.extremal else ()
                how = {"saves": bool(saved), "encoder": stage.encoder}
                yield self.move([pair], values_of(stage.inputs), (*values_of([name]), *saved), **how)

    def backward(self) -> Iterator[Instruction]:
        for number, (name, given) in enumerate(self.graph.losses):
            slot = self.slot(name)
            if given is None:
                yield SeedGradient(number, (), (slot,))
            else:
                yield self.move([(self.layouts[given], self.graph.layout(name).dual)], values_of([given]), [slot])
        gathered: Gathered = {}
        steps = 0
        for number, stage in reversed(list(enumerate(self.stages))):
            if isinstance(stage, Segment) and stage.wants:
                steps += 1
                region = self.regions.of.get(number, self.regions.kept.get(number))
                if region is not None and number not in self.redone:
                    yield from self.recomputed(number, gathered, steps)
                yield from self.segment(number, stage, gathered, steps)
            elif isinstance(stage, PartStage) and stage.wants:
                steps += 1
                cotangents = map(self.slot, stage.returns)
                reads = (LocalRegister("saved", number=number), *cotangents)
                yield PartBackward(number, reads, tuple(map(self.slot, stage.wants)))
            elif isinstance(stage, Box):
                move = self.backs.get(stage.output.name)
                if move is not None and LocalRegister("d", move.of) in self.written:
                    yield self.back(move)

    def segment(self, number: int, stage: Segment, gathered: Gathered, step: int) -> Iterator[Instruction]:
        """The backward of a segment, and before it what it needs gathered again."""
        made = self.redone.get(number, {})
        needed = [name for name in self.to_gather(number, stage) if name not in made]
        registers = yield from self.gather(number, needed, gathered, step)
        names = self.again.get(number, ())
        taken = [made.get(name) or registers.get(name) or LocalRegister("value", name) for name in names]
        # Also what no rank here takes again: when a move is waited for must be the same everywhere.
        taken += [register for name, register in registers.items() if name not in names]
        cotangents = [self.slot(name) for name in stage.returns]
        saved = LocalRegister("saved", number=number)
        yield Backward(number, (saved, *taken, *cotangents), tuple(map(self.slot, stage.wants)))

    def gather(
        self, number: int, names: Sequence[str], gathered: Gathered, step: int
    ) -> Generator[Instruction, None, dict[str, LocalRegister]]:
        """Values of parameters gathered again, if that was not done shortly before, and those that went round an axis
        turned back; the registers by their names."""
        registers = {}
        for name in names:
            register = self.lately(name, gathered, step)
            if register is None:
                register = LocalRegister("again", name, number)
                self.layouts[register] = self.layouts[name]
                source = self.turned_back(name, gathered, step) or LocalRegister("value", self.boxes[name].source)
                yield self.move([(self.layouts[source], self.layouts[name])], [source], [register])
            gathered[name] = register, step
            registers[name] = register
        return registers

    def lately(self, name: str, gathered: Gathered, step: int) -> LocalRegister | None:
        """The register of a value that was moved again shortly before, if it was."""
        register, last = gathered.get(name, (None, -AHEAD))
        return register if step - last <= AHEAD else None

    def turned_back(self, name: str, gathered: Gathered, step: int) -> LocalRegister | None:
        """The register from which a value that goes round an axis comes in the backward; None if it does not go round.

        That is the next turn's if it was moved again shortly before; else the one where the value began, which is next
        to its last turn."""
        if name not in self.last_turn:
            return None
        after = self.next_turn.get(name)
        held = self.lately(after, gathered, step) if after else None
        while name in self.last_turn:
            name = self.last_turn[name]
        return held or LocalRegister("value", name)

    def chance(self, number: int) -> tuple[LocalRegister, ...]:
        """The register for the state of the generator before a draw, if the draw is to be made again."""
        drawn_again = self.regions.draws(number) and not self.numbered
        return (LocalRegister("chance", number=number),) if drawn_again else ()

    def recomputed(self, last: int, gathered: Gathered, step: int) -> Iterator[Instruction]:
        """The forward of the region of a segment, the last of it that has a backward, once more."""
        region = self.regions.of.get(last, self.regions.kept.get(last))
        made: dict[str, LocalRegister] = {}
        self.redone.update((number, made) for number, around in self.regions.kept.items() if around == region)
        for number in self.regions.runs[region]:
            stage = self.stages[number]
            self.redone[number] = made
            reads: dict[str, LocalRegister] = {}
            if isinstance(stage, Segment) and self.regather:
                names = [name for name in stage.inputs if name not in made and self.is_gather(name)]
                reads = yield from self.gather(last, names, gathered, step)
            given = [made.get(name) or reads.get(name) or LocalRegister("value", name) for name in stage.inputs]
            outputs = {name: LocalRegister("again", name, last) for name in made_by(stage)}
            self.layouts.update({register: self.layouts[name] for name, register in outputs.items()})
            made.update(outputs)
            if isinstance(stage, Segment):
                saved = (LocalRegister("saved", number=number),) if stage.wants else ()
                yield Forward(number, tuple(given), (*outputs.values(), *saved))
            elif isinstance(stage, Draw):
                yield DrawNumbers(number, (*given, *self.chance(number)), tuple(outputs.values()))
            elif isinstance(stage, Box):  # a part is run once
                pair = self.layouts[stage.source], stage.output.layout
                yield self.move([pair], given, tuple(outputs.values()), encoder=stage.encoder)

    def to_gather(self, number: int, stage: Segment) -> list[str]:
        """Inputs gathered of what is kept in pieces, or sent round an axis, whose values the backward reads; the last
        segment still has them."""
        names = [name for name in stage.inputs if self.is_again(name)] if self.regather and number != self.last else []
        needed = read_again(self.graph, stage) if names else frozenset()
        return [name for name in names if name in needed]

    def is_again(self, name: str) -> bool:
        """Whether a value is moved once more for the backward, rather than kept."""
        return name in self.last_turn or self.is_gather(name)

    def is_gather(self, name: str) -> bool:
        """Whether a value was gathered from pieces of a parameter, of a value made of parameters alone, such as one in
        another dtype, or of a value that somebody wants in pieces.

        One that comes from another placement is not: those who have it are not there when a backward of others runs.
        """
        box = self.boxes.get(name)
        if box is None or name in self.stay or not (box.source in self.weights or box.again):
            return False
        src, dst = self.layouts[box.source], box.output.layout
        larger = src.state.split - dst.state.split
        return bool(larger) and src.placement is dst.placement and between(src, dst).sends

    def back(self, move: Back) -> MoveNow:
        """The move of a gradient, all of which has come."""
        source = self.sources.get(move.into)
        slot = LocalRegister("home" if source and move.dst is source.home else "d", move.into)
        come = LocalRegister("d", move.of)
        self.layouts[slot] = move.dst
        self.written.add(slot)
        layout, target = self.graph.layout(move.of), self.graph.layout(move.into)
        if target.state.partial and target.state.reduction != "sum" and target.state != layout.state:
            saved = self.extremal[move.of] = LocalRegister("holders", move.of)
            return self.move([(move.src, move.dst)], [saved, come], [slot], saved=True)
        if move.bucket is not None:
            self.bucket[len(self.transfers)] = move.bucket
        coded = () if move.encoding is None else (move.encoding,)
        return self.move([(move.src, move.dst)], [come], [slot], encodings=coded, encoder=move.encoder)

    def homeward(self, slot: LocalRegister) -> Iterator[Instruction]:
        """The move that brings a source's gradient home, all of which has come, where it is not there already."""
        if slot.kind == "d" and slot.of in self.ends:
            yield self.back(self.ends[slot.of])

    @property
    def grads(self) -> dict[str, LocalRegister]:
        """The gradients that are brought home, by source."""
        homes = ((name, LocalRegister("home", name)) for name in self.sources)
        return {name: home for name, home in homes if home in self.written}

    def slot(self, name: str) -> LocalRegister:
        """The register where the gradients that ops return for a value are added up."""
        source = self.sources.get(name)
        layout = self.graph.gradient(name)
        slot = LocalRegister("home" if source and source.home is layout else "d", name)
        self.layouts[slot] = layout
        self.written.add(slot)
        return slot


def turned(stages: Sequence[Stage]) -> frozenset[str]:
    """The values that went round an axis, as the calls of a composite take them."""
    calls = [op for stage in stages if isinstance(stage, Segment) for op in stage.ops if op.round]
    boxes = {stage.output.name: stage.output.layout for stage in stages if isinstance(stage, Box)}
    return frozenset(
        name
        for op in calls
        for name in op.inputs
        if name in boxes and boxes[name].placement is not op.outputs[0].layout.placement
    )


def bucketed(todo: Iterable[Instruction], writer: Writer) -> Iterator[Instruction]:
    """With the moves of one bucket as one, where its last member is ready."""
    listed = list(todo)
    members: dict[int, list[Instruction]] = defaultdict(list)
    for do in listed:
        if isinstance(do, MoveNow) and do.number in writer.bucket:
            members[writer.bucket[do.number]].append(do)
    for do in listed:
        bucket = writer.bucket.get(do.number) if isinstance(do, MoveNow) else None
        together = members[bucket] if bucket is not None else []
        if len(together) < 2:
            yield do
        elif do is together[-1]:
            pairs = [pair for each in together for pair in writer.transfers[each.number].pairs]
            reads = [register for each in together for register in each.reads]
            coded = tuple(code for each in together for code in writer.transfers[each.number].encodings)
            writes = [register for each in together for register in each.writes]
            yield writer.move(pairs, reads, writes, encodings=coded)
