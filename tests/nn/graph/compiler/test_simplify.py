"""Torch's own functions stand for ATen ops only with arguments of the kinds that they were tried with."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.graph.compiler import simplify

AT = torch.tensor([2, 0, 2])


class Picked(nn.Module):
    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.pick = nn.Parameter(torch.randn(4, 4, 4)), pick
        self.register_buffer("at", AT)
        self.at: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return (self.pick(self.weight, self.at) * x).sum()


def test_an_index_behind_whole_dims_is_not_given_to_a_function_that_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.index_put takes [at] and refuses [None, at]: whichever came first in a process decided for both."""
    monkeypatch.setattr(simplify, "_bindings", {})
    picks: list[Callable[[Tensor, Tensor], Tensor]] = [lambda w, at: w[at], lambda w, at: w[:, :, at]]
    for pick in picks:
        model, one = Picked(pick), Picked(pick)
        one(torch.ones(())).backward()
        step = flow.compile(model, lambda m, x: m(x), placement=flow.placement("cpu", range(2)), backend="code")
        step(torch.ones(()))
        assert isinstance(model.weight.grad, flow.GlobalTensor)
        assert one.weight.grad is not None
        assert torch.equal(model.weight.grad.full_tensor(), one.weight.grad)


def test_a_function_of_torch_that_takes_what_its_binding_does_not_is_called_as_the_op() -> None:
    """torch.block_diag(*blocks) stands before a binding that takes a list, and that was given its list (BOFT)."""
    pick: Callable[[Tensor, Tensor], Tensor] = lambda w, at: torch.block_diag(*w.unbind(0))  # type: ignore[no-untyped-call]  # noqa: E731
    model, one = Picked(pick), Picked(pick)
    one(torch.ones(())).backward()
    flow.compile(model, lambda m, x: m(x), placement=flow.placement("cpu", range(2)), backend="code")(torch.ones(()))
    assert isinstance(model.weight.grad, flow.GlobalTensor)
    assert one.weight.grad is not None
    assert torch.equal(model.weight.grad.full_tensor(), one.weight.grad)
