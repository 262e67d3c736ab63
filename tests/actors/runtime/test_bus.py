"""A network on several processes does what it does in one, and ends on all of them where it fails on one."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P
from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import Ran, Simulation, simulate
from sbpflow.actors.protocol.state import Firing
from sbpflow.actors.runtime import progress
from sbpflow.actors.runtime.answers import Answers
from sbpflow.actors.runtime.bus import Bus, bus
from sbpflow.actors.runtime.channel import Link, TensorLink, token
from sbpflow.actors.runtime.partition import Partition, RegisterEnd, cut
from sbpflow.actors.runtime.runtime import Runtime, Work, order_of
from sbpflow.actors.schedules.pipeline import Costs, network_of
from sbpflow.actors.schedules.published import published
from sbpflow.placement.errors import SbpflowError, ScheduleError
from sbpflow.placement.world import store
from tests.actors.runtime.test_runtime import random_network, words
from tests.actors.ticks import LIMIT, Clock, Meet, meeting
from tests.ranks import Ended, Fresh, Ranks

Where: TypeAlias = dict[str, int | tuple[int, ...]]
LONG = 60.0  # seconds: the limit of what shall fail for another reason, and a rank's whole test takes less


def bytes_of(line: Bus, edge: RegisterEnd) -> Link:
    to, of = (edge.peers, ()) if edge.sends else ((), edge.peers)
    return token(line.line, edge.number, to=to, of=of)


def runtime(
    run: Simulation,
    where: Where,
    work: Callable[[Partition], Mapping[str, Work]],
    *,
    link: Callable[[Bus, RegisterEnd], Link] = bytes_of,
    ordered: bool = True,
    timeout: float = 20.0,
) -> Runtime:
    """This rank's part; the bus is of all ranks, whether they have a part or not."""
    size = flow.init().size
    assert size is not None
    line = bus(range(size))
    part = cut(run, where, line.rank)
    links = {edge.actor: link(line, edge) for edge in part.edges}
    order, answers = (order_of(run), Answers(run).of(part, where)) if ordered else (None, None)
    every = {**work(part), **part.work(links)}
    return Runtime(part.network, every, order=order, guard=line, answers=answers, timeout=timeout)


# -- as in one process --


def devices(p: int) -> Where:
    return {f"device {d}": d for d in range(p)}


def ranks_meet(name: str) -> Meet:
    line = store()

    def meet(parties: int, at: int) -> None:
        if line.add(f"{name} {at}", 1) == parties:
            line.set(f"{name} {at} is met", "")
        line.wait([f"{name} {at} is met"], timedelta(seconds=LIMIT))

    return meet


def simulated(name: str, p: int) -> Simulation:
    schedule = published(name)
    return simulate(network_of(schedule, schedule.shape(p, 8), Costs(1.0, 1.0, 1.0)))


def met(name: str, p: int, ordered: bool) -> list[Ran]:
    run = simulated(name, p)
    work = meeting(run, ranks_meet(f"{name} {p} {ordered}"))
    with runtime(run, devices(p), lambda part: work, ordered=ordered) as running:
        return list(running.run(record=True).firings)


@pytest.mark.parametrize(
    ("name", "p", "ordered"),
    [("1f1b", 2, False), ("1f1b", 4, False), ("zb_h1", 4, True), ("interleaved", 4, False), ("gpipe", 2, True)],
)
def test_ranks_do_at_one_time_and_in_order_what_is_simulated_so(
    ranks4: Ranks, name: str, p: int, ordered: bool
) -> None:
    run = simulated(name, p)
    ran = [each for rank in ranks4(met, name, p, ordered) for each in rank]
    for queue in run.network.queues:
        assert words([each for each in ran if each.queue == queue]) == words(run.of(queue))


