"""The line through times is found under noise, and refused where there is none."""

import math
import random

import pytest

from sbpflow.placement import PlacementError
from sbpflow.placement.network.fit import fit

SIZES = tuple(1024 * 4**k for k in range(7))


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
