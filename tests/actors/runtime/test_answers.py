"""Arrivals tell which sends are over: no more than must have been taken, and as soon as that is known."""

from collections.abc import Mapping

import pytest

from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import Simulation, simulate
from sbpflow.actors.runtime.answers import Answers
from sbpflow.actors.runtime.channel import Receive, Send, TensorLink
from sbpflow.actors.runtime.job import Job, Work
from sbpflow.actors.runtime.partition import cut
from sbpflow.actors.runtime.replay import Replay
from sbpflow.actors.runtime.runtime import order_of
from sbpflow.actors.runtime.static_order import StaticOrder
from sbpflow.actors.schedules.pipeline import Costs, network_of
from sbpflow.actors.schedules.published import PUBLISHED, published


def run_of(name: str, p: int, m: int) -> Simulation:
    schedule = published(name)
    return simulate(network_of(schedule, schedule.shape(p, m)))


def tape_of(run: Simulation, rank: int, p: int, *, answered: bool = True) -> StaticOrder:
    where = {f"device {d}": d for d in range(p)}
    part = cut(run, where, rank)
    work: dict[str, Work] = {actor.name: lambda firing: None for actor in part.network.actors}
    work |= part.work({edge.actor: TensorLink(None, edge.number) for edge in part.edges})  # type: ignore[arg-type]
    answers: Mapping[str, list[dict[str, int]]] = Answers(run).of(part, where) if answered else {}
    return StaticOrder(Job(part.network, work, order_of(run), answers=answers))


def under_way(tape: StaticOrder) -> int:
    """Sends of one register that are posted and not waited for, at most."""
    most, posted = 0, dict.fromkeys((link for link in tape.links if isinstance(link, Send)), 0)
    for entry in tape.entries:
        if isinstance(entry.link, Send):
            posted[entry.link] -= 1
        for send, _, _ in entry.sends:
            posted[send] += 1
            most = max(most, posted[send])
    return most


def test_a_gradient_that_comes_back_says_that_its_activation_was_read() -> None:
    run = run_of("1f1b", 2, 4)
    part = cut(run, {"device 0": 0, "device 1": 1}, 0)
    # Rank 1 did F0 B0 F1 B1 ..., and so the k-th gradient is behind the k-th activation and before the next.
    known = Answers(run).of(part, {"device 0": 0, "device 1": 1})
    assert known == {"from 1: dy.0": [{"to 1: x.1": k} for k in (1, 2, 3, 4)]}


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v", "dualpipe"])
def test_a_run_knows_whose_slots_a_firing_has_as_a_replay_finds_it(name: str) -> None:
    schedule = published(name)
    run = simulate(network_of(schedule, schedule.shape(4, 8), Costs(1.01, 1.3, 0.7, 0.1)))
    found = Replay(run.network, [(0, ran) for ran in run.firings]).done
    number = {(ran.actor, ran.case, ran.label): n for n, ran in enumerate(run.firings)}
    of = [number[did.ran.actor, did.ran.case, did.ran.label] for did in found]  # a replay sorts by time alone
    assert {n: {(r, of[s]) for r, s in did.sources} for n, did in zip(of, found, strict=True)} == {
        n: set(sources) for n, sources in enumerate(run.sources)
    }
    assert any(run.sources)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name, s in PUBLISHED.items() if s.way != "routes" and name != "dualpipe_v"])
def test_what_is_under_way_does_not_grow_with_micro_batches(name: str) -> None:
    """Nothing that a rank sends waits for the end of a step, but where all forwards come before any backward."""
    for rank in range(4):
        few, many = (under_way(tape_of(run_of(name, 4, m), rank, 4)) for m in (8, 32))
        if name in ("gpipe", "gpipe_lifo", "breadth_first"):
            assert (few, many) == (8, 32)
        else:
            assert few == many <= (8 if published(name).unpinned else 7)
            assert under_way(tape_of(run_of(name, 4, 32), rank, 4, answered=False)) == 32


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.startswith("dualpipe")])  # two tasks at once
def test_no_send_is_waited_for_before_it_must_have_been_taken(name: str) -> None:
    """Ranks that do nothing but what their lists say, each wait being for what another has taken, come to an end."""
    run = run_of(name, 4, 8)
    tapes = [tape_of(run, rank, 4) for rank in range(4)]
    done, at = [0] * 4, True
    sent: dict[tuple[int, int], int] = {}
    taken: dict[tuple[int, int], int] = {}
    while at:
        at = False
        for rank, tape in enumerate(tapes):
            while done[rank] < len(tape.entries):
                entry = tape.entries[done[rank]]
                link = entry.link
                if isinstance(link, Receive | Send):
                    assert isinstance(link.link, TensorLink)
                    key = link.link.number, entry.firing.label
                    if key not in (sent if isinstance(link, Receive) else taken):
                        break
                    taken[key] = rank
                for send, label, _ in entry.sends:
                    assert isinstance(send.link, TensorLink)
                    sent[send.link.number, label] = rank
                done[rank] += 1
                at = True
    assert done == [len(tape.entries) for tape in tapes]


def test_what_goes_to_several_is_over_when_those_it_was_for_have_it() -> None:
    """Of two readers the one that answers says nothing about the other."""
    actors = (
        Actor("a", "device 0", (), (Give("x"),), 2),
        Actor("b", "device 1", (Take("x"),), (Give("y"),)),
        Actor("c", "device 2", (Take("x"),), (Give("z"),)),
        Actor("d", "device 0", (Take("y"), Take("z"))),
    )
    run = simulate(Network(actors, tuple(Register(name, 2) for name in "xyz")))
    where = {f"device {d}": d for d in range(3)}
    known = Answers(run).of(cut(run, where, 0), where)
    assert known["from 1: y"] == [{"to 1: x": 1, "to 2: x": 0}, {"to 1: x": 2, "to 2: x": 0}]
    assert known["from 2: z"] == [{"to 1: x": 0, "to 2: x": 1}, {"to 1: x": 0, "to 2: x": 2}]
