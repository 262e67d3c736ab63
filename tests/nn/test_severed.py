"""Views that had to be moved behave as views: what is written to one side shows on the other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.sbp import Sbp

P4 = flow.placement("cpu", range(4))
LIES = [S(0), S(1), B, P]


def base_then_view(x: Tensor) -> list[Tensor]:
    y = x[1:3]
    x.add_(1)
    return [x, y]


def view_then_base(x: Tensor) -> list[Tensor]:
    y = x[1:3]
    y.add_(10)
    return [x, y]


def one_row(x: Tensor) -> list[Tensor]:
    x[0] += 1
    x[:, 1] *= 2
    x[2, 1] = 7
    return [x]


def view_of_view(x: Tensor) -> list[Tensor]:
    z = x[1:3].view(-1)  # the row between is held by nobody else
    z.mul_(3)
    x.sub_(1)
    return [x, z]


def several(x: Tensor) -> list[Tensor]:
    first, second = torch.split(x, 2)
    second.zero_()
    row = x[3]
    row.add_(2)
    return [x, first, second, row]


def differentiated(x: Tensor) -> list[Tensor]:
    w = x.clone().requires_grad_()
    y = w * 2
    y[1] *= 3
    y[0].exp_()
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None
    return [y.detach(), w.grad]


@pytest.mark.parametrize("lie", LIES, ids=str)
@pytest.mark.parametrize("write", [base_then_view, view_then_base, one_row, view_of_view, several, differentiated])
def test_writing_shows_on_both_sides(write: Callable[[Tensor], list[Tensor]], lie: Sbp) -> None:
    wanted = write(torch.arange(12.0).reshape(4, 3))
    found = write(flow.tensor(torch.arange(12.0).reshape(4, 3), placement=P4, sbp=lie))
    for a, b in zip(wanted, found, strict=True):
        assert isinstance(b, flow.GlobalTensor)
        torch.testing.assert_close(b.full_tensor(), a)


def test_a_view_that_is_gone_costs_nothing() -> None:
    x = flow.tensor(torch.arange(12.0).reshape(4, 3), placement=P4, sbp=S(0))
    assert isinstance(x, Tensor)
    y = x[1:3]
    del y
    with flow.record() as moves:
        x.add_(1)
    assert not moves


def test_writing_to_what_was_moved_by_hand_changes_nothing_else() -> None:
    x = flow.tensor(torch.arange(4.0), placement=P4, sbp=B)
    y = x.to_global(sbp=S(0))
    y.add_(1)
    x.mul_(2)
    assert x.tolist() == [0, 2, 4, 6]
    assert y.tolist() == [1, 2, 3, 4]
