"""Weights of a step whose chunks end one by one: of each they are gathered, its gradients brought home, and changed by
its optimizer while micro-batches go on in others.

All micro-batches see the same weights, as `same_weights` has it. What is done once a step is work of the actors that
`actors/schedules/chunk_ends.py` adds to the schedule's own.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from .....actors.protocol.network import Actor, Network
from .....actors.protocol.state import Firing
from .....actors.schedules.chunk_ends import ChunkEnd, Folding
from .....boxing.exchange.execute import token
from .....boxing.exchange.transport import lane
from .....placement import Placement
from .....placement.errors import ScheduleError
from .....sbp import Layout, State
from ...compiler.generated_calls import Shards
from ...microbatch.batch import PieceKind
from ..tasks import Name
from ..variant import Variant
from .chunk_work import ChunkWork
from .same_weights import Fire, SameWeights, Sums, Update

__all__ = ["ChunkWeights", "GatheredWeights", "Validation"]

VariantKey: TypeAlias = tuple[int, PieceKind]  # of a variant: its route and kind


class Validation(Protocol):
    """An optimizer's steps chunk by chunk, before all is known of the gradients of others."""

    def known(self, chunk: int, grads: Mapping[str, Shards], losses: Sequence[tuple[Placement, Shards]]) -> Tensor:
        """The numbers of the gradients of one chunk, and of losses that it made, as addends."""

    def step(self, chunk: int, known: Tensor) -> None:
        """Step a chunk by what is known so far."""

    def validate(self, chunk: int, known: Tensor) -> None:
        """Make good what was done to it, now that all is known."""

    def undo(self) -> Sequence[int]:
        """Take back what was done in a step that an error has ended; the chunks of which that cannot be."""


class GatheredWeights:
    """The weights of a chunk as its tasks read them, for each variant."""

    def __init__(self) -> None:
        self.shards: dict[VariantKey, dict[str, Shards]] = defaultdict(dict)


