"""A step in micro-batches: captured for one of them, and run for all by actors under a schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ...actors.look import drawn
from ...actors.published import published
from ...actors.schedule import Schedule
from ...actors.timeline import Timeline
from ...boxing.draw import picture
from ...boxing.graph.buckets import bucketed
from ...boxing.graph.physical import Graph, Var, vars_in
from ...placement import Placement
from ...placement.errors import SbpError, ScheduleError
from ...placement.world import world
from ...sbp import B
from ...sbp.call import refs_in
from ...sbp.logical import Logical
from ..annotate import chunk_of
from ..tensor import GlobalTensor
from .batches import Batch, evaluated, joined, together, weight_of
from .called import Shards
from .chunks import Chunks
from .decide import Decided
from .footprint import footprint
from .inputs import cutter, tensors_by_path
from .liveness import Memory
from .lower import shape_of
from .micro import Micro, separated
from .model import joined_path
from .optimizers import adopt
from .pipelined import Pipelined, seeds_of
from .shardwise import step_on_shards
from .step import Step
from .streamed import Streamed
from .structure import replaced
from .variant import Variant

__all__ = ["PipedStep", "schedule_of"]


def schedule_of(given: "str | Schedule | None") -> Schedule:
    """A schedule by name, text or as it is; 1F1B where nothing is said."""
    if not (given is None or isinstance(given, str | Schedule)):
        raise SbpError(f"schedule={given!r}\n  give the name of one, its text, or a Schedule")
    if isinstance(given, str):
        given = Schedule.read(given) if len(given.split()) > 1 else published(given)
    made = given or published("1f1b")
    if made.slices:
        raise SbpError(
            f"schedule {made.name} cuts sequences into slices, and a graph cuts a batch into micro-batches\n"
            f"  look at it by .show(p, m, n=slices), and run the graph under another one, as '1f1b'"
        )
    return made


@dataclass(frozen=True, eq=False)
class Sized:
    """The step for micro-batches of one size: how it lies, and how arguments are cut for it."""

    micro: Micro
    decided: Decided
    graph: Graph
    cut: Mapping[str, Callable[[Tensor], Shards]]
    taken: Mapping[str, str]  # values of the graph that are arguments -> whose


class PipedStep(Step):
    """What a graph does for arguments of one kind, a micro-batch at a time."""

    program: Pipelined
    each: list[Sized]  # of the micro-batches

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
        for path, x in tensors_by_path(args, kwargs).items():
            if x.requires_grad and torch.is_grad_enabled():
                raise SbpError(
                    f"the argument {path} requires grad, which a step in micro-batches does not give\n"
                    "  leave micro_batches= and schedule= out, or pass it detached"
                )
        self.schedule = schedule
        self.size = self.batch.sizes[0]  # of the micro-batches that are looked at
        self.micros: dict[int, Micro] = {}
        self.learning = Lock()
        self.whole = args, kwargs
        self.all: Logical | None = None  # the step of the batch
        super().__init__(build, *self.micro(0), *rest, **options)
        del self.whole, self.all

    def micro(self, k: int) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one micro-batch."""
        at, size = sum(self.batch.sizes[:k]), self.batch.sizes[k]
        return self.changed_inputs(*self.whole, lambda x: x[at : at + size])

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
        if self.all is None:
            reads = self.reads
            self.all, self.reads = super().captured(build, *self.whole), reads
        micro = separated(logical, dict.fromkeys(self.batch.inputs, 0), self.batch.samples, self.all)
        self.micros[self.size] = micro
        return micro.logical

    def compiled(self, build: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pipelined:
        said = {
            joined_path(prefix, path): number
            for prefix, module in self.modules.items()
            for path, number in chunk_of(module).items()
        }
        variants: dict[tuple[int, int], Variant] = {}
        self.sized: dict[tuple[int, int], Sized] = {}

        def add(route: int, decided: Decided) -> None:
            one = self.sized[route, self.size] = self._sized(decided)
            variants[route, self.size] = Variant(one.graph, said, split=self.schedule.split, backend=self.backend)

        two = self.schedule.way == "routes" and self.trains and len(self.batch.sizes) > 1
        for k, size in enumerate(self.batch.sizes):
            if (0, size) not in variants:
                self.size, given = size, self.micro(k)
                logical = self.micros[size].logical if size in self.micros else self.captured(build, *given)
                add(0, self.decide(logical, *given) if variants else self.decided)
                if two:
                    other, rest = mirrored(logical, variants[0, size].where, self.rest)
                    add(1, self.decide(other, *given, rest))
        made = self._program(variants)
        samples = [sum(self.batch.sizes[n] for n in group) for group in self.groups for _ in group]
        self.each = [self.sized[key] for key in made.keys]
        self.seeds = [self._seeds(*three) for three in zip(self.each, self.batch.sizes, samples, strict=True)]
        return made

    def _program(self, variants: Mapping[tuple[int, int], Variant]) -> Pipelined:
        """What runs, and which micro-batches make up each update of the weights."""
        numbers = range(len(self.batch.sizes))
        self.groups = [list(numbers)]
        if self.schedule.synchronous or not self.trains:
            return Pipelined(variants, self.batch.sizes, self.schedule, self.name)
        if not self.optimizers or self.most is not None:
            raise SbpError(
                f"schedule {self.schedule.name} updates weights while a step goes on, "
                f"{'without an optimizer' if not self.optimizers else 'and no norm of all gradients is ever known'}\n"
                "  give it an optimizer and no clip_grad_norm, or take a schedule with a flush, as '1f1b'"
            )
        where = next(iter(variants.values())).where
        shape = shape_of(self.schedule, where, len(numbers))
        every = self.schedule.value(self.schedule.update, shape, 0)
        self.groups = [list(numbers[at : at + every]) for at in range(0, len(numbers), every)]
        return Streamed(variants, self.batch.sizes, self.schedule, self.name, self._update)

    @staticmethod
    def _seeds(one: Sized, size: int, samples: int) -> dict[str, Shards]:
        """The gradients that the losses of a micro-batch start from, of an update of so many samples."""
        parts = [one.micro.parts[loss.number] for loss in one.micro.logical.losses]
        names = [name for name, _ in one.graph.losses]
        weights = [weight_of(part, size, samples, name) for part, name in zip(parts, names, strict=True)]
        return seeds_of(one.graph, weights)

    def _sized(self, decided: Decided) -> Sized:
        micro = self.micros[self.size]
        graph = _unbucketed(bucketed(decided.graph))
        inputs = {s.value.name for s in graph.sources if s.kind == "input"}
        taken = {name: name for name in inputs}
        taken.update({box.output.name: box.source for box in graph.boxes if box.source in inputs})
        cut = {name: cutter(graph.layout(name)) for name in taken}
        for name, given in graph.losses:
            if given is not None:
                raise SbpError(
                    f"backward() of {name} was given a gradient, which a step in micro-batches cannot cut\n"
                    "  multiply the loss by it, and call backward() without"
                )
        for buffer, number in micro.logical.writes.items():
            if not micro.parts[number].whole:
                raise SbpError(
                    f"the buffer {buffer} is changed by what one micro-batch holds: {micro.parts[number]}\n"
                    "  leave micro_batches= out, or have it changed outside of the graph"
                )
        return Sized(micro, decided, graph, cut, taken)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = tensors_by_path(args, kwargs)
        pieces = self.batch.cut(given)
        held = {name: tuple([s.detach() for s in value._shards]) for name, value in self.held.items()}
        constants = {s.value.name for s in self.graph.sources if s.kind == "constant"}
        held.update({name: self.cut[name](self.constants[name]()) for name in constants})
        each = self.each
        self._number(each[0].micro, pieces)
        for group in self.groups:
            self._total([each[k] for k in group], [pieces[k] for k in group], [self.batch.sizes[k] for k in group])
        inputs = [
            {name: cut(piece[one.taken[name]]) for name, cut in one.cut.items()}
            for one, piece in zip(each, pieces, strict=True)
        ]
        if self.optimizers:
            adopt(self.optimizers, self.known, self.changed)
        made = self.program(held, inputs, self.seeds)
        with torch.no_grad():
            for buffer, name in self.graph.writes.items():
                for mine, new in zip(self.held[buffer]._shards, made.values[0].get(name, ()), strict=False):
                    mine.copy_(new)
        if self.trains and self.schedule.synchronous:
            self._learn(made.grads, given)
        return self._joined(made.values)

    def _update(self, grads: Mapping[str, Shards]) -> None:
        """A step of the optimizers on some parameters; stages of one process call it at any time."""
        mine = {id(self.trained[name].master): shards for name, shards in grads.items()}
        with self.learning:
            for optimizer in self.optimizers:
                if not step_on_shards(optimizer, mine):
                    for name, shards in grads.items():
                        self.trained[name].give(shards, keep=False)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)

    def draw_actors(self, path: str | Path) -> Path:
        return picture(drawn(self.program.network), path)

    def memory(self) -> dict[int, Memory]:
        return footprint(self.program, regather=self.backend != "autograd")

    def timeline(self) -> Timeline | None:
        return self.program.timeline()

    def _number(self, micro: Micro, pieces: Sequence[dict[str, Tensor]]) -> None:
        """Add to the arguments of micro-batches their pieces of what numbers the samples of a batch."""
        for name, value, dim in [(each.name, each.value(), each.dim) for each in micro.numbers]:
            for piece, mine in zip(pieces, torch.split(value, list(self.batch.sizes), dim), strict=True):
                piece[name] = mine

    def _total(self, each: Sequence[Sized], pieces: Sequence[dict[str, Tensor]], sizes: Sequence[int]) -> None:
        """Add to the arguments of micro-batches what must be known of all of them before the step."""
        more: dict[str, Tensor] = {}
        if world().rank not in (None, *self.program.everywhere.flat):  # it has no stage, and needs none
            for piece in pieces:
                piece.update({name: torch.empty(0) for name, *_ in each[0].micro.totals})
            return
        for at, (name, graph, how) in enumerate(each[0].micro.totals):
            if not more:
                buffers = {s.name for s in graph.sources if s.kind == "buffer"}
                more = {name: self._everywhere(self.held[name]) for name in buffers if name in self.held}
                more.update({name: make() for name, make in self.constants.items()})
            graphs = [one.micro.totals[at].graph for one in each]
            found = [evaluated(own, {**more, **piece}) for own, piece in zip(graphs, pieces, strict=True)]
            total = together(found, how, sizes)
            for piece in pieces:
                piece[name] = total

    def _everywhere(self, value: GlobalTensor) -> Tensor:
        """All of a buffer, on every rank of the pipeline."""
        if world().rank is None:
            return value.full_tensor()
        everywhere = value.to_global(placement=self.program.everywhere, sbp=B)
        shard: Tensor = everywhere._shards[0].detach()
        return shard

    def _joined(self, values: Sequence[Mapping[str, Shards]]) -> Any:
        """The results of the batch."""
        each = self.each
        micro = each[0].micro
        how = dict(zip(vars_in(self.graph.result), refs_in(micro.logical.result), strict=True))
        names = [list(vars_in(one.graph.result)) for one in each]

        def put(value: Any) -> Any:
            if isinstance(value, Var):
                at = names[0].index(value.name)
                layouts = [one.graph.layout(listed[at]) for one, listed in zip(each, names, strict=True)]
                parts = [mine.get(listed[at]) for mine, listed in zip(values, names, strict=True)]
                scale = 1 / len(self.groups) if micro.totals else 1.0
                return joined(parts, layouts, micro.parts[how[value.name]], self.batch.sizes, scale)
            if isinstance(value, list | tuple):
                return type(value)([put(part) for part in value])
            if isinstance(value, dict):
                return {name: put(part) for name, part in value.items()}
            return value

        with torch.no_grad():
            return self.rebuild(put(self.graph.result))


