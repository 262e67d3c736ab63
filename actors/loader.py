"""A data loader as an actor: batches are read ahead on a queue of their own, up to as many as its register has slots.

    data    loader -> every actor that takes a micro-batch; all slots are filled when a step begins

What the slots hold when a step ends was read for the next one, so that reading overlaps with work across steps too.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..placement.errors import ScheduleError
from .desk import Firing
from .network import Actor, Give, Network, Register, Take

__all__ = ["Loader", "loaded"]


def loaded(
    network: Network, readers: Sequence[tuple[str, str]], *, firings: int, high: int = 2, name: str = "data"
) -> Network:
    """The network with a loader that fires so often a step; each reader, an actor and its case, takes every batch."""
    if not 1 <= high <= firings:
        raise ScheduleError(f"{network.name}: {high} batches ahead in a step of {firings}\n  give 1 to {firings}")
    known = {actor.name for actor in network.actors}
    for reader, _ in readers:
        if reader not in known:
            raise ScheduleError(f"{network.name}: no actor is called {reader!r}, which is to read {name}")
    actors = [
        replace(
            actor, takes=(*actor.takes, *(Take(name, case=case) for reader, case in readers if reader == actor.name))
        )
        for actor in network.actors
    ]
    loader = Actor(f"load {name}", f"load {name}", (), (Give(name),), firings)
    return Network((*actors, loader), (*network.registers, Register(name, high, initial=high)), network.name)


class Loader:
    """The work of a loader. `first` is what its register holds when a step begins.

    `ready` makes a batch what the readers want, on the loader's thread: pinned, or on its way to a card.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        firings: int,
        high: int = 2,
        ready: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.batches: Iterator[Any] = iter(batches)
        self.firings, self.high, self.ready = firings, high, ready
        self.ahead: deque[Any] = deque()  # for the next step
        self.over = False

    @property
    def more(self) -> bool:
        """Whether there is data for another step."""
        if not self.ahead:
            self._read()
        return bool(self.ahead)

    def first(self) -> Sequence[Any]:
        """What was read for this step, and as much more as the slots hold."""
        while len(self.ahead) < self.high and not self.over:
            self._read()
        if len(self.ahead) < self.high:
            raise self._short(len(self.ahead))
        values = tuple(self.ahead)
        self.ahead.clear()
        return values

    def __call__(self, firing: Firing) -> Sequence[Any]:
        if firing.turn < self.firings - self.high:
            try:
                return (self.ready(next(self.batches)),)
            except StopIteration:
                raise self._short(self.high + firing.turn) from None
        self._read()  # not needed in this step, so the data may end here
        return (None,)

    def _read(self) -> None:
        if not self.over:
            try:
                self.ahead.append(self.ready(next(self.batches)))
            except StopIteration:
                self.over = True

    def _short(self, found: int) -> ScheduleError:
        return ScheduleError(
            f"the data ended after {found} of the {self.firings} micro-batches of a step\n"
            "  give whole steps, and ask `more` before each"
        )
