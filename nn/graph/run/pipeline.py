"""Pipelined programs: a graph of one micro-batch run for all of them by actors, under a schedule.

The gradients of weights are added up over the micro-batches where they are made, and brought home once behind them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from ....actors.protocol.feasibility import proved
from ....actors.protocol.network import Actor, Network
from ....actors.protocol.simulate import Simulation
from ....actors.protocol.state import Firing
from ....actors.runtime.answers import Answers
from ....actors.runtime.bus import Bus, bus
from ....actors.runtime.channel import Link
from ....actors.runtime.job import Work
from ....actors.runtime.partition import RegisterEnd, cut, labels_of
from ....actors.runtime.runtime import RunRecord, Runtime, order_of, settled
from ....actors.schedules.schedule import Schedule
from ....boxing.exchange.execute import transport
from ....boxing.graph.physical import Physical
from ....placement import Placement
from ....placement.device import current_stream
from ....placement.world import World, device, world
from ....sbp import Layout
from ....sbp.call import tensors_in
from ...tensors.seeds import agree
from ..compiler.generated_calls import Shards, ones, plain, trimmed
from ..instructions.order import moved_again
from ..lower.segments import Draw, stage_text
from ..microbatch.batch import PieceKind
from ..tasks.chunks import Chunks
from ..tasks.task import Name, Tasks
from .network import Lowered, links_of, lowered
from .open_network import OpenNetwork
from .pairs import by_turns
from .transfers import BundleLink
from .variant import BoundTask, Variant
from .weights.step_state import NO_STEP, StepState, Sums, Update, Validation, VariantKey
from .weights.weights import Fire, Weights

__all__ = ["Pipelined", "seeds_of"]

Bound: TypeAlias = tuple[int, Mapping[PieceKind, BoundTask]]  # the route of a task, and that for each kind


class Pipelined:
    """A step of micro-batches. `variants` are graphs by route and kind of a micro-batch, all of the same chunks.
    When it is made it is proved to end; what runs is made with the first step.

    Micro-batches take the routes by turns. The second has copies of the weights on other ranks. What weights they see,
    and where gradients go, is said by `weights`.
    """

    def __init__(
        self,
        variants: Mapping[VariantKey, Variant],
        kinds: Sequence[PieceKind],
        schedule: Schedule,
        name: str,
        weights: Weights,
        slices: int = 1,
    ) -> None:
        self.variants, self.kinds, self.schedule, self.slices = variants, kinds, schedule, slices
        self.name, self.weights = name, weights
        self.firsts = [variants[route, kinds[0]] for route in sorted({route for route, _ in variants})]
        self.keys = [(k % len(self.firsts), kind) for k, kind in enumerate(kinds)]  # of the micro-batches
        self.where, self.count = self.firsts[0].where, len(self.firsts[0].where.group)
        self.lowered = self.lower(name)
        self.network: Network = self.lowered[kinds[0]].network
        self.proof: Simulation = proved(self.network)
        self.opening: OpenNetwork | None = None
        self.links: dict[str, Link] = {}  # to other ranks
        self._driver: tuple[World, Runtime] | None = None
        self.step = NO_STEP
        self.outcome: RunRecord | None = None
        self.bytes: dict[str, int] = {}  # of the registers, as far as this process has filled them
        self.draws = any(isinstance(stage, Draw) for stage in self.firsts[0].stages)
        ranks = sorted({rank for each in self.places.values() for rank in each})
        self.everywhere = Placement(self.where.placements[0][0].type, tuple(ranks), (len(ranks),), None)

    @cached_property
    def ordered(self) -> bool:
        """Whether ranks keep to the order of the proof."""
        if self.schedule.unpinned:
            return True
        return max(map(len, self.places.values()), default=0) > 1 or settled(self.proof)

    @cached_property
    def answers(self) -> Answers:
        return Answers(self.proof)

    @property
    def runtime(self) -> Runtime:
        """The driver of the actors: threads, and lines to other processes. It ends with its world."""
        here = world()
        if self._driver is None or self._driver[0] is not here:
            self._driver = here, self.alone(self.name) if here.rank is None else self.together(self.name)
        return self._driver[1]

    def prepare(self) -> None:
        """Make it run, which else the first step does."""
        self.weights.prepare()
        _ = self.runtime

    def open(self, made: OpenNetwork) -> None:
        """Have more actors take part, before anything was made to run."""
        self.lowered = {kind: made.rewired(low) for kind, low in self.lowered.items()}
        self.opening, self.network, self.proof = made, made.network, made.proof
        for known in ("ordered", "answers"):
            vars(self).pop(known, None)  # they are of the network as it was

    @property
    def tasks(self) -> dict[PieceKind, list[tuple[Tasks, Chunks]]]:
        """The tasks of micro-batches by kind and route."""
        return {
            kind: [(v.tasks, v.where) for route in range(len(self.firsts)) for v in (self.variants[route, kind],)]
            for kind in dict.fromkeys(self.kinds)
        }

    def lower(self, name: str) -> dict[PieceKind, Lowered]:
        many = len(self.kinds) // self.slices
        return lowered(self.tasks, self.schedule, many, name, self.slices, self.weights.ends())

    def alone(self, name: str) -> Runtime:
        """In a process that owns all ranks: every group's queue is a thread."""
        ranks = {queue: ranks[0] for queue, ranks in self.places.items()}
        work = {actor.name: self.on_card(self.work(actor), ranks[actor.queue]) for actor in self.network.actors}
        order = order_of(self.proof) if self.schedule.unpinned else None  # else weights would depend on the time
        return Runtime(self.network, work, order=order, initial=self.initial(self.network), name=name)

    def initial(self, network: Network) -> dict[str, Callable[[], Sequence[Any]]]:
        """The values that lie in registers from the start."""
        added = self.opening.initial if self.opening else {}
        registers = {register.name for register in network.registers}
        return {**self.weights.initial(network), **{name: of for name, of in added.items() if name in registers}}

    def together(self, name: str) -> Runtime:
        """In one of several processes: the actors of this rank's group, and the ends of registers to others.

        Ranks of a group that talk to each other must do things in one order, so each keeps to that of the proof; and so
        it does where marks lead to that order anyway, since who knows what comes next waits for nothing else.
        """
        rank = world().rank
        assert rank is not None
        transport()  # to which all processes come together, those that have no stage too
        where = self.places
        everybody = {r for ranks in where.values() for r in ranks}
        joint = bus(sorted(everybody)) if rank in everybody else None
        if joint is None:
            return Runtime(Network((), (), name), {}, name=name)
        joint.agree(self.opening.agreed if self.opening else self.network)
        part = cut(self.proof, where, rank)
        labels = labels_of(self.proof)
        links = self.links
        for edge in part.edges:
            links[edge.actor] = self.link(joint, edge, labels[edge.register], rank)
        work = {a.name: self.on_card(self.work(a), rank) for a in part.network.actors if a.name not in links}
        order = order_of(self.proof) if self.ordered else None
        answers = self.answers.of(part, where) if self.ordered else None
        every = {**work, **part.work(links)}
        return Runtime(
            part.network,
            every,
            order=order,
            guard=joint,
            answers=answers,
            initial=self.initial(part.network),
            name=name,
        )

    def link(self, joint: Bus, edge: RegisterEnd, labels: Sequence[int], rank: int) -> Link:
        """How a register's bundles get to other ranks; on cards over a communicator of its own."""
        added = self.opening.link_of(edge, joint.line, rank) if self.opening else None
        if added is not None:
            return added
        told = self.weights.told(edge.register, self.network, self.places)
        bundles = {kind: low.bundles.get(edge.register, told) for kind, low in self.lowered.items()}
        if self.everywhere.type == "cpu":
            return BundleLink(joint.line, edge.number, bundles, self.kinds, labels, edge.peers, rank)
        from ....actors.runtime.card import CardLine, CardLink

        ours = next(ranks for ranks in self.places.values() if rank in ranks)
        line = CardLine(joint, edge.number, (*ours, *edge.peers), device(self.everywhere, rank))
        made = BundleLink(line, edge.number, bundles, self.kinds, labels, edge.peers, rank)
        return CardLink(made, line, edge.peers[0])

    def on_card(self, work: Work, rank: int) -> Work:
        """Work whose kernels go to its card's stream, and whose results others wait for on theirs."""
        if self.everywhere.type == "cpu":
            return work
        from ....actors.runtime.card import OnStream

        return OnStream(work, current_stream(device(self.everywhere, rank)))

    @property
    def places(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each queue."""
        mine = {f"device {group}": self.where.ranks(group) for group in sorted(set(self.where.group))}
        mine.update(links_of(mine, self.network))
        return {**mine, **self.opening.places} if self.opening else mine

    def passes(self) -> dict[str, str]:
        """The results of the passes that made it, by their names."""
        stages = [stage_text(stage) for one in self.variants.values() for stage in one.stages]
        tasks = [str(task) for one in self.variants.values() for task in one.tasks.tasks.values()]
        return {"segments": "\n".join(stages), "order": "\n".join(tasks), "source": self.network.text}

    @property
    def again(self) -> tuple[str, ...]:
        """The values that are moved a second time for the backward, once for each time."""
        return moved_again(do for task in self.firsts[0].tasks.tasks.values() for do in task.todo)

    def work(self, actor: Actor) -> Fire:
        if self.opening is None:
            return self.weights.work(actor, self.task)
        return self.opening.work_of(self, actor, lambda: self.weights.work(actor, self.task))

    def task(self, actor: Actor) -> Fire:
        """The work of an actor that is a task of each micro-batch, or two at once."""
        cases = [[self.bound(actor, part, "&" in case) for part in case.split("&")] for case in actor.cases]
        return partial(_weakly, ref(self), cases, len(actor.gives))

    def bound(self, actor: Actor, case: str, pauses: bool) -> Bound:
        """A task of an actor as it runs for each kind of micro-batch, and its route."""
        name = Name.of(case or actor.name)
        route, chunk = divmod(name.chunk, self.count)
        own, shift = Name(name.kind, chunk), route * self.count
        return route, {
            kind: BoundTask(self.variants[route, kind], self.lowered[kind], own, shift, actor, case, pauses=pauses)
            for kind in dict.fromkeys(self.kinds)
            if own in self.variants[route, kind].tasks.tasks
        }

    def fire(self, cases: Sequence[Sequence[Bound]], width: int, firing: Firing) -> Sequence[Any]:
        """One task for one micro-batch, or two by turns; without gradients, as whoever runs a step asks for none."""
        out: list[Any] = [None] * width
        found = []
        for (route, entries), label in zip(cases[firing.case], (firing.label, *firing.more), strict=True):
            k = label * len(self.firsts) + route
            if (entry := entries.get(self.kinds[k])) is not None:
                found.append((entry, k, self.begun(entry, k, entry.own(firing, label))))
        if firing.more:  # who moves nothing gives way first, and has its turn under the moves of the other
            found.sort(key=lambda each: each[0].moves)
        begun = [each for *_, each in found]
        made = by_turns(begun) if firing.more else begun
        for (entry, k, _), values in zip(found, made, strict=True):
            self.done(entry, k, values, out)
        return out

    def begun(self, entry: BoundTask, k: int, firing: Firing) -> Any:
        """A task of a micro-batch: what it makes, or of one that pauses the generator that makes it."""
        held = firing.held
        bundles = [held[at][0].value if carry is None else carry(held[at][0].value) for at, carry in entry.takes]
        return entry.run(self.weights.seen(self.step.shards[k], firing, self.keys[k], entry.name), *bundles)

    def done(self, entry: BoundTask, k: int, made: Sequence[Any], out: list[Any]) -> None:
        """Hand on what a task has made."""
        for at, bundle in zip(entry.gives, made, strict=False):
            out[at] = bundle
        if entry.new:
            self.weigh(entry, made)
        if entry.values:
            self.keep(entry, k, made[-2])
        if entry.sums:
            self.add(entry, self.step.sums[self.keys[k]], made[-1])

    def weigh(self, entry: BoundTask, bundles: Sequence[Any]) -> None:
        """Note how large what lies in the slots is, once."""
        entry.new = False
        for register, bundle in zip(entry.names, bundles, strict=False):
            self.bytes[register] = sum(x.nbytes for x in tensors_in(bundle))

    def numbered(self) -> None:
        """The seed of this step's random numbers, which ranks have in common, for each micro-batch."""
        if self.draws:
            agree(self.everywhere)
            step = int(torch.randint(1 << 62, ()))
            for k, shards in enumerate(self.step.shards):
                shards["numbers"] = step, k  # type: ignore[assignment]

    def keep(self, entry: BoundTask, k: int, tensors: tuple[Tensor, ...]) -> None:
        """The results of a micro-batch."""
        at = 0
        for register, many in entry.values:
            self.step.values[k][register] = trimmed(tensors[at : at + many])
            at += many

    @staticmethod
    def add(entry: BoundTask, sums: Sums, tensors: tuple[Tensor, ...]) -> None:
        """Gradients of weights to what there is of other micro-batches."""
        if all(slot in sums for slot, _ in entry.sums):
            if tensors:
                torch._foreach_add_([total for slot, _ in entry.sums for total in sums[slot]], list(tensors))
            return
        at = 0
        for slot, many in entry.sums:
            mine = tensors[at : at + many]
            held = sums.get(slot)
            if held is None:
                sums[slot] = [x if own else x.clone() for x, own in zip(mine, entry.owns[at : at + many], strict=True)]
            elif many:
                torch._foreach_add_(held, list(mine))
            at += many

    def __call__(
        self,
        held: Mapping[str, Shards],
        inputs: Sequence[Mapping[str, Shards]],
        seeds: Sequence[Mapping[str, Shards]],
        update: Update,
        validation: Validation | None = None,
    ) -> tuple[list[dict[str, Shards]], dict[str, Shards]]:
        """One step: weights that are there, and for each micro-batch its inputs and its losses' gradients. Weights that
        change meanwhile are changed by `update`, or by `validation`. Returns results by micro-batch, and gradients
        where sources have their homes."""
        values: list[dict[str, Shards]] = [{} for _ in self.kinds]
        sums: dict[VariantKey, Sums] = {key: {} for key in self.keys}
        self.step = step = StepState(held, update, validation, torch.is_grad_enabled(), sums, values)
        with torch.no_grad(), plain():
            weights = self.weights.begin(step)
            try:
                self.stream([weights[key] for key in self.keys], inputs, seeds)
                grads = self.weights.grads()
            except BaseException as error:
                left = self.weights.undo()
                if left:
                    which = ", ".join(map(str, left))
                    error.add_note(
                        f"{self.name} had stepped the optimizers of chunks {which} of {self.count}, and this is not "
                        "taken back: go on from a checkpoint"
                    )
                raise
            finally:
                self.weights.end()
                self.step = NO_STEP
        return values, grads

    def stream(
        self,
        weights: Sequence[Mapping[str, Shards]],
        inputs: Sequence[Mapping[str, Shards]],
        seeds: Sequence[Mapping[str, Shards]],
    ) -> None:
        """All micro-batches, each with the weights that it sees."""
        self.step.shards = [{**own, **mine, **seed} for own, mine, seed in zip(weights, inputs, seeds, strict=True)]
        self.numbered()
        try:
            self.outcome = self.runtime.run(record=True)
        finally:
            self.step.shards = []


def _weakly(of: "ref[Pipelined]", cases: Sequence[Sequence[Bound]], width: int, firing: Firing) -> Sequence[Any]:
    """A program's `fire`; threads hold their work, and must not keep a program alive that nobody else has."""
    program = of()
    assert program is not None
    return program.fire(cases, width, firing)


def seeds_of(graph: Physical, weights: Sequence[float]) -> dict[str, Shards]:
    """The gradient that each loss starts from: its micro-batch's share of the whole."""
    made: dict[str, Shards] = {}
    for number, ((name, given), weight) in enumerate(zip(graph.losses, weights, strict=True)):
        if given is None:
            layout: Layout = graph.layout(name).dual
            made[f"seed {number}"] = tuple(one * weight for one in ones(layout))
    return made
