"""Slow links: from what hosts sent to each other in a window to the host whose link gives far less than the others.

    a -> c   25 MB/s             b gives 2.4 MB/s and was asked for more, others show 24:
    a -> b    1 MB/s, b -> c 1   its link is slow, not theirs, though they send slowly to it

What a host shows at best is a bound from below of what its link gives: to those that took least time, all at once. It
is judged only where it was at the full for seconds, so nobody is slow who has little to send, or computes for long.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, median_low
from typing import NamedTuple

__all__ = ["FACTOR", "LinkJudge", "LinkRate", "LinkUse", "slow_links"]

FACTOR = 3.0  # so many times slower than the others is told; below it is what traffic of another shape may look like
AGAIN = 3.0  # and again where that changes by as much
WELL = 1.5  # a link that was slow is not any more
ASKED = 1.0  # seconds of a window at the full, from which on a link is judged
SHORTEST = 0.1  # seconds; what took less is counted so, because kernels count in steps of up to 10 ms
EARLIER = 0.3  # seconds that an earlier window must have taken where it is compared with: a burst shows no rate
LEAST = 1 << 20  # bytes of a window, from which on a link is judged
LATELY = 12  # windows before this one, by which the rate of others is told
FEWER = 4  # times fewer bytes than a link is judged by may have come by in a burst, which shows no rate


class LinkUse(NamedTuple):
    """Bytes to a host in a window; seconds of the busiest connection; seconds in which it was at the full."""

    bytes: int
    seconds: float
    full: float


Traffic = Mapping[tuple[str, str], LinkUse]  # by who sends and who receives


class LinkRate(NamedTuple):
    """Bytes a second of a host's link and of those of others, and whether it is what it sends or what it receives."""

    rate: float
    others: float
    sends: bool

    @property
    def times(self) -> float:
        return self.others / self.rate


def together(flows: Iterable[tuple[str, str, LinkUse]]) -> Traffic:
    """Traffic of hosts from that of their processes, which send at once."""
    found = dict[tuple[str, str], LinkUse]()
    for source, target, sent in flows:
        old = found.get((source, target), LinkUse(0, 0.0, 0.0))
        found[source, target] = LinkUse(old.bytes + sent.bytes, *map(max, old[1:], sent[1:]))
    return found


def slow_links(
    traffic: Traffic,
    hosts: Sequence[str],
    known: Mapping[str, float],
    best: Callable[[str, int], float] = lambda *_: 0.0,
) -> dict[str, LinkRate]:
    """Hosts whose links are slow beside those of the others, worse than is `known` of them (in any unit).

    `best` is what others have shown in windows before, as who sends (0) or receives (1): it makes nobody slow, but how
    many times slower a link is goes by it, since in a single window the others may show little.

    >>> slow, quick = LinkUse(6_000_000, 9.0, 8.0), LinkUse(9_000_000, 0.4, 0.0)
    >>> traffic = {(a, b): slow if "b" in (a, b) else quick for a in "abc" for b in "abc" if a != b}
    >>> {host: round(found.times) for host, found in slow_links(traffic, "abc", {}).items()}
    {'b': 17}
    """
    found, of = dict[str, LinkRate](), _ends(traffic)
    for host in hosts if len(hosts) > 2 else ():
        others = [each for each in hosts if each != host]
        news = min(1.0, known[host] / median_low(known[each] for each in others)) if host in known else 1.0
        for end in (0, 1):
            sent = of.get((host, end), [])
            total = sum(each.bytes for each in sent)
            if total < LEAST or max(each.full for each in sent) < ASKED:
                continue
            least = total / len(sent) / FEWER
            rates = [_shown(of.get((each, end), ()), least) for each in others]
            rate, theirs = _shown(sent, 0), median_low([each for each in rates if each] or [0.0])
            if theirs * news < FACTOR * rate:
                continue
            told = LinkRate(rate, max(theirs, median(best(each, end) for each in others)), end == 0)
            if host not in found or told.times > found[host].times:
                found[host] = told
    return found


def _ends(traffic: Traffic) -> Mapping[tuple[str, int], list[LinkUse]]:
    """The traffic of each host: what it sends (0), and what it receives (1)."""
    found = defaultdict[tuple[str, int], list[LinkUse]](list)
    for ends, sent in traffic.items():
        for end in (0, 1):
            found[ends[end], end].append(sent)
    return found


