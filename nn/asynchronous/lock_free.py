"""Lock-free training (Hogwild): threads read and change the same weights, and none waits for another.

Each worker is an actor with a queue, a thread, of its own; between them there is no register, so nobody holds a version
of the weights and nobody has to wait. What two threads write at once may be lost; where gradients are sparse, that is
seldom.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...actors.protocol.network import Actor, Network
from ...actors.protocol.state import Firing
from ...actors.runtime.runtime import Runtime
from ...placement.errors import SbpError
from ...placement.world import world
from ..tensors.tensor import GlobalTensor

__all__ = ["LockFreeRun", "hogwild"]


@dataclass
class LockFreeRun:
    """The record of a run: losses by worker, and the number of steps by delay. A delay counts the updates by others
    between a step's reading of the weights and its own update."""

    losses: list[list[float]]
    delays: Counter[int] = field(default_factory=Counter)


def hogwild(
    model: nn.Module, loss_fn: Callable[..., Tensor], batches: Sequence[Sequence[tuple[Any, ...]]], *, lr: float
) -> LockFreeRun:
    """Train by SGD, a thread for each list of batches, on the memory of the model itself.

    A sparse gradient, such as that of `nn.Embedding(sparse=True)`, changes its rows alone, by `index_add_`; another one
    all of its weight. It differs from run to run, as threads come and go. It is for one process.
    """
    _check(model, batches, lr)
    run = LockFreeRun([[] for _ in batches])
    workers = _Workers(model, loss_fn, batches, lr, run)
    actors = tuple(
        Actor(f"worker {at}", f"worker {at}", firings=len(listed)) for at, listed in enumerate(batches) if listed
    )
    work = {actor.name: partial(workers.step, int(actor.name.split()[1])) for actor in actors}
    with Runtime(Network(actors, (), f"hogwild of {type(model).__name__}"), work) as runtime:
        runtime.run()
    return run


class _Workers:
    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], batches: Any, lr: float, run: LockFreeRun
    ) -> None:
        self.model, self.loss_fn, self.batches, self.lr, self.run = model, loss_fn, batches, lr, run
        self.trained = [x for x in model.parameters() if x.requires_grad]
        self.done = [0] * len(batches)  # updates of each, which it alone counts

    def step(self, worker: int, firing: Firing) -> Sequence[Any]:
        before = sum(self.done)
        with torch.enable_grad():
            loss = self.loss_fn(self.model, *self.batches[worker][firing.turn])
        grads = torch.autograd.grad(loss, self.trained, allow_unused=True)
        for x, grad in zip(self.trained, grads, strict=True):
            if grad is not None:
                _subtract(x.data, grad, self.lr)  # autograd of another thread may have x: its version stays
        self.run.delays[sum(self.done) - before] += 1
        self.done[worker] += 1
        self.run.losses[worker].append(loss.item())
        return ()


def _subtract(weight: Tensor, grad: Tensor, lr: float) -> None:
    if not grad.is_sparse:
        weight.sub_(grad, alpha=lr)
        return
    grad = grad.coalesce()
    (rows,) = grad.indices()
    weight.index_add_(0, rows, grad.values(), alpha=-lr)


def _check(model: nn.Module, batches: Sequence[Sequence[Any]], lr: float) -> None:
    if not lr > 0:
        raise SbpError(f"hogwild: lr={lr!r}\n  give it a rate above 0")
    if not any(batches):
        raise SbpError("hogwild: no worker has a batch\n  give a list of batches for each worker")
    if world().rank is not None:
        raise SbpError(
            "hogwild: workers are threads of one process, and here are several processes\n"
            "  have one of them run it, or let processes train apart: flow.nn.ParameterServer, flow.nn.meet"
        )
    strange = next((name for name, x in model.named_parameters() if isinstance(x, GlobalTensor)), None)
    if strange is not None:
        raise SbpError(
            f"hogwild: {strange} is a global tensor, and its ranks have memory of their own\n"
            "  give it a plain model; for global ones there is flow.nn.ParameterServer"
        )
