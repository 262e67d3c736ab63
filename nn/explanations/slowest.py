"""The slowest of many: how long the longest of n times takes that scatter alike, however many n are.

Nothing is drawn n times. The longest of n is at the quantile u where one is at the quantile u^(1/n).
"""

from functools import lru_cache
from math import log1p, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ...actors.protocol.simulate import Seconds

__all__ = ["DRAWS", "QUANTILES", "longest", "longest_of_scattered"]

DRAWS = 512  # runs that are looked at, each of them as likely
QUANTILES = (np.arange(DRAWS) + 0.5) / DRAWS
TAIL = 8  # runs at the end, beyond which the longest of more follow a curve
SKEWED = 1.0  # as that curve is at most


def longest_of_scattered(scatter: float, count: int) -> Seconds:
    """The longest of so many times whose mean is 1 and standard deviation `scatter`, in runs from short to long; none
    takes no time. Each is a lognormal, so that it is above 0.

    >>> longest_of_scattered(0.1, 1).mean().round(6), longest_of_scattered(0.1, 100).mean().round(2)
    (np.float64(1.0), np.float64(1.28))
    """
    if not count:
        return np.zeros(DRAWS)
    width = sqrt(log1p(scatter**2))
    return np.asarray(np.exp(width * _normal(count)) / np.exp(width * _normal(1)).mean())


def longest(found: Seconds, counts: npt.NDArray[np.int64], at: Seconds, scatter: float) -> Seconds:
    """The longest of so many times that are like those found, at each of these quantiles; none takes no time.

    Beyond the longest that were found their logarithms follow a normal distribution, but for its skew."""
    times = np.sort(found)
    wanted = at ** (1 / np.maximum(counts, 1))
    near = np.interp(wanted, QUANTILES, times)
    logs = np.log(times)
    if scatter and logs.std() > 0:
        mean, std = logs.mean(), logs.std()
        skew = np.clip(((logs - mean) ** 3).mean() / std**3, -SKEWED / 4, SKEWED)
        first = QUANTILES[-TAIL]
        z, from_here = _inverse(np.maximum(wanted, first)), _inverse(np.array([first]))[0]
        further = std * (z - from_here + (z**2 - from_here**2) * skew / 6)
        near = np.where(wanted > first, times[-TAIL] * np.exp(further), near)
    return np.where(counts > 0, near, 0.0)


@lru_cache(maxsize=64)
def _normal(count: int) -> Seconds:
    return _inverse(QUANTILES ** (1 / count))


def _inverse(quantiles: Seconds) -> Seconds:
    normal = NormalDist()
    return np.array([normal.inv_cdf(float(each)) for each in quantiles])
