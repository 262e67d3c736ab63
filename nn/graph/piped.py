"""A step in micro-batches: captured for one of them, and run for all by actors under a schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...actors.published import published
from ...actors.schedule import Schedule
from ...actors.timeline import Timeline
from ...boxing.graph.buckets import bucketed
from ...boxing.graph.physical import Graph, Var, vars_in
from ...placement.errors import SbpError
from ...sbp.call import refs_in
from ...sbp.logical import Logical
from ..annotate import chunk_of
from .batches import Batch, joined, summed, weight_of
from .called import Shards
from .decide import Decided
from .inputs import cutter, tensors_by_path
from .micro import Micro, separated
from .pipelined import Pipelined, Variant, seeds_of
from .step import Step
from .structure import replaced

__all__ = ["PipedStep", "schedule_of"]


def schedule_of(given: "str | Schedule | None") -> Schedule:
    """A schedule by name, text or as it is; 1F1B where nothing is said."""
    if isinstance(given, Schedule):
        return given
    if given is None:
        return published("1f1b")
    if not isinstance(given, str):
        raise SbpError(f"schedule={given!r}\n  give the name of one, its text, or a Schedule")
    return Schedule.read(given) if len(given.split()) > 1 else published(given)


@dataclass(frozen=True, eq=False)
class Sized:
    """The step for micro-batches of one size: how it lies, and how arguments are cut for it."""

    micro: Micro
    decided: Decided
    graph: Graph
    cut: Mapping[str, Callable[[Tensor], Shards]]
    taken: Mapping[str, str]  # values of the graph that are arguments -> whose
    seeds: Mapping[str, Shards]


class PipedStep(Step):
    """What a graph does for arguments of one kind, a micro-batch at a time."""

    program: Pipelined

    def __init__(
        self,
        build: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *rest: Any,
        micro_batches: int,
        schedule: Schedule,
        **options: Any,
    ) -> None:
        self.batch = Batch.of(args, kwargs, micro_batches, options["name"])
        self.schedule = schedule
        self.size = self.batch.sizes[0]  # of the micro-batches that are looked at
        self.micros: dict[int, Micro] = {}
        self.whole = args, kwargs
        super().__init__(build, *self.micro(0), *rest, **options)
        del self.whole

    def micro(self, k: int) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one micro-batch."""
        at, size = sum(self.batch.sizes[:k]), self.batch.sizes[k]
        return self.changed_inputs(*self.whole, lambda x: x[at : at + size])

    def twice(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of one sample, with that sample twice."""
        return self.changed_inputs(args, kwargs, lambda x: torch.cat([x, x]))

    def changed_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Tensor], Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Arguments with something done to what has samples."""

        def put(path: str, x: Tensor) -> Tensor:
            return change(x) if path in self.batch.inputs else x

        cut = [replaced(value, put, str(number), objects=True) for number, value in enumerate(args)]
        return cut, {name: replaced(value, put, name, objects=True) for name, value in kwargs.items()}

    def captured(self, build: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Logical:
        logical = super().captured(build, args, kwargs)
        like = None
        if self.size == 1:
            reads = self.reads
            like, self.reads = super().captured(build, *self.twice(args, kwargs)), reads
        micro = separated(logical, dict.fromkeys(self.batch.inputs, 0), max(self.size, 2), like)
        self.micros[self.size] = micro
        return micro.logical

    def compiled(self, build: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pipelined:
        self.sized = {self.size: self._sized(self.decided)}
        for k, size in enumerate(self.batch.sizes):
            if size not in self.sized:
                self.size = size
                given = self.micro(k)
                self.sized[size] = self._sized(self.decide(self.captured(build, *given), *given))
        said = {
            f"{prefix}.{path}" if prefix and path else prefix or path: number
            for prefix, module in self.modules.items()
            for path, number in chunk_of(module).items()
        }
        variants = {
            size: Variant(each.graph, said, split=self.schedule.split, backend=self.backend)
            for size, each in self.sized.items()
        }
        return Pipelined(variants, self.batch.sizes, self.schedule, self.name)

    def _sized(self, decided: Decided) -> Sized:
        micro, size = self.micros[self.size], self.size
        graph = _unbucketed(bucketed(decided.graph))
        inputs = {s.value.name for s in graph.sources if s.kind == "input"}
        taken = {name: name for name in inputs}
        taken.update({box.output.name: box.source for box in graph.boxes if box.source in inputs})
        cut = {name: cutter(graph.layout(name)) for name in taken}
        parts = [micro.parts[loss.number] for loss in micro.logical.losses]
        names = [name for name, _ in graph.losses]
        for name, given in graph.losses:
            if given is not None:
                raise SbpError(
                    f"backward() of {name} was given a gradient, which a step in micro-batches cannot cut\n"
                    "  multiply the loss by it, and call backward() without"
                )
        samples = self.batch.samples
        weights = [weight_of(part, size, samples, name) for part, name in zip(parts, names, strict=True)]
        for buffer, number in micro.logical.writes.items():
            if not micro.parts[number].whole:
                raise SbpError(
                    f"the buffer {buffer} is changed by what one micro-batch holds: {micro.parts[number]}\n"
                    "  leave micro_batches= out, or have it changed outside of the graph"
                )
        return Sized(micro, decided, graph, cut, taken, seeds_of(graph, weights))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = tensors_by_path(args, kwargs)
        pieces = self.batch.cut(given)
        held = {name: tuple([s.detach() for s in value._shards]) for name, value in self.held.items()}
        constants = {s.value.name for s in self.graph.sources if s.kind == "constant"}
        held.update({name: self.cut[name](self.constants[name]()) for name in constants})
        each = [self.sized[size] for size in self.batch.sizes]
        totals = self._totals(each, pieces)
        inputs = [
            {name: cut(totals[of] if (of := one.taken[name]) in totals else piece[of]) for name, cut in one.cut.items()}
            for one, piece in zip(each, pieces, strict=True)
        ]
        made = self.program(held, inputs, [one.seeds for one in each])
        with torch.no_grad():
            for buffer, name in self.graph.writes.items():
                for mine, new in zip(self.held[buffer]._shards, made.values[0].get(name, ()), strict=False):
                    mine.copy_(new)
        if self.trains:
            self._learn(made.grads, given)
        return self._joined(made.values)

    def timeline(self) -> Timeline | None:
        return self.program.timeline()

    def _totals(self, each: Sequence[Sized], pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The sums over all micro-batches that are known before the step."""
        found: dict[str, Tensor] = {}
        for one, piece in zip(each, pieces, strict=True):
            for name, graph in one.micro.totals:
                part = summed(graph, piece, self.constants)
                found[name] = found[name] + part if name in found else part
        return found

    def _joined(self, values: Sequence[Mapping[str, Shards]]) -> Any:
        """The results of the batch."""
        each = [self.sized[size] for size in self.batch.sizes]
        micro = each[0].micro
        how = dict(zip(vars_in(self.graph.result), refs_in(micro.logical.result), strict=True))
        names = [list(vars_in(one.graph.result)) for one in each]

        def put(value: Any) -> Any:
            if isinstance(value, Var):
                at = names[0].index(value.name)
                layouts = [one.graph.layout(listed[at]) for one, listed in zip(each, names, strict=True)]
                parts = [mine.get(listed[at]) for mine, listed in zip(values, names, strict=True)]
                return joined(parts, layouts, micro.parts[how[value.name]], self.batch.sizes)
            if isinstance(value, list | tuple):
                return type(value)([put(part) for part in value])
            if isinstance(value, dict):
                return {name: put(part) for name, part in value.items()}
            return value

        with torch.no_grad():
            return self.rebuild(put(self.graph.result))


def _unbucketed(graph: Graph) -> Graph:
    """Only what is brought home once a step goes in buckets, not what moves with every micro-batch."""
    backs = tuple(back if back.of == back.into else replace(back, bucket=None) for back in graph.backs)
    return replace(graph, backs=backs)
