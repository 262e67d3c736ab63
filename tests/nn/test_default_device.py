"""A program may have set torch's default device, which is a mode of functions: all goes as without it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S

LINE = flow.placement("cpu", range(2))


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


class Doubled(torch.autograd.Function):
    """Nothing, but for the gradient, which is doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def test_a_function_with_its_own_backward_has_its_gradient() -> None:
    """Its path was lost, and with a second path to the weight the gradient was wrong without a word."""
    w = flow.ones(3, placement=LINE, sbp=B).requires_grad_()
    (w + Doubled.apply(w)).sum().backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None
    assert w.grad.full_tensor().tolist() == [3, 3, 3]


def test_an_op_that_is_made_of_others_is_taken_apart() -> None:
    """The mode was handed the op where it was asked for its parts, which went on for ever."""
    cell, x, h = nn.GRUCell(4, 6), torch.randn(8, 4), torch.randn(8, 6)
    want = cell(x, h).std()
    step = flow.compile(cell, lambda cell, x, h: cell(x, h).std(), placement=LINE)
    torch.testing.assert_close(step(x, h).full_tensor(), want)
    y = flow.tensor(x, placement=LINE, sbp=S(0))
    z = F.gelu(y, approximate="tanh")
    assert isinstance(z, flow.GlobalTensor)
    torch.testing.assert_close(z.full_tensor(), F.gelu(x, approximate="tanh"))
