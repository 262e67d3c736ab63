"""Instructions that run eager parts, forward and backward, on all ranks of this process at once."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from ....placement.world import owned
from ....sbp import Layout
from ...eager_parts.part import EagerPart, Shards
from ..compiler.source_text import SourceText, tuple_of
from ..lower.segments import PartStage, Stage
from .computing import modules_of
from .instruction import Instruction, Storages

__all__ = ["PartBackward", "RunPart"]


class PartWork(Instruction):
    """An eager part at work."""

    way: ClassVar[str]

    def stage(self, stages: Sequence[Stage]) -> PartStage:
        stage = stages[self.number]
        assert isinstance(stage, PartStage)
        return stage

    def title(self, text: SourceText) -> str:
        return f"{self.way} {modules_of([self.stage(text.stages).op])}, eagerly"


class RunPart(PartWork, word="part"):
    """The part itself. What it saves is what torch's autograd keeps, and an object of the process."""

    way = "forward"

    def source(self, text: SourceText) -> None:
        stage, graph = self.stage(text.stages), text.graph
        stage.part.check_draws(stage.placement)
        if not owned(stage.placement):
            return
        slots = [stage.inputs.index(name) for name in stage.op.inputs]
        lies = [graph.layout(name) for name in stage.inputs]
        wants = [name in stage.wants for name in stage.inputs]
        run = partial(_run, stage.part, slots, lies, wants, [y.layout for y in stage.op.outputs])
        outputs = self.writes[: len(stage.outputs)]
        saved = [text.target(text.name(y, 0)) for y in self.writes[len(outputs) :]] or ["_"]
        makes = [f"({text.targets(y)})" for y in outputs]
        given = ", ".join(text.held(x) for x in self.reads)
        text.line(f"{', '.join([*makes, *saved])} = {text.bind(run, 'part')}({given})")

    def effect(self, memory: Storages) -> None:
        for register in self.writes:
            if register.kind == "value":
                memory.take(register)
            else:  # inputs and results at least; what autograd keeps in between is not known
                memory.hold(register, [s for x in self.reads for s in memory.held.get(x, ())])


class PartBackward(PartWork, word="part grad"):
    """The gradients of what went in, by torch's autograd of the run."""

    way = "backward"

    def source(self, text: SourceText) -> None:
        stage = self.stage(text.stages)
        if not owned(stage.placement):
            return
        returns = [stage.outputs.index(name) for name in stage.returns]
        wants = [stage.inputs.index(name) for name in stage.wants]
        run = partial(stage.part.backward, returns=returns, wants=wants)
        saved, *come = self.reads
        cotangents = tuple_of(tuple_of(text.cotangent(x, at) for at in range(len(text.names(x)))) for x in come)
        makes = ", ".join(f"({text.targets(y)})" for y in self.writes)
        text.line(f"{makes}, = {text.bind(run, 'back')}({text.name(saved, 0)}, {cotangents})")
        for y in self.writes:
            text.borrowed.update(text.names(y))  # autograd may hand out one tensor twice
            for at in range(len(text.names(y))):
                text.cast([y], at)


def _run(
    part: EagerPart,
    slots: Sequence[int],
    lies: Sequence[Layout],
    wants: Sequence[bool],
    gives: Sequence[Layout],
    *given: Shards,
) -> tuple[Any, ...]:
    made, saved = part.forward(given, lies, wants, gives, slots)
    return *made, saved
