"""The smallest change to fixed orders under which a stuck network ends: things to do sooner, one after the other.

An order takes no part in marks: where two devices wait for each other in the middle of theirs, more slots help nobody.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .network import Actor, Network
from .simulate import Simulation, simulate

__all__ = ["Sooner", "sooner"]

MANY = 1 << 40  # slots; an order says itself how many it uses
MOST = 8  # changes


@dataclass(frozen=True, slots=True)
class Sooner:
    """Work that an actor does sooner, and before what; each a case and how often that was done before."""

    actor: str
    what: tuple[str, int]
    before: tuple[str, int]

    def __str__(self) -> str:
        (what, k), (before, other) = self.what, self.before
        return f"{what} of micro-batch {k} before {before} of micro-batch {other} in {self.actor}"


def sooner(network: Network) -> tuple[Sooner, ...]:
    """The changes, each of which lets the network go further than any other does; none if they are not enough."""
    network = replace(network, registers=tuple(replace(r, high=MANY) for r in network.registers))
    run, found = simulate(network, record=False), list[Sooner]()
    while not run.finished and len(found) < MOST:
        tried = [(simulate(other, record=False), change) for other, change in _changes(run)]
        best = max(tried, key=lambda one: _fired(one[0]), default=None)
        if best is None or _fired(best[0]) <= _fired(run):
            return ()
        run = best[0]
        found.append(best[1])
    return tuple(found) if run.finished else ()


def _changes(run: Simulation) -> Iterator[tuple[Network, Sooner]]:
    """Of every actor that stopped within its order, the next of each other thing that it has to do, done now."""
    network = run.network
    for actor, state in zip(network.actors, run.desk.states, strict=True):
        at, order = state.fired, actor.sequence
        for later in range(at + 1, len(order)):
            if order[later] not in order[at:later]:
                moved = replace(actor, sequence=(*order[:at], order[later], *order[at:later], *order[later + 1 :]))
                change = Sooner(actor.name, _turn(network, actor, later), _turn(network, actor, at))
                yield replace(network, actors=tuple(moved if a is actor else a for a in network.actors)), change


def _turn(network: Network, actor: Actor, at: int) -> tuple[str, int]:
    case = actor.sequence[at]
    return case, _number(network, actor, case, actor.sequence[:at].count(case))


def _number(network: Network, actor: Actor, case: str, turn: int) -> int:
    """The micro-batch of a firing of a case: that of the slot which it takes first, where order says another number."""
    for take in actor.takes:
        if actor.active(take, case) and take.slots == take.every == 1:
            left = list(range(turn + 1 + max(take.skips, default=0)))
            taken = [left.pop(skip) for skip in take.skips[: turn + 1] or [0] * (turn + 1)]
            maker = network.producers.get(take.register)
            if maker is None:
                return taken[-1]
            by = network.actor(maker)
            give = next(give for give in by.gives if give.register == take.register)
            return _number(network, by, give.case or case, taken[-1])
    return turn


def _fired(run: Simulation) -> int:
    return sum(state.fired for state in run.desk.states)
