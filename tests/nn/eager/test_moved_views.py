"""Views that had to be moved behave as views: what is written to one side shows on the other."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.sbp import Sbp
from tests.ranks import Ranks

P4 = flow.placement("cpu", range(4))
LIES: list[Sbp] = [S(0), S(1), B, P]


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


@pytest.mark.sampled(9)
@pytest.mark.parametrize("lie", LIES, ids=str)
@pytest.mark.parametrize("write", [base_then_view, view_then_base, one_row, view_of_view, several, differentiated])
def test_writing_shows_on_both_sides(write: Callable[[Tensor], list[Tensor]], lie: Sbp) -> None:
    wanted = write(torch.arange(12.0).reshape(4, 3))
    found = write(flow.tensor(torch.arange(12.0).reshape(4, 3), placement=P4, sbp=lie))
    for a, b in zip(wanted, found, strict=True):
        assert isinstance(b, flow.GlobalTensor)
        torch.testing.assert_close(b.full_tensor(), a)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x[0],
    "rows": lambda x: x[::2],
    "others": lambda x: x[1:],
    "deep": lambda x: x.unsqueeze(0)[0, 0],
    "first": lambda x: torch.split(x, 1)[0],
}


def off(name: str) -> list[tuple[int, str]]:
    """Where writing to a part, and then to the whole, does not show on the other side."""
    found = []
    for rows in (1, 2, 5):
        for lie in (S(0), S(1)):
            one = torch.arange(3.0 * rows).reshape(rows, 3)
            x = flow.tensor(one, placement=P4, sbp=lie)
            part, wanted = PARTS[name](x), PARTS[name](one)
            part.mul_(2)
            wanted.mul_(2)
            same = torch.equal(x.full_tensor(), one)
            x.add_(1)
            one.add_(1)
            if not same or not torch.equal(part.full_tensor(), wanted):  # type: ignore[attr-defined]
                found.append((rows, str(lie)))
    return found


@pytest.mark.parametrize("name", PARTS)
def test_ranks_that_have_all_of_it_or_nothing_agree_on_what_is_a_view(ranks4: Ranks, name: str) -> None:
    assert ranks4(off, name, timeout=20.0) == [[]] * 4


@pytest.mark.parametrize("lie", [S(0), S(1), B], ids=str)
def test_what_is_empty_has_views_and_memory_of_its_own_too(lie: Sbp) -> None:
    w = flow.tensor(torch.ones(0, 3), placement=P4, sbp=lie, requires_grad=True)
    x = flow.tensor(torch.ones(0, 3), placement=P4, sbp=lie)
    x[::2] += w
    assert x.requires_grad
    torch.autograd.backward(x.sum())
    assert w.grad is not None


def test_what_is_empty_is_moved_to_memory_of_its_own() -> None:
    w = flow.tensor(torch.ones(0, 3), placement=flow.placement("cpu", [0]), sbp=B, requires_grad=True)
    moved = w.to_global(sbp=S(1))
    moved[::2].add_(1)  # of w itself torch refuses this
    assert moved.shape == w.shape


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


GRID = flow.placement("cpu", [[0, 1], [2, 3]])
UNSAFE: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "unsafe_chunk": lambda t: torch.unsafe_chunk(t, 2, 1),
    "unsafe_split": lambda t: torch.unsafe_split(t, 3, 1),
    "unsafe_split_with_sizes": lambda t: torch.unsafe_split_with_sizes(t, [3, 3], 1),
}


@pytest.mark.parametrize("way", UNSAFE)
def test_in_place_ops_on_what_unsafe_chunk_gave_do_not_spoil_each_other(way: str) -> None:
    def gates(t: Tensor) -> Tensor:
        a, b = UNSAFE[way](t * 1)
        (a.sigmoid_() * b.tanh_()).sum().backward()  # type: ignore[no-untyped-call]
        assert t.grad is not None
        return t.grad

    value = torch.arange(18.0).reshape(3, 6) / 8
    wanted = gates(value.clone().requires_grad_())
    lies: list[tuple[flow.Placement, tuple[Sbp, ...]]] = [(P4, (a,)) for a in LIES]
    lies += [(GRID, (a, b)) for a in LIES for b in LIES]
    for where, sbp in lies:
        found = gates(flow.tensor(value, placement=where, sbp=sbp, requires_grad=True))
        assert isinstance(found, flow.GlobalTensor)
        assert torch.allclose(found.full_tensor(), wanted), sbp


CELLS: list[tuple[flow.Placement, tuple[Sbp, ...], tuple[Sbp, ...]]] = [  # how weights and biases lie
    (P4, (B,), (B,)),
    (P4, (S(0),), (S(0),)),
    (P4, (S(1),), (P,)),
    (GRID, (S(0), S(1)), (S(0), B)),
    (GRID, (B, S(0)), (P, S(0))),
]


def cell_step(cell: nn.RNNCellBase, inputs: list[Tensor]) -> list[Tensor]:
    x, *state = inputs
    out = cell(x, tuple(state) if len(state) > 1 else state[0])
    outs = out if isinstance(out, tuple) else (out,)
    torch.stack([(y * y).sum() * (i + 1) for i, y in enumerate(outs)]).sum().backward()  # type: ignore[no-untyped-call]
    grads = [w.grad for w in (*inputs, *cell.parameters())]
    return [w.full_tensor() if isinstance(w, flow.GlobalTensor) else w for w in (*outs, *grads) if w is not None]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("at", range(len(CELLS)), ids=lambda at: str(CELLS[at][1:]))
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_of_recurrent_nets_are_right_in_every_layout(kind: type[nn.RNNCellBase], at: int) -> None:
    def made() -> tuple[nn.RNNCellBase, list[Tensor]]:
        torch.manual_seed(0)
        states = 2 if kind is nn.LSTMCell else 1
        inputs = [torch.randn(3, n, dtype=torch.float64) for n in (6, *[5] * states)]
        return kind(6, 5, dtype=torch.float64), inputs  # type: ignore[call-arg]

    cell, inputs = made()
    wanted = cell_step(cell, [x.requires_grad_() for x in inputs])
    where, weights, biases = CELLS[at]
    every = list(itertools.product(itertools.product(LIES, repeat=where.ndim), repeat=2))
    for lies in every[:: 1 if where is P4 else 15]:  # on two axes there are 256 of x and h: 18 of them, a sample
        cell, inputs = made()
        flow.nn.to_global(cell, where, lambda _, value: weights if value.ndim == 2 else biases)
        x, *state = inputs
        held = [(x, lies[0]), *[(h, lies[1]) for h in state]]
        found = cell_step(cell, [flow.tensor(v, placement=where, sbp=sbp, requires_grad=True) for v, sbp in held])
        assert all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True)), lies


class Middle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[1:3]


@pytest.mark.parametrize("lie", [S(0), B, P], ids=str)
def test_a_view_by_a_function_of_ones_own_is_made_anew(lie: Sbp) -> None:
    x = torch.arange(8.0)
    g = flow.tensor(x, placement=P4, sbp=lie)
    y, h = x[1:3], Middle.apply(g)  # type: ignore[no-untyped-call]
    for one in (x, g):
        one.add_(1)
    assert torch.equal(h.full_tensor(), y)
    for one in (y, h):
        one.mul_(10)
    assert torch.equal(g.full_tensor(), x)


def test_a_tensor_in_memory_that_a_base_has_left_changes_no_view_of_it() -> None:
    pair = flow.placement("cpu", range(2))
    x = flow.tensor(torch.arange(8.0).reshape(4, 2), placement=pair, sbp=S(0))
    y, there = x[1:3], x._shards[0].untyped_storage()._cdata
    assert isinstance(y, flow.GlobalTensor)
    assert y._torn is not None
    before, made = y.full_tensor().clone(), list[Tensor]()
    x.data = flow.zeros(4, 2, placement=pair, sbp=S(0))
    while len(made) < 50 and there not in [each.untyped_storage()._cdata for each in made]:
        made.append(torch.ones(2, 2))
    z = flow.from_local([made[-1], torch.ones(2, 2)], placement=pair, sbp=S(0))
    z.mul_(2)
    assert torch.equal(y.full_tensor(), before)
