"""Additions: a network that was opened, with the work of what was added; and what it changes, checked and proved.

Whoever made the network has the work of its own actors, and goes on to do it. So these stay what they are: they may
wait for more registers and fill more tokens, and read a register of the same values where one was led through others.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

from ...placement.errors import ScheduleError, did_you_mean
from ..protocol.feasibility import proved
from ..protocol.network import Actor, Network, Take
from ..protocol.simulate import Simulation
from ..runtime.job import Work
from ..runtime.partition import Ranks, cut
from ..runtime.ranked import is_wire

__all__ = ["Added", "Opening", "opened"]


@dataclass(frozen=True, eq=False)
class Added:
    """A network that was opened. `work` is that of the actors that were added, by name; `ranks` says of each queue that
    was added where it lives: a rank, several, or the name of a queue that lives there too. `feeds` names registers
    whose values are an argument of the step, a micro-batch each; `initial` gives values that lie in a register from the
    start."""

    network: Network
    work: Mapping[str, Work]
    ranks: Mapping[str, int | Sequence[int] | str] = field(default_factory=dict)
    feeds: Mapping[str, str] = field(default_factory=dict)
    initial: Mapping[str, Callable[[], Sequence[Any]]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Opening:
    """The network as it is to run, and what was added to that of the step. `led` says of its actors which registers
    they read in the place of others, `legs` where each lies that was led so, with all that holds the same, and `homes`
    on which ranks each of the step's registers is read by these."""

    base: Network
    network: Network
    proof: Simulation
    places: Mapping[str, Ranks]
    work: Mapping[str, Work]
    feeds: Mapping[str, str]
    initial: Mapping[str, Callable[[], Sequence[Any]]]
    led: Mapping[str, Mapping[str, str]]
    homes: Mapping[str, Collection[Ranks]]
    legs: Mapping[str, Mapping[str, Ranks]]

    @property
    def agreed(self) -> Network:
        """The network under a name that tells all else that ranks must have in common."""
        where = ", ".join(f"{queue} on {','.join(map(str, ranks))}" for queue, ranks in self.places.items())
        feeds = "".join(f", {register} is {argument}" for register, argument in self.feeds.items())
        times = [(actor.time, *actor.times) for actor in self.network.actors]
        return replace(self.network, name=f"{self.network.name}: {where}{feeds}, times {crc32(str(times).encode())}")

    def readers(self, register: str) -> frozenset[Ranks]:
        """The ranks of the queues that read a register."""
        actors = self.network.actors
        return frozenset(self.places[a.queue] for a in actors if any(take.register == register for take in a.takes))


def opened(
    base: Network, proof: Simulation, places: Mapping[str, Ranks], added: Added, before: Opening | None = None
) -> Opening:
    """The opening of a network whose queues have these places, by what was added; refused where it cannot be.

    `proof` is the run of the network as it was, with what was added `before`.
    """
    ranks = tuple(sorted({rank for each in places.values() for rank in each}))
    network, known = added.network, {actor.name for actor in base.actors}
    new = [actor for actor in network.actors if actor.name not in known]
    led = {actor.name: _led(base, network, actor) for actor in base.actors}
    _check_registers(base, network)
    _check_work(network, new, known, added.work)
    where = {**places, **_placed(network, base, places, added.ranks, ranks)}
    wrong = next((name for name in added.initial if name not in network.producers or _has(base, name)), None)
    if wrong is not None:
        fix = "initial= is of registers that were added and that have initial slots"
        raise _bad(network, f"initial values for {wrong}", fix)
    run = proved(network)
    _check_firings(proof, run)
    cut(run, where, ranks[0])  # what lies on several ranks must be such that it can be cut
    _check_pairs(run, where, base)
    _check_feeds(network, base, added)
    homes: dict[str, set[Ranks]] = {}
    for actor in base.actors:
        for take in actor.takes:
            homes.setdefault(take.register, set()).add(places[actor.queue])
    legs = _legs(network, where, led, before.legs if before else {})
    more = Opening(base, network, run, where, added.work, added.feeds, added.initial, led, homes, legs)
    if before is None:
        return more
    work, feeds = {**before.work, **added.work}, {**before.feeds, **added.feeds}
    initial = {**before.initial, **added.initial}
    return replace(more, work=work, feeds=feeds, initial=initial, homes=before.homes)


