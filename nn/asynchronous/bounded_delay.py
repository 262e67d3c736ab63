"""The network of a parameter server: who pulls, computes and pushes when, so that no weights are too late.

    clock.i   updates -> pulls of worker i: it starts with delay + 1, so that a worker is as many rounds ahead at most
    have.i    weights that worker i has pulled -> its gradient
    push.i    gradients of worker i -> updates; one of each worker makes an update

Weights are read unpinned: a pull takes those of its time. Of two things at one instant the update is first.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ...actors.protocol.feasibility import proved
from ...actors.protocol.network import Actor, Give, Network, Register, Take
from ...actors.protocol.simulate import Simulation, simulate

__all__ = ["BoundedDelay", "bounded_delay"]


@dataclass(frozen=True)
class BoundedDelay:
    """The course of some rounds of workers and a server, as it was simulated. Print it."""

    run: Simulation
    workers: int

    @property
    def order(self) -> tuple[str, ...]:
        """All that is done, thing by thing: `pull 0`, `gradient 0`, `update`."""
        return tuple(ran.actor for ran in self.run.firings)

    @cached_property
    def versions(self) -> tuple[tuple[int, ...], ...]:
        """By worker and round, after how many updates were the weights that it pulled."""
        found: list[list[int]] = [[] for _ in range(self.workers)]
        updates = 0
        for name in self.order:
            what, _, worker = name.partition(" ")
            updates += what == "update"
            if what == "pull":
                found[int(worker)].append(updates)
        return tuple(map(tuple, found))

    @property
    def delays(self) -> Counter[int]:
        """The number of gradients by delay: updates between the weights that they are of and those that they
        changed."""
        return Counter(at - version for row in self.versions for at, version in enumerate(row))

    @property
    def line(self) -> Network:
        """The same network for one queue, that is held to the order."""
        actors = tuple(replace(actor, queue="here") for actor in self.run.network.actors)
        return Network(actors, self.run.network.registers, self.run.network.name)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.run.network.name}: {self.run.end:g} units, delays {dict(sorted(self.delays.items()))}"
        unit = min((ran.end - ran.start for ran in self.run.firings if ran.end > ran.start), default=1.0)
        for worker in range(self.workers):
            line, at = "", 0
            for ran in self.run.of(f"worker {worker}"):
                if ran.actor.startswith("gradient"):
                    start = max(at, round(ran.start / unit))
                    line += ".   " * (start - at)
                    at = max(start + 1, round(ran.end / unit))
                    line += f"w{self.versions[worker][ran.label]}".ljust((at - start) * 4 - 1, "-") + " "
            yield f"  worker {worker}  {line}".rstrip()


def bounded_delay(
    workers: int, rounds: int, delay: int, seconds: Callable[[int, int], float], name: str
) -> BoundedDelay:
    """So many rounds of each worker, one of which takes `seconds(worker, round)`; proved to end."""
    actors = [
        Actor(
            "update",
            "server",
            tuple(Take(f"push.{i}") for i in range(workers)),
            tuple(Give(f"clock.{i}") for i in range(workers)),
        )
    ]
    registers = []
    for i in range(workers):
        pulls = Actor(f"pull {i}", f"worker {i}", (Take(f"clock.{i}"),), (Give(f"have.{i}"),), rounds)
        pushes = Actor(f"gradient {i}", f"worker {i}", (Take(f"have.{i}"),), (Give(f"push.{i}"),), time=1.0)
        actors += [pulls, pushes]
        ahead = delay + 1
        registers += [Register(f"clock.{i}", ahead, ahead), Register(f"have.{i}"), Register(f"push.{i}", ahead)]
    network = Network(tuple(actors), tuple(registers), name)

    def time(actor: str, case: str, label: int) -> float:
        what, _, worker = actor.partition(" ")
        return seconds(int(worker), label) if what == "gradient" else 0.0

    proved(network)  # whatever time things take
    return BoundedDelay(simulate(network, time=time), workers)
