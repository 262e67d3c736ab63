"""Instructions that compute: segments forward, backward or in two halves, random numbers, first gradients and sums.

A gradient comes in parts, one from each that uses its value, which are added up before anybody reads the sum.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, ClassVar, TypeAlias

from ....boxing.graph.physical import Op
from ....placement.world import owned
from ....sbp import Layout
from ..compiler.backends import Function
from ..compiler.generated_calls import SumOfParts, ones
from ..compiler.inside import Estimate
from ..compiler.source_text import SourceText, tuple_of
from ..lower.random import Drawer, Numbered
from ..lower.registers import LocalRegister
from ..lower.segments import Draw, Segment, Stage
from .instruction import Instruction, Storages

__all__ = [
    "AddPart", "AddToSum", "Backward", "DrawNumbers", "FirstHalf", "Forward", "Parts", "SecondHalf", "SeedGradient",
    "SegmentWork", "innermost", "modules_of",
]  # fmt: skip

BackwardPart: TypeAlias = tuple[Sequence[str], Function | None, Sequence[int], Sequence[bool]]


class SegmentWork(Instruction):
    """A segment at work, beside which moves go on; `way` says which way through it."""

    way: ClassVar[str]

    def segment(self, stages: Sequence[Stage]) -> Segment:
        stage = stages[self.number]
        assert isinstance(stage, Segment)
        return stage

    def title(self, text: SourceText) -> str:
        return self.words(text.stages)

    def words(self, stages: Sequence[Stage]) -> str:
        """The way, and the modules that it goes through."""
        return f"{self.way}{' again' * self.again} {modules_of(self.segment(stages).ops)}"


def innermost(modules: Iterable[str]) -> str:
    """The innermost module around all of these.

    >>> innermost(["blocks.0.norm", "blocks.0", "blocks.0.mlp.up"])
    'blocks.0'
    """
    levels = zip(*(name.split(".") for name in modules), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len({*level}) == 1, levels))


def modules_of(ops: Iterable[Op]) -> str:
    """The modules of ops: the innermost one around all of them, and those inside it.

    >>> from types import SimpleNamespace as Some
    >>> modules_of([Some(origin=Some(module=name)) for name in ("blocks.0.norm", "blocks.0", "blocks.0.mlp.up")])
    'blocks.0: norm, mlp.up'
    """
    names = list(dict.fromkeys(op.origin.module for op in ops))
    home = innermost(names) if len(names) > 1 else ""
    inside = [name.removeprefix(home).removeprefix(".") for name in names]
    said = ", ".join(filter(None, inside))
    return ": ".join(filter(None, (home, said))) or "the model itself"


class Forward(SegmentWork, word="run"):
    way = "forward"

    @property
    def again(self) -> bool:
        return not self.writes or super().again  # it writes nothing that only its own backward reads

    def source(self, text: SourceText) -> None:
        stage = self.segment(text.stages)
        kept = next((register for register in self.writes if register.kind == "saved"), None)
        for at, rank in enumerate(owned(stage.placement)):
            made = text.compiled[self.number, rank]
            run = text.bind(made.forward, "f")
            makes = [text.name(y, at) for y in self.writes[: len(stage.outputs)]]
            saved = text.name(kept, at) if kept else "_"
            given = ", ".join(text.on(x, rank, at) for x in self.reads)
            text.line(f"{text.makes([*makes, saved])} = {run}({given})")
            if stage.wants and not kept:
                text.line("del _")
            if self.writes and self.writes[-1].kind == "stash":
                stash = text.target(text.name(self.writes[-1], at))
                parts = [tuple_of([f"{saved}[{n}]" for n in half]) for half in text.apart(self.number, rank).saved]
                text.line(f"{saved}, {stash} = {parts[0]}, {parts[1]}")

    def effect(self, memory: Storages) -> None:
        made, many = memory.traced.get(self.number), len(self.segment(memory.stages).outputs)
        if made is None:  # it runs on other ranks
            return
        outputs = self.writes[:many]
        if isinstance(made, Estimate):
            memory.passing(made.forward)
            for register in outputs:
                memory.take(register)
            left = [*(memory.held[name][0] for name in (*self.reads, *outputs)), memory.new(made.kept)]
        else:
            found = memory.run(made.forward, self.reads)
            left = found[many:]
            for register, storage in zip(outputs, found, strict=False):
                memory.hold(register, [storage])
        for register in self.writes[many:]:  # what it saved
            memory.hold(register, left)


class Backward(SegmentWork, word="grad"):
    """A backward, called with what was saved, inputs that it takes again, and gradients that came."""

    way = "backward"

    def part(self, text: SourceText, rank: int) -> BackwardPart:
        """The names of inputs that ranks here take again, and on one rank the function, which of the segment's inputs
        it takes, and whether the memory of what it makes is nobody else's."""
        made = text.compiled[self.number, rank]
        return text.again.get(self.number, ()), made.backward, made.again, made.owns

    def come(self, stage: Segment) -> Sequence[LocalRegister]:
        """The registers of gradients that came."""
        return self.reads[len(self.reads) - len(stage.returns) :]

    def source(self, text: SourceText) -> None:
        stage = self.segment(text.stages)
        for at, rank in enumerate(owned(stage.placement)):
            names, function, again, owns = self.part(text, rank)
            registers = dict(zip(names, self.reads[1:], strict=False))
            taken = [text.on(registers[stage.inputs[i]], rank, at) for i in again]
            given = [f"*{text.name(self.reads[0], at)}", *taken]
            given += [f"*{text.name(x, at)}" if x.kind == "rest" else text.cotangent(x, at) for x in self.come(stage)]
            made = [text.on(register, rank, at) for register in self.writes]
            text.borrowed.update(name for name, own in zip(made, owns, strict=True) if not own)
            text.line(f"{text.makes(made)} = {text.bind(function, 'b')}({', '.join(given)})")
            text.cast(self.writes, at)

    def effect(self, memory: Storages) -> None:
        made = memory.traced.get(self.number)
        if isinstance(made, Estimate):
            memory.passing(made.backward)
            super().effect(memory)
        elif made is not None:
            assert made.backward is not None
            given = (*self.reads[: 1 + len(made.again)], *self.come(self.segment(memory.stages)))
            for register, storage in zip(self.writes, memory.run(made.backward, given), strict=True):
                memory.hold(register, [storage])
            for register in self.writes:
                lies = memory.layouts
                if register.is_gradient and lies[register].dtype is not lies[register.of].dtype:  # it is cast
                    memory.take(register)


