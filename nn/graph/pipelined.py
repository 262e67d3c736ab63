"""Pipelined programs: a graph of one micro-batch run for all of them by actors, under a schedule.

The gradients of weights are added up over the micro-batches where they are made, and brought home once behind them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...actors.bus import bus
from ...actors.cut import cut
from ...actors.desk import Firing
from ...actors.network import Actor, Network
from ...actors.proof import proved
from ...actors.runtime import Outcome, Runtime, order_of
from ...actors.schedule import Schedule
from ...actors.simulate import Run
from ...actors.timeline import Timeline
from ...boxing.graph.physical import Graph
from ...placement import Placement
from ...placement.errors import ScheduleError
from ...placement.world import owned, world
from ...sbp import Layout
from ..seeds import agree
from .backend import Backend, Compiled
from .called import Shards, no_shards, ones
from .chunks import Chunks, chunks
from .hops import BundleLink, carrier, labels_of
from .local import Localiser
from .lower import Lowered, lowered
from .overlap import Do, freed
from .program import compiled_once
from .schedule import Schedule as Listed
from .segments import Draw, Segment, Stage, segments
from .straight import Bundles, Running, task
from .tasks import Name, Tasks, derived
from .tasks import tasks as tasks_of
from .timing import timeline

__all__ = ["Made", "Pipelined", "Variant", "plain", "seeds_of"]


@dataclass(frozen=True)
class Made:
    """What a step made: results by micro-batch, and gradients where each source has its home."""

    values: list[dict[str, Shards]]
    grads: dict[str, Shards]


class Variant:
    """A graph of micro-batches of one size, compiled task by task."""

    def __init__(self, graph: Graph, said: Mapping[str, int], *, split: bool, backend: Backend) -> None:
        self.graph = graph
        self.stages: tuple[Stage, ...] = segments(graph, said)
        self.where: Chunks = chunks(graph, self.stages, said)
        localiser = Localiser(graph)
        weights = derived(self.stages, self.where)
        self.compiled: dict[tuple[int, int], Compiled] = {}
        self.again: dict[int, tuple[str, ...]] = {}
        self.halves: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        for number, stage in enumerate(self.stages):
            if not isinstance(stage, Segment):
                continue
            flags = tuple(name in weights for name in stage.wants)
            apart = flags if split and any(flags) and not all(flags) else None
            for rank in owned(stage.placement):
                local = localiser.segment(stage, rank)
                self.compiled[number, rank] = compiled_once(local, backend, apart)
            mine = [self.compiled[number, rank] for rank in owned(stage.placement)]
            self.again[number] = _names(stage, [one.again for one in mine])
            if apart is not None:
                halves = [[one.apart.again[half] for one in mine if one.apart] for half in (0, 1)]
                self.halves[number] = _names(stage, halves[0]), _names(stage, halves[1])
        self.tasks: Tasks = tasks_of(
            graph,
            self.stages,
            self.where,
            self.again,
            apart=self.halves if split else None,
            regather=backend != "autograd",
        )

    def running(self, name: str, todo: Sequence[Do], bundles: Bundles) -> Running:
        """Things to do as a function."""
        stay = {register for bundle in (*bundles.takes, *bundles.gives) for register in bundle}
        plan = Listed(tuple(freed(todo, stay)), self.tasks.transfers, self.tasks.layouts, (), {})
        return task(self.graph, self.stages, plan, self.compiled, self.again, self.halves, bundles, name)


def _names(stage: Segment, taken: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The inputs that some rank here takes."""
    return tuple(stage.inputs[at] for at in sorted({at for numbers in taken for at in numbers}))


class Entry:
    """One task of one variant, made to run: where its bundles lie among the actor's takes and gives."""

    def __init__(self, variant: Variant, low: Lowered, name: Name, actor: Actor) -> None:
        own = variant.tasks.tasks[name]
        takes, gives = low.takes.get(name, ()), low.gives.get(name, ())
        bundles = Bundles(
            tuple(low.bundles[register].come for register in takes),
            (*(low.bundles[register].sent for register in gives), own.values, own.sums),
        )
        self.made = variant.running(str(name), own.todo, bundles)
        self.run = self.made.run
        ports = [take.register for take in actor.takes]
        self.takes = [
            (ports.index(register), carrier(low.bundles[register]) if world().rank is None else None)
            for register in takes
        ]
        ports = [give.register for give in actor.gives]
        self.gives = [ports.index(register) for register in gives]
        self.width = len(actor.gives)
        self.values, self.sums = own.values, own.sums
        self.layouts = variant.tasks.layouts
        self.into = [variant.tasks.sums[register] for register in own.sums]