def mirrored(logical: Logical, where: Chunks, rest: Placement | None) -> tuple[Logical, Placement | None]:
    """The same step with its first stage where the last is, and so on: the way of every second micro-batch."""
    groups = where.placements
    if any(len(each) > 1 or each[0].shape != groups[0][0].shape for each in groups):
        shapes = ", ".join(str(place) for each in groups for place in each)
        raise ScheduleError(
            f"micro-batches cannot go both ways over {shapes}\n"
            "  a schedule of two routes has every stage on two placements, so all must be of one shape; or take '1f1b'"
        )
    other = dict(zip((a for (a,) in groups), (b for (b,) in groups[::-1]), strict=True))

    def turned(place: Placement | None) -> Placement | None:
        return None if place is None else other.get(place, place)

    sources = tuple(replace(s, placement=turned(s.placement)) for s in logical.sources)
    ops = tuple(replace(op, placement=turned(op.placement)) for op in logical.ops)
    return replace(logical, sources=sources, ops=ops), turned(rest)


def _unbucketed(graph: Graph) -> Graph:
    """Only what is brought home once a step goes in buckets, not what moves with every micro-batch."""
    backs = tuple(back if back.of == back.into else replace(back, bucket=None) for back in graph.backs)
    return replace(graph, backs=backs)
