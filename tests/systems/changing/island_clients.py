"""Programs that clients send to an island of two ranks, and clients that are processes: `python THIS NAME FILE ...`."""

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.nn.islands.scheduler import IslandScheduler

TWO = flow.placement("cpu", range(2))
LIMIT, PAUSE = 30000, 0.01  # how often a gate looks before it gives up


def rank() -> int:
    return int(os.environ["RANK"])


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def batch(at: int) -> Tensor:
    return torch.arange(32.0).reshape(4, 8) / 10 - at


def noted(log: str, what: object) -> None:
    with Path(f"{log}.{rank()}").open("a") as file:
        file.write(f"{what}\n")


def parts(seed: int, drop: float = 0.3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(drop), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def alone(seed: int, steps: int, drop: float = 0.3) -> list[float]:
    """The losses of plain torch on one device."""
    model, optimizer = parts(seed, drop)
    losses = []
    for at in range(steps):
        loss = loss_fn(model, batch(at))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Trainer:
    """A model with its optimizer and compiled step, which lives on an island."""

    drop = 0.3

    def __init__(self, seed: int, log: str) -> None:
        model, optimizer = parts(seed)
        flow.nn.shard(model, {"0.weight": S(0)})  # so that ranks have to talk to each other
        self.seed, self.log = seed, log
        self.compiled = flow.compile(model, loss_fn, optimizer, placement=TWO)
        noted(log, seed)

    def step(self, x: Tensor) -> Any:
        noted(self.log, self.seed)
        return self.compiled(x)


class Staged(Trainer):
    """One that is a pipeline of two stages, whose micro-batches would draw numbers of their own."""

    drop = 0.0

    def __init__(self, seed: int, log: str) -> None:
        model, optimizer = parts(seed, self.drop)
        stages = [flow.placement("cpu", [rank]) for rank in range(2)]
        flow.nn.pipeline(model, stages)  # type: ignore[arg-type]
        self.seed, self.log = seed, log
        self.compiled = flow.compile(model, loss_fn, optimizer, micro_batches=2)


def stacked(log: str, seed: int, losses: list[Tensor]) -> Tensor:
    noted(log, seed)
    return torch.stack([loss.detach().full_tensor() for loss in losses])  # type: ignore[attr-defined]


def until(waiting: int, clients: int) -> None:
    """Wait, on the scheduler's rank, until so many programs lie there with this one, and so many clients are left."""
    if rank():
        return
    (scheduler,) = (each for each in gc.get_objects() if isinstance(each, IslandScheduler) and not each._over)
    for _ in range(LIMIT):
        queues = [queue.items for queue in [*scheduler._shares._queues.values()]]
        lie = len(scheduler._sent) + sum(cost for items in queues for _, cost in [*items])
        if lie >= waiting and len(scheduler._clients) <= clients:
            return
        time.sleep(PAUSE)
    raise RuntimeError(f"{lie} programs of {len(scheduler._clients)} clients")


class Marked:
    """An object that tells when it is freed, and cannot be sent."""

    def __init__(self, log: str, whole: Tensor) -> None:
        self.log, self.x = log, flow.tensor(whole, placement=TWO, sbp=S(0))

    def __reduce__(self) -> Any:
        raise TypeError("it came home")

    def __del__(self) -> None:
        noted(self.log, "freed")


def total(marked: Marked, times: float = 1.0) -> dict[str, Any]:
    return {"sum": marked.x.sum() * times, "x": marked.x, "rank": rank()}


def broken(trainer: Trainer, at: int) -> float:
    """It raises on one rank, while the other is in an exchange; or, with -1, on all alike."""
    if at in (-1, rank()):
        raise ValueError(f"no luck at {at}")
    return trainer.step(batch(0)).item()  # type: ignore[no-any-return]


def client_here(file: str) -> None:
    flow.island(file)


def train(file: str, log: str, seed: str) -> None:
    """A client: a model, four steps, and their losses."""
    with flow.island(file, most=20) as island:
        trainer = island.run(Trainer, int(seed), log)
        losses = [island.run(Trainer.step, trainer, batch(at)) for at in range(4)]
        print(island.run(stacked, log, int(seed), losses).result().tolist())


def doomed(file: str, log: str) -> None:
    """A client that is killed while its programs wait."""
    island = flow.island(file, most=20)
    kept: list[object] = [island.run(Marked, log, torch.ones(4))]
    island.run(rank).result()  # its object is there: what is put on a line is sent by a thread, some time
    kept += [island.run(until, 0, 1), *(island.run(noted, log, "late") for _ in range(5))]
    print("sent", flush=True)
    time.sleep(LIMIT * PAUSE)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
