"""Random networks that look like pipelines, with all that a network may have, and the rule of their marks."""

import random
from collections.abc import Iterator
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.schedules.definition import Marks

__all__ = ["chain", "ends", "feasible", "fits", "loosened", "marks", "tightened"]

Need: TypeAlias = tuple[tuple[str, int], tuple[str, int]]  # a firing, and one that goes before it


def marks(rng: random.Random, chunks: int, m: int) -> list[Marks]:
    """Marks as they come, about as often too tight as not."""
    high = min(m, 5)
    return [
        Marks(*(rng.randint(1, high) for _ in range(3)), *(rng.choice([0, 0, rng.randint(0, high)]) for _ in range(2)))
        for _ in range(chunks)
    ]


def fits(listed: list[Marks], m: int, split: bool = True) -> bool:
    """Whether a chain of chunks with these marks ends, for m micro-batches, by the rule and without a run.

    F of e goes on to its slot j only when the chunks behind it, c >= e, have come back for slot j - act(e); a low mark
    there asks for a slot further on, which must not be that of j itself. No slot is further on than the last.
    """
    for e, at in enumerate(listed):
        for behind in listed[e:]:
            if min(behind.low_b, m - 1) >= at.act:
                return False
            if split and min(at.low_w + behind.low_b, m - 1) >= at.stash:
                return False
        if split and min(at.low_w, m - 1) >= at.dy:
            return False
    return True


def chain(listed: list[Marks], m: int, split: bool = True) -> Network:
    """One chunk behind the other, each on its own queue; what goes from one to the next never waits for a slot."""
    actors, registers = [], []
    last = len(listed) - 1
    for c, at in enumerate(listed):
        forward, backward = [Give(f"act.{c}")], [Take(f"act.{c}", low=at.low_b)]
        registers.append(Register(f"act.{c}", at.act))
        into: list[Take] = [Take(f"x.{c}")] if c else []
        out: list[Give] = [Give(f"dy.{c - 1}")] if c else []
        if c < last:
            registers += [Register(f"x.{c + 1}", m), Register(f"dy.{c}", m)]
            forward.append(Give(f"x.{c + 1}"))
            backward.append(Take(f"dy.{c}"))
        if split:
            registers += [Register(f"stash.{c}", at.stash), Register(f"gw.{c}", at.dy)]
            forward.append(Give(f"stash.{c}"))
            out.append(Give(f"gw.{c}"))
            takes = (Take(f"gw.{c}", low=at.low_w), Take(f"stash.{c}"))
            actors.append(Actor(f"W{c}", f"device {c}", takes, time=1.0, kind=2))
        actors.append(Actor(f"F{c}", f"device {c}", tuple(into), tuple(forward), 0 if c else m, time=1.0))
        actors.append(Actor(f"B{c}", f"device {c}", tuple(backward), tuple(out), time=1.0, kind=1))
    return Network(tuple(actors), tuple(registers), "chain")


