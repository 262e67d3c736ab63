"""A slow link: exchanges that take as long as between hosts far apart, by their messages and bytes; for trying plans.

    with slow_link(latency=1e-3, bandwidth=1e7) as link: ...      link.seconds, link.bytes, link.exchanges

Each rank has a link of its own to all others. An exchange takes the latency, and the bytes that its busiest rank sends
or receives over the bandwidth; several that are under way at once come one after the other. `seconds` are counted from
bytes alone, so that they are the same in every run; with `wait` the exchange is over no sooner than that.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from time import monotonic, sleep
from typing import NamedTuple

from torch import Tensor

from ...placement.errors import SbpError
from ...sbp.signature import Reduction
from ..boxing import Boxing
from .transport import Arrival, Errand, Given, Sent, Transport

__all__ = ["SlowLink", "SlowTransport", "open_link", "slow_link"]


class SlowLink:
    """A link with what it has carried so far: exchanges, bytes of the busiest rank of each, and seconds of these."""

    def __init__(
        self,
        latency: float,
        bandwidth: float,
        *,
        wait: bool = True,
        now: Callable[[], float] = monotonic,
        pause: Callable[[float], None] = sleep,
    ) -> None:
        self.latency, self.bandwidth, self.wait = latency, bandwidth, wait
        self.now, self.pause = now, pause
        self.exchanges = self.bytes = 0
        self.seconds = 0.0
        self._free = 0.0  # when the line is done with what it was given so far
        self._lock = Lock()

    def takes(self, nbytes: int) -> float:
        """Carry so many bytes; the time at which they have arrived."""
        with self._lock:
            line = nbytes / self.bandwidth
            self.exchanges, self.bytes = self.exchanges + 1, self.bytes + nbytes
            self.seconds += self.latency + line
            self._free = max(self._free, self.now()) + line
            return self._free + self.latency

    def until(self, due: float) -> None:
        """Wait for it, if this link waits."""
        left = due - self.now()
        if self.wait and left > 0:
            self.pause(left)

    def __repr__(self) -> str:
        return f"{self.seconds:.3f} s for {self.bytes} bytes in {self.exchanges} exchanges"


_open: list[SlowLink] = []


def open_link() -> SlowLink | None:
    """The link that exchanges go by now, if there is a slow one."""
    return _open[-1] if _open else None


@contextmanager
def slow_link(*, latency: float = 0.0, bandwidth: float = float("inf"), wait: bool = True) -> Iterator[SlowLink]:
    """Inside, exchanges take `latency` seconds and their bytes over `bandwidth`, in bytes a second. Without `wait` they
    are only counted. All processes enter it alike."""
    if not (latency >= 0 and bandwidth > 0):
        raise SbpError(
            f"slow_link(latency={latency!r}, bandwidth={bandwidth!r})\n"
            "  give seconds from 0, and bytes a second above 0, as in slow_link(latency=1e-3, bandwidth=1e8)"
        )
    link = SlowLink(latency, bandwidth, wait=wait)
    _open.append(link)
    try:
        yield link
    finally:
        _open.remove(link)


class SlowTransport:
    """A transport whose exchanges arrive as late as a slow link brings them."""

    def __init__(self, inner: Transport, link: SlowLink) -> None:
        self.inner, self.link = inner, link
        self.sent: Sent = inner.sent

    def start(
        self, boxing: Given, stage: int, jobs: list[Errand], reduction: Reduction, background: bool = False
    ) -> Arrival:
        return self._late(self.inner.start(boxing, stage, jobs, reduction, background), jobs, 1)

    def all_reduce(self, boxing: Given, stage: int, jobs: list[Errand], reduction: Reduction) -> Arrival | None:
        arrival = self.inner.all_reduce(boxing, stage, jobs, reduction)
        return None if arrival is None else self._late(arrival, jobs, 2)

    def refuse(self, boxing: Boxing, error: Exception) -> None:
        self.inner.refuse(boxing, error)

    def _late(self, arrival: Arrival, jobs: Sequence[Errand], halves: int) -> Arrival:
        most = max((_busy(job) for job in jobs), default=0)
        return LateArrival(arrival, self.link, self.link.takes(halves * most)) if most else arrival


class LateArrival(NamedTuple):
    """An exchange under way over a slow link."""

    inner: Arrival
    link: SlowLink
    due: float

    def wait(self) -> list[Tensor]:
        found = self.inner.wait()
        self.link.until(self.due)
        return found


def _busy(job: Errand) -> int:
    """Bytes that a rank sends or receives in an exchange, whichever are more."""
    sends, receives = (sum(part.numel for part in parts) for parts in (job.program.sends, job.program.receives))
    return max(sends, receives) * job.buffer.element_size()
