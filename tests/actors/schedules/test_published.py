"""The published schedules do what their papers say: order, time, idle time and slots, for every p and m."""

import math
import random
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sbpflow.actors import Costs, Network, Preview, Schedule, Shape, bubble, peak_slots, published, simulate
from sbpflow.actors.protocol.state import Desk, Firing
from sbpflow.actors.schedules.pipeline import network_of, version
from sbpflow.actors.schedules.v_orders import slots
from sbpflow.placement.errors import ScheduleError

GOLDEN = Path(__file__).with_name("golden_orders.txt")
EVEN = Costs(1, 0.5, 0.5)  # backward as long as forward
UNIT = Costs()


def golden() -> dict[str, tuple[float, float, tuple[int, ...], tuple[str, ...]]]:
    """By name when a schedule ends, the longest span of a device, slots and rows."""
    found = {}
    for block in GOLDEN.read_text().split("\n\n")[1:]:
        head, *rows = block.strip().splitlines()
        name, _, end, _, span, _, *held = head.split()
        found[name] = float(end), float(span), tuple(map(int, held)), tuple(rows)
    return found


KNOWN = golden()


def shown(name: str, p: int, m: int, costs: Costs = UNIT) -> Preview:
    return published(name).show(p, m, costs=costs)


@pytest.mark.parametrize("name", sorted(KNOWN.keys() - {"v_half", "v_min"}))
def test_a_schedule_has_the_published_order(name: str) -> None:
    drawn = published(name).show(4, 4, n=2) if name == "terapipe" else shown(name, 4, 8)
    assert drawn.order == KNOWN[name][3]


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_schedule_has_the_published_time_and_slots(name: str) -> None:
    drawn = published(name).show(4, 4, n=2) if name == "terapipe" else shown(name, 4, 8)
    span = max(drawn.run.span(f"device {s}") for s in range(4))
    assert (drawn.end, span, drawn.slots) == KNOWN[name][:3]


def one_f_one_b(p: int, m: int, s: int) -> str:
    lead = min(p - s, m)
    words = [f"F{k}" for k in range(lead)]
    for k in range(m):
        words += [f"B{k}", *([f"F{k + lead}"] if k + lead < m else [])]
    return " ".join(words)


def interleaved(p: int, m: int, s: int) -> str:
    """Groups of p micro-batches up the chunks and down; 2(p-s-1)+p forwards, then one and a backward by turns."""
    up = [f"{'Ff'[c]}{k}" for at in range(0, m, p) for c in (0, 1) for k in range(at, at + p)]
    down = [f"{'Bb'[c]}{k}" for at in range(0, m, p) for c in (1, 0) for k in range(at, at + p)]
    lead = min(2 * (p - s - 1) + p, len(up))
    words = up[:lead]
    for f, b in zip(up[lead:], down, strict=False):
        words += [f, b]
    return " ".join([*words, *down[len(up) - lead :]])


@pytest.mark.parametrize("p", range(2, 9))
def test_orders_are_the_published_ones_at_any_size(p: int) -> None:
    for m in (p, 2 * p, 3 * p):
        assert shown("1f1b", p, m).order == tuple(one_f_one_b(p, m, s) for s in range(p))
        assert shown("interleaved", p, m, Costs(hop=0.1)).order == tuple(interleaved(p, m, s) for s in range(p))


def law(name: str, p: int, m: int) -> tuple[float, list[int]]:
    """The share of idle time and the slots of every device, T being 3 and of it F, B and W 1 each."""
    line = range(p)
    pool = [min(2 * (p - s - 1) + p + 1, 2 * m) for s in line]
    h2 = max(0, p - 1 - max(0, m - p))  # fewer than 2p-1 micro-batches do not fill the line
    return {
        "gpipe": ((p - 1) / (m + p - 1), [m for _ in line]),
        "gpipe_lifo": ((p - 1) / (m + p - 1), [m for _ in line]),
        "1f1b": ((p - 1) / (m + p - 1), [min(p - s, m) for s in line]),
        "eager_1f1b": ((p - 1) / (m + p - 1), [min(2 * (p - s) - 1, m) for s in line]),
        "interleaved": ((p - 1) / (2 * m + p - 1), pool),
        "breadth_first": ((p - 1) / (2 * m + p - 1), [2 * m for _ in line]),
        "zb_h1": ((p - 1) / (3 * m + p - 1), [min(p, m) for _ in line]),
        "zb_h2": (h2 / (3 * m + h2), [min(2 * p - 1, m) for _ in line]),
    }[name]


