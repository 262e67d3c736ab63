"""Rows that every micro-batch sorts for itself: right where they go back to their places, and refused elsewhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbpflow.placement.errors import SbpError

from .piecewise import Step, layers, run, same_piecewise

Rows = Callable[[Any, Tensor], Tensor]


def chosen(z: Tensor, many: int = 2) -> tuple[Tensor, Tensor]:
    """For each row the numbers of some columns, in a line, and how much of each."""
    shares, numbers = z.topk(many, dim=-1)
    return numbers.reshape(-1), shares.softmax(-1).reshape(-1)


def placed(m: Any, z: Tensor) -> Tensor:
    keys, shares = chosen(z)
    _, order = keys.sort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    rows: Tensor = (z[order // 2] + m.two[keys[order] % 2]).tanh() * shares[order][:, None]
    return rows[place].view(len(z), 2, -1).sum(1)


def added(m: Any, z: Tensor) -> Tensor:
    keys, shares = chosen(z)
    ids, order = keys.sort(stable=True)
    rows = z.index_select(0, order // 2) * shares[order].unsqueeze(-1) + m.two[ids.clamp(0, 1)]
    return z + torch.zeros_like(z).index_add(0, order // 2, rows.square())


def scattered(m: Any, z: Tensor) -> Tensor:
    order = z.argmax(-1).argsort(descending=True)
    at = order.unsqueeze(-1).expand(-1, z.shape[1])
    return torch.zeros_like(z).scatter_add(0, at, z.gather(0, at).sigmoid())


def grouped(m: Any, z: Tensor, of: Any = lambda z: chosen(z)[0], most: int = 5, **sort: Any) -> Tensor:
    """Rows times the matrix of their key, in single precision, because the product takes no more."""
    ids, order = of(z).sort(**sort)
    ends = torch.histc(ids.float(), bins=6, min=0, max=most).cumsum(0, dtype=torch.int32)
    weights = F.pad(m.token.float(), (0, 2, 0, 7)) * torch.arange(1, 7)[:, None, None]
    rows = F.pad(z[order // (len(order) // len(z))].float(), (0, 2)).contiguous()
    back: Tensor = F.grouped_mm(rows, weights.contiguous(), offs=ends)[order.argsort()]
    return back.view(len(z), -1, 8).sum(1)[:, :6].double()


RIGHT: dict[str, Rows] = {
    "back by argsort": lambda m, z: z[(order := z[:, 0].argsort())].tanh()[order.argsort()],
    "back by places": placed,
    "added": added,
    "scattered": scattered,
    "copied": lambda m, z: torch.zeros_like(z).index_copy(0, (order := z[:, 1].argsort()), z[order].exp()),
    "put": lambda m, z: z.index_put([(order := z[:, 1].argsort())], z[order].exp()),
    "normed": lambda m, z: F.layer_norm(z[(order := z[:, 0].argsort())], (6,))[order.argsort()],
    "choices": lambda m, z: (
        (z[(o := chosen(z)[0].argsort()) // 2] * (o % 2)[:, None])[o.argsort()].view(8, 2, 6).sum(1)
    ),
}


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_rows_that_go_back_are_those_of_the_batch(name: str, micro_batches: int) -> None:
    micros = same_piecewise(layers(RIGHT[name]), numbers(), micro_batches)
    assert len({id(micro) for micro in micros}) == len({len(micro.logical.sources[0].fake) for micro in micros})


@pytest.mark.parametrize("most", [5, 6])
def test_rows_are_multiplied_by_the_matrix_of_their_key(most: int) -> None:
    same_piecewise(layers(partial(grouped, most=most)), numbers(), 3, tolerance=1e-6)


def test_a_mean_in_any_order_is_that_of_the_batch() -> None:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Any:
        z: Tensor = m(x)
        return z[z[:, 0].argsort()].relu().mean()

    same_piecewise(Step(nn.Linear(4, 3).double(), loss), numbers(), 3)


def two(z: Tensor) -> tuple[Tensor, Tensor]:
    return z, z[:, 0].argsort()


def other(m: Any, z: Tensor) -> Tensor:
    """The product with counts of other keys."""
    z, order = two(z)
    ends = torch.histc(z.argmin(-1).float(), bins=6, min=0, max=5).cumsum(0, dtype=torch.int32)
    rows: Tensor = F.grouped_mm(F.pad(z[order], (0, 2)).float(), torch.ones(6, 8, 8), offs=ends)
    return rows[order.argsort()][:, :6].double()


REFUSED: dict[str, tuple[Rows, str]] = {
    "among others": (lambda m, z: z + z[two(z)[1]], "add.Tensor at"),
    "among numbers of rows": (lambda m, z: z[two(z)[1]] * torch.arange(8)[:, None], "mul.Tensor at"),
    "as they are": (lambda m, z: z[two(z)[1]], "gather at"),
    "their order": (lambda m, z: z * two(z)[1][:, None], "mul.Tensor at"),
    "the first": (lambda m, z: z + z[two(z)[1]][0], "select.int at"),
    "sums so far": (lambda m, z: z[(o := two(z)[1])].cumsum(0)[o.argsort()], "cumsum at"),
    "turned round": (lambda m, z: z[(o := two(z)[1])].flip(0)[o.argsort()], "flip at"),
    "in groups": (lambda m, z: z[(o := two(z)[1])].view(4, 2, 6).tanh().view(8, 6)[o.argsort()], "view at"),
    "of threes": (lambda m, z: z[two(z)[1] // 3], "floor_divide at"),
    "of another order": (lambda m, z: z[(o := two(z)[1])][z[:, 1].argsort().argsort()] + z[o][o.argsort()], "index"),
    "put over each other": (lambda m, z: z.index_put([two(z)[1] // 1], z[two(z)[1]] * 2), "index_put at"),
    "added to what is sorted": (lambda m, z: z[(o := two(z)[1])].index_add(0, o, z[o]), "index_add at"),
    "of other keys": (other, "_grouped_mm at"),
    "the last first": (partial(grouped, descending=True), "_grouped_mm at"),
    "of any keys": (partial(grouped, of=lambda z: z[:, 0].long()), "_grouped_mm at"),
    "of too many keys": (partial(grouped, of=lambda z: z[:, 0].long().clamp(0, 6)), "_grouped_mm at"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_in_an_order_are_refused_elsewhere(name: str) -> None:
    function, says = REFUSED[name]
    with pytest.raises(SbpError, match=f"(?s)({says}).*in the order of \\S*sort\\S* at \\S+:\\d+, and each"):
        run(layers(function), numbers(), 3)


def test_an_order_is_no_result() -> None:
    with pytest.raises(SbpError, match="a result, or a buffer, needs more than one micro-batch"):
        run(Step(nn.Linear(4, 3).double(), lambda m, x, y: (m(x).sum(), m(x)[:, 0].argsort())), numbers(), 2)


def numbers() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