def _shown(flows: Iterable[LinkUse], least: float) -> float:
    """Bytes a second that a link has carried at best, to several hosts at once; 0 if fewer bytes than `least`."""
    best = total = 0.0
    for sent in sorted(flows, key=lambda each: each.seconds):
        total += sent.bytes
        if total >= least:
            best = max(best, total / max(sent.seconds, SHORTEST))
    return best


class LinkJudge:
    """The judge of all windows of a run. A link is told where two windows say it and none between them says otherwise,
    and again where it changed. Of two hosts it is compared with earlier windows, because there are no others."""

    def __init__(self, hosts: Mapping[str, str], known: Callable[[], Mapping[str, float]]) -> None:
        self.hosts, self.known = hosts, known  # in words, by their names; what is known of the links of each
        self.told = dict[str, LinkRate]()
        self.lines = dict[str, str]()
        self._suspects: Mapping[str, LinkRate] = {}
        self._before: list[LinkUse] = []
        self._shown: deque[Mapping[tuple[str, int], float]] = deque(maxlen=LATELY)

    def judge(self, flows: Iterable[tuple[str, str, LinkUse]]) -> list[str]:
        """News of a window: lines on links that are slow, or are not any more."""
        traffic = together(flows)
        pair = len(self.hosts) == 2
        found = self._slower(traffic) if pair else slow_links(traffic, tuple(self.hosts), {})
        if found and not pair:
            found = slow_links(traffic, tuple(self.hosts), self.known(), self._best)
        self._shown.append({at: _shown(sent, LEAST) for at, sent in _ends(traffic).items()})
        before = {host: rate for host, rate in self._suspects.items() if not self._quick(host, rate, traffic)}
        self._suspects = before | found
        news = list[str]()
        for host, rate in found.items():
            told = self.told.get(host)
            if host in before and (told is None or not 1 / AGAIN < rate.times / told.times < AGAIN):
                self.told[host] = rate
                self.lines[host] = _line(" and ".join(self.hosts.values()) if pair else self.hosts[host], rate, pair)
                news.append(self.lines[host])
        well = [host for host, told in self.told.items() if host not in found and self._quick(host, told, traffic)]
        return news + [self._well(host) for host in well]

    def _best(self, host: str, end: int) -> float:
        """Bytes a second that a link has shown lately, at best."""
        return max((shown.get((host, end), 0.0) for shown in self._shown), default=0.0)

    def _slower(self, traffic: Traffic) -> dict[str, LinkRate]:
        """The link of two hosts where it gives less than it did, under the name of the first host."""
        found, before = dict[str, LinkRate](), self._before
        self._before = [*before, *(sent for sent in traffic.values() if sent.seconds >= EARLIER)]
        for ends, sent in traffic.items():
            rate = _shown([sent], 0)
            best = max((_shown([each], sent.bytes / FEWER) for each in before), default=0.0)
            if sent.bytes >= LEAST and sent.full >= ASKED and best >= FACTOR * rate:
                first = next(iter(self.hosts))
                found[first] = LinkRate(rate, best, ends[0] == first)
        self._before = sorted(self._before, key=lambda each: each.bytes / each.seconds)[-8:]
        return found

    def _quick(self, host: str, slow: LinkRate, traffic: Traffic) -> bool:
        """Whether a link that was slow carries what others do, as far as was asked of it."""
        end = 0 if slow.sends else 1
        rates = [(ends[end] == host, _shown([sent], LEAST)) for ends, sent in traffic.items()]
        own = [rate for inside, rate in rates if inside and rate]
        rest = [rate for inside, rate in rates if not inside and rate]
        if len(self.hosts) == 2:
            rest = [slow.others]
        return bool(own and rest) and min(own) * WELL * (len(self.hosts) - 1) >= max(rest)

    def _well(self, host: str) -> str:
        del self.told[host], self.lines[host]
        if len(self.hosts) == 2:
            return f"the link between {' and '.join(self.hosts.values())} is as quick as before again"
        return f"{self.hosts[host]} has a link as quick as the others again"


def _line(who: str, found: LinkRate, pair: bool) -> str:
    rate, others = (f"{each / 1e6:.3g} MB/s" for each in (found.rate, found.others))
    if pair:
        return f"the link between {who} is slow: {rate}, {found.times:.1f} times less than the {others} before"
    does = "sends" if found.sends else "receives"
    return (
        f"{who} has a slow link: it {does} {rate} while more waits, the others {others}, "
        f"{found.times:.1f} times as much"
    )