def delayed(seeds: Sequence[int]) -> list[list[str]]:
    """What this rank ran of random networks, whose queue n is on rank n."""
    rank, found = flow.init().rank, []
    for seed in seeds:
        network, draw = random_network(seed), random.Random(seed)
        work: dict[str, Work] = {a.name: lambda f: time.sleep(draw.random() * 1e-3) for a in network.actors}  # noqa: B023
        where: Where = {queue: int(queue[1:]) for queue in network.queues}
        with runtime(simulate(network), where, lambda part: work, ordered=seed % 2 == 0) as running:  # noqa: B023
            ran = running.run(record=True).of(f"q{rank}")
        found.append(sorted(f"{each.actor}{each.label}" for each in ran))
    return found


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.sweep)])
def test_random_networks_finish_on_ranks_under_random_delays(ranks4: Ranks, count: int) -> None:
    seeds = [seed for seed in range(2 * count) if simulate(random_network(seed)).finished][:count]
    for rank, found in enumerate(ranks4(delayed, seeds)):
        for seed, names in zip(seeds, found, strict=True):
            ran = simulate(random_network(seed)).of(f"q{rank}")
            assert names == sorted(f"{each.actor}{each.label}" for each in ran)


def relay(firings: int, high: int = 1) -> Network:
    """A value that goes on from rank to rank, one more at each."""
    actors = tuple(
        Actor(
            f"a{n}",
            f"device {n}",
            (Take(f"x{n}"),) if n else (),
            (Give(f"x{n + 1}"),) if n < 3 else (),
            0 if n else firings,
        )
        for n in range(4)
    )
    return Network(actors, tuple(Register(f"x{n}", high) for n in range(1, 4)), "relay")


def tensors(size: int) -> Callable[[Bus, RegisterEnd], Link]:
    def link(line: Bus, edge: RegisterEnd) -> Link:
        if edge.sends:
            return TensorLink(line.line, edge.number, sends=tuple((peer, lambda value: value) for peer in edge.peers))
        return TensorLink(line.line, edge.number, receives=tuple((p, lambda: torch.empty(size)) for p in edge.peers))

    return link


def relayed(size: int, firings: int, ordered: bool) -> list[list[float]]:
    """Of each of two steps what this rank saw."""
    seen: list[float] = []

    def work(firing: Firing) -> list[Tensor]:
        value = firing.held[0][0].value if firing.held else torch.full((size,), 100.0 * firing.label)
        assert bool((value == value[0]).all())
        seen.append(value[0].item())
        return [value + 1] if rank < 3 else []

    rank = flow.init().rank or 0
    with runtime(
        simulate(relay(firings)), devices(4), lambda part: {f"a{rank}": work}, link=tensors(size), ordered=ordered
    ) as running:
        running.run()
        first, seen = seen, []
        running.run()
    return [first, seen]


@pytest.mark.parametrize("size", [3, 200_000], ids=["small", "large"])
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "as_it_comes"])
def test_tensors_arrive_in_order_and_whole(ranks4: Ranks, size: int, ordered: bool) -> None:
    for rank, steps in enumerate(ranks4(relayed, size, 6, ordered)):
        assert steps == [[100.0 * label + rank for label in range(6)]] * 2


def recorded(ordered: bool) -> list[Ran]:
    line = flow.init().rank or 0
    with runtime(
        simulate(relay(6)),
        devices(4),
        lambda part: {f"a{line}": lambda f: [torch.zeros(8)] if line < 3 else []},
        link=tensors(8),
        ordered=ordered,
    ) as running:
        return list(running.run(record=True).firings)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "as_it_comes"])
def test_messages_are_recorded_on_queues_of_their_own(ranks4: Ranks, ordered: bool) -> None:
    ranks = ranks4(recorded, ordered)
    for here, there in pairwise(range(4)):
        sent = [ran for ran in ranks[here] if ran.queue.startswith("to ")]
        got = [ran for ran in ranks[there] if ran.queue.startswith("from ")]
        assert [ran.label for ran in sent] == [ran.label for ran in got] == list(range(6))
        for one, other in zip(sent, got, strict=True):
            assert one.start < other.end  # one clock for all processes of a host
        for queue in (sent, got):
            assert all(one.end <= other.start for one, other in pairwise(queue))


