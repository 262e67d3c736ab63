"""Pipelined steps beside torch.distributed.pipelining, 1F1B by hand and the ideal; what a firing, a hop and a step add.

    python -m benchmarks.pipeline [--quick] [--only A B C D] [--write]

A   steps of 8 micro-batches on two Gloo ranks under each schedule, compute-bound and of tiny stages
B   what a firing adds to its stage's own work
C   a hop between two ranks beside a plain isend and irecv
D   what a step costs that computes next to nothing

All ways of a part go in turn, round by round, in the same processes, after their losses and gradients were found equal.
"""

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts import pipeline_peers
from benchmarks.parts.alone import Times, aligned
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.pipeline_peers import MICRO_BATCHES, SCHEDULES, SIZES
from benchmarks.parts.processes import launched, worker
from benchmarks.parts.tables import judged

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 31


@dataclass(frozen=True)
class Part:
    measure: Callable[..., Times]
    show: Callable[[Times], Iterator[str]]
    ranks: Sequence[int] = (2,)  # each number has processes of its own


def main() -> None:
    options = command_line(__doc__, PARTS).parse_args()
    if options.job:
        measured(json.loads(options.job))
        return
    lines = [f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a rank."]
    for name in options.only:
        part, times = PARTS[name], Times()
        for ranks in part.ranks:
            times |= launched("pipeline", ranks, {"part": name, "rounds": 3 if options.quick else ROUNDS})
        lines += ["", *part.show(times)]
    reported("pipeline", lines, write=options.write)


def measured(job: dict[str, Any]) -> None:
    worker(job, lambda: PARTS[job["part"]].measure(job["rounds"]))


def fifth(us: Sequence[float]) -> float:
    """The fifth of the rounds from below: whatever else a machine does only adds, and most to who waits."""
    return statistics.quantiles(us, n=5)[0]


def ms(us: Sequence[float]) -> str:
    return f"{statistics.median(us) / 1e3:.2f}/{fifth(us) / 1e3:.2f}"


def beside(mine: Sequence[float], other: Sequence[float], aim: float | None) -> list[str]:
    """Two ratios, of what a fifth of the rounds stay below and the median of single rounds; an aim is for both."""
    ratios = fifth(mine) / fifth(other), statistics.median(a / b for a, b in zip(mine, other, strict=True))
    told = [] if aim is None else [f"{aim:.2f}", "yes" if max(ratios) <= aim else "no"]
    return [f"{ratio:.2f}" for ratio in ratios] + (told or ["", ""])


def show_schedules(times: Times) -> Iterator[str]:
    yield (
        f"**A step of {MICRO_BATCHES} micro-batches on two ranks**, forward and backward, milliseconds, median/a fifth "
        "of the rounds stay below; the ratio of the latter, and the median of the ratios in single rounds."
    )
    for name, (size, _) in SIZES.items():
        ways, bound = times[name], name == "compute-bound"
        yield ""
        yield f"*{name}*: {size}; a stage alone: {ms([us / MICRO_BATCHES for us in ways['stage']])} each."
        yield ""
        rows = [["schedule", "way", "ms", "beside", "ms", "ratio", "by round", "aim", "met"]]
        for schedule, way in SCHEDULES.items():
            mine, theirs, hand = ways[f"graph {schedule}"], ways[f"torch {schedule}"], ways["by hand"]
            ideal, own = (
                [us * (1 + way.bubble / MICRO_BATCHES) for us in ways[stage]] for stage in ("stage", f"busy {schedule}")
            )
            compared = [
                ("graph", mine, "ideal", ideal, 1.1 if bound else None),
                ("graph", mine, "ideal of its own stages", own, None),
                ("graph", mine, way.theirs.__name__, theirs, 1.0),
                (way.theirs.__name__, theirs, "ideal", ideal, None),
            ]
            if schedule == "1f1b":
                compared += [
                    ("graph", mine, "by hand", hand, None if bound else 1.2),
                    ("by hand", hand, "ideal", ideal, None),
                ]
            rows += [[schedule, a, ms(us), b, ms(vs), *beside(us, vs, aim)] for a, us, b, vs, aim in compared]
        yield from aligned(rows)


def show_firings(times: Times) -> Iterator[str]:
    yield (
        "**A firing**, microseconds of the calling thread's CPU time beyond its task's code, median/min. On two ranks "
        "this holds the hop that goes with it."
    )
    yield ""
    rows = [["firing", "us", "aim", "met"]]
    for what, ways in times.items():
        for way, us in ways.items():
            told = "yes" if statistics.median(us) <= 25 else "no"
            aim = ["25", told] if way == "graph" else ["", ""]
            rows.append([f"{way}, {what}", f"{statistics.median(us):.1f}/{min(us):.1f}", *aim])
    yield from aligned(rows)


def show_hops(times: Times) -> Iterator[str]:
    yield (
        "**A hop between two ranks**, microseconds, a fifth of the rounds stay below: isend and irecv by hand, and "
        "actors whose queues run what is ready or keep to an order."
    )
    yield ""
    rows = [["bytes", "by hand", "as it comes", "ratio", "in order", "ratio", "aim", "met"]]
    for what, ways in times.items():
        hand, free, ordered = (fifth(ways[way]) for way in ("by hand", "as it comes", "in order"))
        rows.append([
            what, f"{hand:.0f}", f"{free:.0f}", f"{free / hand:.2f}", f"{ordered:.0f}", *judged(ordered / hand, 1.3)
        ])  # fmt: skip
    yield from aligned(rows)


def show_fixed(times: Times) -> Iterator[str]:
    yield (
        "**A step of one small linear layer a stage**, forward and backward, microseconds, median/a fifth of "
        "the rounds stay below. By hand is plain torch, on two ranks with isend and irecv."
    )
    yield ""
    rows = [["ranks", "micro-batches", "graph", "by hand", "graph - by hand", "aim", "met"]]
    for what, ways in times.items():
        for words, us in ways.items():
            if words.startswith("graph, "):
                m = words.removeprefix("graph, ")
                hand = ways[f"by hand, {m}"]
                both = [f"{statistics.median(each):.0f}/{fifth(each):.0f}" for each in (us, hand)]
                more = fifth(us) - fifth(hand)
                told = ["300", "yes" if more <= 300 else "no"] if m == "1" else ["", ""]
                rows.append([what, m, *both, f"{more:.0f}", *told])
    yield from aligned(rows)


PARTS = {
    "A": Part(pipeline_peers.schedules, show_schedules),
    "B": Part(pipeline_peers.firings, show_firings, ranks=(1, 2)),
    "C": Part(pipeline_peers.hops, show_hops),
    "D": Part(pipeline_peers.fixed, show_fixed, ranks=(1, 2)),
}


if __name__ == "__main__":
    main()
