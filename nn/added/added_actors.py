"""Actors that a user added to a step. Here are bundles of registers led through others, what added work sees of the
step's registers, and how values of registers that nobody planned get to other ranks.

A task's bundle is a tuple of the shards that this process holds, as its maker left them; who reads such a register on
the ranks of a task that does, finds what the task finds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from ...actors.added.addition import Opening
from ...actors.added.value_link import ValueLink, free
from ...actors.protocol.network import Actor
from ...actors.protocol.state import Firing, Slot
from ...actors.runtime.channel import Carrier, Link
from ...actors.runtime.job import check_given
from ...actors.runtime.partition import RegisterEnd
from ...placement.errors import ScheduleError
from ...placement.structure import mapped
from ...placement.world import world
from ..graph.compiler.generated_calls import Shards
from ..graph.microbatch.batch import PieceKind
from ..graph.run.network import Bundle, Lowered, task_actors
from ..graph.run.open_network import OpenProgram
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

    def work_of(self, program: OpenProgram, actor: Actor, task: Callable[[], Fire]) -> Fire:
        return work_of(program, self, actor, task)


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
        actor: Actor,
        bundles: Mapping[PieceKind, Mapping[str, Bundle]],
        links: Mapping[str, Link],
        route: Callable[[Actor], int],
    ) -> None:
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
                each = {kind: of.get(take.register) for kind, of in bundles.items()}
                carriers = {kind: carrier(bundle) if bundle else None for kind, bundle in each.items()}
                self.takes[port] = route(opening.base.actor(opening.base.producers[take.register])), carriers
        for port, give in enumerate(actor.gives):
            if opening.readers(give.register) - {here}:
                self.copies.append(port)

    def __call__(self, firing: Firing, kinds: Sequence[PieceKind], routes: int, grad: bool) -> Sequence[Any]:
        """One firing, with gradients where whoever called the step has them."""
        if self.takes:
            held = [self.carried(port, slots, kinds, routes) for port, slots in enumerate(firing.held)]
            firing = firing._replace(held=tuple(held))
        with torch.set_grad_enabled(grad):
            made = self.work(firing)
        values: list[Any] = [None] * self.width if made is None else list(made)
        check_given(values, self.width)
        for port, link in self.hands:
            link.hand(firing.label, values[port])
            values[port] = None
        # What another rank reads is its own, as it would be in another process.
        return [mapped(v, Tensor, _own) if port in self.copies else v for port, v in enumerate(values)]

    def carried(self, port: int, slots: tuple[Slot, ...], kinds: Sequence[PieceKind], routes: int) -> tuple[Slot, ...]:
        if port not in self.takes:
            return slots
        route, by_kind = self.takes[port]
        carry = [by_kind[kinds[slot.label * routes + route]] for slot in slots]
        return tuple(
            slot if to is None else slot._replace(value=to(slot.value)) for slot, to in zip(slots, carry, strict=True)
        )


def work_of(program: OpenProgram, opening: Opening, actor: Actor, task: Callable[[], Fire]) -> Fire:
    """The work of an actor: one that was added, or a task of the step, to which registers may bring arguments.

    Threads hold their work, and must not keep a program alive that nobody else has.
    """

    def routes(of: Actor) -> list[int]:
        return [Name.of(part or of.name).chunk // program.count for part in of.parts]

    if actor.name in opening.work:
        bundles = {kind: low.bundles for kind, low in program.lowered.items()}
        made = AddedWork(opening, actor, bundles, program.links, lambda of: routes(of)[0])
        return partial(_added, ref(program), made)
    feeds = [(n, opening.feeds[t.register]) for n, t in enumerate(actor.takes) if t.register in opening.feeds]
    return partial(_fed, ref(program), task(), feeds, actor, routes(actor)) if feeds else task()


def _added(of: "ref[OpenProgram]", work: AddedWork, firing: Firing) -> Sequence[Any]:
    """The work of an added actor."""
    program = of()
    assert program is not None
    return work(firing, program.kinds, len(program.firsts), program.step.grad)


def _fed(
    of: "ref[OpenProgram]",
    run: Fire,
    feeds: Sequence[tuple[int, str]],
    actor: Actor,
    routes: Sequence[int],
    firing: Firing,
) -> Sequence[Any]:
    """A task of which some arguments come out of registers."""
    program = of()
    assert program is not None
    assert isinstance(program.opening, OpenStep)
    for part, label in zip(actor.cases[firing.case].split("&"), (firing.label, *firing.more), strict=True):
        k = label * len(program.firsts) + routes[actor.parts.index(part)]
        for port, argument in feeds:
            if actor.active(actor.takes[port], part):
                program.step.shards[k].update(program.opening.fed(k, argument, firing.held[port][0].value))
    return run(firing)


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
