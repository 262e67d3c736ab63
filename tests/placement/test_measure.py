"""Measuring: real processes are timed and always ended, and what they took is a cluster."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import IO, Any

import pytest

from sbpflow.placement import PlacementError, TransportError, cluster
from sbpflow.placement import measure as module
from sbpflow.placement.measure import LinkTimes, measure
from sbpflow.placement.network.hosts import Hosts
from sbpflow.placement.network.levels import PairLink
from tests.ranks import Nursery


def command_of(code: str, job: str, log: str) -> None:
    """The life of `python -c CODE JOB`, which says what it says to a file."""
    said = os.open(log, os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv[:] = ["-c", job]
    try:
        exec(code)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class ForkedCommand:
    """As a Popen, by a process that has loaded torch; `python -c` takes three seconds for it."""

    def __init__(self, nursery: Nursery, command: Sequence[str], stdout: IO[bytes]) -> None:
        (self.rank,) = nursery.world(1)
        self.rank.give(command_of, *command[2:], stdout.name)

    def poll(self) -> int | None:
        return self.rank.code if self.rank.ended() else None

    def kill(self) -> None:
        self.rank.end()

    def wait(self) -> int | None:
        return self.rank.code


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.sweep)], ids=["forked", "by its command"])
def processes(request: pytest.FixtureRequest, nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(module, "Popen", lambda command, stdout, **_: ForkedCommand(nursery, command, stdout))


@pytest.mark.usefixtures("processes")
def test_real_processes_are_timed() -> None:
    measured = measure(2)
    (link,) = measured.links
    level = measured.cluster().levels[0]
    assert (level.latency, level.bandwidth, level.size) == (link.latency, link.bandwidth, 65536)
    assert link.latency > 0
    assert measured.cluster().device == cluster("cpu").device
    assert re.match(r"measured \d{4}-\d\d-\d\d \d\d:\d\d UTC on this machine \(2\)", measured.cluster().origin)


def test_a_measurement_prints_beside_the_preset() -> None:
    links = (PairLink((0,), 5e-5, 2e9, 1), PairLink((1,), 5e-5, 2e9, 1), PairLink((0, 1), 3e-4, 12.5e6, 2))
    text = str(LinkTimes(Hosts((0, 0, 1, 1)), ("a", "b"), links))
    assert "links between 4 ranks on 2 hosts, all sending at once" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["a", "-", "b", "300.0", "12.5", "200"] in rows
    assert ["network", "300.0", "12.5"] in rows
    assert ["preset's", "host", "60.0", "1500.0"] in rows


@pytest.mark.usefixtures("processes")
def test_a_process_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    start: Callable[..., Any] = vars(module)["Popen"]
    monkeypatch.setattr(module, "Popen", lambda command, **options: start([*command[:3], "{}"], **options))
    with pytest.raises(
        TransportError, match=r"rank \d of the measurement ended with code 1\n  it said: KeyError: 'rank'"
    ):
        measure(2)


def test_a_measurement_that_takes_too_long_is_ended() -> None:
    with pytest.raises(TransportError, match=r"more than 0.1 s\n  ranks \[0, 1\] were still running"):
        measure(2, timeout=0.1)


def test_one_rank_has_nobody_to_measure_with() -> None:
    with pytest.raises(PlacementError, match="cannot measure between 1 ranks\n  a transport needs at least 2"):
        measure(1)
