"""The balance of a pipeline: layers in runs that take as long as each other, as far as they can."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf

__all__ = ["balanced"]


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Where each run of layers ends. The longest run is as short as can be; of such cuts the most even one, and of
    equal ones that with more layers in the early runs.

    >>> balanced([8, 1, 1, 1, 1, 1, 1, 1], 2), balanced([1, 1, 1, 1, 1], 2)
    ([1, 8], [3, 5])
    """
    sums, n = [0.0, *accumulate(costs)], len(costs)
    slack = 1 + 1e-9  # costs are sums of floats
    most = _least([[sums[end] - sums[at] for end in range(n + 1)] for at in range(n + 1)], parts) * slack
    best: list[list[tuple[float, int]]] = [[(inf, n)] * (n + 1) for _ in range(parts + 1)]  # squares, and the end
    best[0][n] = 0.0, n
    for left in range(1, parts + 1):
        for at in range(n - left, -1, -1):
            for end in range(at + 1, n - left + 2):
                long = sums[end] - sums[at]
                if long > most:
                    break
                squares = long * long + best[left - 1][end][0]
                if squares <= best[left][at][0] * slack:
                    best[left][at] = squares, end
    ends, at = [], 0
    for left in range(parts, 0, -1):
        at = best[left][at][1]
        ends.append(at)
    return ends


def _least(long: Sequence[Sequence[float]], parts: int) -> float:
    """The least that the longest run of any cut takes; `long` is by first layer and end."""
    n = len(long) - 1
    row = [0.0 if at == n else inf for at in range(n + 1)]
    for left in range(1, parts + 1):
        row = [
            min((max(long[at][end], row[end]) for end in range(at + 1, n - left + 2)), default=inf)
            for at in range(n + 1)
        ]
    return row[0]
