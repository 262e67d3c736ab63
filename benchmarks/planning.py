"""How long planning takes, how far the bytes of plans are from the lower bound, and what search gains on two levels.

    python benchmarks/planning.py [--quick] [--write]
    python benchmarks/planning.py --models [--write]       what flow.find_plan takes for models of transformers
    python benchmarks/planning.py --degrees [--write]      the same where it looks for all degrees

One process and no wire: planning is pure. Pairs are of signatures, S(0), S(1), B or P on each axis, for a matrix.
"""

import argparse
import gc
import random
import statistics
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, pairwise, permutations, product
from math import ceil, inf, prod
from pathlib import Path
from time import thread_time
from typing import TypeAlias

import torch

import sbpflow as flow
from benchmarks.parts.found_plans import CASES, DEGREES, degrees_rows, found_rows
from sbpflow.sbp import Sbp

DOCS = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "benchmarks.md"
ENTRIES: tuple[Sbp, ...] = (flow.S(0), flow.S(1), flow.B, flow.P)
TIMED = ((4,), (2, 2), (2, 4), (2, 2, 2), (32, 8))
WEIGHED = ((4,), (2, 2), (2, 4), (3, 2), (2, 2, 2))
LEVELS = ((2, 2), (2, 4), (2, 2, 2))  # axis 0 joins nodes
MANY = 500  # of more pairs than this a seeded sample is timed

Pair: TypeAlias = tuple[tuple[Sbp, ...], tuple[Sbp, ...]]
Row: TypeAlias = tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few pairs of each grid: whether all runs")
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/evidence/benchmarks.md")
    parser.add_argument("--models", action="store_true", help="find plans of models of transformers instead")
    parser.add_argument("--degrees", action="store_true", help="find degrees of models instead")
    options = parser.parse_args()
    if options.degrees:
        report = "\n".join(aligned(list(degrees_rows(DEGREES[:1] if options.quick else DEGREES))))
        print(report)
        if options.write:
            write(report, "degrees")
        return
    if options.models:
        report = "\n".join(aligned(list(found_rows(CASES[:1] if options.quick else CASES))))
        print(report)
        if options.write:
            write(report, "planner")
        return
    most = 40 if options.quick else None
    report = "\n".join([*planning_times(most or MANY), "", *bytes_moved(most), "", *two_levels(most)])
    print(report)
    if options.write:
        write(report)


def planning_times(most: int) -> Iterator[str]:
    """Cold: each pair has a shape that nothing was planned for yet. Warm: the same pair again."""
    rows: list[Row] = [("grid", "pairs", "cold median, ms", "p99", "max", "programs median, ms", "max", "warm, us")]
    sides = count(96)
    gc.collect()
    gc.freeze()  # a collection of all that torch brings takes 50 ms and would fall on some plan
    for grid in TIMED:
        cold, programs, warm = [], [], []
        p, chosen = placement(grid), pairs(grid, most)
        for a, b in chosen:
            shape = (next(sides), 96)
            src, dst = flow.layout(p, a, shape), flow.layout(p, b, shape)
            start = thread_time()
            way = flow.boxing.between(src, dst)
            planned = thread_time()
            way.programs(p.flat[-1])
            cold.append((planned - start) * 1e3)
            programs.append((thread_time() - planned) * 1e3)
            again = partial(flow.boxing.between, src, dst)
            warm.append(min(timeit.repeat(again, number=20, repeat=3)) / 20 * 1e6)
        figures = (statistics.median(cold), percentile(cold, 99), max(cold), statistics.median(programs), max(programs))
        rows.append((name(grid), str(len(chosen)), *(f"{ms:.2f}" for ms in figures), f"{statistics.median(warm):.2f}"))
    yield (
        "**Time of a boxing.** Cold: each pair of a shape not seen before, then the program of the last rank, which is "
        "made at its first use; both in time on the core. Warm: the same `flow.boxing.between(src, dst)` again."
    )
    yield ""
    yield from aligned(rows)
    yield ""
    yield from free_moves()


def free_moves() -> Iterator[str]:
    """The whole of a warm `flow.box` where nothing is sent, on ranks of one process."""
    yield "`flow.box` where nothing is sent, four ranks in one process, and one:"
    yield ""
    rows: list[Row] = [("move", "ranks", "us")]
    for ranks, (a, b) in product((4, 1), (("B", "B"), ("B", "S(0)"), ("B", "P"))):
        if ranks == 1 and b != "B":
            continue
        p = placement((ranks,))
        src, dst = flow.layout(p, a, (32, 32)), flow.layout(p, b, (32, 32))
        shards = flow.boxing.scatter(torch.ones(32, 32), src)
        rows.append((f"{a} -> {b}", str(ranks), f"{warm_us(lambda s=shards, x=src, y=dst: flow.box(s, x, y)):.2f}"))  # type: ignore[misc]
    yield from aligned(rows)


def warm_us(call: Callable[[], object], number: int = 2000) -> float:
    return statistics.median(timeit.repeat(call, number=number, repeat=9)) / number * 1e6