LAWS = ("gpipe", "gpipe_lifo", "1f1b", "eager_1f1b", "interleaved", "breadth_first", "zb_h1", "zb_h2")


def check_law(name: str, p: int, m: int) -> None:
    schedule = published(name)
    run = simulate(network_of(schedule, schedule.shape(p, m)))
    idle, held = law(name, p, m)
    assert run.finished
    assert bubble(run) == pytest.approx(idle), (name, p, m)
    assert list(peak_slots(run).values()) == held, (name, p, m)


@pytest.mark.parametrize("name", LAWS)
def test_idle_time_and_slots_are_those_of_the_formulas(name: str) -> None:
    for p in (2, 3, 4, 6):
        for m in (p, 2 * p, 4 * p):
            check_law(name, p, m)


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("p", range(2, 17))
def test_formulas_hold_for_every_number_of_micro_batches(name: str, p: int) -> None:
    for m in range(p, 4 * p + 1):
        if name != "interleaved" or m % p == 0:
            check_law(name, p, m)


@pytest.mark.parametrize("p", [2, 3, 4, *(pytest.param(p, marks=pytest.mark.sweep) for p in range(5, 9))])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaving_ends_also_where_groups_are_not_whole(v: int, p: int) -> None:
    """Papers want whole groups of p; the memory is theirs with any number."""
    schedule = published("interleaved")
    for m in range(1, 3 * p + 1):
        run = simulate(network_of(schedule, schedule.shape(p, m, v=v)))
        assert run.finished, (p, m)
        assert all(run.peak[f"pool.{s}"] <= 2 * (p - s - 1) + (v - 1) * p + 1 for s in range(p))


def vee_idle(name: str, p: int) -> int:
    """Units that a device is idle from its first to its last, once 2p micro-batches fill the line."""
    if name == "zb_v":
        return 0
    if name == "v_half":
        return max(1, 3 * p - 7 + p % 2)
    return max(1, 4 * p - (7, 5, 9)[p % 3])  # measured; no number of devices is worse than published


def check_vee(name: str, p: int, m: int) -> None:
    schedule = published(name)
    run = simulate(network_of(schedule, schedule.shape(p, m)))
    assert run.finished
    assert len(run.firings) == 6 * p * m
    assert max(peak_slots(run).values()) <= slots(name, p)
    if m >= 2 * p:
        span = max(run.span(f"device {s}") for s in range(p)) - 6 * m
        some = (0, 2) if name == "v_min" and p % 3 == 2 else (0,)  # there the end of the line depends on m
        assert span - vee_idle(name, p) in some
        assert run.end == 6 * m + (p - 1 if name == "zb_v" else span)


@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min"])
def test_the_v_family_keeps_its_memory_and_its_time(name: str) -> None:
    draw = random.Random(name)
    for p in (2, 3, 4, 5, 6):  # all that `vee_idle` tells apart
        for m in (1, draw.randint(2, p), draw.randint(p, 2 * p), 2 * p):
            check_vee(name, p, m)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min"])
@pytest.mark.parametrize("p", range(2, 17))
def test_the_v_family_has_an_order_for_every_number_of_micro_batches(name: str, p: int) -> None:
    for m in range(1, 4 * p + 1):
        check_vee(name, p, m)


def test_the_v_family_needs_the_published_slots() -> None:
    assert [slots("v_min", p) for p in (4, 6, 8, 12, 16)] == [4, 6, 8, 10, 12]
    published_end = {4: 11, 6: 17, 8: 27, 12: 41, 16: 59}  # beyond 6 units a micro-batch
    assert all(vee_idle("v_min", p) <= end for p, end in published_end.items())


@pytest.mark.parametrize(("p", "ends"), [(4, (10, 18, 34)), (6, (16, 28, 52)), (8, (22, 38, 70))])
def test_chimera_takes_the_published_time(p: int, ends: tuple[int, ...]) -> None:
    assert tuple(shown("chimera", p, m, EVEN).end for m in (p, 2 * p, 4 * p)) == ends
    drawn = shown("chimera", p, p)
    assert drawn.end == 5 * p - 4
    assert max(drawn.slots) <= p


