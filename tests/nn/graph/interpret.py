"""Runs a logical graph op by op on plain tensors with autograd: the oracle for what was captured."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sbpflow.nn.graph.capture.arguments import tensors_by_path
from sbpflow.sbp.call import fill, tensors_in
from sbpflow.sbp.logical import Logical


class Ran(NamedTuple):
    """What a step gave: its result, gradients of parameters by name, and what buffers would hold."""

    result: Any
    grads: dict[str, Tensor]
    writes: dict[str, Tensor]


def named(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers by their names under every prefix."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in modules.items()
        for values in (module.named_parameters, module.named_buffers)
        for name, value in values(remove_duplicate=False)
    }


def interpret(
    logical: Logical,
    constants: Mapping[str, Callable[[], Tensor]],
    modules: Mapping[str, nn.Module],
    *args: Any,
    **kwargs: Any,
) -> Ran:
    """A step on real tensors: every op in order, then a backward from all losses together."""
    held = {**named(modules), **tensors_by_path(args, kwargs)}
    values: dict[int, Tensor] = {}
    leaves: dict[str, Tensor] = {}
    for number, source in enumerate(logical.sources):
        value = constants[source.name]() if source.kind == "constant" else held[source.name]
        value = value.detach().clone().to(source.fake.dtype)  # of parameters, the type that they are to rest in
        if source.requires_grad:
            leaves[source.name] = value.requires_grad_()
        values[number] = value
    for op in logical.ops:
        with torch.set_grad_enabled(op.grad):
            out = op.op(*fill(op.args, values), **fill(dict(op.kwargs), values))
        made = tensors_in(out)
        assert [(y.shape, y.dtype) for y in made] == [(y.shape, y.dtype) for y in op.outputs], op
        values.update(zip(op.numbers, made, strict=True))
    if logical.losses:
        ends = [values[loss.number] for loss in logical.losses]
        starts = [None if loss.gradient is None else values[loss.gradient] for loss in logical.losses]
        torch.autograd.backward(ends, starts)
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    writes = {name: values[number] for name, number in logical.writes.items()}
    return Ran(logical.rebuild(fill(logical.result, values)), grads, writes)
