"""The ledger: ranks of a host see what each other is at, whole entries only, and no file stays behind."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from sbpflow.placement.ledger import Ledger
from sbpflow.placement.network import this_host as room
from sbpflow.placement.network.page import stamp
from sbpflow.placement.network.this_host import memory_folder, this_host
from sbpflow.placement.world import store, world
from tests.ranks import Fresh


def ledgers(ranks: int) -> list[Ledger]:
    """The ledgers of these ranks, which meet in threads as processes would."""
    store, found = HashStore(), dict[int, Ledger]()
    threads = [threading.Thread(target=lambda r=r: found.update({r: Ledger(r, ranks, store)})) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [found[rank] for rank in range(ranks)]


@pytest.fixture
def two() -> list[Ledger]:
    return ledgers(2)


def test_the_later_of_two_that_differ_is_told(two: list[Ledger]) -> None:
    assert two[0].enter(5, (0, 1), 111, b"one") == (1, None)
    assert two[1].enter(5, (0, 1), 222, b"other") == (1, 0)
    assert two[0].differs(1, 5, stamp(1, 111))


def test_two_that_agree_are_not_told_anything(two: list[Ledger]) -> None:
    for turn in range(1, 100):
        assert [ledger.enter(5, (0, 1), turn * 7, b"same") for ledger in two] == [(turn, None)] * 2


def test_turns_of_other_groups_and_other_turns_do_not_count(two: list[Ledger]) -> None:
    two[0].enter(5, (0, 1), 111, b"")
    two[0].enter(5, (0, 1), 112, b"")
    assert two[1].enter(13, (0, 1), 222, b"") == (1, None)  # 13 shares the page's place with 5
    assert two[1].enter(5, (0, 1), 333, b"") == (1, None)  # the first turn, which the peer has left


def test_the_latest_entry_says_what_and_where(two: list[Ledger]) -> None:
    assert two[0].latest(1) is None
    two[1].enter(5, (0, 1), 222, "ein Maß\nat x.py:3".encode())
    latest = two[0].latest(1)
    assert latest is not None
    assert (latest.group, latest.turn, latest.fingerprint, latest.text) == (5, 1, 222, "ein Maß\nat x.py:3")


def test_a_long_text_is_cut_not_spilled(two: list[Ledger]) -> None:
    two[1].enter(5, (0, 1), 222, b"x" * 5000)
    latest = two[0].latest(1)
    assert latest is not None
    assert set(latest.text) == {"x"}
    assert two[0].fault(1) is None


def test_a_refusal_is_seen_though_the_rank_went_on(two: list[Ledger]) -> None:
    two[1].enter(5, (0, 1), 0, b"refused")
    two[1].enter(5, (0, 1), 222, b"the next")
    assert two[0].enter(5, (0, 1), 111, b"waits") == (1, 1)
    assert two[0].refused(1, 5, 1)
    assert not two[0].refused(1, 5, 2)


def test_a_reader_never_takes_half_an_entry_for_a_difference(two: list[Ledger]) -> None:
    """One rank goes through turns of groups that share a place; the other must never see a false difference."""
    done = threading.Event()

    def write() -> None:
        for turn in range(1, 20_000):
            for group in (5, 13):
                two[1].enter(group, (), turn * 3 + group, b"text")
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    false, turn = 0, 1
    while not done.is_set():
        false += any(two[0].differs(1, group, stamp(turn, turn * 3 + group)) for group in (5, 13))
        turn = turn % 20_000 + 1
    writer.join()
    assert not false


def test_a_fault_is_seen_by_the_others(two: list[Ledger]) -> None:
    two[1].fail("no more")
    assert two[0].fault(1) == "no more"
    assert two[0].fault(0) is None


def test_this_process_is_alive_and_a_gone_one_is_not(two: list[Ledger]) -> None:
    assert two[0].gone(1) is None
    two[1]._pages[1].pid = 2**22 + 1  # beyond any process id
    assert two[0].gone(1) == "rank 1 died"


def test_no_file_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules[Ledger.__module__], "memory_folder", lambda: str(tmp_path))
    assert len(ledgers(3)) == 3
    assert not list(tmp_path.iterdir())


def test_without_room_nobody_gets_memory(monkeypatch: pytest.MonkeyPatch, two: list[Ledger]) -> None:
    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    found: list[object] = []
    threads = [threading.Thread(target=lambda x=x: found.append(x.share("mail", 4096))) for x in two]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [None, None]


def test_ranks_of_other_hosts_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setenv("SBPFLOW_HOST", "a")
    store.set("host/1", "b")
    alone = Ledger(0, 2, store)
    assert alone.local == (0,)
    assert alone.gone(1) is None
    assert alone.fault(1) is None
    assert alone.remote_fault() is None
    assert alone.where(1) == "on another host"


def test_containers_of_one_name_are_hosts_of_their_own_where_they_share_no_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each mount of memory has a device of its own; here another file system stands for another one's."""
    monkeypatch.delenv("SBPFLOW_HOST", raising=False)
    here = this_host()
    assert here == this_host()
    other = next((path for path in ("/proc", "/sys", "/dev") if os.path.isdir(path)), None)
    if other is None or os.stat(other).st_dev == os.stat(memory_folder()).st_dev:
        pytest.skip("there is one file system")
    monkeypatch.setattr(room, "memory_folder", lambda: other)
    assert this_host() != here


def agree(seconds: float) -> int:
    """Rank 1 goes through the turns of groups that share a place; rank 0 looks at the very turn it is in."""
    ledger = Ledger(world().rank or 0, 2, store())
    deadline, looks, turn = time.monotonic() + seconds, 0, 0
    while time.monotonic() < deadline:
        turn += 1
        if world().rank:
            for group in (5, 13, 21):
                ledger.enter(group, (), turn * 7 + group, b"text" * (turn % 50))
        elif (seen := ledger.latest(1)) is not None:
            assert seen.turn
            for number in (seen.turn, seen.turn + 1):
                looks += 1
                assert not any(ledger.differs(1, g, stamp(number, number * 7 + g)) for g in (5, 13, 21))
    return looks


def test_another_process_never_takes_half_an_entry_for_a_difference(fresh: Fresh) -> None:
    reader, _ = fresh(2, agree, 1.0)
    assert reader.answer is not None
    assert reader.answer.error is None, reader.answer.error
    assert reader.answer.value > 1000