@pytest.mark.parametrize("p", [4, 6, 8])
def test_chimera_with_more_micro_batches_than_devices_has_better_marks_beside_it(p: int) -> None:
    """With B = 2F the paper's marks are slower than 1F1B there."""
    assert shown("chimera", p, 4 * p).end > 1.15 * shown("1f1b", p, 4 * p).end
    for m in (p, 2 * p, 4 * p, 8 * p):
        paper, free, full, line = (shown(name, p, m) for name in ("chimera", "chimera_free", "chimera_full", "1f1b"))
        assert free.slots == paper.slots
        assert free.end <= (0.97 if m > p else 1.0) * paper.end
        assert full.end < line.end
        assert max(full.slots) <= p + 1
    for m in (p, 2 * p, 4 * p):
        assert shown("chimera_free", p, m, EVEN).end == shown("chimera", p, m, EVEN).end


def test_two_routes_share_micro_batches_also_where_they_are_odd() -> None:
    for m in range(1, 10):
        for name in ("chimera", "gems"):
            did = [cell.op for row in shown(name, 4, m).rows for cell in row]
            assert Counter(op.number for op in did) == dict.fromkeys(range(m), 8)
            assert all(op.chunk == op.number % 2 for op in did)


@pytest.mark.parametrize("p", range(2, 9))
def test_gems_has_one_activation_at_a_time(p: int) -> None:
    for m in (2, 4, 8):
        drawn = shown("gems", p, m)
        assert drawn.end == m // 2 * (4 * p + 2) + p - 1
        assert set(drawn.slots) == {1}