def _led(base: Network, network: Network, old: Actor) -> Mapping[str, str]:
    """The registers that an actor of the step reads in the place of others; nothing else of it may be another."""
    new = next((actor for actor in network.actors if actor.name == old.name), None)
    if new is None:
        fix = "leave the step's own actors, and add to step.network, as in step.network.adding(actors, registers)"
        raise _bad(network, f"there is no actor {old.name}, which the step has", fix)
    takes: list[Take] = [
        replace(now, register=was.register, low=was.low) for was, now in zip(old.takes, new.takes, strict=False)
    ]
    gives = new.gives[: len(old.gives)]
    same = replace(new, takes=tuple(takes), gives=gives, time=old.time, times=old.times)
    if same != old:
        fix = "an actor of the step may take and give more, behind what it takes and gives; all else of it stays"
        raise _bad(network, f"{old.name} is another than in the step", fix)
    known = {actor.name for actor in base.actors}
    found = {}
    for was, now in zip(old.takes, new.takes, strict=False):
        if was.register != now.register:
            if now.register not in network.producers or network.producers[now.register] in known:
                what = f"{old.name} is to read {now.register} in the place of {was.register}"
                raise _bad(network, what, f"only actors that were added hand on what lies in {was.register}")
            found[was.register] = now.register
    return found


def _legs(
    network: Network,
    places: Mapping[str, Ranks],
    led: Mapping[str, Mapping[str, str]],
    before: Mapping[str, Mapping[str, Ranks]],
) -> dict[str, Mapping[str, Ranks]]:
    """By register of the step that is led through others: all that holds the same, and the ranks where it is read."""
    lies = {take.register: places[actor.queue] for actor in network.actors for take in actor.takes}
    found = {name: {leg: lies[leg] for leg in legs if leg in lies} for name, legs in before.items()}
    for mine in led.values():
        for old, new in mine.items():
            first = next((name for name, legs in before.items() if old in legs), old)
            found.setdefault(first, {})[old] = lies[old]
            left = [new]
            while left:
                leg = left.pop()
                if leg != old and leg not in found[first]:
                    found[first][leg] = lies[leg]
                    left += [take.register for take in network.actor(network.producers[leg]).takes]
    return dict(found)


def _check_registers(base: Network, network: Network) -> None:
    known = {register.name: register for register in network.registers}
    for old in base.registers:
        new = known.get(old.name)
        if new is None:
            raise _bad(network, f"there is no register {old.name}, which the step has", "leave it there")
        if new.initial != old.initial:
            what = f"{old.name} is filled with {new.initial} slots at first, and in the step with {old.initial}"
            raise _bad(network, what, f"leave initial={old.initial}")


def _check_work(network: Network, more: Sequence[Actor], known: Collection[str], work: Mapping[str, Work]) -> None:
    names = [actor.name for actor in more]
    idle = [name for name in names if name not in work]
    if idle:
        fix = f"give it a function of a firing, as in work={{{idle[0]!r}: function}}"
        raise _bad(network, f"nothing says what {', '.join(idle)} shall do", fix)
    for name in work:
        if name not in names:
            what = "is the step's own" if name in known else "is no actor"
            added = f"the actors that were added: {', '.join(names) or 'none'}"
            raise _bad(network, f"work is given for {name}, which {what}", did_you_mean(name, names, added))


