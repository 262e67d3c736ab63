"""Traffic of this process to other hosts, in windows: bytes, seconds that the links took, and how much at the full.

A connection is at the full in a look if it was busy from the last one to this, with more bytes waiting behind. Whatever
it carried then is all that its link gave; what it carries otherwise may be less because nobody asked for more.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from .connections import ConnectionCount, connection_counts
from .page import Page
from .slow_links import LinkJudge, LinkUse

__all__ = ["WINDOW", "HostTraffic", "LinkWatch"]

WINDOW = 5.0  # seconds
FULL = 0.9  # of the seconds between two looks
MANY = 64  # hosts to which a process sends most; a page has no room for more


class HostTraffic:
    """Counts are taken at any times by `look`; each window that is over is a number and what was sent in it.

    `hosts` says whose an address is; others are of no interest.
    """

    def __init__(self, hosts: Mapping[str, str]) -> None:
        self.hosts = hosts
        self.number = 0
        self._known: Mapping[tuple[str, int, int], ConnectionCount] | None = None
        self._looked = self._began = 0.0
        self._bytes, self._full = dict[str, int](), dict[str, float]()
        self._seconds = dict[tuple[str, int, int], float]()

    def look(self, now: float, counts: Mapping[tuple[str, int, int], ConnectionCount]) -> dict[str, LinkUse] | None:
        """Take what is new; the window by hosts if it is over now."""
        before, self._known = self._known, counts
        passed, self._looked = now - self._looked, now
        if before is None:
            self._began = now
            return None
        full = set[str]()
        for at, count in counts.items():
            host = self.hosts.get(at[0])
            if host is None:
                continue
            old = before.get(at, ConnectionCount(0, 0.0, 0))
            busy = max(count.seconds - old.seconds, 0.0)
            self._bytes[host] = self._bytes.get(host, 0) + max(count.bytes - old.bytes, 0)
            self._seconds[at] = self._seconds.get(at, 0.0) + busy
            if busy >= FULL * passed and (old.queued or count.queued):
                full.add(host)
        for host in full:
            self._full[host] = self._full.get(host, 0.0) + passed
        return self._end(now) if now - self._began >= WINDOW else None

    def _end(self, now: float) -> dict[str, LinkUse]:
        longest = dict[str, float]()
        for at, seconds in self._seconds.items():
            longest[self.hosts[at[0]]] = max(longest.get(self.hosts[at[0]], 0.0), seconds)
        found = {
            h: LinkUse(n, round(longest[h], 3), round(self._full.get(h, 0.0), 3)) for h, n in self._bytes.items() if n
        }
        self._bytes, self._full, self._seconds = {}, {}, {}
        self._began = now
        self.number += 1
        return found


class LinkWatch:
    """The watch over the links of a run: what this process sent goes to its page, and all pages are judged. The first
    rank warns of what is new; `lines` are on all of them.

    `places` are addresses by rank, `known` gives what is known of the links by host; it is asked when it is needed.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        names: Mapping[str, str],
        pages: Mapping[int, Page],
        places: Mapping[int, str],
        known: Callable[[], Mapping[str, float]],
    ) -> None:
        self.rank, self.hosts, self.pages = rank, hosts, pages
        self.order = tuple(dict.fromkeys(hosts))
        self.traffic = HostTraffic(_homes(hosts, places, hosts[rank]))
        self.judge = LinkJudge(names, known)
        self._seen = [0] * len(hosts)

    @property
    def lines(self) -> tuple[str, ...]:
        """Links that are slow now."""
        return tuple(self.judge.lines.values())

    def look(self) -> None:
        """Count, and judge when a window is over."""
        if not self.traffic.hosts:
            return
        window = self.traffic.look(time.monotonic(), connection_counts())
        if window is None:
            return
        most = sorted(window.items(), key=lambda each: -each[1].bytes)[:MANY]
        said = [[self.order.index(host), *sent] for host, sent in most]
        self.pages[self.rank].carry(self.traffic.number, json.dumps(said, separators=(",", ":")))
        for news in self.judge.judge(list(self._flows())):
            if not self.rank:
                with suppress(Warning):  # where warnings are errors, this one is nobody's
                    warnings.warn(news, stacklevel=2)

    def _flows(self) -> Iterator[tuple[str, str, LinkUse]]:
        """Windows that were not judged before, of hosts of which each process has one: they share a link, and what some
        of them sent in the seconds of all is less than it gave."""
        carried = [self.pages[rank].carried() for rank in range(len(self.hosts))]
        new = [
            number not in (0, seen) for (number, _), seen in zip(carried, self._seen, strict=True)
        ]  # 0: being written
        late = {host for host, there in zip(self.hosts, new, strict=True) if not there}
        for rank, (host, (number, text)) in enumerate(zip(self.hosts, carried, strict=True)):
            if host not in late:
                self._seen[rank] = number
                for target, nbytes, seconds, full in json.loads(text):
                    yield host, self.order[target], LinkUse(nbytes, seconds, full)


def _homes(hosts: Sequence[str], places: Mapping[int, str], mine: str) -> dict[str, str]:
    """The other host of each address; none where several have it, as containers of one machine may."""
    found = {address: {hosts[r] for r, at in places.items() if at == address} for address in places.values()}
    return {address: next(iter(homes)) for address, homes in found.items() if len(homes) == 1 and mine not in homes}
