"""The partition of a network that lies on several processes, in parts that each of them runs.

A register between two processes becomes a register on each side, with as many slots: on the side of its producer an
actor reads it and sends, on the side of its consumers an actor receives and fills it. No other message travels: what
arrives says `filled`, and a receive that is posted says `freed`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...placement.errors import ScheduleError
from ..protocol.network import Actor, Give, Network, Register, Take, skips
from ..protocol.simulate import Simulation
from .channel import Link, Receive, Send
from .job import Work

__all__ = ["Partition", "RegisterEnd", "cut", "labels_of"]

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RegisterEnd:
    """One end of a cut register: the actor here, and the ranks at the other end."""

    actor: str
    register: str
    number: int  # of the register, the same on every rank
    sends: bool
    peers: Ranks
    firings: int = 0  # of one that receives


@dataclass(frozen=True)
class Partition:
    """The part of a network that one process runs."""

    network: Network
    edges: tuple[RegisterEnd, ...]

    def work(self, links: Mapping[str, Link]) -> dict[str, Work]:
        """The work of the edges, given the link of each by its actor."""
        missing = [edge.actor for edge in self.edges if edge.actor not in links]
        if missing:
            raise ScheduleError(f"{self.network.name}: no link for {', '.join(missing)}")
        return {
            edge.actor: Send(links[edge.actor]) if edge.sends else Receive(links[edge.actor], edge.firings)
            for edge in self.edges
        }


def cut(run: Simulation, where: Mapping[str, int | Ranks], rank: int) -> Partition:
    """The part of one rank. `where` says which ranks have each queue; each of them runs all of its actors.

    `run` is the proof that the whole network ends; it tells how often a register is filled.
    """
    network = run.network
    homes = {queue: _ranks(network, where, queue) for queue in network.queues}
    here = {actor.name for actor in network.actors if rank in homes[actor.queue]}
    readers: dict[str, dict[Ranks, None]] = {}  # where each register is read
    for actor in network.actors:
        for take in actor.takes:
            readers.setdefault(take.register, {})[homes[actor.queue]] = None
    used: dict[str, None] = {}
    edges: list[RegisterEnd] = []
    ends: list[Actor] = []
    filled, labels, numbers = _filled(run), labels_of(run), list[Register]()
    for number, register in enumerate(network.registers):
        name = register.name
        producer = network.producers.get(name)
        made = homes[network.actor(producer).queue] if producer else None
        for read in readers.get(name, {}):
            if rank in read:
                used[name] = None
            if made is None or read == made:
                continue
            if set(read) & set(made):
                raise _overlap(network, name, made, read)
            if register.initial:
                raise ScheduleError(
                    f"{network.name}: {name} goes from ranks {made} to {read} and is filled at the start\n"
                    "  keep a register with initial slots on one side"
                )
            if rank in made:
                edge = RegisterEnd(f"to {_words(read)}: {name}", name, number, True, read)
                ends.append(Actor(edge.actor, edge.actor, takes=(Take(name),)))
            elif rank in read:
                edge = RegisterEnd(f"from {_words(made)}: {name}", name, number, False, made, filled[name])
                counted = range(edge.firings)
                takes: tuple[Take, ...] = ()
                if sorted(labels[name]) == [*counted] != [*labels[name]]:
                    # What comes in another order than it is counted in has its number from this register.
                    numbers.append(Register(f"numbers of {edge.actor}", edge.firings, edge.firings))
                    takes = (Take(numbers[-1].name, skips=skips(counted, labels[name])),)
                ends.append(Actor(edge.actor, edge.actor, takes, (Give(name),), edge.firings))
            else:
                continue
            edges.append(edge)
        if made is not None and rank in made:
            used[name] = None
    kept = tuple(actor for actor in network.actors if actor.name in here)
    registers = tuple(register for register in network.registers if register.name in used)
    return Partition(Network((*kept, *ends), (*registers, *numbers), f"{network.name} on rank {rank}"), tuple(edges))


def labels_of(run: Simulation) -> dict[str, tuple[int, ...]]:
    """For each register the numbers of what fills it, in the order in which its slots are filled."""
    gives = {actor.name: actor.gives for actor in run.network.actors}
    found: dict[str, list[int]] = {}
    for ran in sorted(run.firings, key=lambda ran: ran.end):
        each = dict(ran.parts)
        for give in gives[ran.actor]:
            if give.case in ("", ran.case, *each):  # what is of no part of two at once goes by the first
                found.setdefault(give.register, []).append(each.get(give.case, ran.label))
    return {register: tuple(labels) for register, labels in found.items()}


def _ranks(network: Network, where: Mapping[str, int | Ranks], queue: str) -> Ranks:
    if queue not in where:
        raise ScheduleError(f"{network.name}: nothing says which ranks have queue {queue!r}")
    found = where[queue]
    return (found,) if isinstance(found, int) else tuple(sorted(found))


def _words(ranks: Iterable[int]) -> str:
    return ",".join(map(str, ranks))


def _filled(run: Simulation) -> dict[str, int]:
    """How many slots of each register a step fills."""
    count: dict[tuple[str, str], int] = {}
    for ran in run.firings:
        count[ran.actor, ran.case] = count.get((ran.actor, ran.case), 0) + 1
    filled: dict[str, int] = {}
    for actor in run.network.actors:
        for give in actor.gives:
            times = sum(count.get((actor.name, case), 0) for case in actor.cases if actor.active(give, case))
            filled[give.register] = times // give.every * give.slots
    return filled


def _overlap(network: Network, register: str, made: Ranks, read: Ranks) -> ScheduleError:
    return ScheduleError(
        f"{network.name}: {register} goes from ranks {_words(made)} to {_words(read)}, which overlap\n"
        "  what ranks exchange among themselves is the work of one actor; a register joins ranks that are all different"
    )
