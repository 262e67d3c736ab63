"""Training steps on two Gloo ranks: a graph's, and those of DDP, of split modules by hand, of DTensor and of FSDP2."""

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sbpflow as flow
from benchmarks.parts.alone import Times, timed
from benchmarks.parts.eager_block import Copy, Reduce, whole_of
from benchmarks.parts.graph_models import GPT, Batch, Size, Step, adamw, agree, batch, loss_of, made, trainer

__all__ = ["PARALLEL", "SIZES", "parallel"]

SIZES = {
    "small": (Size(layers=4, width=64, heads=4, batch=4, length=32), 4),  # and calls a round
    "large": (Size(layers=4, width=256, heads=8, batch=8, length=64), 1),
}
SPLIT = {"q": 0, "k": 0, "v": 0, "up": 0, "out": 1, "down": 1}  # Megatron's: which dim of each weight is split

# Who is compared, and the part of each one's time that a graph may take.
PARALLEL = {
    "data": {"DDP": 1.0},
    "tensor": {"by hand": 1.05, "DTensor": 0.6},
    "ZeRO-3": {"FSDP2": 1.0},
}


def parallel(rounds: int) -> Times:
    flow.init(timeout=120)
    times: Times = {}
    for name, (size, calls) in SIZES.items():
        table: dict[str, dict[str, Callable[[], object]]] = {}
        for what, ways in variants(size).items():
            agree({way: told(step, way) for way, step in ways.items()}, next(iter(ways)), f"{what}, {name}")
            table[f"{what}, {name}"] = dict(ways)
        times |= timed(table, rounds, calls, meet=True)
    return times


def variants(size: Size) -> dict[str, dict[str, Step]]:
    me, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    whole = batch(size)
    mine: Batch = tuple(x.chunk(ranks)[me].clone() for x in whole)
    split = {f"blocks.*.{part}.weight": flow.S(dim) for part, dim in SPLIT.items()}
    return {
        "data": {"DDP": replicated(size, mine), "sbpflow": ours(size, whole, flow.S(0), {"*": flow.B})},
        "tensor": {
            "by hand": by_hand(size, whole, me, ranks),
            "DTensor": dtensor(size, whole, mesh),
            "sbpflow": ours(size, whole, flow.B, split | {"*": flow.B}),
        },
        "ZeRO-3": {"FSDP2": sharded(size, mine, mesh), "sbpflow": ours(size, whole, flow.S(0), {"*": flow.S(0)})},
    }


def told(step: Step, way: str) -> Callable[[], float]:
    def value() -> float:
        loss = whole_of(step())
        if way in ("DDP", "FSDP2"):  # theirs is the loss of the rank's own part of the batch
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss.item()

    return value


def ours(size: Size, whole: Batch, inputs: Any, hints: dict[str, Any]) -> Step:
    p = flow.placement("cpu", range(dist.get_world_size()))
    model = made(size)
    flow.nn.shard(model, hints)
    step: Callable[..., Any] = flow.compile(model, loss_of, adamw(model.parameters(), fused=True), placement=p)
    given = [flow.tensor(x, placement=p, sbp=inputs) for x in whole]
    return lambda: step(*given)


def replicated(size: Size, mine: Batch) -> Step:
    """DistributedDataParallel on this rank's part of the batch."""
    model = DistributedDataParallel(made(size), gradient_as_bucket_view=True)
    return trainer(model, adamw(model.parameters(), fused=True), mine)


def sharded(size: Size, mine: Batch, mesh: DeviceMesh) -> Step:
    """fully_shard, a block at a time, on this rank's part of the batch."""
    model = made(size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trainer(model, adamw(model.parameters(), fused=True), mine)


def by_hand(size: Size, whole: Batch, me: int, ranks: int) -> Step:
    """Plain modules with this rank's part of each split weight; a block calls all_reduce twice each way."""
    model = GPT(size, ranks, Copy.apply, Reduce.apply)
    values = copy.deepcopy(made(size).state_dict())
    for name, value in values.items():
        part = name.split(".")[-2]
        if part in SPLIT:
            values[name] = value.chunk(ranks, SPLIT[part])[me].clone()
    model.load_state_dict(values)
    return trainer(model, adamw(model.parameters(), fused=True), whole)


def dtensor(size: Size, whole: Batch, mesh: DeviceMesh) -> Step:
    """The same split by torch's own parallelize_module."""
    model = made(size)
    styles = (ColwiseParallel, RowwiseParallel)
    for block in model.blocks:
        assert isinstance(block, nn.Module)
        parallelize_module(block, mesh, {part: styles[dim]() for part, dim in SPLIT.items()})
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
    return trainer(model, adamw([{"params": kind} for kind in kinds], fused=True), whole)
