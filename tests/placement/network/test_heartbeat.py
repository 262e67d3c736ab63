"""Heartbeats bring what ranks of other hosts are at; a host is silent only where its system does not answer."""

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations

import pytest
from torch._C._distributed_c10d import HashStore

from sbpflow.placement.network.heartbeat import Heartbeats, partners
from sbpflow.placement.network.line import HostLine
from sbpflow.placement.network.page import PAGE, Page, stamp

LIMIT = 60.0  # seconds in which what must come has come, however busy the machine is


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Run:
    """Ranks of hosts, in threads of this process; `pages[rank][of]` is what a rank has of another."""

    def __init__(self, hosts: str, linked: bool = True) -> None:
        self.hosts, self.store = hosts, HashStore()
        self.pages = [[Page(memoryview(bytearray(PAGE))) for _ in hosts] for _ in hosts]
        for pages in self.pages:
            for page in pages:
                page.pid = os.getpid()
        self.beats: dict[int, Heartbeats] = {}
        threads = [threading.Thread(target=self.join, args=[rank]) for rank in range(len(hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        want = {r: sum(map(len, partners(r, hosts))) if linked else 0 for r in range(len(hosts))}
        until(lambda: {r: len(beats._lines) for r, beats in sorted(self.beats.items())} == want)

    def join(self, rank: int) -> None:
        pages = dict(enumerate(self.pages[rank]))
        self.beats[rank] = Heartbeats(rank, self.hosts, pages, self.store, 2.0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    made: list[Run] = []

    def start(hosts: str, linked: bool = True) -> Run:
        made.append(Run(hosts, linked))
        return made[-1]

    yield start
    for beats in [beats for each in made for beats in each.beats.values()]:
        beats.close()


@pytest.mark.parametrize("hosts", ["ab", "aab", "abb", "aabb", "aaabbc", "abcabc", "abcdd"])
def test_each_rank_has_a_line_to_each_other_host_and_both_ends_agree(hosts: str) -> None:
    opens = {(rank, peer) for rank in range(len(hosts)) for peer in partners(rank, hosts)[0]}
    awaits = {(peer, rank) for rank in range(len(hosts)) for peer in partners(rank, hosts)[1]}
    assert opens == awaits
    lines = Counter(end for pair in opens for end in ((pair[0], hosts[pair[1]]), (pair[1], hosts[pair[0]])))
    assert {*lines} == {(rank, host) for rank in range(len(hosts)) for host in {*hosts} - {hosts[rank]}}
    for one, other in combinations(sorted({*hosts}), 2):
        between = [pair for pair in opens if {hosts[rank] for rank in pair} == {one, other}]
        assert len(between) == max(hosts.count(one), hosts.count(other))


def test_what_a_rank_is_at_arrives_on_other_hosts(run: Callable[..., Run]) -> None:
    made = run("aab")
    made.pages[2][2].enter(5, stamp(3, 7), "ein Maß\nat x.py:3".encode())
    made.pages[2][2].fail("no more")
    made.beats[2].tell()
    for rank in (0, 1):
        page = made.pages[rank][2]
        until(page.fault)
        assert page.fault() == "no more"
        assert page.latest() == (5, 3, 7, "ein Maß\nat x.py:3")
        assert page.differs(5, stamp(3, 8))
        assert made.beats[rank].first_fault == 2
        assert made.beats[rank].gone(2) is None
        assert made.beats[rank].state(2) == "on host b"


def test_a_refusal_arrives(run: Callable[..., Run]) -> None:
    made = run("ab")
    made.pages[1][1].enter(5, stamp(1, 0), b"refused")
    made.pages[1][1].enter(5, stamp(2, 9), b"the next")
    until(lambda: made.pages[0][1].refused(5, 1))


def test_a_rank_that_died_is_told_by_those_of_its_host(run: Callable[..., Run]) -> None:
    made = run("abb")
    made.pages[1][2].pid = 2**22 + 1  # beyond any process id
    until(lambda: made.beats[0].gone(2))
    assert made.beats[0].gone(2) == "rank 2 died"
    assert made.beats[0].lost(2) is None


def test_who_leaves_is_gone_and_its_host_is_not_silent(run: Callable[..., Run]) -> None:
    made = run("ab")
    made.beats.pop(1).close()
    until(lambda: made.beats[0].gone(1))
    assert made.beats[0].silent == {}


@pytest.mark.parametrize("breaks", [0, 1])
def test_a_line_that_breaks_comes_back(run: Callable[..., Run], breaks: int) -> None:
    """By whichever end: the kernel of the other answers, so that nobody is taken for dead."""
    made = run("ab")
    before = made.beats[breaks]._lines[1 - breaks]
    before.connection.shutdown(socket.SHUT_RDWR)
    until(lambda: made.beats[breaks]._lines.get(1 - breaks, before) is not before)
    made.pages[1][1].fail("heard")
    until(made.pages[0][1].fault)
    assert made.beats[0].gone(1) is None
    assert made.beats[1].gone(0) is None


def test_a_host_that_does_not_answer_is_silent_until_it_does(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, cut = run("abbc"), [True]
    opened = Heartbeats._open

    def open_(self: Heartbeats, peer: int) -> socket.socket:
        if cut[0] and "b" in (made.hosts[peer], made.hosts[self.rank]):
            raise TimeoutError
        return opened(self, peer)

    monkeypatch.setattr(Heartbeats, "_open", open_)
    for rank, peer in ((0, 1), (0, 2), (3, 1), (3, 2)):
        made.beats[rank]._lines[peer].connection.shutdown(socket.SHUT_RDWR)
    until(lambda: all(beats.silent for beats in made.beats.values()))
    until(lambda: len(made.beats[1].silent) == len(made.beats[2].silent) == 2)
    said = "host b (ranks 1, 2) does not answer any more: its cable was cut, or it is down"
    assert made.beats[0].lost(1) == made.beats[3].lost(2) == made.beats[0].gone(2) == said
    assert made.beats[0].lost(3) is None
    assert str(made.beats[1].lost(0)).startswith("host a (rank 0) and host c (rank 3) do not answer, which are")
    cut[0] = False
    until(lambda: not any(beats.silent for beats in made.beats.values()))


def test_nobody_is_heard_without_the_key(run: Callable[..., Run]) -> None:
    made = run("ab")
    line, place = made.beats[0]._lines[1], made.beats[0]._listener.getsockname()
    for said in (b"x" * 36, b"GET / HTTP/1.1\r\n\r\n", made.store.get("heartbeat/key")[:31] + b"xxxxx"):
        with socket.create_connection(place) as other, suppress(ConnectionResetError):
            other.sendall(said)
            other.settimeout(LIMIT)
            assert other.recv(1) == b""
    assert made.beats[0]._lines[1] is line


def test_two_that_both_had_no_turn_for_long_hear_each_other_again(run: Callable[..., Run]) -> None:
    made = run("ab")
    module = sys.modules[HostLine.__module__]
    quiet, module.QUIET = module.QUIET, 0.0  # type: ignore[attr-defined]
    try:  # whatever either says now, the other has been silent for longer than that
        before = {rank: made.beats[rank]._lines[1 - rank].heard for rank in (0, 1)}
        until(lambda: all(made.beats[rank]._lines[1 - rank].heard > before[rank] + 1 for rank in (0, 1)))
    finally:
        module.QUIET = quiet  # type: ignore[attr-defined]
    made.pages[1][1].fail("heard")
    until(made.pages[0][1].fault)


def test_the_last_words_of_one_that_leaves_are_heard_by_one_that_speaks(run: Callable[..., Run]) -> None:
    """Words sent on a line that is closed there break the line, behind what has come on it."""
    made = run("ab")
    deaf = made.beats[0]
    with deaf._lock:
        ready, deaf._ready = deaf._ready, lambda *_: time.sleep(0.01)  # type: ignore[method-assign]
    made.pages[1][1].fail("the reason")
    made.beats.pop(1).close()
    time.sleep(1.5)  # it speaks meanwhile
    deaf._ready = ready  # type: ignore[method-assign]
    until(lambda: deaf.gone(1))
    assert made.pages[0][1].fault() == "the reason"


def test_it_listens_at_the_address_of_the_run_only(run: Callable[..., Run]) -> None:
    made = run("ab")
    assert {beats._listener.getsockname()[0] for beats in made.beats.values()} == {"127.0.0.1"}


def refuse(self: Heartbeats, peer: int) -> socket.socket:
    raise TimeoutError("timed out")


def test_a_host_that_cannot_be_reached_is_warned_of_and_nothing_ends(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall between hosts leaves the run as it was."""
    warned: list[str] = []
    monkeypatch.setattr("warnings.warn", lambda text, **_: warned.append(text))
    monkeypatch.setattr(Heartbeats, "_open", refuse)
    made = run("ab", linked=False)
    (text,) = warned
    assert "cannot reach rank" in text
    assert "GLOO_SOCKET_IFNAME" in text
    assert made.beats[0].gone(1) is None
