"""Pipelined programs: a graph of one micro-batch run for all of them by actors, under a schedule.

The gradients of weights are added up over the micro-batches where they are made, and brought home once behind them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch

from ....actors.protocol.network import Actor, Network
from ....actors.runtime.bus import Bus, bus
from ....actors.runtime.channel import Link
from ....actors.runtime.job import Work
from ....actors.runtime.partition import RegisterEnd, cut, labels_of
from ....actors.runtime.runtime import RunRecord, Runtime, order_of
from ....boxing.exchange.execute import transport
from ....placement.device import current_stream
from ....placement.world import World, device, world
from ...tensors.seeds import agree
from ..compiler.generated_calls import Shards, plain
from ..lower.segments import stage_text
from .bound_tasks import BoundTasks
from .proved_pipeline import ProvedPipeline
from .transfers import BundleLink
from .weights.step_state import LateEnd, StepState, Sums, Update, Validation, VariantKey
from .weights.weights import Fire

__all__ = ["Pipelined"]


class Pipelined:
    """A proved pipeline as this process drives it: a runtime of its actors, and links to others, made with the first
    step."""

    def __init__(self, proved: ProvedPipeline) -> None:
        self.proved = proved
        self.links: dict[str, Link] = {}  # to other ranks
        self._driver: tuple[World, Runtime] | None = None
        self.outcome: RunRecord | None = None

    @cached_property
    def bound(self) -> BoundTasks:
        return BoundTasks(self.proved)

    @property
    def again(self) -> tuple[str, ...]:
        """The values that are moved a second time for the backward, once for each time."""
        return self.proved.again

    @property
    def runtime(self) -> Runtime:
        """The driver of the actors: threads, and lines to other processes. It ends with its world."""
        here = world()
        if self._driver is None or self._driver[0] is not here:
            self._driver = here, self.alone() if here.rank is None else self.together(here.rank)
        return self._driver[1]

    def prepare(self) -> None:
        """Make it run, which else the first step does."""
        self.proved.weights.prepare()
        _ = self.runtime

    def alone(self) -> Runtime:
        """In a process that owns all ranks: every group's queue is a thread."""
        proved = self.proved
        ranks = {queue: ranks[0] for queue, ranks in proved.places.items()}
        work = {actor.name: self.on_card(self.work(actor), ranks[actor.queue]) for actor in proved.network.actors}
        order = order_of(proved.proof) if proved.schedule.unpinned else None  # else weights would depend on the time
        return Runtime(proved.network, work, order=order, initial=self.initial(proved.network), name=proved.name)

    def initial(self, network: Network) -> dict[str, Callable[[], Sequence[Any]]]:
        """The values that lie in registers from the start."""
        added = self.proved.opening.initial if self.proved.opening else {}
        registers = {register.name for register in network.registers}
        mine = self.proved.weights.initial(network)
        return {**mine, **{name: of for name, of in added.items() if name in registers}}

    def together(self, rank: int) -> Runtime:
        """In one of several processes: the actors of this rank's group, and the ends of registers to others.

        Ranks of a group that talk to each other must do things in one order, so each keeps to that of the proof; and so
        it does where marks lead to that order anyway, since who knows what comes next waits for nothing else.
        """
        proved, where, links = self.proved, self.proved.places, self.links
        transport()  # to which all processes come together, those that have no stage too
        everybody = {r for ranks in where.values() for r in ranks}
        joint = bus(sorted(everybody)) if rank in everybody else None
        if joint is None:
            return Runtime(Network((), (), proved.name), {}, name=proved.name)
        joint.agree(proved.opening.agreed if proved.opening else proved.network)
        part = cut(proved.proof, where, rank)
        labels = labels_of(proved.proof)
        for edge in sorted(part.edges, key=attrgetter("number")):
            links[edge.actor] = self.link(joint, edge, labels[edge.register], rank)
        work = {a.name: self.on_card(self.work(a), rank) for a in part.network.actors if a.name not in links}
        return Runtime(
            part.network,
            {**work, **part.work(links)},
            order=order_of(proved.proof) if proved.ordered else None,
            guard=joint,
            answers=proved.answers.of(part, where) if proved.ordered else None,
            initial=self.initial(part.network),
            name=proved.name,
        )

    def link(self, joint: Bus, edge: RegisterEnd, labels: Sequence[int], rank: int) -> Link:
        """How a register's bundles get to other ranks; on cards over a communicator of its own."""
        proved = self.proved
        added = proved.opening.link_of(edge, joint.line, rank) if proved.opening else None
        if added is not None:
            return added
        told = proved.weights.told(edge.register, proved.network, proved.places)
        bundles = {kind: low.bundles.get(edge.register, told) for kind, low in proved.lowered.items()}
        if proved.everywhere.type == "cpu":
            return BundleLink(joint.line, edge.number, bundles, proved.kinds, labels, edge.peers, rank)
        from ....actors.runtime.card import CardLine, CardLink

        line = CardLine(joint, edge.number, device(proved.everywhere, rank))
        made = BundleLink(line, edge.number, bundles, proved.kinds, labels, edge.peers, rank)
        line.meet(made.partners)
        return CardLink(made, line, edge.peers[0])

    def on_card(self, work: Work, rank: int) -> Work:
        """Work whose kernels go to its card's stream, and whose results others wait for on theirs."""
        if self.proved.everywhere.type == "cpu":
            return work
        from ....actors.runtime.card import OnStream

        return OnStream(work, current_stream(device(self.proved.everywhere, rank)))

    def passes(self) -> dict[str, str]:
        """The results of the passes that made it, by their names."""
        variants = self.proved.variants.values()
        stages = [stage_text(stage) for one in variants for stage in one.stages]
        tasks = [str(task) for one in variants for task in one.tasks.tasks.values()]
        return {"segments": "\n".join(stages), "order": "\n".join(tasks), "source": self.proved.network.text}

    def work(self, actor: Actor) -> Fire:
        task = partial(self.proved.weights.work, actor, self.bound.task)
        opening = self.proved.opening
        return task() if opening is None else opening.work_of(self.proved, self.links, actor, task)

    def __call__(
        self,
        held: Mapping[str, Shards],
        inputs: Sequence[Mapping[str, Shards]],
        seeds: Sequence[Mapping[str, Shards]],
        update: Update,
        validation: Validation | None = None,
        late: LateEnd | None = None,
    ) -> tuple[list[dict[str, Shards]], dict[str, Shards]]:
        """One step: weights that are there, and for each micro-batch its inputs and its losses' gradients. Weights that
        change meanwhile are changed by `update`, or by `validation`; `late` is what is done behind all forwards.
        Returns results by micro-batch, and gradients where sources have their homes."""
        proved, weights = self.proved, self.proved.weights
        values: list[dict[str, Shards]] = [{} for _ in proved.kinds]
        sums: dict[VariantKey, Sums] = {key: {} for key in proved.keys}
        step = StepState(held, update, validation, torch.is_grad_enabled(), sums, values, late)
        with torch.no_grad(), plain():
            seen = weights.begin(step)
            try:
                each = zip(proved.keys, inputs, seeds, strict=True)
                added: dict[VariantKey, Any] = {key: {"sums": sums[key]} for key in proved.keys}
                self.stream(step, [{**seen[key], **mine, **seed, **added[key]} for key, mine, seed in each])
                grads = weights.grads()
            except BaseException as error:
                left = weights.undo()
                if left:
                    which = ", ".join(map(str, left))
                    error.add_note(
                        f"{proved.name} had stepped the optimizers of chunks {which} of {proved.count}, and this is "
                        "not taken back: go on from a checkpoint"
                    )
                raise
            finally:
                weights.end()
        return values, grads

    def stream(self, step: StepState, shards: list[dict[str, Shards]]) -> None:
        """All micro-batches, each with the sources that it sees."""
        step.shards = shards
        self.numbered(shards)
        try:
            self.outcome = self.runtime.run(record=True)
        finally:
            step.shards = []

    def numbered(self, shards: Sequence[dict[str, Shards]]) -> None:
        """The seed of this step's draws, which ranks have in common, for each micro-batch."""
        if self.proved.draws:
            agree(self.proved.everywhere)
            step = int(torch.randint(1 << 62, (), device="cpu"))
            for k, each in enumerate(shards):
                each["numbers"] = step, k  # type: ignore[assignment]