def feasible(seed: int) -> Network:
    """A network that ends, of chunks on random queues with random rates, tokens, skips, priorities and times."""
    rng = random.Random(seed)
    chunks, group = rng.randint(1, 5), rng.choice([1, 1, 2, 3])
    m, split = group * rng.randint(1, 6), rng.random() < 0.5
    listed = marks(rng, chunks, m)
    while not fits(listed, m, split):
        at = rng.randrange(chunks)
        low_b, low_w = max(0, listed[at].low_b - 1), max(0, listed[at].low_w - 1)
        listed[at] = replace(listed[at], low_b=low_b, low_w=low_w)
    network = chain(listed, m, split)
    actors = {actor.name: actor for actor in network.actors}
    registers = list(network.registers)

    def join(name: str, src: str, dst: str, high: int, give: Give, take: Take, initial: int = 0) -> None:
        registers.append(Register(name, high, initial))
        actors[src] = replace(actors[src], gives=(*actors[src].gives, give))
        actors[dst] = replace(actors[dst], takes=(*actors[dst].takes, take))

    def plain(name: str, src: str, dst: str, high: int) -> None:
        join(name, src, dst, high, Give(name), Take(name))

    for n in range(rng.randint(0, 3)):  # skips forward and back, and tokens that say what is so already
        i, j = sorted(rng.choices(range(chunks), k=2))
        if i < j:
            plain(f"skip.{n}", f"F{i}", f"F{j}", rng.randint(1, 3))
            plain(f"back.{n}", f"B{j}", f"B{i}", m)  # were it less, j could not run ahead as a low mark of i may ask
        plain(f"token.{n}", f"F{i}", f"B{j}", m)
    if rng.random() < 0.5:  # a batch is cut into micro-batches
        actors["load"] = Actor("load", "host", firings=m // group)
        join("batch", "load", "F0", group + rng.randint(0, 2), Give("batch", slots=group), Take("batch"))
    if rng.random() < 0.5:  # as many losses are joined
        actors["log"] = Actor("log", "host", (Take("loss", slots=group),))
        registers.append(Register("loss", group + rng.randint(0, 2)))
        actors[f"F{chunks - 1}"] = replace(last := actors[f"F{chunks - 1}"], gives=(*last.gives, Give("loss")))
    for c in range(chunks):  # an update after every group, and the weights held for the next
        if rng.random() < 0.3:
            low = max(at.low_b for at in listed[c:])
            versions = (group - 1 + low) // group + 1 + rng.randint(0, 1)
            actors[f"U{c}"] = Actor(f"U{c}", rng.choice([f"device {c}", "host"]), (Take(f"grad.{c}"),))
            actors[f"B{c}"] = replace(b := actors[f"B{c}"], gives=(*b.gives, Give(f"grad.{c}", every=group)))
            registers.append(Register(f"grad.{c}", rng.randint(1, 2)))
            give, take = Give(f"weights.{c}"), Take(f"weights.{c}", every=group)
            join(f"weights.{c}", f"U{c}", f"F{c}", versions, give, take, versions)
    return _scattered(rng, actors, registers)


def ends(network: Network, firings: dict[str, int]) -> bool:
    """Whether it ends with so many firings, by what must go before what: no firing may go before itself."""
    before: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for later, earlier in _needs(network, firings):
        before.setdefault(later, []).append(earlier)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


def _needs(network: Network, firings: dict[str, int]) -> Iterator[Need]:
    for actor in network.actors:
        for n in range(1, firings[actor.name]):
            yield (actor.name, n), (actor.name, n - 1)
        for take in actor.takes:
            register, name = network.register(take.register), network.producers[take.register]
            producer = network.actor(name)
            give = next(give for give in producer.gives if give.register == take.register)
            filled = register.initial + firings[name] // give.every * give.slots
            for n in range(0, firings[actor.name], take.every):
                slot = n // take.every * take.slots + take.slots - 1
                group = (min(slot + take.low, max(slot, filled - 1)) - register.initial) // give.slots
                if group >= 0:
                    yield (actor.name, n), (name, (group + 1) * give.every - 1)
            for n in range(0, firings[name], give.every):
                slot = n // give.every * give.slots + give.slots - 1 + register.initial - register.high
                if slot >= 0:
                    yield (name, n), (actor.name, (slot // take.slots + 1) * take.every - 1)


def loosened(network: Network) -> Network:
    """The same without marks that could hold it up."""
    actors = [replace(a, takes=tuple(replace(take, low=0) for take in a.takes)) for a in network.actors]
    registers = [replace(r, high=10_000) for r in network.registers]
    return replace(network, actors=tuple(actors), registers=tuple(registers))


def tightened(network: Network, rng: random.Random) -> Network:
    """The same with some marks changed at random, most of them for the worse."""
    actors = [
        replace(a, takes=tuple(replace(t, low=t.low + (rng.random() < 0.1) * rng.randint(0, 3)) for t in a.takes))
        for a in network.actors
    ]
    least = {give.register: give.slots for a in network.actors for give in a.gives}
    registers = [
        replace(r, high=max(1, r.initial, least[r.name], r.high - (rng.random() < 0.2) * rng.randint(-1, 3)))
        for r in network.registers
    ]
    return replace(network, actors=tuple(actors), registers=tuple(registers))


def _scattered(rng: random.Random, actors: dict[str, Actor], registers: list[Register]) -> Network:
    """The same actors in any order, on any queues, with any priorities and times."""
    queues = rng.randint(1, len(actors))
    made = [
        replace(
            actor,
            queue=f"queue {rng.randrange(queues)}",
            time=rng.choice([0.0, 0.5, 1.0, rng.random()]),
            kind=rng.randint(0, 2),
            place=rng.randint(-3, 3),
            unit=rng.randint(0, 3),
            group=rng.randint(0, 3),
        )
        for actor in rng.sample(list(actors.values()), len(actors))
    ]
    delayed = [replace(register, delay=rng.choice([0.0, 0.0, 1.0, rng.random()])) for register in registers]
    return Network(tuple(made), tuple(delayed), "random")
