"""Weights of a step whose chunks end one by one: of each they are gathered, its gradients brought home, and changed by
its optimizer while micro-batches go on in others.

All micro-batches see the same weights, as `same_weights` has it. What is done once a step is work of the actors that
`actors/schedules/chunk_ends.py` adds to the schedule's own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .....actors.protocol.network import Actor
from .....actors.protocol.state import Firing
from .....actors.schedules.chunk_ends import ChunkEnd, Folding
from .....boxing.exchange.execute import token
from .....boxing.exchange.transport import lane
from .....placement.errors import ScheduleError
from ...compiler.generated_calls import Shards
from ...memory.resident import Resident
from ...tasks.task import Name
from ..network import Ends
from ..variant import Variant
from .chunk_work import ChunkWork
from .same_weights import SameWeights
from .step_state import StepState, VariantKey
from .weights import Fire, MeanDtype

__all__ = ["ChunkWeights", "GatheredWeights"]


class GatheredWeights:
    """The weights of a chunk as its tasks read them, for each variant."""

    def __init__(self) -> None:
        self.shards: dict[VariantKey, dict[str, Shards]] = defaultdict(dict)


class ChunkWeights(SameWeights):
    """How a schedule with a flush keeps weights where chunks end one by one; with `steps` so do optimizers."""

    def __init__(
        self,
        variants: Mapping[VariantKey, Variant],
        micro_batches: Sequence[VariantKey],
        folding: Folding,
        name: str,
        *,
        steps: bool = False,
    ) -> None:
        super().__init__(variants, micro_batches)
        self.micro_batches, self.folding, self.steps = micro_batches, folding, steps
        self.count = len(self.home.where.group)
        self.routes = 1 + max(route for route, _ in micro_batches)
        self.lane = 1 if folding.beside else 0  # of exchanges on links
        self.work_of = {key: ChunkWork(variants[key], folding.parts) for key in self.keys}
        self.alone = self.work_of[self.keys[0]].alone
        if steps:
            self.check(name)
        self.held: dict[VariantKey, Mapping[str, Shards]] = {}
        self.gathering: dict[int, GatheredWeights] = defaultdict(GatheredWeights)
        self.homes: dict[VariantKey, dict[str, Shards]] = {}  # gradients at home
        self.stepped: set[int] = set()  # by optimizers that nobody looks at again

    def check(self, name: str) -> None:
        """Refuse optimizers of chunks where weights are not of one chunk alone."""
        if self.routes > 1:
            raise ScheduleError(
                f"{name}: post_validation steps each chunk by itself, and here every weight is on two routes\n"
                "  take a schedule of one route, such as '1f1b' or 'zb_h2', or leave post_validation= out"
            )
        where = self.home.where
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

    def ends(self, updates: Mapping[str, float] | None = None) -> Ends:
        """Numbered route by route."""
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
        return Ends(tuple(found), self.folding, self.validates is not None)

    def resident(self, slots: Mapping[str, int], states: int, mean: MeanDtype) -> Iterator[Resident]:
        """Weights that are gathered whole."""
        work, layouts = self.work_of[self.keys[0]], self.home.tasks.layouts
        yield Resident.of("activations", [layouts[y] for c in range(self.count) for y in work.brought(c)])

    def prepare(self) -> None:
        for work in self.work_of.values():
            _ = work.homes, work.gathers, work.rest

    def begin(self, step: StepState) -> dict[VariantKey, Mapping[str, Shards]]:
        """But for those that are gathered."""
        self.step, self.homes = step, {key: {} for key in self.keys}
        there = {key: self.copied(step.held, self.variants[key]) for key in self.keys}
        self.held = {key: self.work_of[key].rest.before(there[key]) for key in self.keys}
        return self.held

    def grads(self) -> dict[str, Shards]:
        found: dict[str, Shards] = {}
        if self.steps:
            return found
        for key in self.keys:
            work, homes = self.work_of[key], self.homes[key]
            sources = {s.value.name: s.home for s in work.variant.graph.sources}
            # Also those of other processes, of which everybody has a token.
            theirs = {name: homes.get(name) or (token(sources[name]),) for name in work.variant.tasks.grads}
            theirs.update(work.rest.after(self.held[key], self.step.sums[key]))
            self.returned(work.variant, theirs, found)
        return found

    def undo(self) -> Sequence[int]:
        return sorted(self.stepped)

    def end(self) -> None:
        super().end()
        self.held, self.homes, self.stepped = {}, {}, set()

    def work(self, actor: Actor, task: Callable[[Actor], Fire]) -> Fire:
        kind, number = actor.name[0], actor.name[1:]
        how = self.once_a_step.get(kind)
        return task(actor) if how is None or not number.isdigit() else partial(how, int(number), len(actor.gives))

    @property
    def once_a_step(self) -> dict[str, Callable[[int, int, Firing], Sequence[Any]]]:
        """The work for a chunk that its actors do once a step."""
        return {"G": self.gather, "R": self.bring_home, "U": self.update}

    def seen(self, shards: Mapping[str, Shards], firing: Firing, key: VariantKey, task: Name) -> Mapping[str, Shards]:
        """With what was gathered for a task."""
        for slots in firing.held:
            if slots and isinstance(slots[0].value, GatheredWeights):
                shards = {**shards, **slots[0].value.shards[key]}
        return shards

    def of(self, number: int) -> list[tuple[VariantKey, ChunkWork, int]]:
        """The variants of a chunk's route, and its number there."""
        route, chunk = divmod(number, self.count)
        return [(key, work, chunk) for key, work in self.work_of.items() if key[0] == route]

    def gather(self, number: int, width: int, firing: Firing) -> Sequence[Any]:
        """A part of a chunk's weights."""
        at, made = firing.turn, self.gathering[number]
        with torch.no_grad(), lane(self.lane):
            for key, work, chunk in self.of(number):
                if chunk in work.gathers:
                    (seen,) = work.gathers[chunk][0][at].run(self.held[key])
                    made.shards[key].update(seen)
        if at < self.folding.parts - 1:
            return (None,)
        return (self.gathering.pop(number),)

    def bring_home(self, number: int, width: int, firing: Firing) -> Sequence[Any]:
        """A part of a chunk's gradients home."""
        at = firing.turn
        with torch.no_grad(), lane(self.lane):
            for key, work, chunk in self.of(number):
                if chunk in work.homes:
                    self.homes[key].update(work.homes[chunk].run(at, self.held[key], self.step.sums[key]))
            if not width or at < self.folding.parts - 1:
                return (None,) * width
            found: dict[str, Shards] = {}
            for key, work, chunk in self.of(number):
                if chunk in work.homes:
                    theirs = {name: self.homes[key].pop(name) for name in work.homes[chunk].names}
                    self.returned(work.variant, theirs, found)
        return (found,)

    def update(self, number: int, width: int, firing: Firing) -> Sequence[Any]:
        """A chunk's optimizer."""
        self.stepped.add(number)
        with torch.no_grad():
            self.step.update(firing.held[0][0].value)
        return (None,) * width
