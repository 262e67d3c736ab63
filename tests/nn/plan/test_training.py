"""Trainings that fail: the expectation is that of a simulation, saves are as often as is best, and runs that were
published come out."""

import json
import random
from itertools import pairwise
from statistics import fmean, stdev

import pytest

from sbpflow.nn.plan.training import Failures, TrainingCost
from sbpflow.placement.errors import SbpError

HOUR = 3600.0


def simulated(of: TrainingCost, every: int, draw: random.Random) -> float:
    """Seconds of one training, stop by stop."""
    now, done, stop = 0.0, 0, draw.expovariate(1 / of.between)
    while done < of.steps:
        steps = min(every, of.steps - done)
        end = now + steps * of.step + of.save
        while stop < end:
            now = stop
            stop = now + draw.expovariate(1 / of.between)
            while stop < now + of.back:  # it stops once more before it is back
                now = stop
                stop = now + draw.expovariate(1 / of.between)
            now += of.back
            end = now + steps * of.step + of.save
        now, done = end, done + steps
    return now


# Stops are so many that runs are short: one in 1 to 20 minutes, of steps of seconds.
RUNS = [
    TrainingCost(300, 3.0, 64, 64 * 10**9, Failures(rate=HOUR / 300 / 64, storage=1e8, restart=20.0)),
    TrainingCost(100, 7.0, 8, 10**9, Failures(rate=HOUR / 60 / 8, storage=1e9, restart=5.0)),
    TrainingCost(500, 1.0, 16, 16 * 10**9, Failures(rate=HOUR / 1200 / 16, storage=1e8, restart=0.0)),
    TrainingCost(301, 100.0, 64, 64 * 10**9, Failures(rate=HOUR / 1300 / 64, storage=1e8, restart=60.0)),
    TrainingCost(301, 150.0, 64, 64 * 10**9, Failures(rate=HOUR / 1300 / 64, storage=1e8, restart=60.0)),
]


@pytest.mark.parametrize("of", RUNS, ids=range(len(RUNS)))
@pytest.mark.parametrize("times", [1, 3])
def test_the_expectation_is_that_of_a_simulation(of: TrainingCost, times: int) -> None:
    every, draw = of.every * times, random.Random(0)
    found = [simulated(of, every, draw) for _ in range(600)]
    assert abs(fmean(found) - of.expected(every)) < 4 * stdev(found) / len(found) ** 0.5


@pytest.mark.parametrize("of", RUNS, ids=range(len(RUNS)))
def test_saves_are_as_often_as_is_best_by_trying_all(of: TrainingCost) -> None:
    least = min(map(of.expected, range(1, of.steps + 1)))
    assert of.seconds == of.expected(of.every) <= least * (1 + 1e-5)
    draw = random.Random(1)
    means = [fmean(simulated(of, every, draw) for _ in range(300)) for every in (of.every, 4 * of.every)]
    assert means[0] < means[1]


def test_seldom_stops_give_youngs_square_root_and_frequent_ones_do_not() -> None:
    seldom = TrainingCost(10**7, 1.0, 8, 8 * 10**9, Failures(rate=HOUR / 1e6 / 8, storage=1e8))
    assert seldom.every == pytest.approx((2 * 10 * 1e6) ** 0.5, rel=0.01)
    often = TrainingCost(10**6, 0.01, 8, 8 * 10**9, Failures(rate=HOUR / 10 / 8, storage=1e8))
    young = (2 * often.save * often.between) ** 0.5 / often.step
    assert often.expected(often.every) < often.expected(round(young)) * 0.95


def llama(devices: int = 16_384) -> TrainingCost:
    """405B: 15.6T words in batches of 16M, of which a step took about 5 s; bf16, and three numbers of float32."""
    return TrainingCost(975_000, 5.0, devices, 14 * 405 * 10**9)


def test_llama_3_stopped_every_three_hours_and_got_on_nine_tenths_of_its_time() -> None:
    of = llama()
    assert of.between / HOUR == pytest.approx(54 * 24 / 419)
    assert 3.0 < of.between / HOUR < 3.2
    assert 0.90 < of.share < 0.97
    mega = TrainingCost(50_000, 6.34, 12_288, 18 * 175 * 10**9)
    assert 0.90 < mega.share < 0.97


def test_a_higher_rate_that_was_published_is_a_parameter() -> None:
    of = TrainingCost(10**5, 5.0, 1024, 10**12, Failures(rate=1 / 7.9 / 1024))
    assert of.between / HOUR == pytest.approx(7.9)
    assert of.share < TrainingCost(10**5, 5.0, 1024, 10**12).share


def test_more_devices_or_a_higher_rate_never_help() -> None:
    counts = [2**k for k in range(16)]
    assert all(a > b for a, b in pairwise(llama(n).between for n in counts))
    rates = [TrainingCost(1000, 5.0, 64, 10**11, Failures(rate=10.0**-k)).seconds for k in range(8, 1, -1)]
    assert all(a < b for a, b in pairwise(rates))
    assert all(llama(n).every <= llama(n).steps for n in counts)


def test_what_never_fails_saves_once_and_what_always_does_never_ends() -> None:
    never = TrainingCost(1000, 2.0, 8, 8 * 10**9, Failures(rate=0.0, storage=1e8), price=2.0)
    assert (never.every, never.seconds) == (1000, 2010.0)
    assert never.money == pytest.approx(2010 / HOUR * 8 * 2)
    assert str(never).startswith("none, a save of 10 s every 33.3 min, 99.5% effective: 0.0 days, 9; assumed 0 stops")
    hopeless = TrainingCost(10, 1e6, 8, 10**9, Failures(rate=10.0))
    assert hopeless.share == 0
    assert "no save is ever reached" in str(hopeless)
    assert json.loads(json.dumps(hopeless.dict(), allow_nan=False))["days"] is None
    assert TrainingCost(1000, 2.0, 8, 0).every == 1  # a save that costs nothing


@pytest.mark.parametrize("wrong", [{"rate": -1.0}, {"storage": 0.0}, {"restart": float("nan")}, {"rate": float("inf")}])
def test_figures_that_cannot_be_are_errors(wrong: dict[str, float]) -> None:
    with pytest.raises(SbpError, match=f"failures cannot be: {next(iter(wrong))} = "):
        Failures(**wrong)
