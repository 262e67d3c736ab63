"""Planning a step in micro-batches: the step of each kind of them on each route, all on the same weights.

The step is captured once, for the whole batch, and laid along time: what one micro-batch runs is peeled off. Where
weights are updated while a step goes on, an update is such a batch, and captured by itself: only so is a mean one.

A limit of memory is kept by all that a schedule has under way at once: where one micro-batch that fits leaves too
little for the others, it is chosen again with less room.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial

from torch import Tensor

from ...boxing.graph.buckets import bucketed
from ...boxing.graph.physical import Physical
from ...boxing.graph.text.text import to_text
from ...placement import Placement
from ...placement.errors import SbpError, ScheduleError
from ...placement.structure import replaced
from ...sbp import Layout
from ...sbp.call import refs_in
from ...sbp.joint.demands import Rounds
from ...sbp.joint.known_options import KnownOptions
from ...sbp.joint.placements import Homes, homes
from ...sbp.logical import Logical
from ...sbp.state import Runs
from ..model.annotate import LayerMoves, chunk_of, placement_of
from .capture.arguments import StepCall
from .choose.choose import Decided
from .memory.account import account, held_by_rank
from .microbatch.along import Along, along
from .microbatch.batch import Batch, PieceKind
from .microbatch.micro import Micro
from .microbatch.needs_all import WAITING, NeedsAll, said
from .microbatch.peel import peeled
from .passes import Passes
from .pieces import Pieces, Sized, kept_of
from .run.footprint import less, outgrown
from .run.late_graph import LateGraph
from .run.network import shape_of
from .run.variant import Variant
from .tasks.chunks import Chunks, groups

__all__ = ["plan_pieces"]

TURNS = 4  # of choosing again where a limit of memory is not kept


def plan_pieces(
    passes: Passes, call: StepCall, batch: Batch, step: Logical, moved: LayerMoves, known: KnownOptions
) -> Pieces:
    """The plan for a batch, of which `step` is captured, where some layers are moved to other stages; `known` is of
    others on this cluster."""
    choose, limit = _Planner(passes, call, batch, step, moved, known).chosen, passes.options.memory
    return choose(None) if limit is None else _fitted(choose, limit, passes.states)


def _fitted(choose: Callable[[float], Pieces], limit: float, states: int) -> Pieces:
    """Chosen with less room until all that the schedule has under way at once fits into the limit."""
    refused: dict[int, SbpError] = {}
    pieces = choose(limit)
    for turn in range(TURNS):
        one = pieces.first
        held = held_by_rank(pieces.memory(), one.graph, states)
        rank = max(held, key=lambda rank: held[rank].total)
        if held[rank].total <= limit:
            return pieces
        refused[held[rank].total] = outgrown(pieces.proved, one.decided, rank, held[rank], limit)
        single = account(one.graph, states, regather=pieces.options.backend != "autograd")[rank]
        if turn < TURNS - 1:
            try:
                pieces = choose(less(held[rank], single, limit))
            except SbpError:
                break
    raise refused[min(refused)]


class _Planner:
    """The pieces of one batch in the making: each update is captured once, however often it is chosen."""

    def __init__(
        self, passes: Passes, call: StepCall, batch: Batch, step: Logical, moved: LayerMoves, known: KnownOptions
    ) -> None:
        self.passes, self.call, self.batch = passes, call, batch
        self.inputs, self.moved = batch.lying(call.inputs), moved
        self.schedule = passes.options.policy
        self.said, self.placed = chunk_of(passes.modules, moved), placement_of(passes.modules)
        self.numbers = range(len(batch.pieces))
        try:
            self.whole = self.along(step)
        except SbpError as error:
            _tell_samples(error, call.inputs)
            raise
        self.streams = bool(self.whole.logical.losses) and not self.schedule.synchronous
        self.known = known
        self.micros: dict[Runs, list[Micro]] = {}  # of an update, by how it is cut

    def along(self, step: Logical) -> Along:
        """The step along time. Where an op needs all micro-batches, another schedule may help."""
        how = self.batch.runs, self.batch.inputs, end_of(step, self.passes.rest)
        waits = not step.losses or self.schedule.waits
        try:
            return along(step, *how, waits=waits)
        except NeedsAll as error:
            if waits:
                raise
            with suppress(SbpError):
                along(step, *how, waits=True)
                error.args = (f"{error}{WAITING}", *error.args[1:])
            raise

    def chosen(self, room: float | None) -> Pieces:
        """The step of each kind and route with so much room for one micro-batch, on the weights of the first."""
        groups = self.every(int(self.schedule.update)) if self.streams and self.schedule.update.isdigit() else None
        groups = groups or [self.numbers]
        kinds, sized = self.laid(groups, room)
        wanted = self.groups(sized[0, kinds[0]].variant)
        if wanted != groups:  # how many micro-batches an update has may depend on how many stages there are
            kinds, sized = self.laid(wanted, room)
        results = [self.whole.states[n] for n in refs_in(self.whole.logical.result)]
        how = self.passes.scale is not None, self.passes.states
        return Pieces(self.passes.options, self.batch, kinds, sized, wanted, results, room, *how, self.late)

    @cached_property
    def late(self) -> LateGraph | None:
        """The end of the step that is done behind all forwards, decided by itself."""
        whole = self.whole.whole
        return None if whole is None else LateGraph(whole, bucketed(self.passes.by_itself(whole.logical).graph))

    def laid(
        self, groups: Sequence[Sequence[int]], room: float | None
    ) -> tuple[list[PieceKind], dict[tuple[int, PieceKind], Sized]]:
        """The kind of each micro-batch, and the step of each, where so many make up an update."""
        kinds: list[PieceKind] = []
        micros: dict[PieceKind, Micro] = {}
        for group in groups:
            update = self.batch.update(group)
            for piece, micro in zip(update.pieces, self.micros_of(group, update), strict=True):
                alike = sum(kind.sizes == piece.sizes for kind in micros)
                kind = next((kind for kind, other in micros.items() if other is micro), PieceKind(piece.sizes, alike))
                micros[kind] = micro
                kinds.append(kind)
        sized: dict[tuple[int, PieceKind], Sized] = {}
        kept: Mapping[str, Layout] = {}
        rounds = partial(self.rounds, len(groups[0]))
        two = self.schedule.way == "routes" and bool(self.whole.logical.losses) and len(self.numbers) > 1
        for kind, micro in micros.items():
            logical = micro.logical
            if kept:
                logical = self.passes.placed(logical, self.moved, {name: of.placement for name, of in kept.items()})
                logical = _as_first(logical, next(iter(micros.values())).logical, self.passes.rest)
            decided = self.passes.decided(logical, self.inputs, room, kept, known=self.known, rounds=rounds)
            kept = kept or kept_of(decided.graph)
            one = sized[0, kind] = self.sized(micro, decided)
            if two:
                logical, rest = mirrored(logical, one.variant.where, self.passes.rest)
                decided = self.passes.decided(logical, self.inputs, room, kept, rest, known=self.known, rounds=rounds)
                sized[1, kind] = self.sized(micro, decided)
        return kinds, sized

    def rounds(self, many: int, where: Homes) -> Rounds:
        """How often a step does a micro-batch's work, for each time that it does something once, with so many
        micro-batches. Stages wait for the first to come and for the last to go back, as long as one of them works at a
        micro-batch for each other stage. Where weights' gradients wait, these fill two thirds of that."""
        stages = len(set(groups(where.ops).values())) or 1
        waits = (stages - 1) / max(1, (1 + max(self.said.values(), default=0)) // stages)
        if not self.schedule.synchronous:
            waits = 0
        ends = self.passes.options.ends
        return Rounds(many + waits / (3 if self.schedule.split else 1), stages, ends is not None and ends.once)

    def captured(self, group: Sequence[int]) -> Logical:
        """The step of some micro-batches."""
        batch, rows = self.batch, self.batch.rows(group)

        def put(path: str, x: Tensor) -> Tensor:
            return batch.piece(x, batch.inputs[path], rows)

        cut = [replaced(value, put, str(number), objects=True) for number, value in enumerate(self.call.args)]
        named = {name: replaced(value, put, name, objects=True) for name, value in self.call.kwargs.items()}
        try:
            return self.passes.placed(self.passes.captured(StepCall(self.call.build, cut, named)), self.moved)
        except Exception as error:
            many = f"{rows.sizes[0]} of {batch.sizes[0]} samples"
            error.add_note(f"{self.passes.name} updates its weights after {many}, for which this step was captured")
            raise

    def micros_of(self, group: Sequence[int], update: Batch) -> list[Micro]:
        """The steps of an update's micro-batches."""
        if update.runs not in self.micros:
            whole = self.whole
            if update is not self.batch:
                whole = along(self.captured(group), update.runs, update.inputs)
            self.micros[update.runs] = peeled(whole, whole_draws=self.passes.options.draws == "batch")
            steps = dict.fromkeys(micro.logical for micro in self.micros[update.runs])
            self.passes.dump("microbatch", lambda: "\n".join(map(str, steps)))
        return self.micros[update.runs]

    def sized(self, micro: Micro, decided: Decided) -> Sized:
        """A decided step, cut into chunks."""
        _check(micro, decided.graph, len(self.batch.sizes))
        variant = Variant(
            decided.graph,
            self.said,
            split=self.schedule.split,
            apart=not self.schedule.synchronous or self.passes.options.ends is not None,
            folding=self.passes.options.ends,
            backend=self.passes.options.backend,
            placed=self.placed,
        )
        self.passes.dump("physical", lambda: to_text(variant.graph))
        return Sized(micro, decided, variant)

    def groups(self, variant: Variant) -> list[Sequence[int]]:
        """The micro-batches that make up each update of the weights."""
        schedule = self.schedule
        if not self.streams:
            return [self.numbers]
        learns = self.passes.learns
        if not learns or self.passes.options.clip_grad_norm is not None:
            raise SbpError(
                f"schedule {schedule.name} updates weights while a step goes on, "
                f"{'and no norm of all gradients is ever known' if learns else 'without an optimizer'}\n"
                "  give it an optimizer and no clip_grad_norm, or take a schedule with a flush, such as '1f1b'"
            )
        return self.every(schedule.value(schedule.update, shape_of(schedule, variant.where, len(self.numbers)), 0))

    def every(self, many: int) -> list[Sequence[int]]:
        return [self.numbers[at : at + many] for at in self.numbers[::many]]


def end_of(step: Logical, rest: Placement | None) -> Placement | None:
    """The placement of the first loss, or of the first result."""
    where = homes(step, rest)
    made = {n: there for op, there in zip(step.ops, where.ops, strict=True) for n in op.numbers}
    ends = [loss.number for loss in step.losses] or list(refs_in(step.result))
    return next((made[n] for n in ends if n in made), None)


def _as_first(logical: Logical, first: Logical, rest: Placement | None) -> Logical:
    """The same with every op where its like is in the first kind of micro-batch, whose parameters were still free: a
    tied weight may be at home elsewhere than an op that reads it, and where least is sent depends on how many samples
    there are. Alike are those of a name on a line of a module, in order."""
    places = dict(zip(_each_of_line(first), homes(first, rest).ops, strict=True))
    found = [op.placement or places.get(key) for key, op in zip(_each_of_line(logical), logical.ops, strict=True)]
    ops = zip(logical.ops, found, strict=True)
    return replace(logical, ops=tuple(replace(op, placement=there) for op, there in ops))


def _each_of_line(logical: Logical) -> Iterator[tuple[str, str, str, int]]:
    """Keys that tell ops of a graph apart, and are those of their like in one of another size of micro-batch."""
    many: Counter[tuple[str, str, str]] = Counter()
    for op in logical.ops:
        key = op.origin.module, op.origin.line, op.name
        yield *key, many[key]
        many[key] += 1


def _tell_samples(error: SbpError, inputs: Mapping[str, Tensor]) -> None:
    """Say whose dim was taken for the samples, where another argument may have been meant."""
    batches = [(path, x) for path, x in inputs.items() if x.ndim]
    for path, x in batches[1:]:
        taken, first = batches[0]
        if x.ndim > first.ndim and len(x) != len(first):
            error.add_note(
                f"  {len(first)} samples were taken for a batch, as the argument {taken} has them, the first tensor; "
                f"{path} has {len(x)} along its first dim: if these are the samples, pass it first"
            )
            return


def _check(micro: Micro, graph: Physical, axes: int) -> None:
    """Refuse what micro-batches cannot do."""
    for name, given in graph.losses:
        if given is not None:
            raise SbpError(
                f"backward() of {name} was given a gradient, which a step in micro-batches cannot cut\n"
                "  multiply the loss by it, and call backward() without"
            )
    for buffer, number in micro.logical.writes.items():
        state = micro.states[number]
        if state.split or state.partial:
            raise SbpError(
                f"the buffer {buffer} is changed by what one micro-batch holds: along time it is {said(state, axes)}\n"
                "  leave micro_batches= out, or have it changed outside of the graph"
            )


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
