"""Measuring: the fit finds the line under the noise, and real processes are timed and always ended."""

import math
import os
import random
import sys
import traceback
from collections.abc import Sequence
from typing import IO

import pytest

from sbpflow.placement import PlacementError, TransportError, cluster
from sbpflow.placement import measure as module
from sbpflow.placement.measure import SIZES, LinkTimes, fit, measure
from tests.ranks import Nursery


@pytest.mark.parametrize("latency", [1e-6, 60e-6, 1e-3])
@pytest.mark.parametrize("bandwidth", [1e6, 1.5e9, 360e9])
def test_fit_finds_an_exact_line(latency: float, bandwidth: float) -> None:
    found = fit(SIZES, [latency + size / bandwidth for size in SIZES])
    assert found == pytest.approx((latency, bandwidth), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_fit_finds_both_ends_under_ten_percent_noise(seed: int) -> None:
    dice = random.Random(seed)
    seconds = [(60e-6 + size / 1.5e9) * dice.uniform(0.9, 1.1) for size in SIZES]
    assert fit(SIZES, seconds) == pytest.approx((60e-6, 1.5e9), rel=0.15)


def test_fit_is_never_negative() -> None:
    assert fit([1, 2], [2.0, 1.0])[1] == math.inf
    assert 1.0 < fit([1, 2], [2.0, 1.0])[0] < 2.0
    assert fit([1, 2], [1.0, 3.0]) == pytest.approx((0.0, 13 / 15))
    assert fit([0, 8], [1.0, 3.0]) == pytest.approx((1.0, 4.0))


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ([], []),
        ([8], [1.0]),
        ([8, 8], [1.0, 2.0]),
        ([8, 16], [1.0]),
        ([8, 16], [1.0, 0.0]),
        ([8, 16], [1.0, math.nan]),
        ([8, 16], [1.0, math.inf]),
        ([-8, 16], [1.0, 2.0]),
    ],
)
def test_fit_refuses_what_gives_no_line(sizes: list[float], seconds: list[float]) -> None:
    with pytest.raises(PlacementError, match="need two different sizes, and for each a time above 0\n  found"):
        fit(sizes, seconds)


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
    measured = measure(2, [1024, 2**20])
    level = measured.cluster().levels[0]
    assert (level.latency, level.bandwidth, level.size) == (measured.latency, measured.bandwidth, 65536)
    assert all(0 < seconds < 60 for seconds in measured.seconds)
    assert measured.cluster().device == cluster("cpu").device


def test_a_measurement_prints_beside_the_preset() -> None:
    text = str(LinkTimes(2, (1024, 2**20), (1e-4, 1e-3), 5e-5, 2e9))
    assert "all-gather over 2 local Gloo ranks, one hop" in text
    assert "latency        50.0 us    preset     60.0 us" in text
    assert "bandwidth      2.00 GB/s  preset     1.50 GB/s" in text


@pytest.mark.usefixtures("processes")
def test_a_process_that_fails_is_quoted() -> None:
    with pytest.raises(
        TransportError, match=r"rank \d of the measurement ended with code 1\n  it said: .*RuntimeError"
    ):
        measure(2, [1024, -1])


def test_a_measurement_that_takes_too_long_is_ended() -> None:
    with pytest.raises(TransportError, match=r"more than 0.1 s\n  ranks \[0, 1\] were still running"):
        measure(2, timeout=0.1)


def test_one_rank_has_nobody_to_measure_with() -> None:
    with pytest.raises(PlacementError, match="cannot measure between 1 ranks\n  a transport needs at least 2"):
        measure(1)
