"""One training step in micro-batches on two ranks: a graph's, that of torch's pipelining, and one written by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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

__all__ = ["MICRO_BATCHES", "SCHEDULES", "Size", "Step", "by_hand", "gradients", "ours", "plain", "stage_alone", "torchs"]

MICRO_BATCHES = 8
BLOCKS = 4

Step: TypeAlias = Callable[[], Tensor | None]  # one step; returns the loss, None on ranks that do not have it


@dataclass(frozen=True)
class Size:
    width: int
    rows: int  # of a micro-batch

    def __str__(self) -> str:
        return f"{BLOCKS} blocks of width {self.width}, micro-batches of {self.rows} rows"


@dataclass(frozen=True)
class Way:
    """A schedule: torch's class of it, and how many of its bubble's units are left with a chunk on each rank."""

    theirs: Any
    chunks: int = 1
    bubble: float = 1.0  # of one stage's forward and backward, between two ranks


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
    return nn.Sequential(*(Block(size.width) for _ in range(BLOCKS)))


def batch(size: Size) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    rows = MICRO_BATCHES * size.rows
    first, second = (torch.randn(rows, size.width, generator=source) for _ in range(2))
    return first, second


def chunks_of(model: nn.Sequential, ranks: int, chunks: int) -> list[nn.Sequential]:
    """The chunks of this rank, of all that go round and round."""
    count = ranks * chunks
    each = BLOCKS // count
    return [model[at * each : (at + 1) * each] for at in range(dist.get_rank(), count, ranks)]


def cleared(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


def gradients(modules: Sequence[nn.Module]) -> float:
    """One number of all gradients, to compare ways by."""
    grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    local = [shard for g in grads for shard in (g.to_local() if hasattr(g, "to_local") else (g,))]
    return sum(float(g.double().square().sum()) for g in local)


def plain(size: Size) -> float:
    """The loss in one process."""
    x, y = batch(size)
    return float(F.mse_loss(made(size)(x), y))


def ours(size: Size, schedule: str) -> tuple[Step, list[nn.Module]]:
    model = made(size)
    stages = [flow.placement("cpu", [rank]) for rank in range(dist.get_world_size())]
    flow.nn.pipeline(model, stages, schedule)

    def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(module(x), y)

    graph: Callable[..., Any] = flow.compile(model, loss_of, micro_batches=MICRO_BATCHES, schedule=schedule)
    given = batch(size)

    def step() -> Tensor | None:
        cleared([model])
        loss = graph(*given)
        return loss.to_local() if dist.get_rank() == dist.get_world_size() - 1 else None

    return step, [model]


def torchs(size: Size, schedule: str) -> tuple[Step, list[nn.Module]]:
    """torch.distributed.pipelining on the same chunks."""
    way, ranks, me = SCHEDULES[schedule], dist.get_world_size(), dist.get_rank()
    mine = chunks_of(made(size), ranks, way.chunks)
    places = range(me, ranks * way.chunks, ranks)
    stages = [PipelineStage(one, at, ranks * way.chunks, torch.device("cpu")) for one, at in zip(mine, places)]
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
    """1F1B with isend and irecv: a receive is posted as long before it is waited for as can be."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    (stage,) = chunks_of(made(size), ranks, 1)
    first, last = me == 0, me == ranks - 1
    x, y = (part.chunk(MICRO_BATCHES) for part in batch(size))
    like = x[0]

    def step() -> Tensor | None:
        cleared([stage])
        under_way, losses = [], []
        xs = [] if first else [_posted(like, me - 1) for _ in range(MICRO_BATCHES)]
        dys = [] if last else [_posted(like, me + 1) for _ in range(MICRO_BATCHES)]
        held: list[tuple[Tensor, Tensor]] = []

        def forward(k: int) -> None:
            come = x[k] if first else xs[k]().requires_grad_()
            out = stage(come)
            if last:
                out = F.mse_loss(out, y[k]) / MICRO_BATCHES
                losses.append(out.detach())
            else:
                under_way.append((out, dist.isend(out.detach(), me + 1)))
            held.append((come, out))

        def backward(k: int) -> None:
            come, out = held.pop(0)
            out.backward(None if last else dys[k]())
            if not first:
                assert come.grad is not None
                under_way.append((come.grad, dist.isend(come.grad, me - 1)))

        ahead = min(ranks - 1 - me, MICRO_BATCHES)
        for k in range(ahead):
            forward(k)
        for k in range(MICRO_BATCHES - ahead):
            forward(k + ahead)
            backward(k)
        for k in range(MICRO_BATCHES - ahead, MICRO_BATCHES):
            backward(k)
        for _, work in under_way:
            work.wait()
        return torch.stack(losses).sum() if last else None

    return step, [stage]


def _posted(like: Tensor, peer: int) -> Callable[[], Tensor]:
    come = torch.empty_like(like)
    work = dist.irecv(come, peer)

    def arrived() -> Tensor:
        work.wait()
        return come

    return arrived


def stage_alone(size: Size) -> Callable[[], None]:
    """One stage's forward and backward for every micro-batch, where nothing is sent and nobody waited for."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    (stage,) = chunks_of(made(size), ranks, 1)
    first, last = me == 0, me == ranks - 1
    x, y = (part.chunk(MICRO_BATCHES) for part in batch(size))

    def run() -> None:
        cleared([stage])
        for come, other in zip(x, y):
            out = stage(come if first else come.detach().requires_grad_())
            if last:
                F.mse_loss(out, other).div(MICRO_BATCHES).backward()
            else:
                out.backward(other)

    return run
