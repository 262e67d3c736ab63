"""The line through times: seconds of a message  =  latency + bytes / bandwidth."""

import math
from collections.abc import Sequence
from operator import mul

from ..errors import PlacementError

__all__ = ["fit"]


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and bandwidth of the line `seconds = latency + size / bandwidth` nearest to what was measured.

    Nearest in *relative* error, so that a microsecond at 1 KiB counts as much as a millisecond at 8 MiB.
    Neither is ever negative: a slope lost in noise gives an infinite bandwidth, an intercept below zero
    gives latency 0.

    >>> latency, bandwidth = fit([1_000, 1_000_000], [11e-6, 1010e-6])
    >>> f"{latency:.6f} s, {bandwidth:.3g} bytes/s"
    '0.000010 s, 1e+09 bytes/s'
    """
    sane = all(math.isfinite(x) and x >= 0 for x in sizes) and all(math.isfinite(t) and t > 0 for t in seconds)
    if len(sizes) != len(seconds) or len(set(sizes)) < 2 or not sane:
        raise PlacementError(
            "a latency and a bandwidth need two different sizes, and for each a time above 0\n"
            f"  found sizes {list(sizes)}\n  and seconds {list(seconds)}"
        )
    # Least squares of (a + b x - t) / t, that is of a u + b v - 1 with u = 1 / t and v = x / t.
    us, vs = [1 / t for t in seconds], [x / t for x, t in zip(sizes, seconds, strict=True)]
    uu, uv, vv = (sum(map(mul, left, right)) for left, right in ((us, us), (us, vs), (vs, vs)))
    det = uu * vv - uv * uv
    latency, slope = (sum(us) * vv - sum(vs) * uv) / det, (uu * sum(vs) - uv * sum(us)) / det
    if slope <= 0:
        return sum(us) / uu, math.inf
    return (latency, 1 / slope) if latency >= 0 else (0.0, vv / sum(vs))
