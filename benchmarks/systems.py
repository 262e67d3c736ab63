"""Ways to send less, or less often, or to wait for nobody, beside data parallelism over a slow link: time to one loss.

    python -m benchmarks.systems [--quick] [--write] [--only 'data parallel' '1-bit Adam']

Four ranks in one process, one thread at a time. The link is emulated: a step takes what it computes, a quarter of the
measured time on the core, since ranks do that beside each other, and the seconds that the link counts for its
exchanges. A parameter server and pipelines compute and send at the same time, and their links carry more than one thing
at once: their time is that of their own network, simulated with the measured seconds of computing and with links as
queues that take what was counted (parts/late_methods.py). A loss is the mean of the last steps'; all run until they
have the one that data parallelism has at its last step, and time is that of the first step with it, as a share of data
parallelism's own, in one run.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from statistics import median
from time import process_time
from typing import NamedTuple

import torch

from benchmarks.parts.alone import aligned
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.late_methods import LATE
from benchmarks.parts.systems_methods import BANDWIDTH, LAST, LATENCY, METHODS, RANKS, Method, Way
from sbpflow.boxing import slow_link

STEPS, PATIENCE = 120, 2
WAYS = [*METHODS, *LATE]


class Ran(NamedTuple):
    """A run: its losses, what the link counted for each step, and seconds that a rank computes in one."""

    way: Way
    losses: list[float]
    link: list[float]
    bytes: list[float]
    compute: float

    def reached(self, loss: float) -> int | None:
        """The first step after which the mean of the last losses is as low."""
        ends = range(LAST, len(self.losses) + 1)
        return next((end for end in ends if sum(self.losses[end - LAST : end]) / LAST <= loss), None)

    def seconds(self, steps: int) -> float:
        if self.way.ends is None:
            return steps * self.compute + sum(self.link[:steps])
        ends = self.way.ends(self.compute, median(self.bytes))  # of the steps of a call, behind which nothing is left
        calls, rest = divmod(steps - 1, len(ends))
        return calls * ends[-1] + ends[rest]


def main() -> None:
    options = command_line(__doc__, [way.name for way in WAYS]).parse_args()
    torch.set_num_threads(1)
    steps = 2 * LAST if options.quick else STEPS
    chosen = [method for method in WAYS if method.name in options.only or method is WAYS[0]]
    reported("systems", table(chosen, steps), write=options.write)


def table(methods: Sequence[Method], steps: int) -> Iterator[str]:
    first = ran(methods[0], steps)
    goal = sum(first.losses[-LAST:]) / LAST
    own = first.seconds(first.reached(goal) or steps)  # it may have had that loss before, as the others may
    rows = [("way", "steps to the loss", "loss after as many", "KB a step", "computes, ms", "link, ms", "time")]
    for method in methods:
        mine = first if method is methods[0] else ran(method, steps, goal)
        end = mine.reached(goal)
        behind = sum(mine.losses[steps - LAST : steps]) / LAST
        many, busy = end or len(mine.losses), mine.way.busiest
        sent, link = busy * sum(mine.bytes[:many]) / many / 1e3, busy * sum(mine.link[:many]) / many * 1e3
        ratio = f"{mine.seconds(end) / own:.2f}" if end else f"not in {len(mine.losses)} steps"
        figures = (
            str(end or "-"),
            f"{behind / goal - 1:+.1%}",
            f"{sent:.1f}",
            f"{mine.compute * 1e3:.1f}",
            f"{link:.1f}",
        )
        rows.append((method.name, *figures, ratio))
    yield f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, times on the core."
    yield ""
    yield f"**Systems over a slow link.** Time to the loss {goal:.3f}, which data parallelism has after {steps} steps,"
    yield f"as a share of its own; {RANKS} ranks, {LATENCY * 1e3:g} ms and {BANDWIDTH * 8 / 1e6:g} Mbit/s, emulated."
    yield "KB and link are those of the busiest link; `computes` is of a rank on average."
    yield ""
    yield from aligned(rows)


def ran(method: Method, steps: int, goal: float | None = None) -> Ran:
    """A run of so many steps, or on until it has a loss."""
    torch.manual_seed(0)
    way, losses, link, sent, times = method.make(), list[float](), list[float](), list[float](), list[float]()
    with slow_link(latency=LATENCY, bandwidth=BANDWIDTH, wait=False) as line:
        while len(losses) < steps or (
            goal is not None and len(losses) < PATIENCE * steps and sum(losses[-LAST:]) / LAST > goal
        ):
            seconds, nbytes, start = line.seconds, line.bytes, process_time()
            found = way.steps(len(losses))
            losses += found
            times.append((process_time() - start) / len(found))
            link += [(line.seconds - seconds) / len(found)] * len(found)
            sent += [(line.bytes - nbytes) / len(found)] * len(found)
    return Ran(way, losses, link, sent, median(times[1:]) / RANKS)  # the first compiles


if __name__ == "__main__":
    main()
