"""Ways to send less, or less often, beside data parallelism over a slow link: time to the same loss.

    python -m benchmarks.systems [--quick] [--write] [--only 'data parallel' '1-bit Adam']

Four ranks in one process, one thread. The link is emulated: a step takes what it computes, a quarter of the measured
time on the core, since ranks do that beside each other, and the seconds that the link counts for its exchanges. A loss
is the mean of the last steps'; all run until they have the one that data parallelism has at its last step, and figures
are ratios to it, in one run.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from time import thread_time
from typing import NamedTuple

import torch

from benchmarks.parts.alone import aligned
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.systems_methods import METHODS, RANKS, Method
from sbpflow.boxing import slow_link

LATENCY, BANDWIDTH = 1e-3, 1.25e7  # seconds; 100 Mbit/s
STEPS, LAST, PATIENCE = 80, 20, 2


class Ran(NamedTuple):
    """A run: its losses, what the link counted for each step, and seconds that a rank computes in one."""

    losses: list[float]
    link: list[float]
    bytes: list[int]
    compute: float

    def reached(self, loss: float) -> int | None:
        """The first step after which the mean of the last losses is as low."""
        ends = range(LAST, len(self.losses) + 1)
        return next((end for end in ends if sum(self.losses[end - LAST : end]) / LAST <= loss), None)

    def seconds(self, steps: int) -> float:
        return steps * self.compute + sum(self.link[:steps])


def main() -> None:
    options = command_line(__doc__, [method.name for method in METHODS]).parse_args()
    torch.set_num_threads(1)
    steps = 2 * LAST if options.quick else STEPS
    chosen = [method for method in METHODS if method.name in options.only or method is METHODS[0]]
    reported("systems", table(chosen, steps), write=options.write)


def table(methods: Sequence[Method], steps: int) -> Iterator[str]:
    first = ran(methods[0], steps)
    goal = sum(first.losses[-LAST:]) / LAST
    rows = [
        ("way", "steps to the loss", "loss after as many", "KB a step and rank", "computes, ms", "link, ms", "time")
    ]
    for method in methods:
        mine = first if method is methods[0] else ran(method, steps, goal)
        end = steps if mine is first else mine.reached(goal)
        behind = sum(mine.losses[steps - LAST : steps]) / LAST
        many = end or len(mine.losses)
        sent, link = sum(mine.bytes[:many]) / many / 1e3, sum(mine.link[:many]) / many * 1e3
        ratio = f"{mine.seconds(end) / first.seconds(steps):.2f}" if end else f"not in {len(mine.losses)} steps"
        figures = (
            str(end or "-"),
            f"{behind / goal - 1:+.1%}",
            f"{sent:.1f}",
            f"{mine.compute * 1e3:.1f}",
            f"{link:.1f}",
        )
        rows.append((method.name, *figures, ratio))
    yield f"**Systems over a slow link.** Time to the loss {goal:.3f}, which data parallelism has after {steps} steps,"
    yield f"as a share of its own; {RANKS} ranks, {LATENCY * 1e3:g} ms and {BANDWIDTH * 8 / 1e6:g} Mbit/s, emulated."
    yield ""
    yield from aligned(rows)


def ran(method: Method, steps: int, goal: float | None = None) -> Ran:
    """A run of so many steps, or on until it has a loss."""
    torch.manual_seed(0)
    step, losses, link, sent, times = method.make(), list[float](), list[float](), list[int](), list[float]()
    with slow_link(latency=LATENCY, bandwidth=BANDWIDTH, wait=False) as line:
        while len(losses) < steps or (
            goal is not None and len(losses) < PATIENCE * steps and sum(losses[-LAST:]) / LAST > goal
        ):
            before, start = (line.seconds, line.bytes), thread_time()
            losses.append(step(len(losses)))
            times.append(thread_time() - start)
            link.append(line.seconds - before[0])
            sent.append(line.bytes - before[1])
    return Ran(losses, link, sent, median(times) / RANKS)


if __name__ == "__main__":
    main()
