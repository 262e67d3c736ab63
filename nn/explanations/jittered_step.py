"""A step on devices that compute unevenly: its expectation, since everybody waits for the slowest.

    stage 0   F0 F1 B0 F2 B1 B2 |           ranks of a stage that move something inside a task take all as long as the
    stage 1      F0 B0 F1 B1 B2 |           slowest of them; copies of the pipeline, such as data has, wait once a step
       once a step, for the slowest copy

Tasks are scattered in many runs of the schedule's clock at once. Of equal ranks and of equal copies the longest is
known by its quantiles, so that a step of thousands of ranks takes as long to ask as one of a few.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...actors.protocol.network import Actor, Give, Network, Register, Take
from ...actors.protocol.simulate import Seconds, simulate
from ...boxing.figures import duration
from ...boxing.graph.report.report import Report
from ...placement import Jitter
from ..graph.step import Step
from .lockstep import Lockstep, lockstep
from .slowest import DRAWS, QUANTILES, longest, longest_of_scattered

__all__ = ["JitteredStep", "jittered", "jittered_network"]

MOST = 0.95  # of the steps that stay under a bound
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class JitteredStep:
    """Seconds of a step under jitter: those that are expected, those under which 95 % of steps stay, and the part of
    the expected ones that is waiting for the slowest. `plain` are those without jitter."""

    jitter: Jitter
    plain: float
    steps: Seconds  # of many, each as likely

    @cached_property
    def expected(self) -> float:
        return max(float(self.steps.mean()), self.plain)

    @cached_property
    def most(self) -> float:
        return float(np.quantile(self.steps, MOST))

    @property
    def waiting(self) -> float:
        return self.expected - self.plain

    def __str__(self) -> str:
        return (
            f"expected {duration(self.expected)}, {MOST:.0%} of steps under {duration(self.most)}, of which "
            f"{duration(self.waiting)} for waiting on the slowest; assumed {self.jitter}"
        )

    def dict(self) -> dict[str, Any]:
        """All of it as numbers; None is what no card is."""
        given = {name: getattr(self.jitter, name) for name in ("scatter", "slow", "one_in", "seed")}
        given["one_in"] = given["one_in"] if self.jitter.slow else None
        return {"plain": self.plain, "expected": self.expected, "most": self.most, "waiting": self.waiting} | given


def jittered(step: Step, report: Report, jitter: Jitter) -> JitteredStep | None:
    """The step under jitter; None where its seconds are not known."""
    if report.predicted is None:
        return None
    pieces = step.plan.pieces
    network = _straight(report) if pieces is None else pieces.network()
    ran = jittered_network(network, lockstep(step, report), jitter)
    rest = report.predicted - ran.plain  # what is done once a step, behind the slowest
    return JitteredStep(jitter, report.predicted, ran.steps + rest)


def jittered_network(network: Network, of: Lockstep, jitter: Jitter) -> JitteredStep:
    """All copies of a network under jitter, until the slowest of them is done."""
    draw = np.random.default_rng(jitter.seed)
    hit, slow = _stragglers(of, jitter, draw)
    factors = _Factors(of, jitter, slow, draw)
    run = simulate(network, others=lambda queue, seconds: seconds * factors.of(queue))
    ends = np.full(DRAWS * factors.kinds, run.end) if run.ends is None else run.ends
    steps = longest(ends[:DRAWS], of.copies - hit, QUANTILES, jitter.scatter)
    if factors.kinds > 1:
        steps = np.maximum(steps, longest(ends[DRAWS:], hit, draw.permutation(QUANTILES), jitter.scatter))
    return JitteredStep(jitter, run.end, steps)


def _straight(report: Report) -> Network:
    """The network of a step without micro-batches: one chunk that goes forward and back."""
    back = sum(cost.backward for cost in report.costs)
    forward = Actor("F0", "device 0", gives=(Give("act.0"),), firings=1, time=(report.compute or 0.0) - back)
    return Network((forward, Actor("B0", "device 0", (Take("act.0"),), time=back)), (Register("act.0"),))


def _stragglers(of: Lockstep, jitter: Jitter, draw: np.random.Generator) -> tuple[Ints, Mapping[str, Ints]]:
    """In each of the runs, how many copies have slow cards; and of one copy that has some, how many each queue has.

    Of n cards n / one_in are slow, wherever they are; the rest of that is one more in so many of the runs."""
    hit, slow = np.zeros(DRAWS, np.int64), {queue: np.zeros(DRAWS, np.int64) for queue in of.together}
    if not jitter.slow:
        return hit, {}
    ends = np.cumsum([*of.together.values()])
    cards, found = int(ends[-1]), list[Ints]()
    mean = of.copies * cards / jitter.one_in
    for run in range(DRAWS):
        many = int(mean) + int(draw.random() < mean % 1)
        copies, card = np.divmod(draw.choice(of.copies * cards, many, replace=False), cards)
        which = np.unique(copies)
        hit[run] = len(which)
        if many:
            mine = card[copies == draw.choice(which)]
            found.append(np.bincount(np.searchsorted(ends, mine, "right"), minlength=len(ends)))
    for run in range(DRAWS if found else 0):
        for queue, count in zip(slow, found[run % len(found)], strict=True):
            slow[queue][run] = count
    return hit, slow if found else {}


class _Factors:
    """By how much longer than their mean tasks take, in runs of a copy without slow cards, and of one that has some."""

    def __init__(self, of: Lockstep, jitter: Jitter, slow: Mapping[str, Ints], draw: np.random.Generator) -> None:
        self.jitter, self.draw, self.kinds = jitter, draw, 2 if slow else 1
        self.even = {queue: longest_of_scattered(jitter.scatter, many) for queue, many in of.together.items()}
        self.slowed = {queue: self._slowed(of.together[queue], counts) for queue, counts in slow.items()}

    def _slowed(self, ranks: int, counts: Ints) -> tuple[Ints, Seconds, Seconds]:
        """For each run the row of the two tables of what the others take, and what the slow ones do."""
        kinds, row = np.unique(counts, return_inverse=True)
        others = np.array([longest_of_scattered(self.jitter.scatter, ranks - int(many)) for many in kinds])
        slow = np.array([longest_of_scattered(self.jitter.scatter, int(many)) for many in kinds])
        return row, others, (1 + self.jitter.slow) * slow

    def of(self, queue: str) -> Seconds:
        """Those of one task in each of the runs."""
        if queue not in self.even:  # what no device does
            return np.ones(DRAWS * self.kinds)
        found = self.even[queue][self.draw.permutation(DRAWS)]
        if queue not in self.slowed:
            return found
        row, others, slow = self.slowed[queue]
        here = others[row, self.draw.permutation(DRAWS)]
        return np.concatenate([found, np.maximum(here, slow[row, self.draw.permutation(DRAWS)])])
