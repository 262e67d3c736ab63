"""A network cut into parts loses nothing: what one part sends another receives, as often."""

import pytest

from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import simulate
from sbpflow.actors.runtime.partition import Partition, cut
from sbpflow.actors.schedules.pipeline import network_of
from sbpflow.actors.schedules.published import PUBLISHED, published
from sbpflow.placement.errors import ScheduleError


def parts(name: str, p: int, m: int) -> dict[int, Partition]:
    schedule = published(name)
    run = simulate(network_of(schedule, schedule.shape(p, m)))
    return {rank: cut(run, {f"device {d}": d for d in range(p)}, rank) for rank in range(p)}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_actor_is_somewhere_and_every_send_has_its_receive(name: str) -> None:
    whole = network_of(published(name), published(name).shape(4, 8))
    cuts = parts(name, 4, 8)
    ends = {edge.actor for part in cuts.values() for edge in part.edges}
    kept = [actor.name for part in cuts.values() for actor in part.network.actors if actor.name not in ends]
    assert sorted(kept) == sorted(actor.name for actor in whole.actors)
    sent = {(r, p, e.register, e.number) for r, part in cuts.items() for e in part.edges if e.sends for p in e.peers}
    got = {(p, r, e.register, e.number) for r, part in cuts.items() for e in part.edges if not e.sends for p in e.peers}
    assert sent == got
    assert sent


def test_a_part_has_the_registers_that_it_uses_and_edges_on_queues_of_their_own() -> None:
    part = parts("1f1b", 3, 4)[1]
    assert {r.name for r in part.network.registers} == {"act.1", "x.1", "dy.0", "dy.1", "x.2"}
    assert part.network.queues[0] == "device 1"
    assert {(edge.actor, edge.firings) for edge in part.edges} == {
        ("from 0: x.1", 4),
        ("to 2: x.2", 0),
        ("to 0: dy.0", 0),
        ("from 2: dy.1", 4),
    }
    assert {actor.queue for actor in part.network.actors[2:]} == {edge.actor for edge in part.edges}


def test_a_receive_fires_as_often_as_its_register_is_filled() -> None:
    actors = (Actor("a", "q", (), (Give("x", slots=3, every=2),), 4), Actor("b", "r", (Take("x", slots=2),)))
    run = simulate(Network(actors, (Register("x", 6),)))
    (edge,) = cut(run, {"q": 0, "r": 1}, 1).edges
    assert edge.firings == 6


def test_one_register_goes_to_several_groups_of_ranks() -> None:
    actors = (
        Actor("a", "q", (), (Give("x"),), 4),
        *(Actor(f"b{n}", f"r{n}", (Take("x"),)) for n in range(3)),
    )
    run = simulate(Network(actors, (Register("x"),)))
    where: dict[str, int | tuple[int, ...]] = {"q": (0, 1), "r0": (1, 0), "r1": (2, 3), "r2": 4}
    assert [(e.actor, e.peers) for e in cut(run, where, 1).edges] == [("to 2,3: x", (2, 3)), ("to 4: x", (4,))]
    assert [(e.actor, e.peers) for e in cut(run, where, 3).edges] == [("from 0,1: x", (0, 1))]
    assert not cut(run, where, 5).network.actors


def test_what_cannot_be_cut_is_refused() -> None:
    actors = (Actor("a", "q", (), (Give("x"),), 4), Actor("b", "r", (Take("x"),)))
    run = simulate(Network(actors, (Register("x"),), "two"))
    with pytest.raises(ScheduleError, match=r"x goes from ranks 0,1 to 1,2, which overlap"):
        cut(run, {"q": (0, 1), "r": (1, 2)}, 0)
    with pytest.raises(ScheduleError, match="nothing says which ranks have queue 'r'"):
        cut(run, {"q": 0}, 0)
    filled = simulate(Network(actors, (Register("x", 2, initial=1),), "two"))
    with pytest.raises(ScheduleError, match="filled at the start"):
        cut(filled, {"q": 0, "r": 1}, 0)
    with pytest.raises(ScheduleError, match="no link for to 1: x"):
        cut(run, {"q": 0, "r": 1}, 0).work({})