def bytes_moved(most: int | None) -> Iterator[str]:
    """Exact bytes of the busiest rank over the bound; a free pair that moves nothing is at the bound."""
    rows: list[Row] = [("grid", "matrix", "pairs", "at the bound", "mean", "max", "without P", "at the bound")]
    with flow.use_cluster("flat"):
        for grid, shape in product(WEIGHED, ((96, 96), (33, 35))):
            p, whole, plain = placement(grid), [], []
            for a, b in pairs(grid, most):
                if flow.P in b:
                    continue
                src, dst = flow.layout(p, a, shape), flow.layout(p, b, shape)
                moved, bound = flow.boxing.between(src, dst).bytes, flow.boxing.lower_bound(src, dst)
                whole.append(moved / bound if bound else inf if moved else 1.0)
                if flow.P not in a:
                    plain.append(whole[-1])
            row = (
                name(grid),
                f"{shape[0]} x {shape[1]}",
                str(len(whole)),
                share(whole),
                f"{statistics.mean(whole):.3f}",
            )
            rows.append((*row, f"{max(whole):.2f}", str(len(plain)), share(plain)))
    yield (
        "**Bytes.** The busiest rank's, over `flow.boxing.lower_bound`, for every pair without P in the target, "
        "where all links are alike."
    )
    yield ""
    yield from aligned(rows)


def share(ratios: Sequence[float]) -> str:
    return f"{sum(r < 1 + 1e-9 for r in ratios) / len(ratios):.0%}"


def two_levels(most: int | None) -> Iterator[str]:
    """The plan's time beside that of going axis by axis, in the best order and in any."""
    rows: list[Row] = [
        ("grid", "pairs", "faster orders", "best/plan mean", "p95", "max", "any/plan mean", "p95", "max")
    ]
    for grid in LEVELS:
        p, best, every, faster = placement(grid), [], [], 0
        with flow.use_cluster(flow.cluster("two_level").with_node(prod(grid[1:]))):
            for a, b in pairs(grid, most):
                orders = [time for time in axis_by_axis(p, a, b) if time > 0]
                plan = seconds(p, a, b)
                faster += any(time < plan * (1 - 1e-9) for time in orders)
                if len(orders) > 1 and plan > 0:
                    best.append(min(orders) / plan)
                    every.append(statistics.mean(orders) / plan)
        figures = (f(r) for r in (best, every) for f in (statistics.mean, p95, max))
        rows.append((name(grid), str(len(best)), str(faster), *(f"{x:.2f}" for x in figures)))
    yield (
        "**Two levels.** A byte between nodes (axis 0) takes 8 times as long as one inside. A per-axis order changes "
        "one axis after the other, each step by its own best plan; pairs that differ on several axes and cost anything."
    )
    yield ""
    yield from aligned(rows)


def axis_by_axis(p: flow.Placement, a: tuple[Sbp, ...], b: tuple[Sbp, ...]) -> Iterator[float]:
    """Seconds by every order in which the axes that differ can be changed one at a time."""
    for order in permutations(axis for axis in range(len(a)) if a[axis] is not b[axis]):
        stops = [a]
        for axis in order:
            stops.append((*stops[-1][:axis], b[axis], *stops[-1][axis + 1 :]))
        yield sum(seconds(p, x, y) for x, y in pairwise(stops))


def seconds(p: flow.Placement, a: tuple[Sbp, ...], b: tuple[Sbp, ...]) -> float:
    return flow.boxing.between(flow.layout(p, a, (96, 96)), flow.layout(p, b, (96, 96))).price.time


def p95(values: Sequence[float]) -> float:
    return percentile(values, 95)


def percentile(values: Sequence[float], part: int) -> float:
    return sorted(values)[ceil(len(values) * part / 100) - 1]


def placement(grid: Sequence[int]) -> flow.Placement:
    return flow.placement("cpu", list(range(prod(grid)))).reshape(tuple(grid))


def name(grid: Sequence[int]) -> str:
    return " x ".join(map(str, grid))


def pairs(grid: Sequence[int], most: int | None) -> list[Pair]:
    """Every pair of signatures on a grid, or a sample that is the same each time."""
    signatures = list(product(ENTRIES, repeat=len(grid)))
    every = list(product(signatures, signatures))
    return every if most is None or len(every) <= most else random.Random(0).sample(every, most)


def aligned(table: Sequence[Row]) -> Iterator[str]:
    """The rows as Markdown that is readable as it stands."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for k, row in enumerate(table):
        yield "| " + " | ".join(entry.rjust(w) for entry, w in zip(row, widths, strict=True)) + " |"
        if k == 0:
            yield "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|"


def write(report: str, part: str = "planning") -> None:
    """Put the report between its markers in the docs."""
    begin, end = f"<!-- {part}:begin -->", f"<!-- {part}:end -->"
    head, _, rest = DOCS.read_text(encoding="utf-8").partition(begin)
    DOCS.write_text(f"{head}{begin}\n{report}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
