"""A model's step against its graph, run op by op: results, gradients and buffers must be the same."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sbpflow.nn.graph.capture.arguments import WrittenArguments, tensors_by_path
from sbpflow.nn.graph.capture.trace import Constants, trace
from sbpflow.sbp.logical import Logical
from tests.nn.graph.interpret import interpret


class Of(nn.Module):
    """A module with one parameter `w` of 4 by 4 that runs a function of itself and its arguments."""

    def __init__(self, function: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(4, 4))
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def step(model: nn.Module) -> Callable[..., Any]:
    """A build that calls the model, and backward if it returns a loss."""

    def build(*args: Any, **kwargs: Any) -> Any:
        result = model(*args, **kwargs)
        if isinstance(loss := getattr(result, "loss", result), Tensor) and loss.requires_grad and loss.dim() == 0:
            loss.backward()  # type: ignore[no-untyped-call]
        return result

    return build


def traced(model: nn.Module, *args: Any, reuse: bool = True, **kwargs: Any) -> tuple[Logical, Constants]:
    return trace(step(model), args, kwargs, {"": model}, device=torch.get_default_device().type, reuse=reuse)


def ops_of(logical: Logical) -> list[str]:
    """The names of its ops."""
    return [str(op.op).removeprefix("aten.").removesuffix(".default") for op in logical.ops]


def same(model: nn.Module, *args: Any, atol: float = 1e-6, reuse: bool = True, **kwargs: Any) -> Logical:
    """Trace a step, run what was captured, and compare with the step itself; returns the graph."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    chance = torch.get_rng_state()
    logical, constants = traced(model, *args, reuse=reuse, **kwargs)
    assert torch.equal(chance, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    eager = copy.deepcopy(model)
    torch.manual_seed(1)
    given: Any = copy.deepcopy((args, kwargs))
    wanted = step(eager)(*given[0], **given[1])
    torch.manual_seed(1)
    ran = interpret(logical, constants, {"": model}, *args, **kwargs)
    result = ran.result
    if isinstance(logical.rebuild, WrittenArguments):
        result, written = result
        for path, value in written.items():
            torch.testing.assert_close(value, tensors_by_path(*given)[path], atol=atol, rtol=1e-5)
    assert type(result) is type(wanted)
    found = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    for x, y in zip(found, [x for x in tree_leaves(wanted) if isinstance(x, Tensor)], strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=1e-5)
    grads = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    assert ran.grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(ran.grads[name], grad, atol=10 * atol, rtol=1e-5)
    buffers = dict(eager.named_buffers())
    changed = {name for name, value in model.named_buffers() if not torch.equal(value, buffers[name])}
    assert changed <= ran.writes.keys()
    for name, value in ran.writes.items():
        torch.testing.assert_close(value, buffers[name], atol=atol, rtol=1e-5)
    assert not any(op.op._schema.is_mutable for op in logical.ops)
    return logical
