"""Overhead of eager ops: a global tensor beside DTensor in the same minute, and a block beside one by hand.

    python -m benchmarks.eager [--quick] [--only ops first block] [--write]

ops      rank 0 of 4 on tensors so small that their own work hardly counts; the layouts are such that nothing is sent
first    the first call of an op at layouts that it has not met, and at shapes only that it has not met
block    a transformer block with its weights split as Megatron does, forward and backward: alone, and on 2 Gloo ranks

All ways go in turn, round by round, in the same processes. Where a process is alone as rank 0 of four, all systems run
on PyTorch's fake process group, whose collectives end at once.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.parts.alone import Times
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.eager_block import blocks, show_blocks
from benchmarks.parts.eager_ops import first, ops, show_first, show_ops
from benchmarks.parts.processes import launched, worker

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 21

Part: TypeAlias = tuple[Callable[[int], Times], tuple[int, ...], Callable[[Times], Iterator[str]]]
PARTS: dict[str, Part] = {  # what measures, on how many processes, what shows it
    "ops": (ops, (1,), show_ops),
    "first": (first, (1,), show_first),
    "block": (blocks, (1, 2), show_blocks),
}


def main() -> None:
    options = command_line(__doc__, PARTS).parse_args()
    if options.job:
        measured(json.loads(options.job))
        return
    lines = [f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a rank."]
    for part in options.only:
        sizes, show = PARTS[part][1:]
        times: Times = {}
        for ranks in sizes:
            times |= launched("eager", ranks, {"part": part, "rounds": 3 if options.quick else ROUNDS})
        lines += ["", *show(times)]
    reported("eager", lines, write=options.write)


def measured(job: dict[str, Any]) -> None:
    def measure() -> Times:
        torch.manual_seed(0)
        return PARTS[job["part"]][0](job["rounds"])

    worker(job, measure)


if __name__ == "__main__":
    main()
