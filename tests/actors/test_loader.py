"""A loader reads ahead, never further than its slots, and every batch is read once."""

import threading
from collections.abc import Iterator

import pytest

from sbpflow.actors.desk import Firing
from sbpflow.actors.loader import Loader, loaded
from sbpflow.actors.network import Network
from sbpflow.actors.pipeline import pipeline
from sbpflow.actors.published import published
from sbpflow.actors.runtime import Runtime, Work
from sbpflow.actors.simulate import simulate
from sbpflow.placement.errors import ScheduleError
from tests.actors.ticks import LIMIT

M = 4


class Source:
    """Numbers, and how many were asked for."""

    def __init__(self, count: int = 1000) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.read += 1
            yield number


def fed(high: int) -> Network:
    network = pipeline(published("1f1b"), published("1f1b").shape(2, M))
    return loaded(network, [("F0", ""), ("F1", "")], firings=M, high=high)


def trained(source: Source, high: int, steps: int) -> tuple[list[tuple[str, int, int]], list[int]]:
    """What the forwards read, and how far the source was read after each step."""
    network, loader = fed(high), Loader(source, firings=M, high=high)
    seen: list[tuple[str, int, int]] = []

    def forward(name: str) -> Work:
        gives = len(network.actor(name).gives)

        def work(firing: Firing) -> list[None]:
            (slot,) = firing.held[-1]
            seen.append((name, firing.label, slot.value))
            return [None] * gives

        return work

    work: dict[str, Work] = {actor.name: lambda firing: None for actor in network.actors}
    work |= {"F0": forward("F0"), "F1": forward("F1"), "load data": loader}
    read = []
    with Runtime(network, work, initial={"data": loader.first}) as runtime:
        for _ in range(steps):
            runtime.run()
            read.append(source.read)
    return seen, read


@pytest.mark.parametrize("high", [1, 2, M])
def test_every_reader_sees_every_batch_once_and_in_order(high: int) -> None:
    seen, read = trained(Source(), high, 3)
    for name in ("F0", "F1"):
        assert [(label, value) for who, label, value in seen if who == name] == [(n % M, n) for n in range(3 * M)]
    assert read == [M * (step + 1) + high for step in range(3)]  # the next step's first are there already


def test_a_network_with_a_loader_ends_in_the_simulator_too() -> None:
    assert simulate(fed(2)).finished


def test_reading_overlaps_with_work_and_across_steps() -> None:
    """A slot that one firing let go is filled while the next is at work: each waits here for the other."""
    threads: set[int] = set()
    together = threading.Barrier(2)

    def slow() -> Iterator[int]:
        for number in range(100):
            threads.add(threading.get_ident())
            if number >= M:  # the first are read before the first step
                together.wait(LIMIT)
            yield number

    network = loaded(pipeline(published("gpipe"), published("gpipe").shape(1, M)), [("F0", "")], firings=M, high=M)
    loader = Loader(slow(), firings=M, high=M)
    work: dict[str, Work] = {actor.name: lambda firing: None for actor in network.actors}

    def meet(firing: Firing) -> None:
        if (network.actors[firing.actor].name, firing.label) in {("F0", 1), ("F0", 2), ("F0", 3), ("B0", 0)}:
            together.wait(LIMIT)

    work |= {"F0": meet, "B0": meet, "load data": loader}
    with Runtime(network, work, initial={"data": loader.first}, timeout=LIMIT) as runtime:
        for _ in range(4):
            runtime.run()
    assert len(threads) == 2  # before the first step the calling one, then the loader's


def test_data_that_ends_between_steps_is_no_error_and_within_one_is() -> None:
    assert [value for who, _, value in trained(Source(2 * M), 2, 2)[0] if who == "F0"] == list(range(2 * M))
    loader = Loader(Source(2 * M), firings=M)
    assert loader.more
    with pytest.raises(ScheduleError, match="the data ended after 3 of the 4 micro-batches of a step"):
        trained(Source(2 * M + 3), 2, 3)
    with pytest.raises(ScheduleError, match="the data ended after 0 of the 4"):
        trained(Source(M), 2, 2)


def test_a_loader_that_does_not_fit_is_refused() -> None:
    network = pipeline(published("1f1b"), published("1f1b").shape(2, M))
    with pytest.raises(ScheduleError, match="5 batches ahead in a step of 4"):
        loaded(network, [("F0", "")], firings=M, high=5)
    with pytest.raises(ScheduleError, match="no actor is called 'F9'"):
        loaded(network, [("F9", "")], firings=M)