class Pipelined:
    """A step of micro-batches. `variants` are graphs by the size of a micro-batch, which differ in nothing else."""

    def __init__(self, variants: Mapping[int, Variant], sizes: Sequence[int], schedule: Schedule, name: str) -> None:
        self.variants, self.sizes, self.schedule = variants, sizes, schedule
        first = variants[sizes[0]]
        self.where, m = first.where, len(sizes)
        self.lowered = {size: lowered(v.tasks, v.where, schedule, m, name) for size, v in variants.items()}
        self.network: Network = self.lowered[sizes[0]].network
        self.proof: Run = proved(self.network)
        self.actors = {actor.name: actor for actor in self.network.actors}
        self.values: list[dict[str, Shards]] = []
        self.sums: dict[str, list[Tensor]] = {}
        self.shards: list[dict[str, Shards]] = []
        self.outcome: Outcome | None = None
        self.draws = any(isinstance(stage, Draw) for stage in first.stages)
        ranks = sorted({rank for each in self.places.values() for rank in each})
        self.everywhere = Placement(first.where.placements[0][0].type, tuple(ranks), (len(ranks),), None)
        once = tuple(dict.fromkeys(y for do in first.tasks.before for y in do.writes))
        self.once = once
        self.before = first.running("before", first.tasks.before, Bundles((), tuple((y,) for y in once)))
        self.slots = tuple(dict.fromkeys(first.tasks.sums.values()))
        homes = tuple((register,) for register in first.tasks.grads.values())
        takes = tuple((slot,) for slot in self.slots)
        self.after = first.running("after", first.tasks.after, Bundles(takes, homes))
        self.runtime = self.alone(name) if world().rank is None else self.together(name)

    def alone(self, name: str) -> Runtime:
        """In a process that owns all ranks: every group's queue is a thread."""
        work = {actor.name: self.work(actor) for actor in self.network.actors}
        return Runtime(self.network, work, initial=self.initial(self.network), name=name)

    def together(self, name: str) -> Runtime:
        """In one of several processes: the actors of this rank's group, and the ends of registers to others.

        Ranks of a group that talk to each other must do things in one order, so each keeps to that of the proof.
        """
        rank = world().rank
        assert rank is not None
        where = self.places
        everybody = [r for ranks in where.values() for r in ranks]
        joint = bus(everybody) if rank in everybody else None
        if joint is None:
            return Runtime(Network((), (), name), {}, name=name)
        joint.agree(self.network)
        part = cut(self.proof, where, rank)
        labels = labels_of(self.proof)
        links = {}
        for edge in part.edges:
            bundles = {size: low.bundles.get(edge.register) for size, low in self.lowered.items()}
            links[edge.actor] = BundleLink(
                joint.line, edge.number, bundles, self.sizes, labels[edge.register], edge.peers, rank
            )
        work = {actor.name: self.work(actor) for actor in part.network.actors if actor.name not in links}
        order = order_of(self.proof) if max(map(len, where.values())) > 1 else None
        every = {**work, **part.work(links)}
        return Runtime(part.network, every, order=order, guard=joint, initial=self.initial(part.network), name=name)

    def initial(self, network: Network) -> dict[str, Callable[[], Sequence[Any]]]:
        """What lies in a network's slots that are filled at the start."""
        return {}

    @property
    def places(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each queue."""
        return {f"device {group}": self.where.ranks(group) for group in sorted(set(self.where.group))}

    def timeline(self) -> Timeline | None:
        """What the last step did and when; all ranks ask for it, and the first gets it."""
        if self.outcome is None:
            raise ScheduleError("a timeline before any step\n  call the graph first")
        return timeline(self.outcome, self.proof, self.lowered[self.sizes[0]], self.places)

    def work(self, actor: Actor) -> Callable[[Firing], Sequence[Any]]:
        cases = [
            {size: Entry(variant, self.lowered[size], name, actor) for size, variant in self.variants.items()}
            if (name := self.named(case or actor.name)) in self.variants[self.sizes[0]].tasks.tasks
            else None
            for case in actor.cases
        ]
        return partial(self.fire, cases, len(actor.gives))

    @staticmethod
    def named(text: str) -> Name:
        return Name(text[0], int(text[1:]))  # type: ignore[arg-type]

    def fire(self, cases: Sequence[Mapping[int, Entry] | None], width: int, firing: Firing) -> Sequence[Any]:
        """One task for one micro-batch."""
        entries = cases[firing.case]
        out: list[Any] = [None] * width
        if entries is None:
            return out
        k = firing.label
        entry = entries[self.sizes[k]]
        held = firing.held
        bundles = [held[at][0].value if carry is None else carry(held[at][0].value) for at, carry in entry.takes]
        with torch.no_grad():
            made = entry.run(self.seen(k, firing), *bundles)
            del bundles
            for at, bundle in zip(entry.gives, made, strict=False):
                out[at] = bundle
            if entry.values:
                self.keep(entry, k, made[-2])
            if entry.sums:
                self.add(entry, made[-1])
        return out

    def seen(self, k: int, firing: Firing) -> Mapping[str, Shards]:
        """The sources as this task is to see them."""
        return self.shards[k]

    def numbered(self) -> None:
        """The seed of this step's random numbers, which ranks have in common, for each micro-batch."""
        if self.draws:
            agree(self.everywhere)
            step = int(torch.randint(1 << 62, ()))
            for k, shards in enumerate(self.shards):
                shards["numbers"] = step, k  # type: ignore[assignment]

    def keep(self, entry: Entry, k: int, tensors: tuple[Tensor, ...]) -> None:
        """The results of a micro-batch."""
        at = 0
        for register in entry.values:
            many = len(owned(entry.layouts[register].placement))
            self.values[k][register] = tensors[at : at + many]
            at += many

    def add(self, entry: Entry, tensors: tuple[Tensor, ...]) -> None:
        """Gradients of weights to what there is of other micro-batches."""
        at = 0
        owns = entry.made.owns[-1]
        for slot, register in zip(entry.into, entry.sums, strict=True):
            many = len(owned(entry.layouts[register].placement))
            held = self.sums.get(slot)
            if held is None:
                pairs = zip(tensors[at : at + many], owns[at : at + many], strict=True)
                self.sums[slot] = [x if own else x.clone() for x, own in pairs]
            else:
                for total, x in zip(held, tensors[at : at + many], strict=True):
                    total.add_(x)
            at += many

    def __call__(
        self, held: Mapping[str, Shards], inputs: Sequence[Mapping[str, Shards]], seeds: Sequence[Mapping[str, Shards]]
    ) -> Made:
        """One step: weights that are there, and for each micro-batch its inputs and its losses' gradients."""
        self.values = [{} for _ in self.sizes]
        self.sums = {}
        with torch.no_grad(), plain():
            once = dict(zip(self.once, self.before.run(held), strict=True))
            self.shards = [{**held, **once, **mine, **seed} for mine, seed in zip(inputs, seeds, strict=True)]
            self.numbered()
            self.outcome = self.runtime.run(record=True)
            self.shards = []
            sums = [tuple(self.sums.get(slot, ())) for slot in self.slots]  # none of what others have
            self.sums = {}
            grads = self.after.run(held, *sums)
        values, self.values = self.values, []
        tasks = self.variants[self.sizes[0]].tasks
        found = zip(tasks.grads.items(), grads, strict=True)
        return Made(values, {name: mine or no_shards(tasks.layouts[register]) for (name, register), mine in found})


def plain() -> Any:
    """The graph holds its casts."""
    if torch._C._is_any_autocast_enabled():
        return torch._C._DisableAutocast()
    return nullcontext()


def seeds_of(graph: Graph, weights: Sequence[float]) -> dict[str, Shards]:
    """The gradient that each loss starts from: its micro-batch's share of the whole."""
    made: dict[str, Shards] = {}
    for number, ((name, given), weight) in enumerate(zip(graph.losses, weights, strict=True)):
        if given is None:
            layout: Layout = graph.layout(name).dual
            made[f"seed {number}"] = tuple(one * weight for one in ones(layout))
    return made
