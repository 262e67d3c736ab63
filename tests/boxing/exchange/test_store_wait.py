"""Nobody waits at the store for a rank that is gone, nor for an answer of a store whose host is."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from sbpflow.boxing.exchange.store_wait import StoreGuard, await_key
from sbpflow.placement.errors import TransportError
from sbpflow.placement.network.connections import end_connections

LIMIT = 60.0


def test_a_value_that_comes_is_had() -> None:
    meeting = HashStore()
    writes = threading.Timer(0.2, meeting.set, ["key", "value"])
    writes.start()
    assert await_key(meeting, "key", LIMIT, lambda: None) == "value"
    writes.join()


def test_who_is_gone_is_not_waited_for() -> None:
    with pytest.raises(TransportError, match="rank 3 died"):
        await_key(HashStore(), "key", LIMIT, lambda: "rank 3 died")


def test_the_words_of_one_who_is_gone_since_are_heard() -> None:
    meeting = HashStore()

    def gone() -> str:
        meeting.set("key", "written before")
        return "rank 3 died"

    assert await_key(meeting, "key", LIMIT, gone) == "written before"


def test_the_limit_holds() -> None:
    assert await_key(HashStore(), "key", 0.05, lambda: None) is None


def lost(said: str | None, meeting: Any) -> StoreGuard:
    beats = SimpleNamespace(lost_at=lambda address: said if address == "127.0.0.1" else None)
    ledger: Any = SimpleNamespace(heartbeats=beats, store=meeting)
    return StoreGuard(ledger)


@pytest.fixture
def served() -> Any:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield PrefixStore("run", TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False))
    del server


def test_who_asks_a_store_whose_host_is_lost_has_an_error(served: Any) -> None:
    guard, said = lost("host a does not answer", served), list[str]()

    def asks() -> None:
        with guard:
            try:
                served.get("what nobody writes")
            except RuntimeError:
                said.append(str(guard.lost()))

    waits = threading.Thread(target=asks)
    waits.start()
    while not said:
        guard.look()
        waits.join(0.01)
    waits.join()
    assert said == ["host a does not answer"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_store_is_left_alone_while_its_host_is_there_or_nobody_asks(served: Any, inside: bool) -> None:
    guard = lost(None if inside else "host a does not answer", served)
    if inside:
        with guard:
            guard.look()
    guard.look()
    served.set("key", "value")
    assert served.get("key") == b"value"
    assert end_connections("127.0.0.1", 1) == 0


def test_a_store_without_an_address_has_no_guard() -> None:
    with lost("host a does not answer", HashStore()) as guard:
        guard.look()
        assert guard.lost() is None
