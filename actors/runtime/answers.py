"""Answers: of what a process sent, how much must have been taken when a message from another one arrives.

Gloo says that a send is over only to one who waits for that, and who waits for what nobody has taken yet waits long.
But the gradient that comes back for a micro-batch was not made before its activation was read. So where every queue
goes by the order of a run, it is known beforehand which sends are over behind which arrival, and what they hold is let
go there.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..protocol.simulate import Simulation
from .partition import Partition, Ranks

__all__ = ["Answers"]


class Answers:
    """The past of each firing of a run that was proved: all that must have ended before it could."""

    def __init__(self, run: Simulation) -> None:
        self.run = run
        self.queues = {queue: at for at, queue in enumerate(run.network.queues)}
        # By firing how many of each queue had ended with it.
        self.past = np.zeros((len(run.firings), len(self.queues)), dtype=np.int32)
        self.queue: list[int] = []  # by firing
        # By register and the firing that filled it: who took that, as a queue and the place in what it ran.
        self.taken: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(dict)
        last = [-1] * len(self.queues)
        for n, (ran, sources) in enumerate(zip(run.firings, run.sources, strict=True)):
            mine, past = self.queues[ran.queue], self.past[n]
            if last[mine] >= 0:
                past[:] = self.past[last[mine]]
            for _, source in sources:
                np.maximum(past, self.past[source], out=past)
            past[mine] += 1
            for register, source in sources:
                self.taken[register].setdefault(source, []).append((mine, int(past[mine])))
            self.queue.append(mine)
            last[mine] = n
        slots = {give.register: give.slots for actor in run.network.actors for give in actor.gives}
        # By register the firings that filled its slots, in order.
        self.filled = {name: [n for n in sorted(by) for _ in range(slots[name])] for name, by in self.taken.items()}

    def over(self, register: str, readers: Sequence[int], firings: Sequence[int]) -> Iterator[int]:
        """For each of some firings of one queue, how many slots of a register these readers must have taken."""
        filled, taken, count = self.filled.get(register, []), self.taken.get(register, {}), 0
        for n in firings:
            past = self.past[n]
            while count < len(filled) and all(past[q] >= at for q, at in taken[filled[count]] if q in readers):
                count += 1
            yield count

    def of(self, part: Partition, where: Mapping[str, int | Ranks]) -> dict[str, list[dict[str, int]]]:
        """For each message that one part of the run receives, by its actor: how much of what each sends is over."""
        homes = {q: (ranks,) if isinstance(ranks, int) else tuple(sorted(ranks)) for q, ranks in where.items()}
        found: dict[str, list[dict[str, int]]] = {}
        for edge in part.edges:
            if edge.sends:
                continue
            makers = self.filled.get(edge.register, [])
            known: list[dict[str, int]] = [{} for _ in makers]
            for other in part.edges:
                if other.sends:
                    readers = [at for queue, at in self.queues.items() if homes[queue] == other.peers]
                    for each, count in zip(known, self.over(other.register, readers, makers), strict=True):
                        each[other.actor] = count
            found[edge.actor] = known
        return found

    def under_way(self) -> dict[str, int]:
        """By register that goes to another queue, how much of what was sent is at most not known to be over."""
        found: dict[str, int] = {}
        of_queue: dict[int, list[int]] = defaultdict(list)
        for n, queue in enumerate(self.queue):
            of_queue[queue].append(n)
        for register, filled in self.filled.items():
            mine = self.queue[filled[0]]
            readers = sorted({q for takers in self.taken[register].values() for q, _ in takers if q != mine})
            if readers:
                made = set(filled)
                firings = of_queue[mine]
                many = len(filled) // len(made)
                put = most = 0
                for n, over in zip(firings, self.over(register, readers, firings), strict=True):
                    put += many * (n in made)
                    most = max(most, put - over)
                found[register] = most
        return found
