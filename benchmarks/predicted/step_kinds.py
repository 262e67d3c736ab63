"""Kinds of a step's seconds, as predicted and as measured: forward, backward, the update, moves and sums, waiting.

Kernels are timed by the processor's time of their thread, and each counts for what asked for it: a forward or a
backward of the step's code, an optimizer, or else a move. What the step takes beside its kernels is Python's and is
shared out by their numbers, as launches are in what is predicted. What the clock says beyond all that is waiting.
"""

import dis
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import median
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sbpflow.boxing.graph.report.report import Report
from sbpflow.boxing.graph.report.step_parts import step_parts
from sbpflow.placement import Device
from sbpflow.sbp.joint.op_cost import bandwidth, rate

__all__ = ["KINDS", "drift", "kinds_measured", "kinds_predicted"]

KINDS = ("forward", "backward", "update", "moves", "waiting")
WORDS = {"f": "forward", "b": "backward"}
SIDE = 512  # of the product by which the machine is looked at
RUNS, TIMES = 15, 3


def kinds_predicted(report: Report) -> dict[str, float]:
    """Seconds of a step by kind; sums of gradients over micro-batches are among moves."""
    parts = defaultdict(float, step_parts(report))
    computing = parts["products"] + parts["attention"] + parts["other ops"]
    back = sum(cost.backward for cost in report.costs) / max(1e-12, report.compute or 0.0)
    found = (1 - back) * computing, back * computing, parts["optimizer"], parts["moves"]
    return dict(zip(KINDS, (*found, (report.predicted or 0.0) - sum(found)), strict=True))


def kinds_measured(
    step: Callable[[], object], rounds: int, processor: float, clock: float, crowd: float
) -> dict[str, float]:
    """The same of a step that took so many seconds of the processor, which each rank has one `crowd`th of, and of the
    clock."""
    every = []
    for _ in range(rounds):
        with _KernelClock() as found:
            step()
        every.append(found)
    numbers = every[-1].numbers
    kernels = {kind: median(each.seconds[kind] for each in every) for kind in numbers}
    between = (processor - sum(kernels.values())) / max(1, sum(numbers.values()))
    spent = {kind: crowd * (kernels[kind] + between * numbers[kind]) for kind in numbers}
    return {kind: spent.get(kind, 0.0) for kind in KINDS} | {"waiting": clock - crowd * processor}


def drift(device: Device, crowd: float) -> float:
    """How many times as long a product takes now as by the constants that were measured before."""
    x, w = (torch.randn(SIDE, SIDE, device="cpu") for _ in range(2))
    each = []
    for _ in range(RUNS):
        start = time.thread_time()
        for _ in range(TIMES):
            F.linear(x, w)
        each.append(time.thread_time() - start)
    told = 2 * SIDE**3 / rate(device, torch.float32) + 3 * 4 * SIDE**2 / bandwidth(device)
    return crowd * median(each) / TIMES / told


class _KernelClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seconds and numbers of kernels by kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: dict[str, float] = defaultdict(float)
        self.numbers: Counter[str] = Counter()

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kind = _kind()
        start = time.thread_time()
        result = op(*args, **(kwargs or {}))
        self.seconds[kind] += time.thread_time() - start
        self.numbers[kind] += 1
        return result


def _kind() -> str:
    """The kind that asked for a kernel, by the functions that are being called: of a step's code the line tells."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/optim/" in file:
            return "update"
        if "codegen.py (" in file:
            return _of_line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return "moves"


@cache
def _of_line(code: CodeType, line: int) -> str:
    """Forwards are called f0, f1 and so on in a step's code, and backwards b0; all else moves or adds up."""
    calls, here = [], 0
    for each in dis.get_instructions(code):
        here = each.positions.lineno or here if each.positions else here
        if here == line and "GLOBAL" in each.opname:
            calls.append(str(each.argval))
    found = (WORDS[match[1]] for name in calls if (match := re.fullmatch(r"([fb])\d+", name)))
    return next(found, "moves")
