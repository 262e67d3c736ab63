"""Ways to train a model on ranks of several hosts: torch's own, plans by hand, and the planner's answer."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sbpflow as flow
from benchmarks.hosts.models import Model, loss_of

__all__ = ["OURS", "PEERS", "PLANS", "WAITS", "Way", "found", "way"]

PEERS = ("DDP", "FSDP2", "HSDP")
PLANS = {
    "data": "grid (data=*)\n**: data=B",
    "zero1": "grid (data=*)\nstates **: data=S(0)",
    "zero3": "grid (data=*)\n**: data=S(0)",
}
WAITS = "planner, waiting"
OURS = (*PLANS, "planner", WAITS)


class Way:
    """A step of training that tells its loss, and what is known of it besides."""

    def __init__(self, step: Callable[[], Tensor], part: bool, about: Callable[[], dict[str, Any]] = dict) -> None:
        self.step, self.part, self.about = step, part, about

    def loss(self) -> float:
        """One step, and the loss of the whole batch."""
        loss = self.step().detach().clone()
        if self.part:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss.item()


def way(name: str, model: Model, mesh: tuple[int, int] | None) -> Way:
    """The way of this name; `mesh` is hosts x ranks of each, where all have as many."""
    return _peer(name, model, mesh) if name in PEERS else _ours(name, model)


def _peer(name: str, model: Model, mesh: tuple[int, int] | None) -> Way:
    made, ranks = model.made(), dist.get_world_size()
    mine = {key: x.chunk(ranks)[dist.get_rank()].clone() for key, x in model.given().items()}
    run: nn.Module = made
    if name == "DDP":
        run = DistributedDataParallel(made, gradient_as_bucket_view=True)
    elif name == "FSDP2":
        _sharded(made, init_device_mesh("cpu", (ranks,)))
    else:
        assert mesh is not None
        _sharded(made, init_device_mesh("cpu", mesh, mesh_dim_names=("hosts", "local")))
    optimizer = torch.optim.AdamW(run.parameters(), 1e-4)

    def step() -> Tensor:
        loss = loss_of(run, **mine)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Way(step, part=True)


def _sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    """fully_shard, a layer of each list at a time."""
    for module in [*model.modules()]:
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _ours(name: str, model: Model) -> Way:
    made, batch = model.made(), model.given()
    optimizer = torch.optim.AdamW(made.parameters(), 1e-4)
    text = PLANS.get(name) or found(model)
    step: Any = flow.compile(made, loss_of, optimizer, plan=text)
    if name == WAITS:  # a step whose moves are all waited for where they start
        with patch("sbpflow.nn.graph.tasks.straight.overlapped", lambda todo, *_, **__: todo):
            step.step_for(**batch).program.prepare()

    def about() -> dict[str, Any]:
        report = step.explain()
        return {"plan": text, "predicted": report.predicted, "moving": report.moving, "hidden": report.hidden}

    return Way(lambda: step(**batch), part=False, about=about)


@cache
def found(model: Model) -> str:
    """The planner's answer for the cluster in use, which the first rank asks for."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made, batch = model.made(), model.given()
            optimizer = torch.optim.AdamW(made.parameters(), 1e-4)
            told = [str(flow.find_plan(made, batch, loss_fn=loss_of, optimizer=optimizer))]
    dist.broadcast_object_list(told)
    text: str = told[0]
    return text