class ChunkWeights:
    """How a schedule with a flush keeps weights where chunks end one by one; with `steps` their optimizers step then,
    and `validated` that is made good when the gradients of all are known."""

    def __init__(
        self,
        variants: Mapping[VariantKey, Variant],
        micro_batches: Sequence[VariantKey],
        folding: Folding,
        name: str,
        *,
        steps: bool = False,
        validated: bool = False,
    ) -> None:
        self.same = SameWeights(variants, micro_batches)
        self.variants, self.keys, self.micro_batches = variants, self.same.keys, micro_batches
        self.folding, self.steps, self.validated = folding, steps, validated
        self.count = len(self.same.home.where.group)
        self.routes = 1 + max(route for route, _ in micro_batches)
        self.work_of = {key: ChunkWork(variants[key], folding.parts) for key in self.keys}
        self.names = tuple(self.same.home.tasks.grads)  # of what has gradients
        if steps:
            self.check(name)
        self.held: dict[VariantKey, Mapping[str, Shards]] = {}
        self.sums: dict[VariantKey, Sums] = {}
        self.homes: dict[VariantKey, dict[str, Shards]] = {}  # gradients at home
        self.made: Sequence[Mapping[str, Shards]] = ()  # results of micro-batches
        self.stepped: set[int] = set()  # by optimizers that nobody looks at again
        self.update: Update | None = None
        self.validation: Validation | None = None

    def check(self, name: str) -> None:
        """Refuse optimizers of chunks where weights are not of one chunk alone."""
        if self.routes > 1:
            raise ScheduleError(
                f"{name}: post_validation steps each chunk by itself, and here every weight is on two routes\n"
                "  take a schedule of one route, such as '1f1b' or 'zb_h2', or leave post_validation= out"
            )
        where = self.same.home.where
        for group, places in enumerate(where.placements):
            if any(set(place.flat) != set(where.ranks(group)) for place in places):
                on = " and ".join(map(str, places))
                raise ScheduleError(
                    f"{name}: post_validation has a stage on {on}, of which some ranks have only a part\n"
                    "  place a stage's layers on one placement, or leave post_validation= out"
                )
        for work in self.work_of.values():
            shared = list(work.variant.tasks.grads.keys() - work.alone)
            shared += [
                x.of for listed in work.home.values() for each in listed if len(each.chunks) > 1 for x in each.registers
            ]
            if shared:
                raise ScheduleError(
                    f"{name}: post_validation steps each chunk by itself, and {shared[0]} is of several\n"
                    "  give each its own weight, place what shares one together, or leave post_validation= out"
                )

    def ends(self, updates: Mapping[str, float] | None = None) -> list[ChunkEnd]:
        """The ends of all chunks, numbered route by route: with their seconds, if it is known what the optimizer's step
        takes of each weight."""
        found = []
        for number in range(self.count * self.routes):
            route, chunk = divmod(number, self.count)
            works = [work for (of, _), work in self.work_of.items() if of == route]
            joins = [each for work in works for each in work.gathered.get(chunk, ())]
            homes = [each for work in works for each in work.home.get(chunk, ())]
            readers, makers = (
                tuple(sorted({route * self.count + c for each in listed for c in each.chunks} - {number}))
                for listed in (joins, homes)
            )
            many = sum(of == route for of, _ in self.micro_batches)
            gather, reduce, update = (0.0 if listed else None for listed in (joins, homes, homes if self.steps else ()))
            if updates is not None and works:
                first = works[0]
                gather = gather if gather is None else first.seconds(first.gathered.get(chunk, ()))
                reduce = reduce if reduce is None else first.seconds(first.home.get(chunk, ()))
                mine = [name for name, of in first.alone.items() if of == chunk]
                update = update if update is None else sum(updates.get(name, 0.0) for name in mine)
            found.append(ChunkEnd(number, many, gather, reduce, update, readers, makers))
        return found

    @property
    def alone(self) -> dict[str, int]:
        """The weights whose gradients a chunk brings home by itself, and the chunk."""
        return self.work_of[self.keys[0]].alone

    @property
    def lane(self) -> int:
        """The lane of exchanges on links."""
        return 1 if self.folding.beside else 0

    def prepare(self) -> None:
        """Compile what is done once a step, which else the first does."""
        for work in self.work_of.values():
            _ = work.homes, work.gathers, work.rest

    def begin(
        self,
        held: Mapping[str, Shards],
        update: Update,
        made: Sequence[Mapping[str, Shards]],
        validation: Validation | None,
    ) -> dict[VariantKey, Mapping[str, Shards]]:
        """The weights as the micro-batches of each route and kind see them, but for those that are gathered."""
        self.update, self.made, self.validation = update, made, validation
        self.sums, self.homes = {key: {} for key in self.keys}, {key: {} for key in self.keys}
        there = {key: self.same.copied(held, self.variants[key]) for key in self.keys}
        self.held = {key: self.work_of[key].rest.before(there[key]) for key in self.keys}
        return self.held

    def grads(self) -> dict[str, Shards]:
        """The gradients of the step, at home; none that optimizers have had."""
        found: dict[str, Shards] = {}
        if self.steps:
            return found
        for key in self.keys:
            work, homes = self.work_of[key], self.homes[key]
            sources = {s.value.name: s.home for s in work.variant.graph.sources}
            # Also those of other processes, of which everybody has a token.
            theirs = {name: homes.get(name) or (token(sources[name]),) for name in work.variant.tasks.grads}
            theirs.update(work.rest.after(self.held[key], self.sums[key]))
            self.same.returned(work.variant, theirs, found)
        return found

    def undo(self) -> Sequence[int]:
        """Take back the optimizers' steps in a step that an error has ended; the chunks that stay changed."""
        return sorted(self.stepped if self.validation is None else self.validation.undo())

    def end(self) -> None:
        self.held, self.sums, self.homes, self.made, self.stepped = {}, {}, {}, (), set()
        self.update = self.validation = None

    def initial(self, network: Network) -> dict[str, Callable[[], Sequence[Any]]]:
        """Nothing lies in registers from the start."""
        return {}

    def work(self, actor: Actor, task: Callable[[Actor], Fire]) -> Fire:
        """The work of an actor: a task, or what is done for a chunk once a step."""
        kind, number = actor.name[0], actor.name[1:]
        how = {"G": _gather, "R": _home, "U": _step, "N": _known, "V": _validate}.get(kind)
        if how is None or not number.isdigit():
            return task(actor)
        return partial(how, ref(self), int(number), len(actor.gives))

    def seen(self, shards: Mapping[str, Shards], firing: Firing, key: VariantKey, task: Name) -> Mapping[str, Shards]:
        """The sources of a micro-batch with what was gathered for a task."""
        for slots in firing.held:
            if slots and isinstance(slots[0].value, GatheredWeights):
                shards = {**shards, **slots[0].value.shards[key]}
        return shards

    def of(self, number: int) -> list[tuple[VariantKey, ChunkWork, int]]:
        """The variants of a chunk's route, and its number there."""
        route, chunk = divmod(number, self.count)
        return [(key, work, chunk) for key, work in self.work_of.items() if key[0] == route]

    def told_as(self, ranks: Sequence[int]) -> Layout:
        """How what is told of gradients lies on the ranks of a chunk: a number for each, and two for all."""
        device = self.same.home.where.placements[0][0].type
        line = Placement(device, tuple(ranks), (len(ranks),), None)
        return Layout(line, State(((),)), (len(self.names) + 2,), torch.float64)

    @cached_property
    def gathering(self) -> dict[int, GatheredWeights]:
        return defaultdict(GatheredWeights)

    def losses(self, chunk: int) -> list[tuple[Placement, Shards]]:
        """The losses that a chunk made of all micro-batches."""
        found = []
        for key, values in zip(self.micro_batches, self.made, strict=True):
            graph, where = self.variants[key].graph, self.variants[key].where
            mine = [name for name, _ in graph.losses if where.home[name] == chunk and name in values]
            found += [(graph.layout(name).placement, values[name]) for name in mine]
        return found


