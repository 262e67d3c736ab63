"""A step in micro-batches: captured for one of them, and run for all by actors under a schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...actors.protocol.diagram import drawn
from ...actors.schedules.pipeline import Costs
from ...actors.timeline.timeline import Timeline
from ...boxing.graph.physical import Physical, Var, vars_in
from ...boxing.graph.report.report import Report
from ...boxing.picture.draw import picture
from ...boxing.record import asked
from ...placement import Placement
from ...placement.errors import SbpError, SbpflowError, ScheduleError
from ...placement.world import world
from ...sbp import B
from ...sbp.call import mapped, refs_in
from ...sbp.logical import Logical, Source
from ..model.annotate import chunk_of, placement_of
from ..tensors.tensor import GlobalTensor
from .capture.arguments import cutter, tensors_by_path
from .capture.pytree import replaced
from .choose.choose import Decided
from .choose.parameters import joined_path
from .compiler.generated_calls import Shards
from .memory.account import account
from .memory.liveness import RankMemory
from .microbatch.batch import Batch, MicroBatch, joined, weight_of
from .microbatch.parts import Axes, Size
from .microbatch.prologue import Before, Pasts
from .microbatch.rewrite import Micro, separated
from .microbatch.written_sizes import does_not_run
from .optimizer.adopt import adopt, states_of
from .optimizer.on_shards import step_on_shards
from .options import Options
from .passes import stage_text
from .run.chunks import Chunks
from .run.costs import chunk_costs, course, once
from .run.footprint import footprint, less, outgrown
from .run.network import shape_of
from .run.pipeline import Pipelined, seeds_of
from .run.variant import Variant
from .run.weight_versions import WeightVersions
from .step import Step

__all__ = ["PipedStep"]


TURNS = 4  # of choosing again where a limit of memory is not kept


@dataclass(frozen=True, eq=False)
class Sized:
    """The step for micro-batches of one size: how it lies. `taken` has values of the graph that are arguments, and the
    paths of these."""

    micro: Micro
    decided: Decided
    graph: Physical
    taken: Mapping[str, str]

    @cached_property
    def cut(self) -> Mapping[str, Callable[[Tensor], Shards]]:
        """How arguments are cut."""
        return {name: cutter(self.graph.layout(name)) for name in self.taken}


class PipedStep(Step):
    """A step for arguments of one kind, a micro-batch at a time."""

    each: list[Sized]  # of the micro-batches
    in_micro_batches = True

    def __init__(
        self,
        build: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        options: Options,
        names: Sequence[str] = (),
    ) -> None:
        self.batch = Batch.of(args, kwargs, options.micro_batches, str(options.name), options.slices)
        for path, x in tensors_by_path(args, kwargs).items():
            if x.requires_grad and torch.is_grad_enabled():
                raise SbpError(
                    f"the argument {path} requires grad, which a step in micro-batches does not give\n"
                    "  leave micro_batches= and schedule= out, or pass it detached"
                )
        self.schedule, self.many = options.policy, options.micro_batches
        self.size: Size = self.batch.pieces[0].sizes  # of the micro-batches that are looked at
        self.micros: dict[Size, Micro] = {}
        self.learning = Lock()
        self.whole = args, kwargs
        self.all: Logical | None = None  # the step of the batch
        super().__init__(build, *self.micro(self.batch.pieces[0]), modules, optimizers, options, names)
        self._all_sizes(build)
        if options.memory is not None:
            self._fit(build, options.memory)
        del self.whole, self.all

    def micro(self, piece: MicroBatch) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one micro-batch."""

        def put(path: str, x: Tensor) -> Tensor:
            return self.batch.piece(x, self.batch.inputs[path], piece)

        args, kwargs = self.whole
        cut = [replaced(value, put, str(number), objects=True) for number, value in enumerate(args)]
        return cut, {name: replaced(value, put, name, objects=True) for name, value in kwargs.items()}

    def captured(self, build: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Logical:
        if self.all is None:
            self.all = super().captured(build, *self.whole)
        try:
            logical = super().captured(build, args, kwargs)
        except SbpflowError:
            raise
        except Exception as error:
            raise does_not_run(error, self.batch.sizes, self.size, self.name) from error
        micro = separated(logical, self.all, Axes(self.batch.sizes, self.size, self.batch.inputs))
        self.micros[self.size] = micro
        self.dump("microbatch", lambda: str(micro.logical))
        return micro.logical

    def _all_sizes(self, build: Callable[..., Any]) -> None:
        """The same step for micro-batches of other sizes, and for those that go the other way, on the same weights."""
        moved = self.balance.moved if self.balance else {}
        said = {
            joined_path(prefix, path): number
            for prefix, module in self.modules.items()
            for path, number in chunk_of(module, moved).items()
        }
        placed = {joined_path(prefix, path) for prefix, module in self.modules.items() for path in placement_of(module)}
        self.variants: dict[tuple[int, Size], Variant] = {}
        self.sized: dict[tuple[int, Size], Sized] = {}

        def add(route: int, decided: Decided) -> None:
            one = self.sized[route, self.size] = self._sized(decided)
            how: Any = {"split": self.schedule.split, "streamed": not self.schedule.synchronous}
            made = Variant(one.graph, said, **how, backend=self.backend, placed=placed)
            self.variants[route, self.size] = made

        two = self.schedule.way == "routes" and self.trains and len(self.batch.pieces) > 1
        for piece in self.batch.pieces:
            size = piece.sizes
            if (0, size) not in self.variants:
                self.size, given = size, self.micro(piece)
                logical = self.micros[size].logical if size in self.micros else self.captured(build, *given)
                add(0, self.decide(logical, *given) if self.variants else self.decided)
                if two:
                    other, rest = mirrored(logical, self.variants[0, size].where, self.rest)
                    add(1, self.decide(other, *given, rest))
        # As it runs: what moves with every micro-batch is in no bucket.
        self.graph = replace(self.variants[0, self.batch.pieces[0].sizes].graph, called=self.graph.called)
        self.groups = self._groups()

    def _fit(self, build: Callable[..., Any], limit: float) -> None:
        """Choose with less room until all that the schedule has under way at once fits into the limit."""
        refused: dict[int, SbpError] = {}
        for _ in range(TURNS):
            held, _ = self.held_by_rank()
            rank = max(held, key=lambda rank: held[rank].total)
            if held[rank].total <= limit:
                return
            refused[held[rank].total] = outgrown(self.program, self.decided, rank, held[rank], limit)
            one = account(self.graph, states_of(self.optimizers), regather=self.backend != "autograd")[rank]
            self.room, self.size = less(held[rank], one, limit), self.batch.pieces[0].sizes
            del self.program
            try:
                self.choose(self.micros[self.size].logical, *self.micro(self.batch.pieces[0]))
            except SbpError:
                break
            self._all_sizes(build)
        if refused:
            raise refused[min(refused)]

    @cached_property
    def program(self) -> Pipelined:
        """The pipeline that runs."""
        sizes = [piece.sizes for piece in self.batch.pieces]
        if self.schedule.synchronous or not self.trains:
            return Pipelined(self.variants, sizes, self.schedule, self.name, self.batch.slices)
        weights = WeightVersions(self.variants, sizes, self.schedule, self.name, self._update)
        return Pipelined(self.variants, sizes, self.schedule, self.name, weights=weights)

    def prepare(self) -> None:
        if self.ready:
            return
        super().prepare()
        self.each = [self.sized[key] for key in self.program.keys]
        self.before = Before(self.batch, [one.micro for one in self.each], self.groups, self._held, self.name)
        self.seeds = [
            self._seeds(self.each[k], self.batch.shares(self.batch.pieces[k], samples))
            for group in self.groups
            for samples in (sum(self.batch.pieces[k].sizes[0] for k in group[:: self.batch.slices]),)
            for k in group
        ]

    def _dump_program(self) -> None:
        made = self.variants.values()
        self.dump("segments", lambda: "\n".join(stage_text(stage) for one in made for stage in one.stages))
        self.dump("order", lambda: "\n".join(str(task) for one in made for task in one.tasks.tasks.values()))
        self.dump("source", lambda: self.program.network.text)

    def _groups(self) -> list[list[int]]:
        """The micro-batches that make up each update of the weights."""
        numbers = list(range(len(self.batch.pieces)))
        if self.schedule.synchronous or not self.trains:
            return [numbers]
        if not self.optimizers or self.options.clip_grad_norm is not None:
            raise SbpError(
                f"schedule {self.schedule.name} updates weights while a step goes on, "
                f"{'without an optimizer' if not self.optimizers else 'and no norm of all gradients is ever known'}\n"
                "  give it an optimizer and no clip_grad_norm, or take a schedule with a flush, as '1f1b'"
            )
        shape = shape_of(self.schedule, next(iter(self.variants.values())).where, len(numbers))
        every = self.schedule.value(self.schedule.update, shape, 0)
        return [numbers[at : at + every] for at in range(0, len(numbers), every)]

    @staticmethod
    def _seeds(one: Sized, shares: Sequence[float]) -> dict[str, Shards]:
        """The gradients that the losses of a micro-batch start from, which is such a part of the update's samples."""
        parts = [one.micro.parts[loss.number] for loss in one.micro.logical.losses]
        names = [name for name, _ in one.graph.losses]
        weights = [weight_of(part, shares, name) for part, name in zip(parts, names, strict=True)]
        return seeds_of(one.graph, weights)

    def _sized(self, decided: Decided) -> Sized:
        micro = self.micros[self.size]
        graph = decided.graph
        taken = {s.value.name: s.value.name for s in graph.sources if s.kind == "input"}
        for box in graph.boxes:
            if box.source in taken:
                taken[box.output.name] = taken[box.source]
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
        return Sized(micro, decided, graph, taken)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.prepare()
        given = self._given(args, kwargs)
        held = {name: tuple([s.detach() for s in value._shards]) for name, value in self.held.items()}
        constants = {s.value.name for s in self.graph.sources if s.kind == "constant"}
        held.update({name: self.cut[name](self.constants[name]()) for name in constants})
        here = world().rank in (None, *self.program.everywhere.flat)
        pieces = self.before.pieces(given) if here else [{**given, **none} for none in self.before.nothing()]
        if self.optimizers:
            adopt(self.optimizers, self.known, self.changed)
        with asked(), Pasts(self.batch, self.each[0].micro.pasts) as pasts:
            inputs = [self._cut(k, piece, pasts) for k, piece in enumerate(pieces)]
            made = self.program(held, inputs, self.seeds)
        with torch.no_grad():
            for buffer, name in self.graph.writes.items():
                for mine, new in zip(self.held[buffer]._shards, made.values[0].get(name, ()), strict=False):
                    mine.copy_(new)
        if self.trains and self.schedule.synchronous:
            self._learn(made.grads, given)
        return self._joined([{**held, **mine, **values} for mine, values in zip(inputs, made.values, strict=True)])

    def _update(self, grads: Mapping[str, Shards]) -> None:
        """A step of the optimizers on some parameters; stages of one process call it at any time."""
        mine = {id(self.trained[name].master): shards for name, shards in grads.items()}
        with self.learning:
            hooked = self._hooked()
            steps = [o for o in self.optimizers if hooked or not step_on_shards(o, mine)]
            for name, shards in grads.items() if steps else ():
                self.trained[name].give(shards, keep=False)
            for optimizer in steps:
                optimizer.step()
            for optimizer in self.optimizers if steps else ():
                optimizer.zero_grad(set_to_none=True)

    def draw_actors(self, path: str | Path) -> Path:
        return picture(drawn(self.program.network), path)

    def costs(self) -> tuple[Costs, ...]:
        """Costs of every chunk for a micro-batch of the first kind, as predicted; on a second route they are alike."""
        key = 0, self.batch.pieces[0].sizes
        first = self.variants[key]
        return chunk_costs(first.graph, self.sized[key].decided, first.stages, first.where)

    def explain(self) -> Report:
        """Choices and their reasons; ops and moves are those of one micro-batch."""
        pieces, slices = self.batch.pieces, self.batch.slices
        routes = [one for (_, size), one in self.variants.items() if size == pieces[0].sizes]
        first, costs = routes[0], self.costs() * len(routes)
        found = course(
            self.schedule,
            [one.where for one in routes],
            costs,
            len(pieces) // slices,
            slices=slices,
            trains=self.trains,
            more=once(first.graph, self.sized[0, pieces[0].sizes].decided, first.stages, first.where),
        )
        return replace(super().explain(), course=found)

    def memory(self) -> dict[int, RankMemory]:
        return footprint(self.program, regather=self.backend != "autograd")

    def timeline(self) -> Timeline | None:
        return self.program.timeline()

    def _cut(self, k: int, piece: Mapping[str, Tensor], pasts: Pasts) -> dict[str, Shards]:
        """The arguments of one piece as they lie."""
        one = self.each[k]
        return {
            name: pasts.shards(k, one.taken[name], one.graph.layout(name))
            if one.taken[name] in one.micro.pasts
            else cut(piece[one.taken[name]])
            for name, cut in one.cut.items()
        }

    def _held(self, source: Source) -> Tensor:
        """A buffer or constant, whole."""
        return self._everywhere(self.held[source.name]) if source.kind == "buffer" else self.constants[source.name]()

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
        names = [vars_in(one.graph.result) for one in each]

        def put(var: Var) -> GlobalTensor:
            at = names[0].index(var.name)
            layouts = [one.graph.layout(listed[at]) for one, listed in zip(each, names, strict=True)]
            parts = [mine.get(listed[at]) for mine, listed in zip(values, names, strict=True)]
            scale = 1 / len(self.groups) if micro.totals else 1.0
            return joined(parts, layouts, micro.parts[how[var.name]], self.batch, scale)

        with torch.no_grad():
            return self.rebuild(mapped(self.graph.result, Var, put))


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
