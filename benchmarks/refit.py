"""Weights from one model into another by `flow.refit`, beside gathering them on rank 0 and broadcasting from there.

    python -m benchmarks.refit [--quick] [--write]

Four Gloo ranks of this host, one thread each: ranks 0 and 1 have a model in pieces, in float32, which another model
gets in bfloat16. By torch.distributed each weight is gathered on rank 0 and broadcast to those that need it, who cast
and cut it: as it is written where nobody knows how the other model lies. Both go in turn, round by round, in the same
processes, and the values are compared.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sbpflow as flow
from benchmarks.parts.alone import Times
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.processes import launched, worker
from benchmarks.parts.tables import ms, ratio
from sbpflow import B, S
from sbpflow.boxing.exchange.execute import transport

WIDTH, LAYERS, ROUNDS = 1024, 16, 9
SOURCE = flow.placement("cpu:[0-1]")
CASES: dict[str, tuple[list[int], Any]] = {
    "2 others, whole": ([2, 3], B),
    "2 others, by columns": ([2, 3], S(-1)),
    "ranks 1 and 2, by columns": ([1, 2], S(-1)),
    "rank 1 alone": ([1], B),
}


def main() -> None:
    options = command_line(__doc__).parse_args()
    if options.job:
        job = json.loads(options.job)
        worker(job, lambda: measured(job["rounds"]))
        return
    times = launched("refit", 4, {"rounds": 2 if options.quick else ROUNDS})
    reported("refit", [table(times)], write=options.write)


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)


def measured(rounds: int) -> Times:
    """Microseconds of each way in each round, and bytes that this rank sent, by case."""
    source = flow.nn.to_global(model(torch.float32), SOURCE, S(0))
    flow.ones(1, placement=flow.placement("cpu:[0-3]"), sbp=B)  # all meet
    times: Times = {}
    for name, (ranks, sbp) in CASES.items():
        where = flow.placement("cpu", ranks)
        target = flow.nn.to_global(model(torch.bfloat16), where, sbp)
        group = dist.new_group(sorted({0, *ranks}))
        runs: dict[str, list[float]] = {"refit": [], "gathered": []}
        for at in range(rounds + 1):
            before = transport().sent.bytes.total()
            ours = timed(flow.refit, source, target)
            sent = transport().sent.bytes.total() - before
            have = [x._shards[0].clone() for x in target.parameters()]  # type: ignore[attr-defined]
            theirs = timed(through_rank_0, source, target, group, ranks)
            for mine, x in zip(have, target.parameters(), strict=True):
                assert torch.equal(mine, x._shards[0])  # type: ignore[attr-defined]
            if at:
                runs["refit"].append(ours)
                runs["gathered"].append(theirs)

        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, sent)
        times[name] = {**runs, "bytes": [float(sum(every))]}
    return times


def timed(run: Callable[..., object], *args: object) -> float:
    dist.barrier()
    start = time.perf_counter()
    run(*args)
    return (time.perf_counter() - start) * 1e6


def through_rank_0(source: nn.Module, target: nn.Module, group: Any, ranks: list[int]) -> None:
    me = dist.get_rank()
    for x, y in zip(source.parameters(), target.parameters(), strict=True):
        whole = torch.empty(x.shape)
        if me == 0:
            half = torch.empty(x._shards[0].shape)  # type: ignore[attr-defined]
            dist.recv(half, 1)
            torch.cat([x._shards[0].detach(), half], out=whole)  # type: ignore[attr-defined]
        elif me == 1:
            dist.send(x._shards[0].detach(), 0)  # type: ignore[attr-defined]
        if me == 0 or me in ranks:
            dist.broadcast(whole, 0, group)
        if me in ranks:
            y._shards[0].detach().copy_(whole[y.layout_.slices(me)])  # type: ignore[attr-defined]


def table(times: Times) -> str:
    numel = sum(x.numel() for x in model(torch.bfloat16).parameters())
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a rank;"
        f" {numel * 4 / 2**20:.0f} MiB of float32 weights.",
        "",
        "| to | refit, ms | by rank 0, ms | ratio | refit, MiB sent | by rank 0, MiB | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, ways in times.items():
        ranks, _ = CASES[name]
        others = len([rank for rank in ranks if rank != 0])
        by_rank_0 = numel * 4 * (0.5 + others)
        (sent,) = ways["bytes"]
        lines.append(
            f"| {name} | {ms(ways['refit'])} | {ms(ways['gathered'])} | {ratio(ways['refit'], ways['gathered']):.2f}"
            f" | {sent / 2**20:.1f} | {by_rank_0 / 2**20:.1f} | {sent / by_rank_0:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
