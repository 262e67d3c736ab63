"""A net of layers in stages, trained a few steps with or without what the rows are about, to be held to each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import sbpflow as flow
from sbpflow.nn.graph.run.pipeline import Pipelined
from sbpflow.placement.world import world

__all__ = ["ADAMW", "SGD", "Trained", "layers", "loss_fn", "plan_of", "same", "trained"]


def ADAMW(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def SGD(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def layers(count: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)])


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


@dataclass
class Trained:
    """A net after some steps: losses, weights and states whole, and of the last step what moved."""

    step: Any
    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    moves: Any


def trained(
    schedule: str = "1f1b",
    *,
    stages: int = 2,
    ranks: int = 1,
    count: int = 4,
    width: int = 8,
    rows: int = 16,
    steps: int = 3,
    optimizer: Any = ADAMW,
    rest: Any = None,
    said: Callable[[nn.Module], object] | None = None,
    spoilt: tuple[int, ...] = (),
    huge: tuple[int, ...] = (),
    tied: bool = False,
    **options: Any,
) -> Trained:
    """Stages of so many ranks; in steps that are `spoilt` a target is infinite, in those that are `huge` an input.

    The first and the last layer may be `tied`."""
    model = layers(count, width)
    if tied:
        model[-1][0].weight = model[0][0].weight  # type: ignore[index]
    flow.nn.pipeline(model, [flow.placement("cpu", range(ranks * i, ranks * (i + 1))) for i in range(stages)], schedule)
    if rest is not None:
        flow.nn.shard(model, {"*": rest})
        parts = [part for layer in model.children() for part in layer.children()]
        flow.nn.flow(parts, result=flow.S(0), input=flow.S(0))  # what is computed is data parallel
    if said is not None:
        said(model)
    mine = optimizer(model)
    options.setdefault("micro_batches", 4)
    step = flow.compile(model, loss_fn, mine, schedule=schedule, **options)
    draw = torch.Generator().manual_seed(1)
    losses: list[float] = []
    last: Any = None
    for at in range(steps):
        x, y = (torch.randn(rows, width, generator=draw) for _ in range(2))
        if at in spoilt:
            y[0] = float("inf")
        if at in huge:
            x[0, 0] = float("inf")
        with flow.record() as moves:
            losses.append(step(x, y).item())
        last = moves
    names = {id(x): name for name, x in model.named_parameters()}
    states = {}
    listed = mine if isinstance(mine, list) else [mine]
    for each in listed if world().rank is None else ():  # else ranks have the states of their own stage
        for x, state in each.state.items():
            name = names.get(id(getattr(x, "_piece_of", x)))
            states.update({f"{name} {kind}": whole(part) for kind, part in state.items() if part is not None})
    return Trained(step, losses, {name: whole(x) for name, x in model.state_dict().items()}, states, last)


def whole(x: Any) -> Tensor:
    made: Tensor = x.full_tensor() if isinstance(x, flow.GlobalTensor) else x
    return made.detach().clone()


def same(a: Trained, b: Trained) -> None:
    """Losses, weights and states to the bit; a loss that is not finite is not."""
    assert [str(x) for x in a.losses] == [str(x) for x in b.losses]
    for mine, other in ((a.weights, b.weights), (a.states, b.states)):
        assert mine.keys() == other.keys()
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []


def plan_of(made: Trained) -> Pipelined:
    """The pipeline that a step runs."""
    ((step,),) = made.step._steps.values()
    program: Pipelined = step.program
    return program
