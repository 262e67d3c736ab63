"""Predicted steps beside measured ones, at prices that were measured on this machine just before.

    python -m benchmarks.predicted [--quick] [--write]

Each step runs in processes of its own: on one rank, on two Gloo ranks, and as a pipeline of two. Prices are a product's
rate, a sum's bytes a second, and a line fitted to all-gathers. Measured is processor time, which neighbours on a shared
machine hardly change, and the clock's; ranks of one host carry their moves themselves, so that these are in both.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import sbpflow as flow
from benchmarks.parts.alone import Times, aligned
from benchmarks.parts.graph_models import Size, adamw, batch, loss_of, made
from benchmarks.parts.processes import launched, worker
from benchmarks.parts.tables import put
from sbpflow import B, S
from sbpflow.placement.cluster import Cluster
from sbpflow.placement.measure import measure

ROUNDS = 15
GPT = Size(layers=4, width=256, heads=8, batch=4, length=128)
WIDE, ROWS, DEEP = 768, 128, 8


def heavy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(DEEP) for part in (nn.Linear(WIDE, WIDE), nn.GELU())))


def of_gpt(hints: Mapping[str, Any] | None, where: Any, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    model = made(GPT)
    if hints:
        flow.nn.shard(model, hints)
    return flow.compile(model, loss_of, adamw(model.parameters(), fused=True), placement=where, **options), batch(GPT)


def of_mlp(hints: Mapping[str, Any] | None, where: Any, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    model = heavy()
    if hints:
        flow.nn.shard(model, hints)
    given = torch.randn(ROWS, WIDE)
    step = flow.compile(
        model, lambda m, x: F.mse_loss(m(x), x), adamw(model.parameters(), fused=True), placement=where, **options
    )
    return step, (given,)


def piped(schedule: str) -> tuple[Any, tuple[Any, ...]]:
    model = heavy()
    flow.nn.place(list(model)[:DEEP], flow.placement("cpu", [0]))
    flow.nn.place(list(model)[DEEP:], flow.placement("cpu", [1]))
    given = torch.randn(4 * ROWS, WIDE)
    loss = lambda m, x, y: F.mse_loss(m(x), y)  # noqa: E731
    step = flow.compile(model, loss, adamw(model.parameters(), fused=True), schedule=schedule, micro_batches=4)
    return step, (given, torch.zeros_like(given))


CASES: dict[str, tuple[int, Callable[[Any], tuple[Any, tuple[Any, ...]]]]] = {
    "GPT, one rank": (1, lambda where: of_gpt(None, where)),
    "MLP, one rank": (1, lambda where: of_mlp(None, where)),
    "GPT, chosen": (2, lambda where: of_gpt(None, where)),
    "GPT, weights whole": (2, lambda where: of_gpt({"*": B}, where)),
    "GPT, weights in pieces": (2, lambda where: of_gpt({"*": S(0)}, where)),
    "MLP, chosen": (2, lambda where: of_mlp(None, where)),
    "MLP, weights whole": (2, lambda where: of_mlp({"*": B}, where)),
    "MLP, split along columns": (2, lambda where: of_mlp({f"{2 * n}.weight": S(n % 2) for n in range(DEEP)}, where)),
    "MLP pipelined, gpipe": (2, lambda where: piped("gpipe")),
    "MLP pipelined, 1f1b": (2, lambda where: piped("1f1b")),
}


def prices() -> dict[str, float]:
    """Rates of this machine: FLOP/s of a product and bytes/s of a sum, on one processor; a hop between two ranks."""
    torch.set_num_threads(1)
    a, weight = torch.randn(ROWS, WIDE, requires_grad=True), torch.randn(WIDE, WIDE, requires_grad=True)
    x, y = torch.randn(1 << 23), torch.empty(1 << 23)  # more than caches hold, as what an optimizer keeps is
    product = (
        lower(lambda: torch.autograd.backward(F.linear(a, weight), torch.ones(ROWS, WIDE))) / 3
    )  # and its backward
    added = lower(lambda: torch.add(x, x, out=y))  # reads one, as the same twice costs once, and writes one
    wire = measure(2).cluster().levels[0]
    return {
        "flops": 2 * ROWS * WIDE * WIDE / product,
        "memory": 2 * x.nbytes / added,
        "latency": wire.latency,
        "bandwidth": wire.bandwidth,
    }


def here(found: Mapping[str, float]) -> Cluster:
    """The cluster of these prices; all ranks take the same, or their plans would differ."""
    cpu = flow.cluster("cpu")
    level = replace(cpu.levels[0], latency=found["latency"], bandwidth=found["bandwidth"])
    flops = {**cpu.device.flops, "float32": found["flops"]}
    device = replace(cpu.device, flops=flops, memory_bandwidth=found["memory"])
    return replace(cpu, name="this machine", levels=(level, *cpu.levels[1:]), device=device)


def lower(do: Callable[[], object], rounds: int = 40) -> float:
    """Seconds of processor that it takes, the lower quartile."""
    took = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(5):
            do()
        took.append((time.process_time() - start) / 5)
    return statistics.quantiles(took, n=4)[0]


def measured(job: Mapping[str, Any]) -> Times:
    ranks, make = CASES[job["case"]]
    with flow.use_cluster(here(job["prices"])):
        if ranks > 1:
            dist.init_process_group("gloo")
        step, given = make(flow.placement("cpu", range(ranks)))
        for _ in range(3):
            step(*given)
        told = step.explain().predicted
    assert told is not None
    clock, processor = [], []
    for _ in range(job["rounds"]):
        if ranks > 1:
            dist.barrier()
        start, began = time.perf_counter(), time.process_time()
        step(*given)
        clock.append((time.perf_counter() - start) * 1e6)
        processor.append((time.process_time() - began) * 1e6)
    return {job["case"]: {"predicted": [told * 1e6] * len(clock), "processor": processor, "clock": clock}}


def shown(times: Times) -> Iterator[str]:
    rows = [["step", "predicted ms", "processor ms", "clock ms", "processor / predicted", "clock / predicted"]]
    for case, ways in times.items():
        told, used, took = (statistics.median(ways[way]) / 1e3 for way in ("predicted", "processor", "clock"))
        rows.append([case, *(f"{ms:.1f}" for ms in (told, used, took)), f"{used / told:.2f}", f"{took / told:.2f}"])
    yield from aligned(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: whether all runs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--write", action="store_true", help="replace the table in docs/benchmarks.md")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        worker(job, lambda: measured(job))
        return
    found = prices()
    times: Times = {}
    for case in options.only:
        job = {"case": case, "rounds": 3 if options.quick else ROUNDS, "prices": found}
        times |= launched("predicted", CASES[case][0], job)
        print(*list(shown({case: times[case]}))[2:], flush=True)
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a rank; a product at "
        f"{found['flops'] / 1e9:.0f} GFLOP/s, memory at {found['memory'] / 1e9:.1f} GB/s, a hop of "
        f"{found['latency'] * 1e6:.0f} us and {found['bandwidth'] / 1e9:.2f} GB/s.",
        "",
    ]
    lines += shown(times)
    print("\n".join(lines))
    if options.write:
        put("predicted", "\n".join(lines))


if __name__ == "__main__":
    main()
