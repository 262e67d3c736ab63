"""Training steps on one rank beside eager torch and torch.compile; what compiling takes, and what a call costs."""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn

import sbpflow as flow
from benchmarks.parts.alone import Times, timed
from benchmarks.parts.eager_block import whole_of
from benchmarks.parts.graph_models import Size, Step, adamw, agree, batch, loss_of, made, trainer
from sbpflow.nn.graph.compiler.backends import Backend

__all__ = ["SIZES", "fixed", "steps"]

SIZES = {
    "overhead-bound": (Size(layers=4, width=64, heads=4, batch=2, length=32), 8),  # and calls a round
    "compute-bound": (Size(layers=4, width=256, heads=8, batch=4, length=128), 2),
}
BACKENDS = ("code", "inductor")

Maker: TypeAlias = Callable[[Size], Step]


def steps(rounds: int) -> Times:
    times: Times = {}
    warm_inductor()
    for name, (size, calls) in SIZES.items():
        torch._dynamo.reset()
        ways, compiling = {"eager": eager(size)}, {}
        ways["eager"]()  # the others have made a step when they are compiled
        makers: dict[str, Maker] = {"torch.compile": compiled, "code": ours("code"), "inductor": ours("inductor")}
        for way, maker in makers.items():
            ways[way], compiling[way] = twice(maker, size)
        agree({way: lambda step=step: whole_of(step()).item() for way, step in ways.items()}, "eager", name)  # type: ignore[misc]
        times |= timed({name: dict(ways)}, rounds, calls)
        times[f"compiling, {name}"] = compiling
    return times


def eager(size: Size) -> Step:
    model = made(size)
    return trainer(model, adamw(model.parameters(), fused=True), batch(size))


def compiled(size: Size) -> Step:
    model = made(size)
    return trainer(torch.compile(model, dynamic=False), adamw(model.parameters(), fused=True), batch(size))


def ours(backend: Backend) -> Maker:
    def maker(size: Size) -> Step:
        model, given = made(size), batch(size)
        where = flow.placement("cpu", [0])
        step: Callable[..., Tensor] = flow.compile(
            model, loss_of, adamw(model.parameters(), fused=True), placement=where, backend=backend
        )
        return lambda: step(*given)

    return maker


def twice(maker: Maker, size: Size) -> tuple[Step, list[float]]:
    """A step, and microseconds until the first is done, of a model and of its like; no kernels are there at first."""
    times = []
    with tempfile.TemporaryDirectory(prefix="sbpflow-kernels-") as folder, patch.dict(os.environ):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for _ in range(2):
            start = time.perf_counter()
            step = maker(size)
            step()
            times.append((time.perf_counter() - start) * 1e6)
    return step, times


def warm_inductor() -> None:
    """Warms inductor: the work that it does once in a process or on a machine belongs to nobody's model."""
    weight = torch.ones(4, 4, requires_grad=True)
    torch.compile(lambda x: (x @ weight).relu().sum())(torch.ones(4, 4)).backward()


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0


def fixed(rounds: int) -> Times:
    """A graph of one op on four numbers: nothing but what every call costs."""
    where, x = flow.placement("cpu", [0]), torch.ones(4)
    given: Any = flow.tensor(x, placement=where, sbp=flow.B)
    module, fast = Twice(), torch.compile(Twice(), dynamic=False)
    graph: Callable[..., Any] = flow.compile(Twice(), placement=where)
    table: dict[str, Callable[[], object]] = {
        "eager": lambda: module(x),
        "torch.compile": lambda: fast(x),
        "eager on a global tensor": lambda: module(given),
        "graph": lambda: graph(x),
        "graph on a global tensor": lambda: graph(given),
    }
    with torch.no_grad():
        for way, call in table.items():
            assert torch.equal(whole_of(call()), x * 2.0), way  # type: ignore[arg-type]
        return timed({"fixed": table}, rounds, 200)