def test_terapipe_idles_for_slices_and_not_for_sequences() -> None:
    for p in range(2, 9):
        for m, n in ((p, 2), (3, 4), (2 * p, 3)):
            drawn = published("terapipe").show(p, m, n=n)
            assert drawn.bubble == pytest.approx((p - 1) / (m * n + p - 1))
            assert drawn.slots == tuple(min(p - s - 1 + n, m * n) for s in range(p))
            for row in drawn.rows:
                back = [cell.op.number for cell in row if cell.op.kind == "B"]
                assert back == [q * n + k for q in range(m) for k in reversed(range(n))]


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_a_micro_batch_sees_one_version_of_the_weights(name: str, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = published(name)
    shape = schedule.shape(p, 5 * p)
    seen: Counter[tuple[int, int, int]] = Counter()  # chunk, micro-batch and version

    class Watched(Desk):
        def fire(self, at: int) -> Firing:
            firing = super().fire(at)
            actor = self.wiring.actors[at].actor
            for take, held in zip(actor.takes, firing.held, strict=True):
                if take.register.startswith("w."):
                    first = self.wiring.network.register(take.register).initial  # so many are of the first version
                    seen[int(actor.name[1:]), firing.label, max(0, held[0].label - first + 1)] += 1
            return firing

    monkeypatch.setattr(import_module("sbpflow.actors.protocol.simulate"), "Desk", Watched)
    assert simulate(network_of(schedule, shape)).finished
    assert seen == {(c, k, version(schedule, shape, c, k)): 2 for c in range(p) for k in range(5 * p)}


def test_weights_are_as_old_as_published() -> None:
    dream, twice = published("pipedream"), published("2bw")
    shape = dream.shape(4, 20)
    assert [version(dream, shape, s, 10) for s in range(4)] == [7, 8, 9, 10]
    assert [version(twice, shape, 0, k) for k in range(12)] == [0] * 6 + [1] * 3 + [2] * 3
    for name, kept in (("pipedream", [4, 3, 2, 1]), ("2bw", [2, 2, 2, 2])):
        run = simulate(network_of(published(name), shape))
        assert [run.peak[f"w.{s}"] for s in range(4)] == kept
    assert version(published("1f1b"), shape, 0, 19) == 0


PROFILED = [  # p, m, times of F, B, W and a hop; the published bubbles of 1F1B, ZB-H1 and ZB-H2
    (8, 24, Costs(18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 64, Costs(18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (16, 48, Costs(11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
]


@pytest.mark.parametrize(("p", "m", "costs", "rates"), PROFILED)
def test_bubbles_at_profiled_times_are_the_published_ones(
    p: int, m: int, costs: Costs, rates: tuple[float, ...]
) -> None:
    names = ("1f1b", "zb_h1", "zb_h2")
    runs = [simulate(network_of(schedule, schedule.shape(p, m), costs)) for schedule in map(published, names)]
    assert tuple(round(bubble(run), 4) for run in runs) == rates


def period(name: str, hop: float) -> float:
    """What another micro-batch takes, in the long run."""
    return (shown(name, 4, 60, Costs(hop=hop)).end - shown(name, 4, 20, Costs(hop=hop)).end) / 40


@pytest.mark.parametrize("hop", [0.25, 0.5, 1.0])
def test_eager_forwards_hide_the_hops(hop: float) -> None:
    assert period("1f1b", hop) == pytest.approx(3 + 2 * hop * 3 / 4)
    assert period("eager_1f1b", hop) == pytest.approx(3)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2", "interleaved", "v_half"])
def test_the_order_is_the_same_whatever_time_things_take(name: str) -> None:
    schedule, draw = published(name), random.Random(0)
    network = network_of(schedule, schedule.shape(8, 16), Costs(hop=0.1))
    orders = set()
    for _ in range(20):
        run = simulate(network, time=lambda actor, case, label: draw.uniform(0.7, 1.3))
        assert run.finished
        orders.add(tuple(tuple(map(str, run.of(queue))) for queue in network.queues))
    assert len(orders) == 1


def test_costs_may_be_those_of_each_chunk() -> None:
    """A slow last stage: it takes all its time, and the others wait for it."""
    costs = [Costs(1, 1, 1, bytes=100), Costs(1, 1, 1, bytes=10), Costs(2, 2, 2, bytes=1)]
    drawn = published("1f1b").show(3, 9, costs=costs)
    assert drawn.run.busy("device 2") == 54
    assert drawn.end == 54 + 2 * 3
    assert drawn.memory == (300, 20, 1)
    with pytest.raises(ScheduleError, match="costs of 2 chunks for 3"):
        published("1f1b").show(3, 9, costs=costs[:2])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0])
def test_costs_that_no_clock_can_tell_are_refused(wrong: float) -> None:
    """A simulation with such a time never ended, or raised from inside."""
    for field in ("forward", "backward", "weight", "hop", "update"):
        made: dict[str, Any] = {field: wrong}
        with pytest.raises(ScheduleError, match=rf"Costs\({field}={wrong}\)\n  give what it takes"):
            Costs(**made)
    network = network_of(published("1f1b"), Shape(2, 2))
    actor, *others = network.actors
    with pytest.raises(ScheduleError, match="F0 takes"):
        Network((replace(actor, time=wrong), *others), network.registers)
    with pytest.raises(ScheduleError, match="a delay of"):
        Network(network.actors, tuple(replace(r, delay=wrong) for r in network.registers))
    with pytest.raises(ScheduleError, match=r"F0 takes .* for 0"):
        simulate(network, time=lambda actor, case, label: wrong)


def test_a_hop_is_only_between_devices() -> None:
    """Down and up again: the turn of a V stays on its device."""
    schedule = Schedule("vee", way="vee")
    network = network_of(schedule, schedule.shape(2, 1), Costs(hop=5))
    assert [network.register(name).delay for name in ("x.1", "x.2", "x.3", "dy.2", "dy.1", "dy.0")] == [
        5,
        0,
        5,
        5,
        0,
        5,
    ]


def test_backward_of_a_split_lifo_goes_with_its_weights() -> None:
    for schedule in (Schedule("back", lifo=True, split=True), Schedule("cut", slices=True, split=True)):
        for row in schedule.show(3, 4, n=2).rows:
            assert [c.op.number for c in row if c.op.kind == "B"] == [c.op.number for c in row if c.op.kind == "W"]


def test_an_unknown_schedule_is_answered_with_the_known_ones() -> None:
    assert published("dapple") is published("1f1b")
    with pytest.raises(ScheduleError, match=r"\n  did you mean 'gpipe'\?$"):
        published("gpip")
    with pytest.raises(ScheduleError, match=r"there are gpipe, .*, pipedream_2bw$"):
        published("none of them")
