"""Segments: the runs of ops between which nothing has to move, so that each is one local program on every rank.

    ops   a segment: ops of one placement, block, region that is recomputed and round of a composite, offloaded alike,
          cut where an op needs what was moved after the segment began
    box   a move, before the segment that first needs it, and behind the one that makes what it moves
    draw  an op that draws random numbers, which are those of one device and so are not a rank's own business
    part  an eager part, which runs on global tensors; numbers that it draws stand in the order of the program too

Equal blocks begin and end segments, so that equal layers give equal segments, which are compiled once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from ....boxing.graph.physical import Box, Op, Physical, vars_in
from ....placement import Placement
from ....placement.errors import SbpError
from ....sbp.call import Call
from ....sbp.logical import Round, SavedOffload
from ....sbp.traits import traits
from ...eager_parts.part import EagerPart

__all__ = ["Draw", "PartStage", "Segment", "Stage", "draws", "kept", "made_by", "segments", "stage_text"]


@dataclass(frozen=True)
class Segment:
    """Ops that run in a row on one placement. `returns` are the outputs a gradient comes back to, `wants` the inputs
    to which it goes on."""

    placement: Placement
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    returns: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draw:
    """One op that draws random numbers; it has no gradient."""

    op: Op

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(y.name for y in self.op.outputs)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors whose values it reads."""
        return () if "unread" in traits(Call(self.op.op, (), {}, ()).name) else self.op.inputs


@dataclass(frozen=True)
class PartStage:
    """One eager part, with what a segment has."""

    op: Op
    returns: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()

    @property
    def part(self) -> EagerPart:
        made: Any = self.op.op
        assert isinstance(made, EagerPart)
        return made

    @property
    def placement(self) -> Placement:
        return _placement(self.op)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(y.name for y in self.op.outputs)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.op.inputs))


Stage: TypeAlias = Segment | Box | Draw | PartStage


def made_by(stage: Stage) -> tuple[str, ...]:
    """The names of what a stage makes."""
    return (stage.output.name,) if isinstance(stage, Box) else stage.outputs


def draws(op: Op) -> bool:
    """Whether an op draws random numbers."""
    return Call(op.op, op.args, op.kwargs, ()).draws


def kept(graph: Physical) -> frozenset[str]:
    """The values that outlive the step: results, losses, and what buffers are to hold."""
    return frozenset((*vars_in(graph.result), *(name for name, _ in graph.losses), *graph.writes.values()))


def segments(graph: Physical, chunk: Mapping[str, int] | None = None) -> tuple[Stage, ...]:
    """The stages of a graph, in an order in which they can run. Modules of different chunks are cut apart."""
    stages = list(_runs(graph, chunk or {}))
    used = set(kept(graph)) | {of for _, of in graph.losses if of is not None}
    done: list[Stage] = []
    for stage in reversed(stages):
        if isinstance(stage, Segment):
            stage = replace(stage, outputs=tuple(y for y in stage.outputs if y in used))
        used.update(stage.inputs)
        done.append(stage)
    return tuple(_with_gradients(graph, done[::-1]))


