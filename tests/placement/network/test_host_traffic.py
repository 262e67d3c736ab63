"""Traffic to other hosts is counted as the kernel does; windows go to the pages, and what is on all is judged."""

import json
import socket
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest

from sbpflow.placement.network.connections import ConnectionCount, connection_counts
from sbpflow.placement.network.host_traffic import WINDOW, HostTraffic, LinkWatch
from sbpflow.placement.network.page import PAGE, Page
from sbpflow.placement.network.slow_links import LinkUse

SIZE = 3_000_000
A, B, OTHER = ("10.0.0.2", 5, 6), ("10.0.0.3", 7, 8), ("192.0.2.9", 1, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_counts_what_the_other_end_has(family: socket.AddressFamily) -> None:
    """An IPv4 address is told as one where the socket is of IPv6, as those of torch's store are."""
    kind = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
    with socket.socket(family) as listener, socket.socket(family) as mouth:
        listener.bind((kind, 0))
        listener.listen()
        mouth.connect(listener.getsockname())
        ear, _ = listener.accept()
        speaks = threading.Thread(target=mouth.sendall, args=[bytes(SIZE)])
        speaks.start()
        with ear:
            left = SIZE
            while left:
                left -= len(ear.recv(left))
            speaks.join()
            ends = ("127.0.0.1", ear.getsockname()[1], mouth.getsockname()[1])
            ear.sendall(b"x")
            mouth.recv(1)  # behind which all is acknowledged
            found = connection_counts()
    assert found[ends].bytes == SIZE + 1  # the kernel counts the first word of both
    assert 0 <= found[ends].seconds < 60


def test_windows_have_what_was_sent_to_each_host_and_how_much_at_the_full() -> None:
    traffic = HostTraffic({A[0]: "a", B[0]: "b"})
    assert traffic.look(100.0, {A: ConnectionCount(1000, 1.0, 0), OTHER: ConnectionCount(9, 9.0, 9)}) is None
    for at in range(1, 10):
        queued = 5000 if at < 4 else 0
        counts = {
            A: ConnectionCount(1000 + 100 * at, 1.0 + 0.49 * min(at, 5), queued),
            B: ConnectionCount(10 * at, 0.01 * at, 0),
            OTHER: ConnectionCount(10**9 * at, 0.5 * at, 5000),
        }
        assert traffic.look(100 + at / 2, counts) is None
    found = traffic.look(100 + WINDOW, {B: ConnectionCount(100, 0.1, 0)})  # the other one was closed
    assert found == {"a": LinkUse(900, 2.45, 2.0), "b": LinkUse(100, 0.1, 0.0)}
    assert traffic.number == 1
    assert traffic.look(100 + 2 * WINDOW, {B: ConnectionCount(100, 0.1, 0)}) == {}


def watch(rank: int, pages: dict[int, Page], places: dict[int, str]) -> LinkWatch:
    return LinkWatch(rank, "abc", {host: f"host {host}" for host in "abc"}, pages, places, dict)


@pytest.mark.parametrize("rank", [0, 2])
def test_all_judge_what_is_on_the_pages_and_the_first_rank_warns(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {r: Page(memoryview(bytearray(PAGE))) for r in range(3)}
    made = watch(rank, pages, {r: f"10.0.0.{r}" for r in range(3)})
    at, warned = [0.0], list[str]()
    module = sys.modules[LinkWatch.__module__]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: at[0]))
    monkeypatch.setattr(module, "connection_counts", dict)
    monkeypatch.setattr(warnings, "warn", lambda text, **_: warned.append(text))
    for number in range(1, 4):
        for here in {0, 1, 2} - {rank}:
            sent = [[there, 2_000_000, *((4.5, 4.0) if 1 in (here, there) else (0.1, 0.0))] for there in range(3)]
            pages[here].carry(number, json.dumps([each for each in sent if each[0] != here]))
        at[0] += WINDOW
        made.look()
    assert [line[:26] for line in made.lines] == ["host b has a slow link: it"]
    assert warned == list(made.lines) * (rank == 0)


def test_a_window_is_judged_once_though_its_process_is_stopped_since() -> None:
    pages = {r: Page(memoryview(bytearray(PAGE))) for r in range(3)}
    made = watch(0, pages, {r: f"10.0.0.{r}" for r in range(3)})
    pages[1].carry(4, "[[0,5,1.0,0.5]]")
    assert list(made._flows()) == [("b", "a", LinkUse(5, 1.0, 0.5))]
    assert list(made._flows()) == []


def test_a_host_is_judged_when_all_its_processes_have_a_window() -> None:
    """Two share a link: one alone sent half of what it gave, and it was told as twice as slow."""
    pages = {r: Page(memoryview(bytearray(PAGE))) for r in range(4)}
    made = LinkWatch(3, "abbc", {host: host for host in "abc"}, pages, {r: f"10.0.0.{r}" for r in range(4)}, dict)
    pages[0].carry(1, "[[1,7,1.0,0.5]]")
    pages[1].carry(1, "[[0,5,1.0,0.5]]")
    assert list(made._flows()) == [("a", "b", LinkUse(7, 1.0, 0.5))]
    pages[1].carry(2, "[[0,6,1.0,0.5]]")
    pages[2].carry(1, "[[0,8,1.0,0.5]]")
    assert list(made._flows()) == [("b", "a", LinkUse(6, 1.0, 0.5)), ("b", "a", LinkUse(8, 1.0, 0.5))]
    assert list(made._flows()) == []
    pages[0].carry(0, "")  # as one that is being written is read
    assert list(made._flows()) == []


def test_hosts_of_one_address_are_not_told_apart() -> None:
    pages = {r: Page(memoryview(bytearray(PAGE))) for r in range(3)}
    assert watch(0, pages, dict.fromkeys(range(3), "127.0.0.1")).traffic.hosts == {}
    assert watch(0, pages, {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.2"}).traffic.hosts == {}
    assert watch(0, pages, {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.3"}).traffic.hosts == {
        "10.0.0.2": "b",
        "10.0.0.3": "c",
    }


def test_a_page_tells_its_window_to_its_copy_and_none_that_is_being_written() -> None:
    page, copy = (Page(memoryview(bytearray(PAGE))) for _ in range(2))
    copy.hear(page.told())
    assert copy.carried() == (0, "")
    page.carry(3, "[[1,2,3.0,4.0]]")
    copy.hear(json.loads(json.dumps(page.told())))
    assert copy.carried() == (3, "[[1,2,3.0,4.0]]")
