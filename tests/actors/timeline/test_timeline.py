"""Timelines: simulated runs stand for real ones, with clocks that are off, noise, a slow stage, and steps that hang."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import Ran, Simulation, simulate
from sbpflow.actors.schedules.pipeline import Costs, network_of
from sbpflow.actors.schedules.published import PUBLISHED, published
from sbpflow.actors.timeline.advice import parting
from sbpflow.actors.timeline.clocks import clock_offsets, collect, offset
from sbpflow.actors.timeline.timeline import Timeline, Trace
from sbpflow.placement.errors import ScheduleError
from sbpflow.placement.world import world
from tests.ranks import Ranks

COSTS = Costs(0.010, 0.010, 0.010, bytes=1 << 20)
Time = Callable[[str, str, int], float]


def network(name: str = "1f1b", p: int = 4, m: int = 8, costs: Costs = COSTS) -> Network:
    schedule = published(name)
    return network_of(schedule, schedule.shape(p, m, n=2 if schedule.slices else 1), costs)


def by_rank(run: Simulation, clocks: Callable[[int], float] = lambda rank: 0.0) -> dict[int, tuple[Ran, ...]]:
    """Records as real ranks would have made them, each by its own clock."""
    found: dict[int, list[Ran]] = {}
    for ran in run.firings:
        rank = int(ran.queue.split()[-1])
        found.setdefault(rank, []).append(replace(ran, start=ran.start + clocks(rank), end=ran.end + clocks(rank)))
    return {rank: tuple(records) for rank, records in found.items()}


def timeline(net: Network, time: Time | None = None) -> Timeline:
    return Timeline(net, by_rank(simulate(net, time=time)), {}, simulate(net))


def usual(net: Network, actor: str, case: str) -> float:
    return dict(net.actor(actor).times).get(case, net.actor(actor).time)


def slow_stage(net: Network, device: int, factor: float) -> Time:
    def time(actor: str, case: str, label: int) -> float:
        return usual(net, actor, case) * (factor if net.actor(actor).queue == f"device {device}" else 1.0)

    return time


def noisy(net: Network, seed: int, share: float) -> Time:
    source = random.Random(seed)
    return lambda actor, case, label: usual(net, actor, case) * source.uniform(1 - share, 1 + share)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.startswith("dualpipe")])  # two at once
def test_every_slot_comes_from_the_firing_on_the_same_micro_batch(name: str) -> None:
    net = network(name)
    done = timeline(net, noisy(net, 0, 0.3)).step.replay.done
    assert all(did.placed for did in done)
    assert sum(len(did.sources) for did in done) > len(done)
    for did in done:
        for register, by in did.sources:
            assert done[by].ran.end <= did.ran.start
            if (
                register.startswith(("x.", "dy.", "act.")) and "." not in did.ran.case
            ):  # slices have labels of their own
                assert done[by].ran.label == did.ran.label


@pytest.mark.parametrize("name", PUBLISHED)
def test_slots_in_use_are_those_of_the_simulation(name: str) -> None:
    net = network(name)
    run = simulate(net)
    peak = dict.fromkeys(net.producers, 0)
    for did in timeline(net).step.replay.done:
        for register, used in did.gives:
            peak[register] = max(peak[register], used)
    assert peak == {register: run.peak[register] for register in peak}


@pytest.mark.parametrize(("name", "most"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_counters_show_the_live_activations(name: str, most: list[int]) -> None:
    counts = {f"act.{c} filled": 0 for c in range(4)}
    last = dict(counts)
    for event in timeline(network(name)).events():
        if event["ph"] == "C" and event["pid"] != 4:
            title, args = event["name"], event["args"]
            assert isinstance(title, str)
            assert isinstance(args, dict)
            counts[title], last[title] = max(counts[title], args["slots"]), args["slots"]
    assert list(counts.values()) == most
    assert not any(last.values())


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1"])
def test_a_trace_is_what_perfetto_reads(name: str, tmp_path: Path) -> None:
    net = network(name)
    trace = json.loads(timeline(net, slow_stage(net, 1, 1.5)).save(tmp_path / "deep" / "step.json").read_text())
    events: list[Trace] = trace["traceEvents"]
    needed = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"}, "C": {"name", "pid", "tid", "ts", "args"},
        "M": {"name", "pid", "tid", "args"}, "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    }  # fmt: skip
    assert all(event.keys() == needed[str(event["ph"])] | {"ph"} for event in events)
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {
        "rank 0", "rank 1", "rank 2", "rank 3", "simulated"
    }  # fmt: skip
    assert len([e for e in events if e["ph"] == "X"]) == 2 * len(simulate(net).firings)


def test_firings_of_a_queue_do_not_overlap_and_arrows_begin_and_end_in_one() -> None:
    net = network()
    bars: dict[tuple[object, object], list[tuple[float, float]]] = {}
    ends: dict[object, dict[str, tuple[tuple[object, object], float]]] = {}
    for event in timeline(net, noisy(net, 1, 0.2)).events():
        key, ts = (event["pid"], event["tid"]), event.get("ts")
        if event["ph"] == "X":
            assert isinstance(ts, float)
            assert isinstance(event["dur"], float)
            bars.setdefault(key, []).append((ts, ts + event["dur"]))
        elif event["ph"] in ("s", "f"):
            assert isinstance(ts, float)
            ends.setdefault(event["id"], {})[str(event["ph"])] = key, ts
    assert all(a[1] <= b[0] + 0.002 for key in bars for a, b in pairwise(bars[key]))
    assert len(ends) == 2 * 2 * 3 * 8  # real and simulated, x and dy, over three borders
    for pair in ends.values():
        assert pair["s"][1] <= pair["f"][1]
        assert pair["s"][0] != pair["f"][0]
        for key, ts in pair.values():
            assert any(lo <= ts < hi for lo, hi in bars[key])


def test_a_bar_says_what_it_worked_on_and_with_which_slots() -> None:
    bar = next(e for e in timeline(network()).events() if e["name"] == "F2 micro-batch 3")
    assert (bar["pid"], bar["cat"], bar["dur"]) == (2, "forward", 10000.0)
    assert bar["args"] == {
        "micro_batch": 3,
        "takes": {"x.2": "1 of 8 slots in use"},
        "gives": {"act.2": "2 of 2 slots in use", "x.3": "1 of 8 slots in use"},
        "bytes": 1 << 20,
    }


def test_clocks_that_differ_are_put_right() -> None:
    net = network()
    clocks = {0: 5.0, 1: 1005.0, 2: -300.0, 3: 5.001}
    off = {rank: clock - clocks[0] for rank, clock in clocks.items()}
    run = simulate(net)
    plain = Timeline(net, by_rank(run), {}, run)
    shifted = Timeline(net, by_rank(run, clocks.__getitem__), off, run)
    assert shifted.summary() == plain.summary()
    assert shifted.text() == plain.text()


def test_clocks_that_stay_wrong_are_told() -> None:
    net = network()
    wrong = Timeline(net, by_rank(simulate(net), lambda rank: -0.015 * (rank == 1)))
    assert "clocks: some firings began up to 15 ms before what they take was there" in wrong.summary()
    assert all(did.placed for did in wrong.step.replay.done)
    assert "clocks" not in timeline(net).summary()


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (8, 8)])
def test_the_bubble_of_1f1b_is_the_published_one(p: int, m: int) -> None:
    step = timeline(network("1f1b", p, m)).step
    assert [step.bubble(rank) for rank in range(p)] == pytest.approx([(p - 1) / (m + p - 1)] * p)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("unit", [1e-6, 1.0, 50.0])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_step_that_runs_as_simulated_parts_nowhere(name: str, unit: float) -> None:
    """Whatever unit the simulation counts in."""
    model = network(name, costs=Costs(unit, unit, unit, bytes=1))
    real = Timeline(model, by_rank(simulate(network(name))), {}, simulate(model))
    assert "parts from the simulation: nowhere" in real.summary()
    assert real.unit == pytest.approx(0.010 / unit)


@pytest.mark.parametrize("device", range(4))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1"])
def test_a_slow_stage_is_named(name: str, device: int) -> None:
    net = network(name)
    said = timeline(net, slow_stage(net, device, 1.5)).summary()
    assert f"busiest queue: device {device} on rank {device}" in said
    assert f"try: device {device} on rank {device} takes 1.50 of" in said


def test_a_stage_that_has_nearly_all_of_the_work_is_named_though_it_was_simulated_so() -> None:
    """More micro-batches would not help; nor is one of those that wait slow, whatever time its few firings take."""
    costs = [COSTS, Costs(0.1, 0.1, 0.1, bytes=1 << 20), COSTS, COSTS]
    net = network_of(published("1f1b"), published("1f1b").shape(4, 8), costs)
    cut = "another cut of the layers, as the slowest stage sets the pace of all"
    for times in (None, slow_stage(net, 3, 1.5)):
        said = timeline(net, times).summary()
        assert "try: rank 1 works for 9" in said
        assert cut in said
    assert cut not in timeline(network()).summary()


def test_the_first_late_firing_says_what_it_waited_for() -> None:
    net = network()
    where = timeline(net, lambda a, c, n: 0.1 if (a, n) == ("B2", 1) else usual(net, a, c))
    found = parting(where.step, where.model) if where.model else None
    assert found is not None
    assert (found.kind, found.rank, str(found.expected), found.why) == ("late", 1, "B1 micro-batch 1", "filled")
    assert "waited for a filled slot of dy.1, from B2 micro-batch 1 on rank 2, which took 5.00 of its" in found.text


def test_a_late_neighbour_and_a_full_register_are_told_apart() -> None:
    """With two slots F0 must wait for B0, while F1 has nothing to do but to wait for F0."""
    net = network("1f1b", p=2, m=4)
    late = timeline(net, lambda a, c, n: 0.05 if (a, n) == ("F0", 0) else usual(net, a, c))
    why = {str(did): late.step.why(did) for did in late.step.replay.done}
    assert why["F1 micro-batch 0"] == ("filled", "for a filled slot of x.1, from F0 micro-batch 0 on rank 0")
    tight = replace(published("gpipe"), act="1")
    run = simulate(network_of(tight, tight.shape(1, 3), COSTS))
    both = tuple(replace(ran, queue=f"device {ran.actor[0] == 'B':d}") for ran in run.firings)
    actors = tuple(replace(actor, queue=f"device {actor.name[0] == 'B':d}") for actor in run.network.actors)
    step = Timeline(Network(actors, run.network.registers), {0: both}).step
    assert step.why(step.queues[0, "device 0"][1]) == (
        "freed", "for a free slot of act.0, from B0 micro-batch 0 on rank 0"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("p", "why", "fix"),
    [
        (1, "for nothing: all was there, and its queue did not begin it", "the host does not keep up"),
        (2, "for dy.0, 20 ms on its way from B1 micro-batch 1 on rank 1", "data is long on its way"),
    ],
)
def test_what_is_ready_and_begins_late_is_told_from_what_is_on_its_way(p: int, why: str, fix: str) -> None:
    net = network("1f1b", p, m=2)
    records = by_rank(simulate(net))
    *others, last = records[0]
    late = {**records, 0: (*others, replace(last, start=last.start + 0.02, end=last.end + 0.02))}
    said = Timeline(net, late, {}, simulate(net)).summary()
    assert f"B0 micro-batch 1 began 20 ms later than simulated, having waited {why}" in said
    assert fix in said


@pytest.mark.parametrize("seed", range(3))
def test_the_first_difference_of_order_is_found(seed: int) -> None:
    """Against a look at every queue, one by one."""
    net = network("gpipe")
    where = timeline(net, noisy(net, seed, 0.6))
    assert where.simulated is not None
    assert where.model is not None
    first = []
    for queue in net.queues:
        mine = by_rank(simulate(net, time=noisy(net, seed, 0.6)))[int(queue[-1])]
        pairs = zip(mine, where.simulated.of(queue), strict=True)
        first += [(a.start, queue, a.actor, a.label) for a, b in pairs if (a.actor, a.label) != (b.actor, b.label)][:1]
    found = parting(where.step, where.model, tolerance=1e9)
    assert found is not None
    assert found.found is not None
    ran = found.found.ran
    assert (ran.start, found.queue, ran.actor, ran.label) == min(first)
    assert f"ran {found.found} where {found.expected} was to come" in where.summary(tolerance=1e9)


def test_a_step_that_hangs_shows_the_firing_that_did_not_end() -> None:
    net = network()
    hung = simulate(net, time=lambda a, c, n: 1e9 if (a, n) == ("F1", 3) else usual(net, a, c))
    ended = {rank: tuple(r for r in records if r.end < 1e9) for rank, records in by_rank(hung).items()}
    said = Timeline(net, ended, {}, simulate(net)).summary().splitlines()
    assert "      F1 (fired 3) is ready" in said
    assert "      F2 (fired 3) waits for x.2: 0 of 1 filled, by F1" in said
    assert any("rank 1, device 1: F1 micro-batch 3 was not run" in line for line in said)
    assert "the step did not end" in said[-1]


def over_links(posted: float) -> Timeline:
    """F0 on rank 0, two seconds on the way, F1 on rank 1, whose receive was posted at `posted`."""
    net = Network(
        (
            Actor("F0", "device 0", (), (Give("x"),), 1),
            Actor("send x", "send 0", (Take("x"),), (Give("on the way"),)),
            Actor("receive x", "receive 1", (Take("on the way"),), (Give("y"),)),
            Actor("F1", "device 1", (Take("y"),)),
        ),
        (Register("x", bytes=8), Register("on the way"), Register("y", bytes=8)),
    )
    sent = Ran("F0", "", 0, "device 0", 0.0, 1.0), Ran("send x", "", 0, "send 0", 1.0, 3.0)
    got = Ran("receive x", "", 0, "receive 1", posted, 3.0), Ran("F1", "", 0, "device 1", 3.0, 4.0)
    return Timeline(net, {0: sent, 1: got})


@pytest.mark.parametrize("posted", [0.0, 1.0, 2.5])
def test_communication_is_exposed_from_when_it_is_sent(posted: float) -> None:
    """Not from when a receive was posted: before that the rank waits for its neighbour, not for the wire."""
    step = over_links(posted).step
    assert [step.exposed(0), step.exposed(1)] == [2.0, min(2.0, 3.0 - posted)]
    assert [step.bubble(0), step.bubble(1)] == [0.75, 0.75]
    assert step.busiest() == (0, "send 0", 0.5)
    assert "clocks" not in over_links(posted).summary()


def test_a_rank_that_waits_for_the_wire_is_told_to_run_ahead() -> None:
    assert "try: rank 0 waits 50% of the step for data on its way" in over_links(1.0).summary()


def test_text_shows_a_row_for_each_queue() -> None:
    net = network("gpipe", p=2, m=2)
    assert timeline(net, slow_stage(net, 1, 2.0)).text(width=60).splitlines() == [
        "rank 0 device 0    |F0--F1--............................B0------........B1------|",
        "rank 1 device 1    |....F0------F1------B0--------------B1--------------........|",
        "simulated device 0 |F0--F1--............B0------B1------........................|",
        "simulated device 1 |....F0--F1--B0------B1------................................|",
    ]


def test_records_of_another_network_are_refused() -> None:
    ran = Ran("F9", "", 0, "device 0", 0.0, 1.0)
    with pytest.raises(ScheduleError, match=r"rank 3 ran F9\n.*no actor 'F9'.*\n.*give the network"):
        Timeline(network(), {3: (ran,)})


def test_a_step_without_records_says_so() -> None:
    empty = Timeline(network(), {0: ()})
    assert empty.summary() == "1f1b p=4 m=8: nothing was recorded"
    assert empty.text() == ""
    assert [event["ph"] for event in empty.events()] == ["M", "M"]


def test_an_offset_is_off_by_half_of_the_shortest_way_at_most() -> None:
    source = random.Random(0)
    for _ in range(50):
        true = source.uniform(-1e3, 1e3)
        exchanges = []
        for _ in range(8):
            sent, there, back = source.uniform(0, 10), source.expovariate(1e3), source.expovariate(1e3)
            exchanges.append((sent, sent + there + true, sent + there + back))
        shortest = min(back - sent for sent, _, back in exchanges)
        assert abs(offset(exchanges) - true) <= shortest / 2 + 1e-9


def measured(shift: float) -> tuple[dict[int, float], dict[int, tuple[Ran, ...]]]:
    rank = world().rank
    assert rank is not None
    ranks = (0, 1, 3)
    if rank not in ranks:
        return {}, {}
    offsets = clock_offsets(ranks, clock=lambda: time.monotonic() + shift * rank)
    return offsets, dict(collect(ranks, (Ran("F0", "", 0, f"device {rank}", 0.0, 1.0),)))


def test_ranks_compare_their_clocks_and_bring_their_records_to_the_first(ranks4: Ranks) -> None:
    first, *others = ranks4(measured, 100.0)
    assert first[0] == pytest.approx({0: 0.0, 1: 100.0, 3: 300.0}, abs=0.05)  # one host: the clocks are the same
    assert {rank: records[0].queue for rank, records in first[1].items()} == {
        0: "device 0", 1: "device 1", 3: "device 3"
    }  # fmt: skip
    assert others == [({}, {})] * 3


def test_communication_is_hidden_while_its_rank_computes() -> None:
    """Of two seconds on the wire, the sender computes the next during the first."""
    before = over_links(2.5)
    more = Ran("F0", "", 1, "device 0", 1.0, 2.0)
    step = Timeline(before.network, {**before.ranks, 0: (*before.ranks[0], more)}).step
    assert (step.hidden(0), step.exposed(0)) == (1.0, 1.0)
    assert (step.hidden(1), step.exposed(1)) == (0.0, 0.5)