class FirstHalf(Backward, word="first"):
    """The gradients of what came in, and last the rest for the second half."""

    way = "backward of inputs"
    effect = Instruction.effect

    def part(self, text: SourceText, rank: int) -> BackwardPart:
        mine = text.apart(self.number, rank)
        return text.halves[self.number][0], mine.first, mine.again[0], [False] * len(self.writes)


class SecondHalf(Backward, word="second"):
    """The second half of a backward: the gradients of weights, made from the rest."""

    way = "backward of weights"
    effect = Instruction.effect

    def part(self, text: SourceText, rank: int) -> BackwardPart:
        mine = text.apart(self.number, rank)
        return text.halves[self.number][1], mine.second, mine.again[1], mine.owns

    def come(self, stage: Segment) -> Sequence[LocalRegister]:
        return self.reads[-1:]


class DrawNumbers(Instruction, word="draw"):
    """Random numbers of whole tensors; drawn again, from where on they were drawn."""

    def source(self, text: SourceText) -> None:
        stage = text.stages[self.number]
        assert isinstance(stage, Draw)
        drawer = Drawer(text.graph, stage)
        # The same numbers whatever is moved in between.
        before = sum(isinstance(other, Draw) for other in text.stages[: self.number])
        drawn: Any = Numbered(drawer, before) if text.handed else drawer
        here = bool(owned(stage.op.outputs[0].layout.placement))
        if any(x.kind == "chance" for x in self.reads):  # what this process owns nothing of, it does not draw again
            if not here:
                return
            drawn = drawer.again
        elif any(y.kind == "chance" for y in self.writes):
            drawn = drawer.noted
        given = [text.name(x, 0) if x.kind == "chance" else tuple_of(text.names(x)) for x in self.reads]
        call = f"{text.bind(drawn, 'draw')}({', '.join([*(['shards'] if text.handed else []), *given])})"
        if here:
            makes = (
                text.target(text.name(y, 0)) if y.kind == "chance" else f"({text.targets(y)})" for y in self.writes
            )
            call = f"{', '.join(makes)}, = {call}"
        text.line(call)


class SeedGradient(Instruction, word="seed"):
    """The gradient of a loss, to start with."""

    def source(self, text: SourceText) -> None:
        if text.handed:
            text.line(f"{text.targets(self.writes[0])} = shards['seed {self.number}']")
            return
        for name, one in zip(text.names(self.writes[0]), ones(text.layouts[self.writes[0]]), strict=False):
            text.line(f"{text.target(name)} = {text.bind(one, 'one')}")
            text.borrowed.add(name)


class AddPart(Instruction, word="add"):
    """One more part of a gradient, the so manyth, added to what has come."""

    def source(self, text: SourceText) -> None:
        # The first sum is a new tensor, for what it adds to may be somebody else's too.
        call = "add" if self.number == 2 else "add_"
        for into, part in zip(*map(text.names, self.reads), strict=True):
            text.line(f"{into} = {call}({into}, {part})")
            text.borrowed.discard(into)

    def effect(self, memory: Storages) -> None:
        if self.number == 2:  # others are in place
            super().effect(memory)


class AddToSum(Instruction, word="sum"):
    """Parts of gradients of weights added to those of other micro-batches, of which a step has the sums."""

    def source(self, text: SourceText) -> None:
        names = [text.names(part) for part in self.reads]
        if not any(names):
            return
        owns = [[name not in text.borrowed for name in each] for each in names]
        slots = zip((part.slot for part in self.reads), owns, strict=True)
        added = text.bind(SumOfParts(tuple((slot, tuple(own)) for slot, own in slots)), "sum")
        text.line(f"{added}(shards['sums'], {tuple_of(name for each in names for name in each)})")


class Parts:
    """Gradients that come in parts: the first has its slot, each further one a register of its own, and is added."""

    def __init__(self, layouts: dict[str, Layout]) -> None:
        self.layouts = layouts
        self.come: Counter[LocalRegister] = Counter()
        self.total: Counter[LocalRegister] = Counter()  # so many are added up

    def part(self, slot: LocalRegister) -> LocalRegister:
        """The register of one more part; a value that is no gradient has only its own."""
        if not slot.is_gradient:
            return slot
        self.come[slot] += 1
        register = slot.part(self.come[slot])
        self.layouts[register] = self.layouts[slot]
        return register

    def summed(self, slots: Iterable[LocalRegister]) -> Iterator[AddPart]:
        """Add up what has come of these gradients."""
        for slot in slots:
            for number in range(max(2, self.total[slot] + 1), self.come[slot] + 1):
                yield AddPart(number, (slot, slot.part(number)), (slot,))
            self.total[slot] = self.come[slot]

    def added(self, todo: Iterable[Instruction]) -> Iterator[Instruction]:
        """With every further part of a gradient added to the first where it is made."""
        for do in todo:
            yield replace(do, writes=tuple(map(self.part, do.writes)))
            yield from self.summed(do.writes)
