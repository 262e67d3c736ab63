"""A run as a user writes it, of which ranks die at random moments, as a module of torchrun: HOME KIND SEED KILLS.

It has a parameter without dims, buffers, groups, a schedule, dropout and clipping, and is in one of several plans, with
checkpoints on a disk or in hosts' own folders with copies on a neighbour.
"""

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S

STEPS, EVERY = 40, 2
KINDS = ["eager", "clipped", "zero", "beside", "beside zero"]
PLANS = {"clipped": "grid cpu (data=2)", "zero": "grid cpu (data=2)\nstates **: data=S(0)"}


class Net(nn.Module):
    """Two layers with a norm that keeps statistics, dropout, and a scale without dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.scale, self.drop = nn.Parameter(torch.ones(())), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(torch.tanh(self.norm(self.up(x))))) * self.scale
        return y


def loss(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


class Death:
    """When this rank dies in this life, if it is the one: within a step some way on, or before the first."""

    def __init__(self, home: Path, seed: int, kills: int) -> None:
        self.home: Path = home
        self.at: int | None = None
        self.lives = len((home / "lives").read_text()) if (home / "lives").exists() else 0
        dice = Random(1000 * seed + self.lives)
        victim, steps, self.delay = dice.randrange(flow.init().size or 1), dice.randrange(-1, 6), dice.uniform(0, 0.12)
        if self.lives < kills and victim == (flow.init().rank or 0):
            self.at = steps

    def step(self, number: int) -> None:
        """So many steps were made in this life; -1 before what was saved is loaded."""
        if number == self.at:
            timer = threading.Timer(self.delay * (6 if number < 0 else 1), self.die)
            timer.daemon = True
            timer.start()

    def die(self) -> None:
        with (self.home / "lives").open("a") as lives:
            lives.write("+" if any(self.home.rglob("step-*/manifest.json")) else "-")
        os.kill(os.getpid(), signal.SIGKILL)


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer, and a step."""
    model = Net()
    if kind == "eager":
        flow.nn.to_global(model, flow.placement("cpu", range(2)), {"up.weight": S(0), "down.weight": S(1)})
    decayed = [x for x in model.parameters() if x.ndim > 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "lr": 0.05},
        {"params": [x for x in model.parameters() if x.ndim < 2]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    if kind != "eager":
        return model, optimizer, flow.compile(model, loss, optimizer, plan=PLANS[kind], clip_grad_norm=0.5)

    def step(x: Tensor) -> Tensor:
        told = loss(model, flow.tensor(x, placement=flow.placement("cpu", range(2)), sbp=S(0)))
        told.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return told

    return model, optimizer, step


def run(home: Path, kind: str, seed: int, kills: int) -> None:
    here = flow.init(timeout=40.0).rank or 0
    warnings.simplefilter("ignore", RuntimeWarning)  # that one was not written to its end
    beside = kind.startswith("beside")
    folder = home / f"host-{here}" if beside else home / "disk"
    more: dict[str, Any] = {"neighbours": 1} if beside else {}
    death = Death(home, seed, kills)
    death.step(-1)
    model, optimizer, step = made({"beside": "clipped", "beside zero": "zero"}.get(kind, kind))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    found = flow.newest(folder, **more)
    if found is not None:
        flow.load(found.path, model, optimizer=optimizer, extra={"schedule": schedule}, **more)
    start = found.step if found else 0
    for number in range(start, STEPS):
        death.step(number - start)
        told = float(step(batch(number)))
        schedule.step()
        if here == 0:
            with (home / "log.jsonl").open("a") as log:
                log.write(json.dumps([number, told]) + "\n")
        if (number + 1) % EVERY == 0:
            name = folder / f"step-{number + 1}"
            flow.save(
                name, model, optimizer=optimizer, step=number + 1, extra={"schedule": schedule}, keep=2,
                asynchronous=number % 4 == 1, **more,
            )  # fmt: skip
    flow.save(home / "end", model, optimizer=optimizer, step=STEPS)


def end_of(home: Path) -> dict[str, Any]:
    """The losses by step, each of which all lives had alike, and all that a run had in its end."""
    losses: dict[str, Any] = {}
    for at, told in map(json.loads, (home / "log.jsonl").read_text().splitlines()):
        assert losses.setdefault(str(at), told) == told, f"step {at} was made twice, and not alike"
    assert len(losses) == STEPS
    model = Net()
    flow.load(home / "end", model)
    return {**losses, **{name: value.tolist() for name, value in model.state_dict().items()}}


def left(home: Path) -> Iterator[list[str]]:
    """The contents of each folder of checkpoints."""
    for folder in (*home.glob("disk"), *sorted(home.glob("host-*"))):
        yield sorted(os.listdir(folder))


if __name__ == "__main__":
    os.environ.setdefault("SBPFLOW_HOST", f"host {os.environ['RANK']}")
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
