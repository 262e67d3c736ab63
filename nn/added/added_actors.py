"""Actors that a user added to a step. Here are bundles of registers led through others, what added work sees of the
step's registers, and how values of registers that nobody planned get to other ranks.

A task's bundle is a tuple of the shards that this process holds, as its maker left them; who reads such a register on
the ranks of a task that does, finds what the task finds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...actors.added.addition import Opening
from ...actors.added.value_link import ValueLink
from ...actors.protocol.network import Actor
from ...actors.protocol.state import Firing, Slot
from ...actors.runtime.channel import Carrier, Link
from ...actors.runtime.job import check_given
from ...actors.runtime.partition import RegisterEnd
from ...boxing.exchange.value_message import free
from ...placement.errors import ScheduleError
from ...placement.structure import mapped
from ...placement.world import world
from ..graph.compiler.generated_calls import Shards
from ..graph.microbatch.batch import PieceKind
from ..graph.run.network import Bundle, Lowered, task_actors
from ..graph.run.proved_pipeline import ProvedPipeline
from ..graph.run.transfers import carrier
from ..graph.run.weights.weights import Fire
from ..graph.tasks.task import Name

__all__ = ["AddedWork", "Fed", "OpenStep"]

Fed: TypeAlias = Callable[[int, str, Any], dict[str, Shards]]  # of a micro-batch an argument's value, as it lies


@dataclass(frozen=True, eq=False)
class OpenStep(Opening):
    """The opened network of a step, whose arguments registers may bring: `fed` says how these lie."""

    fed: Fed

    def rewired(self, low: Lowered) -> Lowered:
        return rewired(low, self)

    def link_of(self, edge: RegisterEnd, line: Carrier, rank: int) -> ValueLink | None:
        return link_of(self, edge, line, rank)

    def work_of(
        self, pipeline: ProvedPipeline, links: Mapping[str, Link], actor: Actor, task: Callable[[], Fire]
    ) -> Fire:
        """The work of an actor: one that was added, or a task of the step, to which registers may bring arguments."""
        if actor.name in self.work:
            return AddedWork(self, pipeline, links, actor)
        feeds = [(n, self.feeds[t.register]) for n, t in enumerate(actor.takes) if t.register in self.feeds]
        return FedTask(self.fed, pipeline, task(), feeds, actor) if feeds else task()


def rewired(low: Lowered, opening: Opening) -> Lowered:
    """The registers of tasks, where some read a register in the place of another."""
    readers = task_actors(opening.base.actors)
    bundles = dict(low.bundles)
    takes = {}
    for name, registers in low.takes.items():
        led = opening.led.get(readers[str(name)], {})
        for old in registers:
            if old in led:
                bundles[led[old]] = _led(low.bundles[old], old, opening)
        takes[name] = tuple(led.get(old, old) for old in registers)
    return Lowered(opening.network, bundles, takes, low.gives)


def _led(bundle: Bundle, register: str, opening: Opening) -> Bundle:
    """The bundle at the end of a way through others, who hand on the shards as they are."""
    for hop in bundle.hops:
        src, dst = hop.pair
        if src.state != dst.state or src.placement.shape != dst.placement.shape:
            raise ScheduleError(
                f"{opening.network.name}: {register} holds {src}, and is read as {dst}\n"
                "  what other actors hand on stays as it lies: lead a register through them that stays on its ranks"
            )
    return replace(bundle, hops=())


class AddedWork:
    """The work of an added actor in this process, on values as they are where it is."""

    def __init__(
        self,
        opening: Opening,
        pipeline: ProvedPipeline,
        links: Mapping[str, Link],
        actor: Actor,
    ) -> None:
        self.weights, self.kinds, self.routes = pipeline.weights, pipeline.kinds, len(pipeline.firsts)
        self.work, self.width = opening.work[actor.name], len(actor.gives)
        sent = {f"{link.number}": link for link in links.values() if isinstance(link, ValueLink) and link.handed}
        number = {register.name: f"{n}" for n, register in enumerate(opening.network.registers)}
        self.hands = [
            (port, sent[number[g.register]]) for port, g in enumerate(actor.gives) if number[g.register] in sent
        ]
        alone, here = world().rank is None, opening.places[actor.queue]
        self.takes: dict[int, tuple[int, Mapping[PieceKind, Callable[[Any], Any] | None]]] = {}  # with the route
        self.copies: list[int] = []
        if not alone:
            return  # links bring what is elsewhere
        for port, take in enumerate(actor.takes):
            if here in opening.homes.get(take.register, ()):
                each = {kind: low.bundles.get(take.register) for kind, low in pipeline.lowered.items()}
                carriers = {kind: carrier(bundle) if bundle else None for kind, bundle in each.items()}
                maker = opening.base.actor(opening.base.producers[take.register])
                self.takes[port] = routes_of(maker, pipeline)[0], carriers
        for port, give in enumerate(actor.gives):
            if opening.readers(give.register) - {here}:
                self.copies.append(port)

    def __call__(self, firing: Firing) -> Sequence[Any]:
        """One firing, with gradients where whoever called the step has them."""
        if self.takes:
            held = [self.carried(port, slots) for port, slots in enumerate(firing.held)]
            firing = firing._replace(held=tuple(held))
        with torch.set_grad_enabled(self.weights.step.grad):
            made = self.work(firing)
        values: list[Any] = [None] * self.width if made is None else list(made)
        check_given(values, self.width)
        for port, link in self.hands:
            link.hand(firing.label, values[port])
            values[port] = None
        # What another rank reads is its own, as it would be in another process.
        return [mapped(v, Tensor, _own) if port in self.copies else v for port, v in enumerate(values)]

    def carried(self, port: int, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        if port not in self.takes:
            return slots
        route, by_kind = self.takes[port]
        carry = [by_kind[self.kinds[slot.label * self.routes + route]] for slot in slots]
        return tuple(
            slot if to is None else slot._replace(value=to(slot.value)) for slot, to in zip(slots, carry, strict=True)
        )


class FedTask:
    """The work of an actor of the step, of whose arguments some come out of registers."""

    def __init__(
        self, fed: Fed, pipeline: ProvedPipeline, run: Fire, feeds: Sequence[tuple[int, str]], actor: Actor
    ) -> None:
        self.fed, self.run, self.feeds, self.actor = fed, run, feeds, actor
        self.weights, self.routes, self.own = pipeline.weights, len(pipeline.firsts), routes_of(actor, pipeline)

    def __call__(self, firing: Firing) -> Sequence[Any]:
        actor = self.actor
        for part, label in zip(actor.cases[firing.case].split("&"), (firing.label, *firing.more), strict=True):
            k = label * self.routes + self.own[actor.parts.index(part)]
            for port, argument in self.feeds:
                if actor.active(actor.takes[port], part):
                    self.weights.step.shards[k].update(self.fed(k, argument, firing.held[port][0].value))
        return self.run(firing)


def routes_of(actor: Actor, pipeline: ProvedPipeline) -> list[int]:
    """The route of each part of an actor."""
    return [Name.of(part or actor.name).chunk // pipeline.count for part in actor.parts]


def _own(x: Tensor) -> Tensor:
    return free(x).clone()


def link_of(opening: Opening, edge: RegisterEnd, line: Carrier, rank: int) -> ValueLink | None:
    """The link of an added register to other ranks, or of a step's to ranks whose tasks do not read it."""
    made = opening.places[opening.network.actor(opening.network.producers[edge.register]).queue]
    read = edge.peers if edge.sends else next(ranks for ranks in opening.readers(edge.register) if rank in ranks)
    if read in opening.homes.get(edge.register, ()):
        return None
    if edge.sends:
        to = read if len(made) == 1 else (read[made.index(rank)],)
        return ValueLink(line, edge.number, to, handed=_hands_over(opening, edge.register))
    return ValueLink(line, edge.number, of=made[0] if len(made) == 1 else made[read.index(rank)])


def _hands_over(opening: Opening, register: str) -> bool:
    """Whether a register's maker waits until a value was taken, and so keeps what it took as long. It has a queue for
    itself, so that nobody waits with it, and others in its process that read the register would find nothing there."""
    network = opening.network
    maker = network.actor(network.producers[register])
    alone = [actor.name for actor in network.actors if actor.queue == maker.queue] == [maker.name]
    give = next(give for give in maker.gives if give.register == register)
    plain = (give.slots, give.every, network.register(register).initial) == (1, 1, 0)
    there = opening.readers(register)
    return alone and plain and maker.name in opening.work and len(there) == 1 and bool(maker.takes)
