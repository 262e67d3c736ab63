"""Twelve plans on two and four Gloo ranks of this machine: a step as it is predicted, beside what it takes.

    python -m benchmarks.predicted [--quick] [--only "GPT, data, 2" ...] [--write]

Before each count of ranks this machine is measured as `doctor --measure` does it; no other constant goes in. A step's
seconds are the clock's, of the slowest rank, and those of the processor, which neighbours on a machine hardly change:
ranks of one host carry their moves themselves, so that these are in both. Where ranks outnumber cores, processor times
count as often as ranks share one. A second table has where the difference lies, by kind; its last column is how many
times as long a product takes after the steps as when the machine was measured.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from benchmarks.parts.alone import Times, aligned
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.graph_models import Size, adamw, batch, loss_of, made
from benchmarks.parts.processes import launched, worker
from benchmarks.predicted.step_kinds import KINDS, drift, kinds_measured, kinds_predicted
from benchmarks.scale.pairs import APART
from sbpflow.placement.cluster import cluster
from sbpflow.placement.device import usable_cores
from sbpflow.placement.measure import measure

ROUNDS, WARM, WATCHED = 15, 3, 5
GPT = Size(layers=4, width=256, heads=8, batch=4, length=128)
WIDE, ROWS, DEEP = 768, 256, 8


class Case(NamedTuple):
    ranks: int
    model: Callable[[], tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]]  # with its loss and its arguments
    plan: str


def gpt() -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    return made(GPT), loss_of, batch(GPT)


def mlp() -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(DEEP) for part in (nn.Linear(WIDE, WIDE), nn.GELU())))
    given = torch.randn(ROWS, WIDE)
    return model, lambda m, x, y: F.mse_loss(m(x), y), (given, torch.zeros_like(given))


COLUMNS = "\n".join(f"{2 * n}.weight: tensor=S({n % 2})" for n in range(DEEP))
HEADS = (
    "blocks.*.{q,k,v,up}.weight: tensor=S(0)\nblocks.*.{out,down}.weight: tensor=S(1)\n"
    "{tokens,places}.weight: tensor=B\nhead.weight: tensor=S(0)"
)
PIPED = "pipe * over pipe by {}, 4 micro-batches"
CASES = {
    "GPT, data, 2": Case(2, gpt, "grid cpu (data=2)\n**: data=B"),
    "GPT, states in parts, 2": Case(2, gpt, "grid cpu (data=2)\n**: data=B\nstates **: data=S(0)"),
    "GPT, weights in parts, 2": Case(2, gpt, "grid cpu (data=2)\n**: data=S(0)"),
    "GPT, heads, 2": Case(2, gpt, f"grid cpu (tensor=2)\n{HEADS}"),
    "MLP, data, 2": Case(2, mlp, "grid cpu (data=2)\n**: data=B"),
    "MLP, columns, 2": Case(2, mlp, f"grid cpu (tensor=2)\n{COLUMNS}"),
    "MLP, 1f1b, 2": Case(2, mlp, f"grid cpu (pipe=2)\n{PIPED.format('1f1b')}"),
    "GPT, data, 4": Case(4, gpt, "grid cpu (data=4)\n**: data=B"),
    "GPT, weights in parts, 4": Case(4, gpt, "grid cpu (data=4)\n**: data=S(0)"),
    "MLP, data and columns, 4": Case(4, mlp, f"grid cpu (data=2, tensor=2)\n{COLUMNS}"),
    "MLP, data and gpipe, 4": Case(4, mlp, f"grid cpu (pipe=2, data=2)\n{PIPED.format('gpipe')}"),
    "MLP, zb_h1, 4": Case(4, mlp, f"grid cpu (pipe=4)\n{PIPED.format('zb_h1')}"),
}


def main() -> None:
    options = command_line(__doc__, CASES).parse_args()
    if options.job:
        job = json.loads(options.job)
        worker(job, lambda: measured(job))
        return
    times: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({CASES[name].ranks for name in options.only}):
            here = Path(folder, f"{ranks}.toml")
            found = measure(ranks, kernels=not options.quick, timeout=300.0)  # where others are busy, too
            found.cluster().save(here)
            print(found, flush=True)
            for name in (name for name in options.only if CASES[name].ranks == ranks):
                job = {"case": name, "rounds": 2 if options.quick else ROUNDS, "cluster": str(here)}
                times |= launched("predicted", ranks, job)
                print(*list(shown({name: times[name]}))[2:], flush=True)
    head = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a rank."
    reported("predicted", [head, "", *shown(times), "", off(times), "", *by_kind(times)], write=options.write)


def measured(job: Mapping[str, Any]) -> Times:
    case = CASES[job["case"]]
    dist.init_process_group("gloo")
    model, loss, given = case.model()
    with flow.use_cluster(job["cluster"]):
        step = flow.compile(model, loss, adamw(model.parameters(), fused=True), plan=case.plan)
        for _ in range(WARM):
            step(*given)
        report = step.explain()
    told = report.predicted
    assert told is not None
    crowd = max(1.0, case.ranks / usable_cores())
    clock, processor = [], []
    for _ in range(job["rounds"]):
        dist.barrier()
        start, began = time.perf_counter(), time.process_time()
        step(*given)
        clock.append((time.perf_counter() - start) * 1e6)
        processor.append(crowd * (time.process_time() - began) * 1e6)
    spent = statistics.median(processor) / crowd / 1e6, statistics.median(clock) / 1e6
    kinds = kinds_measured(lambda: step(*given), 1 if job["rounds"] < ROUNDS else WATCHED, *spent, crowd)
    every: list[Any] = [None] * case.ranks
    dist.barrier()
    dist.all_gather_object(every, (spent[0], kinds, drift(cluster(job["cluster"]).device, crowd)))
    _, kinds, drifted = max(every, key=lambda each: float(each[0]))  # those of the rank that works most
    told_of = kinds_predicted(report)
    found = {"predicted": told * 1e6, "drift": drifted}
    found |= {f"predicted {kind}": told_of[kind] * 1e6 for kind in KINDS} | {kind: kinds[kind] * 1e6 for kind in KINDS}
    constant = {way: [us] * len(clock) for way, us in found.items()}
    return {job["case"]: {**constant, "processor": processor, "clock": clock}}


def shown(times: Times) -> Iterator[str]:
    rows = [["step", "predicted ms", "processor ms", "clock ms", "processor / predicted", "clock / predicted"]]
    for name, ways in times.items():
        told, used, took = (statistics.median(ways[way]) / 1e3 for way in ("predicted", "processor", "clock"))
        rows.append([name, *(f"{ms:.1f}" for ms in (told, used, took)), f"{used / told:.2f}", f"{took / told:.2f}"])
    yield from aligned(rows)


def by_kind(times: Times) -> Iterator[str]:
    """Where the difference lies: predicted / measured milliseconds of the rank that works most."""
    rows = [["predicted / measured ms", *KINDS, "most apart", "product now / then"]]
    for name, ways in times.items():
        pairs = {kind: (ways[f"predicted {kind}"][0] / 1e3, ways[kind][0] / 1e3) for kind in KINDS}
        most = max(pairs, key=lambda kind: abs(pairs[kind][1] - pairs[kind][0]))
        each = (f"{told:.1f} / {took:.1f}" for told, took in pairs.values())
        apart = f"{most} {pairs[most][1] - pairs[most][0]:+.1f}"
        rows.append([name, *each, apart, f"{ways['drift'][0]:.2f}"])
    yield from aligned(rows)


def off(times: Times) -> str:
    """The median error, and how many pairs of plans of one model on as many ranks are in the right order, as far as
    their clocks are apart."""
    errors = [
        abs(statistics.median(ways["predicted"]) / statistics.median(ways["clock"]) - 1) for ways in times.values()
    ]
    right, pairs = 0, 0
    for one, ways in times.items():
        for other, theirs in times.items():
            if one < other and CASES[one][:2] == CASES[other][:2]:
                told, took = (
                    statistics.median(ways[way]) - statistics.median(theirs[way]) for way in ("predicted", "clock")
                )
                apart = abs(took) > APART * min(statistics.median(each["clock"]) for each in (ways, theirs))
                right, pairs = right + (apart and told * took > 0), pairs + apart
    order = f"{right} of {pairs} pairs that are more than {APART:.0%} apart are in the right order"
    return f"Off by {statistics.median(errors) * 100:.0f} % in the median; {order}."


if __name__ == "__main__":
    main()
