"""Steps of compiled graphs beside eager torch, torch.compile, DDP, FSDP2, DTensor and modules split by hand.

    python -m benchmarks.graph [--quick] [--only A B C D] [--write]

A   training steps on one rank, and how long compiling takes
B   training steps on two Gloo ranks, one thread each
C   capturing and planning large models, which are never run
D   what a call of a graph costs that computes next to nothing

All ways of a part but C go in turn, round by round, in the same processes, after their losses were found equal.
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

from benchmarks.parts import graph_peers, graph_planning, graph_steps
from benchmarks.parts.alone import Times, aligned
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.processes import launched, worker
from benchmarks.parts.tables import judged, ms, ratio

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 21

# What autoparallel reports of its integer programs: model and grid, ops, capture, plan, of it solving, gap.
PUBLISHED = [
    ["autoparallel, LLaMA-3 8B, 2-D", "", "", "11-15 and solving", "12-38", ""],
    ["autoparallel in 2026, LLaMA 1B / 8B / DeepSeek-V3, core only", "", "", "11.8 / 15.9 / 17.7", "", ""],
]


@dataclass(frozen=True)
class Part:
    measure: Callable[..., Times]
    show: Callable[[Times], Iterator[str]]
    ranks: int = 1
    cases: Sequence[tuple[Any, ...]] = ((),)  # arguments; each has processes of its own


def main() -> None:
    options = command_line(__doc__, PARTS).parse_args()
    if options.job:
        measured(json.loads(options.job))
        return
    lines = [f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a rank."]
    for name in options.only:
        part, times = PARTS[name], Times()
        for case in part.cases[:2] if options.quick else part.cases:
            times |= launched(
                "graph", part.ranks, {"part": name, "case": case, "rounds": 3 if options.quick else ROUNDS}
            )
        lines += ["", *part.show(times)]
    reported("graph", lines, write=options.write)


def measured(job: dict[str, Any]) -> None:
    worker(job, lambda: PARTS[job["part"]].measure(job["rounds"], *job["case"]))


def show_steps(times: Times) -> Iterator[str]:
    yield (
        "**A training step on one rank**, forward, backward and AdamW (fused), milliseconds, medians. The ratio is of "
        "the graph to the other way in the same round."
    )
    yield ""
    rows = [["step", "backend", "graph", "beside", "its time", "ratio", "aim", "met"]]
    for what, (size, _) in graph_steps.SIZES.items():
        for backend in graph_steps.BACKENDS:
            for other in ("eager", "torch.compile"):
                # Each aim is for the backend that is meant to meet it.
                aim = {"eager": 0.6 if what == "overhead-bound" else 1.0, "torch.compile": 1.05}[other]
                told = judged(ratio(times[what][backend], times[what][other]), aim)
                rows.append(
                    [f"{what}: {size}", backend, ms(times[what][backend]), other, ms(times[what][other]), *told]
                )
    yield from aligned(rows)
    yield ""
    yield (
        "**Compiling**, seconds until the first step is done: of a model where nothing is compiled yet, and then of "
        "another model like it."
    )
    yield ""
    rows = [["step", "way", "first model", "second"]]
    for what in graph_steps.SIZES:
        for way, us in times[f"compiling, {what}"].items():
            name = way if way == "torch.compile" else f"graph, {way}"
            rows.append([what, name, *(f"{each / 1e6:.2f}" for each in us)])
    yield from aligned(rows)


def show_parallel(times: Times) -> Iterator[str]:
    sizes = "; ".join(f"{name}: {size}" for name, (size, _) in graph_peers.SIZES.items())
    yield (
        "**A training step on two ranks**, forward, backward and AdamW (fused), milliseconds, medians of the slower "
        f"rank. {sizes}; the batch is that of both ranks together."
    )
    yield ""
    rows = [["parallel", "size", "graph", "beside", "its time", "ratio", "aim", "met"]]
    for what, ways in times.items():
        kind, size = what.split(", ")
        for other, aim in graph_peers.PARALLEL[kind].items():
            told = judged(ratio(ways["sbpflow"], ways[other]), aim)
            rows.append([kind, size, ms(ways["sbpflow"]), other, ms(ways[other]), *told])
    yield from aligned(rows)


def show_planning(times: Times) -> Iterator[str]:
    yield (
        f"**Planning**, seconds, of a GPT on a described {graph_planning.CLUSTER} cluster: capturing it, then its plan "
        "(the problem, solving it, the moves). A gap of 0 means that the plan is proven best. Each row has a process "
        "of its own; those of autoparallel are what its authors report, of other models on other machines."
    )
    yield ""
    rows = [["model, grid", "ops", "capture", "plan", "of it solving", "gap"]]
    for what, row in times.items():
        seconds = [f"{row[key][0]:.2f}" for key in ("capture", "plan", "solve")]
        rows.append([what, f"{row['ops'][0]:.0f}", *seconds, f"{row['gap'][0]:.2%}"])
    yield from aligned(rows + PUBLISHED)


def show_fixed(times: Times) -> Iterator[str]:
    yield "**A call of one op on four numbers**, microseconds, median/min."
    yield ""
    ways = times["fixed"].items()
    yield from aligned([["way", "us"], *([way, f"{statistics.median(us):.1f}/{min(us):.1f}"] for way, us in ways)])


PARTS = {
    "A": Part(graph_steps.steps, show_steps),
    "B": Part(graph_peers.parallel, show_parallel, ranks=2),
    "C": Part(graph_planning.planning, show_planning, cases=graph_planning.CASES),
    "D": Part(graph_steps.fixed, show_fixed),
}


if __name__ == "__main__":
    main()
