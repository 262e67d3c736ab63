"""Answers made ahead: a second process makes what is likely, and nothing depends on it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.nn.plan.search.estimates import ahead
from sbpflow.nn.plan.search.estimates.ahead import CAN_FORK, Ahead, processes_here

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="a fork is needed")
HERE = os.getpid()


def made(key: int) -> tuple[int, int]:
    """Its square, and who made it."""
    return key * key, os.getpid()


@contextmanager
def working(make: object = made, processes: int = 2) -> Iterator[Ahead[int, tuple[int, int]]]:
    answers: Ahead[int, tuple[int, int]] = Ahead(make, processes=processes)  # type: ignore[arg-type]
    try:
        yield answers
    finally:
        answers.close()


def heard(answers: Ahead[int, tuple[int, int]], key: int) -> bool:
    """Whether the other process has made an answer, for which it has as long as it takes."""
    answers.hear()
    while key not in answers.known and answers.wire is not None:
        time.sleep(0.01)
        answers.hear()
    return key in answers.known


def test_the_other_process_begins_with_the_last_of_what_is_likely() -> None:
    with working() as answers:
        answers.expect(range(6))
        assert heard(answers, 5)
        value, maker = answers.of(5)
        assert value == 25
        assert maker != HERE
        assert [answers.of(key)[0] for key in range(6)] == [0, 1, 4, 9, 16, 25]


def test_one_process_makes_what_is_asked_for_alone() -> None:
    with working(processes=1) as answers:
        answers.expect(range(6))
        assert answers.process is None
        assert answers.of(3) == (9, HERE)
        assert list(answers.known) == [3]


def test_while_the_other_process_is_at_it_the_next_is_made_here() -> None:
    begun, gate = os.pipe()

    def waits(key: int) -> tuple[int, int]:
        if os.getpid() != HERE:
            os.read(begun, 1)  # until the first process has made another
        elif key == 1:
            os.write(gate, b" ")
        return made(key)

    with working(waits) as answers:
        answers.expect([1, 2])
        while answers.there != 2:
            answers.hear()
        assert answers.of(2)[0] == 4
        assert answers.known[1] == (1, HERE)
        assert answers.known[2][1] != HERE
    os.close(begun)
    os.close(gate)


def test_what_is_told_to_be_left_is_not_made_again() -> None:
    there, here = os.pipe()

    def told(key: int) -> tuple[int, int]:
        os.write(here, str(key).encode())
        return made(key)

    with working(told) as answers:
        answers.expect([2, 1])
        assert heard(answers, 2)
        assert heard(answers, 1)
        answers.left = [3, 2, 1]  # as if nothing had been heard
        answers.send()
        assert heard(answers, 3)
    os.close(here)
    assert os.read(there, 9) == b"123"
    os.close(there)


def test_a_process_that_is_lost_is_done_without() -> None:
    with working() as answers:
        answers.expect(range(4))
        assert answers.process is not None
        os.kill(answers.process.pid or 0, signal.SIGKILL)
        answers.process.join()
        answers.known.clear()
        assert [answers.of(key) for key in range(4)] == [(key * key, HERE) for key in range(4)]
        answers.expect(range(9))
        assert answers.wire is None


def test_a_machine_without_room_for_another_process_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    with working() as answers:
        answers.expect(range(4))
        assert (answers.process, answers.wire) == (None, None)
        assert [answers.of(key) for key in range(4)] == [(key * key, HERE) for key in range(4)]


def test_an_answer_that_fails_there_fails_where_it_is_asked_for() -> None:
    def fails(key: int) -> tuple[int, int]:
        if key == 3:
            raise ValueError("no three")
        return made(key)

    with working(fails) as answers:
        answers.expect(range(4))
        with pytest.raises(ValueError, match="no three"):
            answers.of(3)
        assert answers.of(2)[0] == 4


def test_a_process_that_is_stuck_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PATIENCE", 0.1)

    def sticks(key: int) -> tuple[int, int]:
        if os.getpid() != HERE:
            time.sleep(3600)
        return made(key)

    with working(sticks) as answers:
        answers.expect([1, 2])
        while answers.there != 2:
            answers.hear()
        assert [answers.of(key) for key in (2, 1)] == [(4, HERE), (1, HERE)]
        assert answers.process is not None
        assert answers.process.exitcode == -signal.SIGKILL


def net() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), torch.empty(1024, 256)


def test_two_processes_find_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Ahead[object, object]] = []
    fork = Ahead.fork

    def counted(self: Ahead[object, object]) -> None:
        started.append(self)
        fork(self)

    monkeypatch.setattr(Ahead, "fork", counted)
    seek = "seek pipe, data, tensor, micro-batches, schedule, recompute"
    said: list[list[str]] = [[], []]
    one, two = (
        flow.find_plan(*net(), plan=seek, cluster="h100x8*1", processes=n, told=lines.append)
        for n, lines in zip((1, 2), said, strict=True)
    )
    assert len(started) == 1
    assert one.text == two.text
    assert one.table() == two.table()
    assert said[0] == said[1]
    assert started[0].wire is None


def test_who_interrupts_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Ahead[object, object]] = []
    fork = Ahead.fork

    def interrupted(self: Ahead[object, object]) -> None:
        fork(self)
        found.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Ahead, "fork", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flow.find_plan(*net(), plan="seek pipe, data, tensor, micro-batches", cluster="h100x8*1", processes=2)
    assert found[0].process is not None
    assert found[0].process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("processes", [0, 3, True, "2"])
def test_other_numbers_of_processes_are_refused(processes: int) -> None:
    with pytest.raises(flow.SbpError, match=r"one or two"):
        flow.find_plan(*net(), plan="seek data", cluster="h100x8*1", processes=processes)


def test_a_machine_with_one_core_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert processes_here() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert processes_here() == 2
