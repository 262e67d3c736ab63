"""Rank times: how long each rank works at a step, without waiting for others, so that a slow one is named.

All ranks of a step end together, however slow one is; but the slow one waits least.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, median_low
from time import perf_counter

from ....actors.runtime.ranked import is_wire
from ....actors.runtime.runtime import RunRecord
from ....boxing.exchange.execute import waited

__all__ = ["RankTimes", "StepClock"]

WINDOW = 16  # steps
SLOW = 1.5  # times the median


class StepClock:
    """The clock of this process: seconds of its last steps in which it did not wait for others.

    Steps are noted, and looked at when somebody asks.
    """

    def __init__(self) -> None:
        self.steps: deque[tuple[float, RunRecord | None]] = deque(maxlen=WINDOW)
        self.before = (0.0, 0.0)

    def begin(self) -> None:
        self.before = perf_counter(), waited.seconds

    def end(self, record: RunRecord | None) -> None:
        """Note a step. Of actors a `record` tells when they waited for each other."""
        start, waits = self.before
        self.steps.append((perf_counter() - start - (waited.seconds - waits), record))

    @property
    def usual(self) -> float:
        """The median of the last steps, of which a first one that compiles is no measure."""
        return median(max(seconds - _idle(record), 0.0) for seconds, record in self.steps) if self.steps else 0.0


def _idle(record: RunRecord | None) -> float:
    """The seconds of a step in which no actor of this process worked."""
    if record is None:
        return 0.0
    return record.seconds - sum(ran.end - ran.start for ran in record.firings if not is_wire(ran.queue))


@dataclass(frozen=True)
class RankTimes:
    """Seconds that each rank worked at a step: the median of its last ones; `hosts` has the host of each, by name.

    >>> print(RankTimes({0: 0.010, 1: 0.011, 2: 0.031, 3: 0.010}))
    rank 2 is slow: 31.0 ms of work a step, 3.1 times the median
    """

    seconds: Mapping[int, float]
    hosts: Mapping[int, str] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return median_low(self.seconds.values())

    @property
    def slowest(self) -> int:
        """The rank that works longest."""
        return max(self.seconds, key=lambda rank: self.seconds[rank])

    @property
    def slow(self) -> tuple[int, ...]:
        """The ranks that work more than half as long again as the median."""
        return tuple(rank for rank, seconds in self.seconds.items() if seconds > SLOW * self.median)

    @property
    def slow_hosts(self) -> tuple[str, ...]:
        """The hosts of which all ranks are slow, where there are others."""
        of = {host: [rank for rank in self.seconds if self.hosts.get(rank) == host] for host in self.hosts.values()}
        return tuple(host for host, ranks in of.items() if ranks and {*ranks} <= {*self.slow})

    def __str__(self) -> str:
        of = self.seconds[self.slowest]
        if not self.slow:
            return f"no rank is slow: {min(self.seconds.values()) * 1e3:.1f} to {of * 1e3:.1f} ms of work a step"
        several = ", ".join(map(str, self.slow))
        named = (
            f"rank {several} is slow" if len(self.slow) == 1 else f"ranks {several} are slow, rank {self.slowest} most"
        )
        found = self.slow_hosts
        named += f", all of host{'s' * (len(found) > 1)} {', '.join(found)}" if found else ""
        return f"{named}: {of * 1e3:.1f} ms of work a step, {of / max(self.median, 1e-9):.1f} times the median"
