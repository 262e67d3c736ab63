"""Lengths of slices of a sequence, chosen by what they take: TeraPipe's dynamic program.

A slice of `length` tokens behind `context` others takes `seconds(length, context)` on a stage: later ones look back at
more, and short ones do not fill a device. Slices of m sequences follow each other over p stages, so that a step takes

    m * (sum of all slices)  +  (p - 1) * (the slowest slice)

of which the first alone, under a limit of the second, is a shortest path over the tokens.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf

from ....placement.errors import ScheduleError

__all__ = ["slice_lengths", "sliced_seconds"]

Seconds = Callable[[int, int], float]


def slice_lengths(
    tokens: int, seconds: Seconds, *, p: int, micro_batches: int = 1, multiple: int = 1
) -> tuple[int, ...]:
    """The lengths of slices, for `slices=`, with which a sequence takes the least time in p stages.

    `seconds(length, context)` is that of one slice on one stage, given or measured, forward and backward together:
    exact where the one is a share of the other, and no backward comes before the last forward. Lengths are multiples of
    `multiple` (but for the last, which has what remains), for every pair of which `seconds` is asked once.

    >>> slice_lengths(12, lambda length, context: 1 + length * (8 + length / 2 + context) / 24, p=4)
    (3, 3, 2, 2, 2)
    """
    _check(tokens, p, micro_batches, multiple)
    ends = [*range(0, tokens, multiple), tokens]
    table = [[_asked(seconds, end - start, start) for start in ends[:at]] for at, end in enumerate(ends)]
    best, found, limit = inf, list[int](), inf
    while True:
        cuts = _shortest(table, limit)
        if cuts is None:
            break
        parts = [table[b][a] for a, b in pairwise(cuts)]
        if micro_batches * sum(parts) >= best:  # lower limits make sums longer
            break
        total = _total(parts, p, micro_batches)
        if total < best:
            best, found = total, cuts
        limit = max(parts)  # under which none of those is that were just found
    return tuple(ends[b] - ends[a] for a, b in pairwise(found))


def sliced_seconds(lengths: Sequence[int], seconds: Seconds, *, p: int, micro_batches: int = 1) -> float:
    """The time that sequences cut into such slices take in p stages."""
    _check(sum(lengths), p, micro_batches, min(lengths, default=1))
    pairs = zip(lengths, accumulate(lengths, initial=0), strict=False)
    return _total([_asked(seconds, length, context) for length, context in pairs], p, micro_batches)


def _total(parts: Sequence[float], p: int, micro_batches: int) -> float:
    return micro_batches * sum(parts) + (p - 1) * max(parts)


def _shortest(table: Sequence[Sequence[float]], limit: float) -> list[int] | None:
    """The ends of slices, each of which takes less than `limit`, with the least sum; of equal ones, with fewer slow."""
    reached: list[tuple[float, float, int]] = [(0.0, 0.0, 0)]  # the sum, the slowest, where the last slice begins
    for row in table[1:]:
        ways = [
            (reached[start][0] + time, max(reached[start][1], time), start)
            for start, time in enumerate(row)
            if time < limit and reached[start][0] < inf
        ]
        reached.append(min(ways, default=(inf, inf, 0)))
    if reached[-1][0] == inf:
        return None
    cuts = [len(table) - 1]
    while cuts[-1]:
        cuts.append(reached[cuts[-1]][2])
    return cuts[::-1]


def _asked(seconds: Seconds, length: int, context: int) -> float:
    time = seconds(length, context)
    if not 0 <= time < inf:
        raise ScheduleError(
            f"a slice of {length} tokens behind {context} takes {time} seconds\n"
            "  give what it takes, a number of 0 or more that has an end"
        )
    return time


def _check(tokens: int, p: int, micro_batches: int, multiple: int) -> None:
    given = {"tokens": tokens, "p": p, "micro_batches": micro_batches, "the shortest slice or multiple": multiple}
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise ScheduleError(f"lengths of slices: {name} is {value!r}\n  give a whole number, 1 or more")
