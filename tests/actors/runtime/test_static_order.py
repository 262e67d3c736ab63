"""What is written down of one queue is what the protocol does with threads; its values live no longer than there."""

import random
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import Simulation, simulate
from sbpflow.actors.protocol.state import Firing
from sbpflow.actors.runtime.bus import bus
from sbpflow.actors.runtime.channel import Link, Receive, Send, TensorLink
from sbpflow.actors.runtime.inline import InlineSteps
from sbpflow.actors.runtime.job import Job, Raw, Work
from sbpflow.actors.runtime.partition import cut
from sbpflow.actors.runtime.runtime import Runtime, order_of
from sbpflow.actors.runtime.static_order import StaticOrder, fits
from sbpflow.actors.runtime.threads import ThreadedSteps
from tests.actors.runtime.test_runtime import random_network
from tests.ranks import Ranks

HELD = tuple[tuple[tuple[int, Any], ...], ...]


def one_queue(network: Network) -> Network:
    return Network(tuple(replace(actor, queue="q") for actor in network.actors), network.registers, network.name)


def rates(seed: int) -> Network:
    """Several slots at once, kept for several firings, read from the back, cases and slots filled at the start."""
    draw = random.Random(seed)
    many, every, slots = 6 * draw.randint(1, 2), draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
    actors = (
        Actor("a", "q", (), (Give("x", slots=slots, every=every),), many, kind=draw.randint(0, 1)),
        Actor("b", "q", (Take("x"), Take("w", every=every)), (Give("w", every=every), Give("y"))),
        Actor("c", "q", (Take("x"), Take("y", lifo=slots == 1, low=draw.randint(0, 1))), sequence=("F", "B")),
        Actor("d", "q", (Take("x", slots=slots),), kind=draw.randint(0, 1)),
    )
    registers = Register("x", 2 * slots + every), Register("w", 2, initial=1), Register("y", many * slots)
    return Network(actors, registers, f"rates {seed}")


def noted(
    network: Network, which: type[ThreadedSteps] | type[InlineSteps], order: Simulation | None
) -> tuple[list[Raw], list[HELD]]:
    """What ran, and what each firing held."""
    seen: list[HELD] = []

    def work(actor: Actor) -> Work:
        def give(firing: Firing) -> Sequence[Any]:
            seen.append(tuple(tuple(tuple(slot) for slot in slots) for slots in firing.held))
            made = f"{actor.name}{firing.case}.{firing.turn}"
            return [[f"{made}/{n}" for n in range(g.slots)] if g.slots > 1 else made for g in actor.gives]

        return give

    plan = Job(network, {actor.name: work(actor) for actor in network.actors}, order_of(order) if order else {})
    plan.initial = {r.name: lambda r=r: [f"{r.name} at first"] * r.initial for r in network.registers if r.initial}  # type: ignore[misc]
    runs = which(plan)
    for _ in range(2):
        seen.clear()
        ran = runs.run(record=True)
    runs.close()
    return [(at, case, label, 0.0, 0.0, more) for at, case, label, _, _, more in ran], seen


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.sweep] if n >= 20 else []) for n in range(200)])
@pytest.mark.parametrize("make", [random_network, rates])
def test_a_tape_does_what_threads_do(make: Any, seed: int) -> None:
    network = one_queue(make(seed))
    run = simulate(network)
    if run.finished:
        order = run if seed % 2 else None
        ran, held = noted(network, InlineSteps, order)
        assert (ran, held) == noted(network, ThreadedSteps, order)
        assert len(ran) == len(run.firings)


def link(sends: bool) -> Send | Receive:
    line: Any = None
    return Send(TensorLink(line, 0)) if sends else Receive(TensorLink(line, 0), 4)


def test_a_tape_is_for_one_queue_that_knows_its_order() -> None:
    actors = Actor("a", "q", (), (Give("x"),), 4), Actor("s", "to", (Take("x"),))
    network = Network(actors, (Register("x"),))
    work: dict[str, Work] = {"a": lambda f: [1], "s": link(sends=True)}
    ordered = {"q": ("a",) * 4}
    assert fits(Job(network, work, ordered))
    assert not fits(Job(network, work))  # what comes first is up to the messages
    assert not fits(Job(network, work, ordered, here="to"))
    assert not fits(Job(network, work | {"s": lambda f: None}, ordered))
    assert fits(Job(one_queue(network), work | {"s": lambda f: None}))
    assert not fits(Job(one_queue(network), work))


def test_a_tape_waits_for_a_message_only_where_the_order_needs_it() -> None:
    actors = (
        Actor("a", "q", (), (Give("x"), Give("act")), 4),
        Actor("s", "to", (Take("x"),)),
        Actor("r", "from", (), (Give("y"),), 4),
        Actor("b", "q", (Take("y"), Take("act"))),
    )
    network = Network(actors, (Register("x", 2), Register("y", 2), Register("act", 3)))
    work: dict[str, Work] = {"a": lambda f: [1, 2], "b": lambda f: None, "s": link(True), "r": link(False)}
    tape = StaticOrder(Job(network, work, {"q": tuple("aababbab")}))
    assert "".join(actors[entry.firing.actor].name for entry in tape.entries) == "aarbsarbrbsarbss"
    assert [(fired, room) for _, fired, room in tape.first] == [(0, 2)]
    assert tape.desk.ended


def big(count: int) -> tuple[list[int], list[float]]:
    """How many large values a rank still had when it made the last one, in each step; and what the other one got."""
    living: weakref.WeakSet[Tensor] = weakref.WeakSet()
    left: list[int] = []
    got: list[float] = []
    line = bus((0, 1, 2, 3))
    actors = Actor("a", "first", (), (Give("x"),), count), Actor("b", "second", (Take("x"),))
    run = simulate(Network(actors, (Register("x", count),)))
    part = cut(run, {"first": 0, "second": 1}, line.rank)

    def make(firing: Firing) -> list[Tensor]:
        value = torch.full((1 << 17,), float(firing.label))
        for _ in range(1000 if firing.label == count - 1 else 0):  # until what was sent is let go
            if living:
                time.sleep(0.01)
        if firing.label == count - 1:
            left.append(len(living))
        living.add(value)
        return [value]

    def read(firing: Firing) -> None:
        got.append(firing.held[0][0].value[-1].item())

    links: dict[str, Link] = {
        edge.actor: TensorLink(
            line.line,
            edge.number,
            tuple((peer, lambda value: value) for peer in edge.peers if edge.sends),
            tuple((peer, lambda: torch.empty(1 << 17)) for peer in edge.peers if not edge.sends),
        )
        for edge in part.edges
    }
    work: dict[str, Work] = {"a": make, "b": read, **part.work(links)}
    with Runtime(part.network, work, order=order_of(run), guard=line, timeout=20.0) as running:
        if part.network.actors:
            running.run()
            running.run()
    return left, got


def test_what_is_large_is_let_go_when_it_is_sent(ranks4: Ranks) -> None:
    (left, _), (_, got), *_ = ranks4(big, 12)
    assert left == [0, 0]
    assert got == [float(n) for n in range(12)] * 2
