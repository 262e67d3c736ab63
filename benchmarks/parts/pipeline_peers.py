"""Steps in micro-batches: a graph's, those of torch's pipelining and one by hand; and what firings and steps cost."""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import sbpflow as flow
from benchmarks.parts import hop
from benchmarks.parts.alone import Times, timed
from sbpflow.actors.runtime.runtime import Runtime
from sbpflow.nn.graph.run.variant import Variant

__all__ = ["MICRO_BATCHES", "SCHEDULES", "SIZES", "firings", "fixed", "hops", "schedules"]

MICRO_BATCHES = 8
MANY = 64  # micro-batches where single firings are counted

Step: TypeAlias = Callable[[], Tensor | None]  # one step; returns the loss, None on ranks that do not have it


@dataclass(frozen=True)
class Size:
    width: int
    rows: int  # of a micro-batch
    micro_batches: int = MICRO_BATCHES
    blocks: int = 4
    linear: bool = False  # blocks are but a linear layer each

    def __str__(self) -> str:
        return f"{self.blocks} blocks of width {self.width}, micro-batches of {self.rows} rows"


SIZES = {"compute-bound": (Size(256, 128), 1), "tiny stages": (Size(32, 16), 4)}  # and steps a round
SMALLEST = Size(4, 1, blocks=2, linear=True)


@dataclass(frozen=True)
class Way:
    """A schedule: torch's class of it, the chunks on each rank, and its bubble."""

    theirs: Any
    chunks: int = 1
    bubble: float = 1.0  # of two ranks, in one stage's forwards and backwards of a micro-batch