def halves() -> list[list[float]]:
    """Two stages of two ranks: each rank of the first has half of a value, each of the second wants the whole."""
    actors = (Actor("a", "first", (), (Give("x"),), 3), Actor("b", "second", (Take("x"),)))
    run = simulate(Network(actors, (Register("x", 2),)))
    rank, got = flow.init().rank or 0, []

    def link(line: Bus, edge: RegisterEnd) -> Link:
        sends = tuple((peer, lambda value: value) for peer in edge.peers) if edge.sends else ()
        receives = () if edge.sends else tuple((peer, lambda: torch.empty(2)) for peer in edge.peers)
        return TensorLink(line.line, edge.number, sends, receives, torch.cat)

    work: dict[str, Work] = {
        "a": lambda f: [torch.tensor([1.0, 2.0]) + 2 * rank + 10 * f.label],
        "b": lambda f: got.append(f.held[0][0].value.tolist()),
    }
    with runtime(run, {"first": (0, 1), "second": (2, 3)}, lambda part: work, link=link) as running:
        running.run()
    return got


def test_a_stage_of_several_ranks_sends_and_receives_in_pieces(ranks4: Ranks) -> None:
    whole = [[1.0, 2.0, 3.0, 4.0], [11.0, 12.0, 13.0, 14.0], [21.0, 22.0, 23.0, 24.0]]
    assert ranks4(halves) == [[], [], whole, whole]


def compared(different: int) -> str:
    """What the ranks say of networks of which one rank's is another."""
    rank, size = flow.init().rank, flow.init().size or 0
    network = relay(3, high=2 if rank == different else 1)
    try:
        bus(range(size)).agree(network)
    except ScheduleError as error:
        return str(error)
    return ""


def test_ranks_with_different_networks_are_told_the_first_line_that_differs(ranks4: Ranks) -> None:
    assert ranks4(compared, -1) == [""] * 4
    said = ranks4(compared, 2)
    assert len(set(said)) == 1
    assert "ranks 0 and 2 have different networks, from line 2 on" in said[0]
    assert "rank 0: register x1: 1 slots" in said[0]
    assert "rank 2: register x1: 2 slots" in said[0]


# -- failures --

Ill: TypeAlias = Literal["raises", "dies", "is interrupted", "waits and is interrupted", "hangs"]


class Told(NamedTuple):
    """The error of a rank."""

    kind: str
    text: str
    again: str = ""  # what another step says


def failing(ill: Ill, who: int, ordered: bool) -> Told:
    """A relay of which one rank does ill at its third micro-batch."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background begin with it ignored

    def work(firing: Firing) -> list[None]:
        if rank == who and firing.label == 2:
            if ill == "raises":
                raise ValueError("no more of this")
            if ill == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if ill == "is interrupted":
                signal.raise_signal(signal.SIGINT)
            if ill == "waits and is interrupted":
                store().wait(["interrupted"], timedelta(seconds=LIMIT))  # what the next one waits for comes after that
            if ill == "hangs":
                stuck(clock)
        return [None] if rank < 3 else []

    flow.init(timeout=60)
    rank = flow.init().rank or 0
    limit, clock = 1.0 if ill == "hangs" else LONG, Clock(0.1)
    if ill == "hangs":
        setattr(progress, "monotonic", clock)  # noqa: B010
    running = runtime(simulate(relay(50)), devices(4), lambda part: {f"a{rank}": work}, ordered=ordered, timeout=limit)
    if ill == "waits and is interrupted" and rank == who + 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        running.run()
    except BaseException as error:
        told = Told(type(error).__name__, str(error))
        if isinstance(error, KeyboardInterrupt):
            store().set("interrupted", "")
    else:
        return Told("", "")
    try:
        running.run()
    except SbpflowError as error:
        return told._replace(again=str(error))
    return told


def stuck(clock: Clock) -> None:
    """Nothing goes on here, until this rank's watch has told so; time passes on no other."""
    clock.goes = True
    line, end = bus(range(flow.init().size or 0)), time.monotonic() + LIMIT
    while line.broken is None and time.monotonic() < end:
        time.sleep(0.01)


