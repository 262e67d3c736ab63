"""First calls: the first step of a small model in plain steps, and the capture of 126 layers beside that of four.

    python -m benchmarks.first_calls [--quick] [--only A B] [--write]

A   the first step of a process and of its second model, beside the first step of torch.compile
B   how the time of a capture, and of a first step, grows with the layers

Each number has a process of its own, and several of them. Times are those of the processor, since those of a clock
would have other work of the machine in them. Modules have byte code, as those of an installed package.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow
from benchmarks.parts.alone import Times, aligned
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.eager_block import whole_of
from benchmarks.parts.graph_models import GPT, Batch, Size, adamw, batch, loss_of
from benchmarks.parts.processes import launched, worker
from benchmarks.parts.tables import judged

ROUNDS, STEPS, AIM = 2, 20, 50.0
WAYS = {"graph": "graph", "aot_eager": "torch.compile(backend='aot_eager')"}
DEEP, FEW = 126, 4
Step = Callable[[], Any]


def main() -> None:
    options = command_line(__doc__, PARTS).parse_args()
    if options.job:
        job = json.loads(options.job)
        worker(job, lambda: PARTS[job["part"]][0](*job["case"]))
        return
    rounds = 1 if options.quick else ROUNDS
    lines = [f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread."]
    with tempfile.TemporaryDirectory(prefix="sbpflow-bytes-") as folder:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        for name in options.only:
            _, cases, show = PARTS[name]
            times: Times = {}
            for case in cases(quick=options.quick):
                job = {"part": name, "case": case}
                if case in cases(quick=True) and not options.quick:
                    launched("first_calls", 1, job)  # writes the byte code
                for found in [launched("first_calls", 1, job) for _ in range(rounds)]:
                    for what, ways in found.items():
                        for way, us in ways.items():
                            times.setdefault(what, {}).setdefault(way, []).extend(us)
            lines += ["", *show(times)]
    reported("first_calls", lines, write=options.write)


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


# A


def first_cases(*, quick: bool) -> list[tuple[Any, ...]]:
    return [(way, layers) for layers in ((2,) if quick else (2, 4)) for way in WAYS]


def first(way: str, layers: int) -> Times:
    """Plain steps that the first step takes, of a model and then of another, which is wider."""
    found: Times = {}
    for which, width in (("of a process", 64), ("of its second model", 96)):
        size = Size(layers, width=width, heads=4, batch=2, length=32)
        plain = stepped("eager", GPT(size), batch(size))
        plain()
        usual = statistics.median(seconds(plain) for _ in range(STEPS))
        step = stepped(way, GPT(size), batch(size))
        found[f"{size}, {which}"] = {way: [seconds(step) / usual], "plain": [usual]}
    return found


def stepped(way: str, model: nn.Module, given: Batch) -> Step:
    """A training step."""
    optimizer = adamw(model.parameters(), fused=True)
    if way == "graph":
        step = flow.compile(model, loss_of, optimizer, placement=flow.placement("cpu", [0]))
        return lambda: whole_of(step(*given)).item()
    run = model if way == "eager" else torch.compile(model, backend=way, dynamic=False)

    def plain() -> float:
        loss = loss_of(run, *given)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return plain


def show_first(times: Times) -> Iterator[str]:
    yield (
        "**The first step** of a GPT, forward, backward and AdamW (fused), in plain eager steps of the same model, of "
        "which a median of the same process is taken; medians of processes."
    )
    yield ""
    rows = [["model", "way", "plain step, ms", "first step, plain steps", "aim", "met"]]
    for what, ways in times.items():
        for way, name in WAYS.items():
            told = judged(statistics.median(ways[way]), AIM)
            rows.append([what, name, f"{statistics.median(ways['plain']) * 1e3:.2f}", *told])
    yield from aligned(rows)


# B


def depth_cases(*, quick: bool) -> list[tuple[Any, ...]]:
    few, deep = (2, 3) if quick else (FEW, DEEP)
    return [(way, few, deep) for way in ("capture", *WAYS)]


def depth(way: str, few: int, deep: int) -> Times:
    """Seconds of a capture, or of a first step, of a model of few layers and of a deep one; a like was there before."""
    run = captured if way == "capture" else partial(first_of, way)
    run(2)
    return {way: {str(layers): [run(layers)] for layers in (few, deep)}}


def first_of(way: str, layers: int) -> float:
    size = Size(layers, width=32, heads=2, batch=1, length=16)
    torch._dynamo.reset()
    return seconds(stepped(way, GPT(size), batch(size)))


def captured(layers: int) -> float:
    from sbpflow.nn.graph.capture.surroundings.garbage import uncollected
    from sbpflow.nn.graph.capture.trace import trace

    size = Size(layers, width=32, heads=2, batch=1, length=16)
    model = GPT(size)

    def build(*given: Tensor) -> Tensor:
        loss = loss_of(model, *given)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with uncollected():
        return seconds(lambda: trace(build, batch(size), {}, {"model": model}))


def show_depth(times: Times) -> Iterator[str]:
    few, deep = next(iter(times.values()))
    yield (
        f"**Depth**: seconds for a GPT of width 32 and {few} or {deep} layers, in processes that have done the same "
        "with two layers; medians. Asked for is a capture that takes no longer."
    )
    yield ""
    rows = [["what", f"{few} layers", f"{deep} layers", "ratio", "aim", "met"]]
    said = {"capture": "capture alone, for graphs"} | {way: f"first step, {name}" for way, name in WAYS.items()}
    for way, name in said.items():
        each = [statistics.median(times[way][layers]) for layers in (few, deep)]
        told = judged(each[1] / each[0], 1.0 if way == "capture" else None)
        rows.append([name, *(f"{one:.2f}" for one in each), *told])
    yield from aligned(rows)


PARTS: dict[str, Any] = {"A": (first, first_cases, show_first), "B": (depth, depth_cases, show_depth)}


if __name__ == "__main__":
    main()