# With equal times of F, B and W one third of the bubble is left by zb_h1.
SCHEDULES = {
    "gpipe": Way(ScheduleGPipe),
    "1f1b": Way(Schedule1F1B),
    "interleaved": Way(ScheduleInterleaved1F1B, chunks=2, bubble=1 / 2),
    "zb_h1": Way(ScheduleInterleavedZeroBubble, bubble=1 / 3),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


def made(size: Size) -> nn.Sequential:
    """The same weights each time."""
    torch.manual_seed(0)
    width = size.width
    return nn.Sequential(*(nn.Linear(width, width) if size.linear else Block(width) for _ in range(size.blocks)))


def batch(size: Size) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    rows = size.micro_batches * size.rows
    first, second = (torch.randn(rows, size.width, generator=source) for _ in range(2))
    return first, second


def position() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def chunks_of(size: Size, chunks: int = 1) -> list[nn.Sequential]:
    """The chunks of this rank, of all that go round and round."""
    (me, ranks), layers = position(), list(made(size))
    count = ranks * chunks
    each = size.blocks // count
    return [nn.Sequential(*layers[at * each : (at + 1) * each]) for at in range(me, count, ranks)]


def cleared(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


def squares(modules: Sequence[nn.Module]) -> float:
    """One number of all gradients on this rank, to compare ways by."""
    grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    here = [g.to_local() if isinstance(g, flow.GlobalTensor) else g for g in grads]
    return sum(float(g.double().square().sum()) for g in here)


def compiled(size: Size, schedule: str) -> tuple[Callable[[], Any], nn.Module, Any]:
    """A step as a graph, its model, and the graph."""
    model, (_, ranks) = made(size), position()
    flow.nn.pipeline(model, [flow.placement("cpu", [rank]) for rank in range(ranks)], schedule)

    def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(module(x), y)

    graph: Any = flow.compile(model, loss_of, micro_batches=size.micro_batches, schedule=schedule)
    given = batch(size)

    def step() -> Any:
        cleared([model])
        return graph(*given)

    return step, model, graph


def valued(step: Callable[[], Any]) -> Step:
    """A graph's step, with its loss on the last rank as that of the others."""
    me, ranks = position()

    def value() -> Tensor | None:
        loss = step()
        return loss.to_local() if me == ranks - 1 else None

    return value


def torchs(size: Size, schedule: str) -> tuple[Step, list[nn.Module]]:
    """torch.distributed.pipelining on the same chunks."""
    way, (me, ranks) = SCHEDULES[schedule], position()
    mine = chunks_of(size, way.chunks)
    places = range(me, ranks * way.chunks, ranks)
    stages = [
        PipelineStage(one, at, ranks * way.chunks, torch.device("cpu")) for one, at in zip(mine, places, strict=True)
    ]
    alone = way.theirs in (ScheduleGPipe, Schedule1F1B)
    runs = way.theirs(stages[0] if alone else stages, MICRO_BATCHES, loss_fn=F.mse_loss)
    x, y = batch(size)

    def step() -> Tensor | None:
        cleared(mine)
        losses: list[Tensor] = []
        runs.step(*((x,) if me == 0 else ()), target=y if me == ranks - 1 else None, losses=losses)
        return torch.stack(losses).mean() if losses else None

    return step, list(mine)


def by_hand(size: Size) -> tuple[Step, list[nn.Module]]:
    """1F1B with isend and irecv: all receives are posted first, and sends are waited for last."""
    me, ranks = position()
    (stage,) = chunks_of(size)
    first, last, m = me == 0, me == ranks - 1, size.micro_batches
    x, y = (part.chunk(m) for part in batch(size))

    def step() -> Tensor | None:
        cleared([stage])
        under_way: list[tuple[Tensor, Any]] = []  # what is sent is kept until it is gone
        losses: list[Tensor] = []
        xs = [] if first else [posted(x[0], me - 1) for _ in range(m)]
        dys = [] if last else [posted(x[0], me + 1) for _ in range(m)]
        held: list[tuple[Tensor, Tensor]] = []

        def forward(k: int) -> None:
            come = x[k] if first else xs[k]().requires_grad_()
            out = stage(come)
            if last:
                out = F.mse_loss(out, y[k]) / m
                losses.append(out.detach())
            else:
                under_way.append((out, dist.isend(out.detach(), me + 1)))
            held.append((come, out))

        def backward(k: int) -> None:
            come, out = held.pop(0)
            out.backward(None if last else dys[k]())  # type: ignore[no-untyped-call]
            if not first:
                assert come.grad is not None
                under_way.append((come.grad, dist.isend(come.grad, me - 1)))

        ahead = min(ranks - 1 - me, m)
        for k in range(ahead):
            forward(k)
        for k in range(m - ahead):
            forward(k + ahead)
            backward(k)
        for k in range(m - ahead, m):
            backward(k)
        for _, work in under_way:
            work.wait()
        return torch.stack(losses).sum() if last else None

    return step, [stage]


def posted(like: Tensor, peer: int) -> Callable[[], Tensor]:
    come = torch.empty_like(like)
    work = dist.irecv(come, peer)

    def arrived() -> Tensor:
        assert work is not None
        work.wait()
        return come

    return arrived


def stage_alone(size: Size) -> Callable[[], None]:
    """One stage's forward and backward for every micro-batch, where nothing is sent and nobody waited for."""
    me, ranks = position()
    (stage,) = chunks_of(size)
    first, last = me == 0, me == ranks - 1
    x, y = (part.chunk(size.micro_batches) for part in batch(size))

    def run() -> None:
        cleared([stage])
        for come, other in zip(x, y, strict=True):
            out = stage(come if first else come.detach().requires_grad_())
            if last:
                F.mse_loss(out, other).div(size.micro_batches).backward()  # type: ignore[no-untyped-call]
            else:
                out.backward(other)

    return run


def told(step: Step, modules: Sequence[nn.Module]) -> tuple[float, float]:
    """The loss, 0 on ranks that do not have it, and the squares of the gradients."""
    loss = step()
    return 0.0 if loss is None else loss.item(), squares(modules)


def agree(ways: dict[str, tuple[Step, list[nn.Module]]], what: str) -> None:
    """Every way's loss and gradients are those of the first."""
    expected = None
    for way, (step, modules) in ways.items():
        found = told(step, modules)
        expected = expected or found
        for a, b in zip(found, expected, strict=True):
            assert abs(a - b) <= 1e-4 * abs(b), f"{what}: {found} by {way}, {expected} by {next(iter(ways))}"


def schedules(rounds: int) -> Times:
    flow.init(timeout=120)
    times: Times = {}
    for name, (size, calls) in SIZES.items():
        hand = by_hand(size)
        table: dict[str, Callable[[], object]] = {"by hand": hand[0], "stage": stage_alone(size)}
        busy: dict[str, list[float]] = {}
        for schedule, way in SCHEDULES.items():
            step, model, graph = compiled(size, schedule)
            both = {f"torch {schedule}": torchs(size, schedule), f"graph {schedule}": (valued(step), [model])}
            agree(({"by hand": hand} if way.chunks == 1 else {}) | both, f"{schedule}, {name}")
            table |= {each: run for each, (run, _) in both.items()}
            table[f"graph {schedule}"] = partial(watched, step, graph, busy.setdefault(schedule, []))
        found = timed({name: table}, rounds, calls, meet=True)[name]
        for schedule, each in busy.items():  # the first round is a warm one
            found[f"busy {schedule}"] = [sum(each[k : k + calls]) / calls for k in range(calls, len(each), calls)]
        times[name] = found
    return times


def watched(step: Callable[[], object], graph: Any, busy: list[float]) -> None:
    """A step, and how long this rank was at work in it."""
    step()
    ran = graph.planned.program.outcome.of(f"device {position()[0]}")
    busy.append(sum(each.end - each.start for each in ran) * 1e6)


@contextmanager
def counted(clock: Callable[[], float]) -> Iterator[list[float]]:
    """The time that is spent in the code of tasks compiled meanwhile, and how often it was called."""
    spent, made = [0.0, 0.0], Variant.running

    def running(self: Variant, name: str, *rest: Any, **options: Any) -> Any:
        found = made(self, name, *rest, **options)

        def run(*given: Any) -> Any:
            start = clock()
            out = found.plain(*given)
            spent[0] += clock() - start
            spent[1] += 1
            return out

        return found if name in ("before", "after") else replace(found, plain=run)

    with patch.object(Variant, "running", running):
        yield spent


def firings(rounds: int) -> Times:
    """CPU time of the calling thread for a firing, beyond its task's code, on one rank and on each of two."""
    if "RANK" in os.environ:
        flow.init(timeout=120)
    ranks = position()[1]
    with counted(time.thread_time) as spent:
        step, _, graph = compiled(replace(SMALLEST, micro_batches=MANY), "1f1b")
        step()
    program = graph.planned.program
    nothing = {actor.name: partial(_nothing, len(actor.gives)) for actor in program.proved.network.actors}
    idle = Runtime(program.proved.network, nothing)  # on one rank; of two this is both in one process
    run, took = program.runtime.run, [0.0]

    def measured(**options: Any) -> Any:
        start = time.thread_time()
        out = run(**options)
        took[0] += time.thread_time() - start
        return out

    found: dict[str, list[float]] = {"graph": [], "actors without work": []}
    gc.collect()
    gc.freeze()
    with patch.object(program.runtime, "run", measured):
        for _ in range(10 * rounds):
            spent[:], took[0] = [0.0, 0.0], 0.0
            step()
            found["graph"].append((took[0] - spent[0]) / spent[1] * 1e6)
            start = time.thread_time()
            idle.run()
            found["actors without work"].append((time.thread_time() - start) / spent[1] * 1e6)
    idle.close()
    return {f"{ranks} rank{'s' if ranks > 1 else ''}": found if ranks == 1 else {"graph": found["graph"]}}


def _nothing(width: int, firing: Any) -> tuple[None, ...]:
    return (None,) * width


def hops(rounds: int) -> Times:
    """Trips to the other rank and back: by hand, and through three actors as they come and in the simulated order."""
    flow.init(timeout=120)
    times: Times = {}
    for size in hop.SIZES:
        free, ordered = hop.runtime(size, ordered=False), hop.runtime(size, ordered=True)
        table: dict[str, Callable[[], object]] = {
            "by hand": hop.by_hand(size),
            "as it comes": free.run,
            "in order": ordered.run,
        }
        found = timed({"trips": table}, 2 * rounds, 1, meet=True)["trips"]
        times[str(size)] = {way: [us / hop.TRIPS / 2 for us in row] for way, row in found.items()}
        free.close()
        ordered.close()
    return times


def fixed(rounds: int) -> Times:
    """Steps that compute next to nothing, of one micro-batch and of more."""
    if "RANK" in os.environ:
        flow.init(timeout=120)
    ranks = position()[1]
    table: dict[str, Callable[[], object]] = {}
    for m in (1, 2, MICRO_BATCHES):
        size = replace(SMALLEST, micro_batches=m)
        table |= {f"graph, {m}": compiled(size, "1f1b")[0], f"by hand, {m}": by_hand(size)[0]}
    return timed({str(ranks): table}, 3 * rounds, 10, meet=ranks > 1)