def together(who: int) -> Told:
    """One stage on all ranks, whose work is a collective that one rank leaves out by an error of its own."""
    rank, size = flow.init(timeout=60).rank or 0, flow.init().size or 0
    p = flow.placement("cpu", range(size))
    summed, everywhere = flow.layout(p, P, (4,)), flow.layout(p, B, (4,))

    def work(firing: Firing) -> None:
        if rank == who and firing.label == 2:
            raise ValueError("not with me")
        (got,) = flow.box([torch.ones(4)], summed, everywhere)
        assert got.tolist() == [size] * 4

    network = Network((Actor("a", "stage", firings=5),), (), "one stage")
    running = runtime(simulate(network), {"stage": tuple(range(size))}, lambda part: {"a": work})
    try:
        running.run()
    except Exception as error:
        return Told(type(error).__name__, str(error))
    return Told("", "")


def test_an_error_ends_the_collectives_of_the_others(fresh: Fresh) -> None:
    told = survivors(fresh(4, together, 1))
    assert told[1][:2] == ("ValueError", "not with me")
    for rank in (0, 2, 3):
        assert told[rank].kind == "TransportError"
        assert "rank 1 gave up in a, micro-batch 2: ValueError: not with me" in told[rank].text


def survivors(ended: Sequence[Ended], *, lost: int = -1) -> dict[int, Told]:
    found = {}
    for rank, end in enumerate(ended):
        if rank != lost:
            assert end.answer is not None, f"rank {rank} gave no answer\n{end.stderr}"
            assert end.answer.error is None, end.answer.error
            assert end.code == 0, f"rank {rank} ended with {end.code}\n{end.stderr}"
            assert isinstance(end.answer.value, Told)
            found[rank] = end.answer.value
    return found


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "as_it_comes"])
def test_an_error_on_one_rank_is_told_on_all(fresh: Fresh, ordered: bool) -> None:
    told = survivors(fresh(4, failing, "raises", 1, ordered))
    assert told[1][:2] == ("ValueError", "no more of this")
    for rank in (0, 2, 3):
        assert told[rank].kind == "TransportError"
        assert told[rank].text.startswith("rank 1 gave up in a1, micro-batch 2: ValueError: no more of this\n")
    assert all("no longer talk to each other since an earlier step failed" in each.again for each in told.values())


def two_hosts(rank: int) -> dict[str, str]:
    return {"SBPFLOW_HOST": f"host {rank // 2}"}


def test_an_error_is_told_on_other_hosts(fresh: Fresh) -> None:
    told = survivors(fresh(4, failing, "raises", 0, True, environment=two_hosts))
    for rank in (1, 2, 3):
        assert told[rank].text.startswith("rank 0 gave up in a0, micro-batch 2: ValueError: no more of this\n")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_dies_is_named_on_all_others(fresh: Fresh, who: int) -> None:
    for told in survivors(fresh(4, failing, "dies", who, True), lost=who).values():
        assert told.kind == "TransportError"
        assert told.text.startswith(f"rank {who} died\n")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "as_it_comes"])
def test_an_interrupt_on_one_rank_ends_all(fresh: Fresh, ordered: bool) -> None:
    told = survivors(fresh(4, failing, "is interrupted", 2, ordered))
    assert told[2].kind == "KeyboardInterrupt"
    assert all("rank 2 gave up in a2, micro-batch 2: KeyboardInterrupt" in told[rank].text for rank in (0, 1, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "as_it_comes"])
def test_an_interrupt_ends_the_wait_for_a_message(fresh: Fresh, ordered: bool) -> None:
    told = survivors(fresh(4, failing, "waits and is interrupted", 2, ordered))
    assert told[3].kind == "KeyboardInterrupt"
    assert all(told[rank].text.startswith("rank 3 gave up: KeyboardInterrupt") for rank in (0, 1))
