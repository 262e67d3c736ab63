"""Tables in which backwards, weights or forwards come in another order of micro-batches than what they take."""

import random
from typing import Any

import pytest

from sbpflow.actors import Schedule, network_of, search, simulate
from sbpflow.actors.protocol.state import Desk
from sbpflow.placement.errors import ScheduleError

TABLES = [
    ("F0 F1 B1 B0", "F0 F1 B1 B0"),
    ("F0 F1 B1 B0", "F0 B0 F1 B1"),
    ("F0 F1 B0 B1", "F0 F1 B1 B0"),
    ("F1 F0 B0 B1", "F0 F1 B1 B0"),
    ("F0 F1 B1 B0 W0 W1", "F0 F1 B1 W1 B0 W0"),
    ("F0 F2 F1 F3 B3 B1 B0 B2", "F1 F0 B1 F3 B3 F2 B2 B0"),
]  # fmt: skip


def drawn(p: int, m: int, split: bool, seed: int) -> tuple[str, ...]:
    """A row for each device: what is taken comes before who takes it, and nothing else is in order."""
    draw, rows = random.Random(seed), []
    for _ in range(p):
        left = [["F", "B", *"W" * split] for _ in range(m)]
        words = []
        while any(left):
            k = draw.choice([k for k, kinds in enumerate(left) if kinds])
            words.append(f"{left[k].pop(0)}{k}")
        rows.append(" ".join(words))
    return tuple(rows)


def test_a_table_runs_in_its_own_order() -> None:
    for table in TABLES:
        assert Schedule("own", table=table).show().order == table
        assert Schedule.read(str(Schedule("own", table=table))).table == table


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(200))
def test_each_firing_takes_what_is_of_its_own_micro_batch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a network that stops none takes another's either, and who reads it is told what to do sooner."""
    fire, ran = Desk.fire, list[str]()

    def fired(self: Desk, at: int) -> Any:
        found = fire(self, at)
        assert {slot.label for slots in found.held for slot in slots} <= {found.label}
        ran.append(self.wiring.actors[at].actor.cases[found.case] + str(found.label))
        return found

    monkeypatch.setattr(Desk, "fire", fired)
    p, m, split = seed % 3 + 1, seed % 4 + 1, seed % 2 == 1
    own = Schedule("own", table=drawn(p, m, split, seed))
    run = simulate(network_of(own, own.shape()))
    assert not run.finished or len(set(ran)) == len(ran) == p * m * (3 if split else 2)
    for device in range(p):
        words = [str(ran) for ran in run.of(f"device {device}")]
        wanted = [f"{word[0]}{device}{word[1:]}" for word in own.table[device].split()]
        assert words == wanted[: len(words)]


def test_slots_are_those_that_the_order_needs() -> None:
    assert Schedule("own", table=TABLES[0]).show().slots == (2, 2)
    assert Schedule("own", table=TABLES[1]).show().slots == (2, 1)


def test_an_order_that_stops_names_micro_batches_by_their_numbers() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule("own", table=("F1 B1 F0 B0", "F1 F0 B1 B0")).show()
    assert "order of 0 (fired 1) waits for dy.0: 0 of 1 filled" in str(caught.value)
    assert str(caught.value).endswith("\n  do F0 of micro-batch 0 before B0 of micro-batch 1 in order of 0")
    with pytest.raises(ScheduleError, match=r"waits for dy.0: 0 of 2 filled"):
        Schedule("own", table=("F0 B0 F1 B1", "F0 F1 B1 B0")).show()


def test_versions_of_weights_are_read_in_order() -> None:
    with pytest.raises(ScheduleError, match=r"B1 out of turn(.|\n)*versions are read in order"):
        Schedule("own", table=("F0 F1 B1 B0",), versions="2")


def test_routes_have_their_own_micro_batches() -> None:
    rows = "F0 F2 f1 f3 b3 b1 B2 B0", "f1 f3 F0 F2 B2 B0 b3 b1"
    assert Schedule("own", way="routes", table=rows).show().order == rows
    with pytest.raises(ScheduleError, match="device 0 never does F2"):
        Schedule("own", way="routes", table=("F0 F1 f2 f3 b3 b2 B1 B0",) * 2)


def test_two_of_a_pair_are_of_their_own_micro_batches() -> None:
    own = Schedule("own", table=("F0 F1 F2+ B1 B0 B2", "F0 F1 B1 F2+ B0 B2"))
    assert own.show().order == own.table


def test_a_search_passes_over_them() -> None:
    assert search(2, 2, known=[Schedule("own", table=TABLES[0])]).schedule.in_turn
