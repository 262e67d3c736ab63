"""A bell wakes who sleeps, also who was only about to, and costs nothing where nobody does."""

import mmap
import threading
from dataclasses import dataclass

import torch

from sbpflow.boxing.exchange.bell import Bell
from sbpflow.boxing.exchange.shared_memory import BELL, DOZE, PATROL, SMALLEST, YIELDS, Idle, Mail, mail_size

FOREVER = 1e6


@dataclass
class Ledger:
    """As one of two ranks of a host has it."""

    rank: int
    local: tuple[int, int] = (0, 1)


def both_sides() -> tuple[Bell, Bell]:
    memory = mmap.mmap(-1, BELL)
    return Bell(memory, 0), Bell(memory, 0)


def test_a_sleeper_is_woken_by_a_ring() -> None:
    owner, peer = both_sides()
    owner.set()
    sleeper = threading.Thread(target=owner.sleep, args=(FOREVER,))
    sleeper.start()
    assert peer.ring()
    sleeper.join()


def test_a_ring_before_the_sleep_is_not_lost() -> None:
    owner, peer = both_sides()
    owner.set()
    assert peer.ring()
    owner.sleep(FOREVER)


def test_nobody_is_rung_who_is_awake_or_was_rung_before() -> None:
    owner, peer = both_sides()
    assert not peer.ring()
    owner.set()
    assert [peer.ring(), peer.ring()] == [True, False]


def test_of_ranks_on_one_host_each_has_a_bell_of_its_own() -> None:
    memory = mmap.mmap(-1, 2 * BELL)
    first, second = Bell(memory, 0), Bell(memory, BELL)
    first.set()
    assert not second.ring()
    assert first.ring()


def test_who_waits_sleeps_every_second_round_behind_the_yields_and_sets_the_bell_before() -> None:
    """So the caller looks for mail between the setting and the sleep: else what came then would be found late."""
    done: list[str] = []

    class Heard(Bell):
        def set(self) -> None:
            done.append("set")

        def sleep(self, seconds: float) -> None:
            done.append("sleep")

    idle = Idle(FOREVER, Heard(mmap.mmap(-1, BELL), 0))
    for _ in range(YIELDS):
        idle.wait()
    assert not done
    for _ in range(6):
        idle.wait()
    assert done == ["set", "sleep"] * 3


def test_a_message_and_an_emptied_slot_ring_the_bell_of_the_other_rank_alone() -> None:
    memory = mmap.mmap(-1, mail_size(2, SMALLEST))
    first, second = (Mail(Ledger(rank), memory, SMALLEST) for rank in range(2))  # type: ignore[arg-type]
    first.bell.set()
    second.bell.set()
    first.outgoing[1].put(7, torch.ones(2))
    assert (first.bell.word.value, second.bell.word.value) == (1, 0)
    second.bell.set()
    second.incoming[0].drop()
    assert (first.bell.word.value, second.bell.word.value) == (0, 1)


def test_no_sleep_is_longer_than_the_time_between_two_looks_at_the_peers() -> None:
    naps: list[float] = []

    class Timed(Bell):
        def sleep(self, seconds: float) -> None:
            naps.append(seconds)

    idle = Idle(FOREVER, Timed(mmap.mmap(-1, BELL), 0))
    for _ in range(YIELDS + 40):
        idle.wait()
    assert naps[0] == DOZE < naps[1] < max(naps) == naps[-1] == PATROL