def _runs(graph: Physical, chunk: Mapping[str, int]) -> Iterator[Stage]:
    """The stages, every output still taken for one that others use."""
    ops: list[Op] = []
    made: set[str] = set()  # by the ops so far
    behind: list[Box | Draw] = []  # what has to wait for them
    late: set[str] = set()  # what that will make
    ready: dict[str, Box] = {}  # what could be moved already, by what comes out; nobody has asked for it

    def close() -> Iterator[Stage]:
        if ops:
            inputs = dict.fromkeys(name for op in ops for name in op.inputs if name not in made)
            outputs = tuple(y.name for op in ops for y in op.outputs)
            yield Segment(_placement(ops[0]), tuple(ops), tuple(inputs), outputs)
        yield from behind
        ops.clear()
        made.clear()
        behind.clear()
        late.clear()

    def ask(names: Sequence[str]) -> Iterator[Stage]:
        for name in names:
            if name in ready:
                box = ready.pop(name)
                yield from ask(box.inputs)
                yield box

    for step in graph.steps:
        if isinstance(step, Box) or draws(step):
            stage = step if isinstance(step, Box) else Draw(step)
            waits = any(name in made or name in late for name in stage.inputs)
            # Numbers are drawn in the order of the program.
            if waits or (isinstance(stage, Draw) and any(isinstance(other, Draw) for other in behind)):
                yield from ask(stage.inputs)
                behind.append(stage)
                late.update(y.name for y in step.outputs)
            elif isinstance(stage, Box):
                ready[stage.output.name] = stage
            else:
                yield from ask(stage.inputs)
                yield stage
            continue
        if isinstance(step.op, EagerPart):
            yield from close()
            yield from ask(step.inputs)
            yield PartStage(step)
            continue
        other = ops and _kind(step, chunk) != _kind(ops[0], chunk)
        if other or any(name in late for name in step.inputs):
            yield from close()
        yield from ask(step.inputs)
        ops.append(step)
        made.update(y.name for y in step.outputs)
    yield from close()
    yield from ask(list(ready))


def _kind(
    op: Op, chunk: Mapping[str, int]
) -> tuple[Placement, str, int | None, str, str, SavedOffload | None, Round | None]:
    """Ops of one segment have the same."""
    origin = op.origin
    return (
        _placement(op),
        origin.block,
        chunk.get(origin.module),
        origin.recompute,
        origin.kept_of,
        origin.offload,
        op.round,
    )


def _placement(op: Op) -> Placement:
    return op.outputs[0].layout.placement


def _with_gradients(graph: Physical, stages: Sequence[Stage]) -> list[Stage]:
    """The segments told which outputs the losses' gradients come back to, and where they go on."""
    reached = {name for name, _ in graph.losses}
    back = {move.of: move.into for move in graph.backs if move.of != move.into}
    out: list[Stage] = []
    for stage in reversed(stages):
        if isinstance(stage, Box):
            if stage.output.name in reached and stage.output.name in back:
                reached.add(back[stage.output.name])
        elif isinstance(stage, Draw):
            if any(y.name in reached and y.grad for y in stage.op.outputs):
                raise SbpError(
                    f"{stage.op.op} draws random numbers and has a gradient, at {stage.op.origin.line or 'no line'}\n"
                    "  numbers are drawn by an op of their own; write it as x * noise"
                )
        else:
            returns, wants = _told(graph, stage, reached)
            stage = replace(stage, returns=returns, wants=wants)
            reached.update(stage.wants)
        out.append(stage)
    return out[::-1]


def _told(graph: Physical, segment: Segment | PartStage, reached: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    returns = tuple(name for name in segment.outputs if name in reached)
    on = set(returns)
    for op in reversed(segment.ops if isinstance(segment, Segment) else (segment.op,)):
        if op.grad and any(y.name in on for y in op.outputs):
            on.update(name for name in op.inputs if graph.values[name].grad)
    wants = tuple(name for name in segment.inputs if name in on)
    return returns if wants else (), wants


def stage_text(stage: Stage) -> str:
    """A segment with its ops, a move, or a draw."""
    if isinstance(stage, Box):
        return f"box {stage.source} -> {stage.output.name}: {stage.output.layout}"
    if isinstance(stage, PartStage):
        return f"{stage.op.op}({', '.join(stage.inputs)}) -> {', '.join(stage.outputs)}"
    if isinstance(stage, Draw):
        return f"draw {stage.op.op} -> {', '.join(stage.outputs)}"
    head = f"segment on {stage.placement}: {', '.join(stage.inputs)} -> {', '.join(stage.outputs)}"
    return "\n".join(
        [head, *(f"  {op.op}({', '.join(op.inputs)}) -> {', '.join(y.name for y in op.outputs)}" for op in stage.ops)]
    )
