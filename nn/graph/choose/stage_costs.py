"""The costs of stages: seconds of each layer of a captured step, on each stage that may have it, a micro-batch.

Work on samples is shared out over micro-batches; weights are read in each. A stage of more ranks than the first takes
less time in proportion.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....boxing.boxing import between
from ....placement import Device, Placement, default_cluster
from ....sbp import B, layout
from ....sbp.joint.op_cost import bytes_of, dtype_of, seconds
from ....sbp.joint.source_options import update_seconds
from ....sbp.kernels.kernels import Kernels, is_view, kernels_of
from ....sbp.logical import Logical, LogicalOp
from .stage_work import LayerCost

__all__ = ["stage_costs"]


def stage_costs(
    logical: Logical,
    ops: Sequence[LogicalOp],
    layers: Sequence[int],
    many: int,
    placements: Sequence[Placement],
    micro_batches: int,
    states: int,
) -> list[list[LayerCost]]:
    """By chunk and layer, of which there are so many; `layers` has that of each op. An optimizer keeps so many `states`
    of each parameter."""
    work = _CapturedWork(logical, ops, layers, 1 / micro_batches)
    found = []
    for place, behind in zip(placements, (*placements[1:], placements[-1]), strict=True):
        device, share = default_cluster(place).device_of(place), placements[0].size / place.size
        hops = work.hops(place, behind)
        parts = [work.computed(layer, device, place.size, placements[0].size) for layer in range(many)]
        updates = [work.updated(layer, device, states) * share for layer in range(many)]
        found.append([LayerCost(*parts[n], hops[n], updates[n]) for n in range(many)])
    return found


class _Op(NamedTuple):
    """The work of an op for a micro-batch, as a part of its FLOPs and bytes of its tensors, and whether its backward
    goes to weights, and further back."""

    kernels: Kernels
    part: float
    held: Sequence[float]
    dtype: torch.dtype
    again: bool
    weights: bool
    further: bool


class _CapturedWork:
    def __init__(self, logical: Logical, ops: Sequence[LogicalOp], layers: Sequence[int], share: float) -> None:
        self.logical, self.share = logical, share
        self.ops: dict[int, list[_Op]] = defaultdict(list)
        self.parameters: dict[int, list[Tensor]] = defaultdict(list)
        self.handed: dict[int, list[Tensor]] = defaultdict(list)  # by the layer behind which it is handed on
        self.read: set[int] = set()  # parameters that some layer has, for several may read one
        self.known: dict[tuple[int, int, int], tuple[float, float, float]] = {}
        kinds = [source.kind for source in logical.sources]
        self.weights = {n for n, kind in enumerate(kinds) if kind != "input"}  # and what is made of these alone
        given = {n for n, kind in enumerate(kinds) if kind != "parameter"}
        makers: dict[int, int] = {}  # value -> its layer; not of what is made of arguments and buffers alone
        sent: dict[int, int] = {}  # value -> the layer that it has come to
        for op, at in zip(ops, layers, strict=True):
            self.take(op, at)
            if given.issuperset(op.inputs):
                given.update(op.numbers)
            else:
                makers.update(dict.fromkeys(op.numbers, at))
            for n in op.inputs:
                for behind in range(sent.get(n, makers.get(n, at)), at):
                    self.handed[behind].append(logical.fakes[n])
                sent[n] = max(at, sent.get(n, at))

    def take(self, op: LogicalOp, at: int) -> None:
        logical = self.logical
        call = logical.call(op)
        trains = bool(logical.losses) and not logical.wants_grad.isdisjoint(op.numbers)
        flows = [trains and n in logical.wants_grad for n in op.inputs]
        wants = [n in self.weights for n, grad in zip(op.inputs, flows, strict=True) if grad]
        fixed = [n in self.weights for n in op.inputs]
        made = bool(fixed) and all(fixed)
        if made:
            self.weights.update(op.numbers)
        if not is_view(call):
            part = 1.0 if made else self.share
            parts = (*(1.0 if of else part for of in fixed), *(part for _ in call.outputs))
            held = [size * of for size, of in zip(bytes_of(call), parts, strict=True)]
            again, ways = bool(wants and op.origin.recompute), (any(wants), not all(wants))
            self.ops[at].append(_Op(kernels_of(call, flows), part, held, dtype_of(call), again, *ways))
        trained = {n for n in op.inputs if n < len(logical.sources) and logical.sources[n].requires_grad}
        self.parameters[at] += [logical.fakes[n] for n in sorted(trained - self.read)]
        self.read |= trained

    def computed(self, layer: int, device: Device, ranks: int, times: int) -> tuple[float, float, float]:
        """So many times the seconds of forward, backward and gradients of weights, where so many ranks share the work.
        The launches are not shared."""
        key = layer, id(device), ranks
        if key not in self.known:
            forward = backward = weight = 0.0
            for op in self.ops[layer]:
                held = [size / ranks for size in op.held]
                one, back = seconds(op.kernels, held, ranks / op.part, op.dtype, device)
                one, back = times * one, times * (back + one * op.again)
                half = back / 2 if op.weights and op.further else back
                forward += one
                weight += half * op.weights
                backward += half * op.further
            self.known[key] = forward, backward, weight
        return self.known[key]

    def updated(self, layer: int, device: Device, states: int) -> float:
        """Seconds of the optimizer's step."""
        trained = self.parameters[layer] if self.logical.losses else []
        return sum(update_seconds(x.nbytes, states, None, device) for x in trained)

    def hops(self, here: Placement, there: Placement) -> defaultdict[int, float]:
        """Seconds in which what a layer makes goes on to the next stage, one way."""
        found: defaultdict[int, float] = defaultdict(float)
        if here is there:
            return found
        latency, _ = default_cluster(here).between(here, there)
        prices: dict[tuple[tuple[int, ...], torch.dtype], float] = {}
        for layer, values in self.handed.items():
            for x in values:
                key = tuple(x.shape), x.dtype
                if key not in prices:
                    whole = between(layout(here, B, *key), layout(there, B, *key)).price.time
                    prices[key] = latency + (whole - latency) * self.share
                found[layer] += prices[key]
        return found
