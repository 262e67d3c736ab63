"""Grouped products are split by columns and by what is summed over, in pieces that their kernels take."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P, S

PAIR = flow.placement("cpu:[0-1]")
ENDS = torch.tensor([8, 8, 20, 32], dtype=torch.int32)  # one group has no rows


def product(x: Tensor, w: Tensor) -> Tensor:
    made: Tensor = torch.nn.functional.grouped_mm(x, w, offs=ENDS if type(x) is Tensor else whole(ENDS))
    return made


def whole(x: Tensor) -> Tensor:
    return flow.tensor(x, placement=PAIR, sbp=B)


@pytest.mark.parametrize(
    ("columns", "lies", "gives"),
    [
        (32, (B, S(2)), S(1)),
        (32, (S(1), S(1)), P),
        (32, (S(0), B), B),
        (8, (B, S(2)), B),  # four columns of two bytes are no unit
    ],
    ids=str,
)
def test_pieces_give_what_one_device_gives(columns: int, lies: tuple[Any, ...], gives: object) -> None:
    torch.manual_seed(0)
    plain = [torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(4, 64, columns).bfloat16().requires_grad_()]
    parts = [
        flow.tensor(value.detach(), placement=PAIR, sbp=sbp, requires_grad=True)
        for value, sbp in zip(plain, lies, strict=True)
    ]
    made, want = product(*parts), product(*plain)
    assert isinstance(made, flow.GlobalTensor)
    assert made.sbp == (gives,)
    for result in (made, want):
        result.float().square().sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(made.full_tensor(), want, rtol=2**-6, atol=0.25)
    for part, value in zip(parts, plain, strict=True):
        assert isinstance(part.grad, flow.GlobalTensor)
        torch.testing.assert_close(part.grad.full_tensor(), value.grad, rtol=2**-5, atol=2.0)