Of: TypeAlias = "ref[ChunkWeights]"  # threads hold their work, and must not keep a program alive that nobody else has


def _alive(of: Of) -> ChunkWeights:
    weights = of()
    assert weights is not None
    return weights


def _gather(of: Of, number: int, width: int, firing: Firing) -> Sequence[Any]:
    """A part of a chunk's weights."""
    weights, at = _alive(of), firing.turn
    made = weights.gathering[number]
    with torch.no_grad(), lane(weights.lane):
        for key, work, chunk in weights.of(number):
            if chunk in work.gathers:
                (seen,) = work.gathers[chunk][0][at].run(weights.held[key])
                made.shards[key].update(seen)
    if at < weights.folding.parts - 1:
        return (None,)
    return (weights.gathering.pop(number),)


def _home(of: Of, number: int, width: int, firing: Firing) -> Sequence[Any]:
    """A part of a chunk's gradients home."""
    weights, at = _alive(of), firing.turn
    with torch.no_grad(), lane(weights.lane):
        for key, work, chunk in weights.of(number):
            if chunk in work.homes:
                made = work.homes[chunk].run(at, weights.held[key], weights.sums[key])
                weights.homes[key].update(made)
        if not width or at < weights.folding.parts - 1:
            return (None,) * width
        found: dict[str, Shards] = {}
        for key, work, chunk in weights.of(number):
            if chunk in work.homes:
                theirs = {name: weights.homes[key].pop(name) for name in work.homes[chunk].names}
                weights.same.returned(work.variant, theirs, found)
    return (found,)


def _step(of: Of, number: int, width: int, firing: Firing) -> Sequence[Any]:
    """A chunk's optimizer."""
    weights = _alive(of)
    with torch.no_grad():
        if weights.validated:
            assert weights.validation is not None
            (known,) = firing.held[1][0].value
            weights.validation.step(number, known)
        else:
            assert weights.update is not None
            weights.stepped.add(number)
            weights.update(firing.held[0][0].value)
    return (None,) * width


def _known(of: Of, number: int, width: int, firing: Firing) -> Sequence[Any]:
    """All that is known of gradients, with those of one chunk more."""
    weights = _alive(of)
    assert weights.validation is not None
    with torch.no_grad(), lane(weights.lane):
        known = weights.validation.known(number, firing.held[0][0].value, weights.losses(number))
        for slots in firing.held[1:]:
            (before,) = slots[0].value
            known = known + before.to(known.device)
    return ((known,),) * width


def _validate(of: Of, number: int, width: int, firing: Firing) -> Sequence[Any]:
    """A chunk, now that all is known."""
    weights = _alive(of)
    assert weights.validation is not None
    (known,) = firing.held[1][0].value
    with torch.no_grad():
        weights.validation.validate(number, known)
    return ((known,),) * width
