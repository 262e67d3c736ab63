"""The network as its ranks run it: the parts of all ranks, with a register for each message between two of them.

Names carry the rank, such as `F0@2`, since ranks of one stage run actors of the same name.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..protocol.network import Actor, Give, Network, Register, Take
from ..protocol.simulate import Ran, Simulation
from .partition import cut

__all__ = ["is_wire", "joined", "renamed"]


def is_wire(queue: str) -> bool:
    """Whether a queue of a cut network carries messages."""
    return queue.startswith(("to ", "from "))


def joined(
    run: Simulation, where: Mapping[str, tuple[int, ...]], messages: Mapping[str, Collection[tuple[int, int]]]
) -> Network:
    """The whole network on its ranks. `messages` says for each register that is cut which rank sends to which."""
    ranks = sorted({rank for each in where.values() for rank in each})
    actors: list[Actor] = []
    registers: dict[str, Register] = {}
    for rank in ranks:
        part = cut(run, where, rank)
        ends = {edge.actor: edge for edge in part.edges}
        for register in part.network.registers:
            registers[f"{register.name}@{rank}"] = replace(register, name=f"{register.name}@{rank}")
        for actor in part.network.actors:
            takes = [replace(take, register=f"{take.register}@{rank}") for take in actor.takes]
            gives = [replace(give, register=f"{give.register}@{rank}") for give in actor.gives]
            edge = ends.get(actor.name)
            for pair in messages.get(edge.register, ()) if edge else ():
                assert edge is not None
                name = f"{edge.register} {pair[0]}>{pair[1]}"
                registers[name] = Register(name, max(1, len(run.firings)))
                if edge.sends and pair[0] == rank:
                    gives.append(Give(name))
                elif not edge.sends and pair[1] == rank:
                    takes.append(Take(name))
            name, queue = f"{actor.name}@{rank}", f"{actor.queue}@{rank}"
            actors.append(replace(actor, name=name, queue=queue, takes=tuple(takes), gives=tuple(gives)))
    return Network(tuple(actors), tuple(registers.values()), run.network.name)


def renamed(records: tuple[Ran, ...], rank: int) -> tuple[Ran, ...]:
    """A rank's records under the names of the joined network."""
    return tuple(replace(ran, actor=f"{ran.actor}@{rank}", queue=f"{ran.queue}@{rank}") for ran in records)
