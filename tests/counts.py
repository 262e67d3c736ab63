"""Counts of work: the same on every machine, however busy it is. Times are for benchmarks/."""

import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["calls"]


def calls(action: Callable[[], object]) -> int:
    """How many functions, Python's and C's, are called while it runs.

    >>> calls(lambda: [abs(n) for n in range(1000)]) in range(1001, 1010)
    True
    """
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count