def _placed(
    network: Network,
    base: Network,
    places: Mapping[str, Ranks],
    said: Mapping[str, int | Sequence[int] | str],
    ranks: Ranks,
) -> dict[str, Ranks]:
    """Where the queues lie that were added."""
    found: dict[str, Ranks] = {}
    new = [queue for queue in network.queues if queue not in base.queues]
    for queue in said:
        if queue not in new:
            what = "is the step's own" if queue in base.queues else "no actor is on"
            listed = ", ".join(new) or "none"
            raise _bad(
                network, f"ranks are given for the queue {queue}, which {what}", f"queues that were added: {listed}"
            )
    for queue in new:
        if queue not in said:
            actor = next(actor.name for actor in network.actors if actor.queue == queue)
            fix = f"say ranks={{{queue!r}: {ranks[0]}}}, or put it on one that is there: {', '.join(base.queues)}"
            raise _bad(network, f"{actor} is on the queue {queue!r}, and nothing says which ranks have it", fix)
        if is_wire(queue):
            fix = "call it otherwise: 'to' and 'from' begin the names of what sends and receives"
            raise _bad(network, f"a queue is called {queue!r}", fix)
        place = said[queue]
        if isinstance(place, str) and place not in places:
            raise _bad(network, f"{queue} is to lie where {place!r} does", f"the step has {', '.join(places)}")
        on = places[place] if isinstance(place, str) else (place,) if isinstance(place, int) else tuple(sorted(place))
        strange = [rank for rank in on if rank not in ranks]
        if strange or not on:
            what = f"{queue} is to lie on ranks {','.join(map(str, on)) or 'none'}"
            raise _bad(network, what, f"the step runs on ranks {','.join(map(str, ranks))}: take some of these")
        found[queue] = on
    return found


def _check_firings(was: Simulation, run: Simulation) -> None:
    """Actors of the step must do all that they did, micro-batch by micro-batch."""
    before, now = _labels(was), _labels(run)
    for (actor, case), labels in before.items():
        mine = now.get((actor, case), [])
        if len(mine) == len(labels) and mine == labels:
            continue
        ends = ", ".join(take.register for take in run.network.actor(actor).takes)
        if len(mine) != len(labels):
            what = f"{case or actor} fires {len(mine)} times, and in the step {len(labels)} times"
            fix = f"let what fills {ends} fire as often as it takes"
        else:
            several = [" ".join(map(str, each)) for each in (mine, labels)]
            what = f"{case or actor} works on micro-batches {several[0]}, and in the step on {several[1]}"
            fix = f"let slots of {ends} be filled in the order of the micro-batches, by an actor of one case"
        raise _bad(run.network, what, fix)


def _labels(run: Simulation) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for ran in run.firings:
        for name, label in ran.parts:
            found.setdefault((ran.actor, name if ran.case else ""), []).append(label)
    return found


def _check_pairs(run: Simulation, where: Mapping[str, Ranks], base: Network) -> None:
    """Values that nobody planned go from the first rank to the first, and so on."""
    network = run.network
    for actor in network.actors:
        for take in actor.takes:
            maker = network.producers.get(take.register)
            if maker is None:
                continue
            made, read = where[network.actor(maker).queue], where[actor.queue]
            added = not _has(base, take.register) or actor.name not in {a.name for a in base.actors}
            if added and made != read and len(made) not in (1, len(read)):
                what = f"{take.register} goes from ranks {_words(made)} to {_words(read)}"
                fix = "between added actors values go from one rank to all, or between groups of as many ranks"
                raise _bad(network, what, fix)


def _check_feeds(network: Network, base: Network, added: Added) -> None:
    """Registers that bring an argument are filled by an added actor, and read by the step's."""
    for register in added.feeds:
        maker = network.producers.get(register)
        readers = [a.name for a in base.actors if any(t.register == register for t in network.actor(a.name).takes)]
        if maker not in added.work or _has(base, register) or not readers:
            what = f"{register} is to bring {added.feeds[register]}"
            fix = "let an added actor fill a register of its own, and an actor of the step read it: network.reading"
            raise _bad(network, what, fix)


def _has(network: Network, register: str) -> bool:
    return any(each.name == register for each in network.registers)


def _words(ranks: Ranks) -> str:
    return ",".join(map(str, ranks))


def _bad(network: Network, what: str, fix: str) -> ScheduleError:
    return ScheduleError(f"{network.name}: {what}\n  {fix}")
