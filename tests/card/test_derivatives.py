"""Derivatives of torch.func inside of a step: torch's own zeros are right on a card where those of the host are not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian, jacfwd, vmap

import sbpflow as flow

# Forward-mode differentiation loads torch's own decompositions, by torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")


class Of(nn.Module):
    def __init__(self, derivative: Any) -> None:
        super().__init__()
        self.derivative = derivative
        self.w = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64, device="cuda").view(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Any = vmap(self.derivative(lambda row: (torch.tanh(row @ self.w).softmax(-1) * row).sum()))(x)
        return found.sin().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("derivative", [hessian, jacfwd])
def test_a_step_with_a_derivative_forward_is_that_of_one_card(derivative: Any) -> None:
    one, other = Of(derivative), Of(derivative)
    sgd = torch.optim.SGD(one.parameters(), 0.1)
    where = flow.placement("cuda", range(2))
    flow.nn.shard(other, {"w": flow.B})
    made = torch.optim.SGD(other.parameters(), 0.1)
    step: Any = flow.compile(other, lambda model, x: model(x), made, placement=where, inputs={"x": flow.S(0)})
    x = torch.linspace(-2, 2, 32, dtype=torch.float64, device="cuda").sin().view(8, 4)
    for at in range(3):
        loss = one(x + at)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        torch.testing.assert_close(step(x + at).full_tensor(), loss.detach(), rtol=1e-12, atol=1e-12)
    held: Any = other.w
    torch.testing.assert_close(held.full_tensor().detach(), one.w.detach(), rtol=1e-12, atol=1e-12)
