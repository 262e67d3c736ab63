"""Views of dims that are cut where the view's dims do not end: rows come from neighbours, and no dim is gathered."""

from itertools import product
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import B, S

F64 = torch.float64
GRID = flow.placement("cpu:[0-3] as (data=2, space=2)")
VIEWS = [
    ((7, 4, 3), (28, 3)), ((28, 3), (7, 4, 3)), ((2, 28), (2, 7, 4)), ((1, 7, 4), (28,)), ((6, 4), (8, 3)),
    ((5, 3, 2), (30,)), ((30,), (5, 3, 2)), ((3, 2, 5), (2, 3, 5)), ((2, 7, 3), (42,)), ((42,), (2, 7, 3)),
    ((2, 7, 3), (2, 21)), ((4, 1, 9), (12, 3)),
]  # fmt: skip


def viewed(x: torch.Tensor, target: tuple[int, ...], where: flow.Placement, sbp: Any) -> tuple[Any, Any]:
    """The view, which is held to one device with its gradient, and the moves of the forward."""
    split: Any = flow.tensor(x, placement=where, sbp=sbp).requires_grad_()
    with flow.record() as moves:
        found: Any = split.reshape(target)
    assert torch.equal(found.full_tensor(), x.reshape(target))
    weights = torch.randn(target, dtype=F64)
    (found * flow.tensor(weights, placement=where, sbp=B)).sum().backward()
    assert torch.equal(split.grad.full_tensor(), weights.reshape(x.shape))
    return found, [move for move in moves if move.bytes]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("shape", "target"), VIEWS, ids=str)
def test_a_view_is_that_of_one_device(shape: tuple[int, ...], target: tuple[int, ...], ranks: int) -> None:
    for dim in range(len(shape)):
        viewed(torch.randn(shape, dtype=F64), target, flow.placement("cpu", range(ranks)), S(dim))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shape", "target"), VIEWS, ids=str)
def test_a_view_of_a_tensor_in_four_is_that_of_one_device(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    for dims in product(range(len(shape)), repeat=2):
        viewed(torch.randn(shape, dtype=F64), target, GRID, tuple(map(S, dims)))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("shape", "target", "row"), [((7, 4, 3), (28, 3), 12), ((28, 3), (7, 4, 3), 3), ((18, 4), (9, 8), 4)], ids=str
)
def test_no_more_is_sent_than_the_rows_that_a_rank_lacks(
    shape: tuple[int, ...], target: tuple[int, ...], row: int, ranks: int
) -> None:
    found, moves = viewed(torch.randn(shape, dtype=F64), target, flow.placement("cpu", range(ranks)), S(0))
    assert found.sbp == (S(0),)
    assert {move.route for move in moves} <= {"halo"}
    assert all(move.bytes <= 3 * row * 8 for move in moves)


def test_samples_that_are_split_besides_stay_so() -> None:
    """Seven rows of three, in each of two pictures."""
    found, moves = viewed(torch.randn(2, 7, 3, dtype=F64), (42,), GRID, (S(0), S(1)))
    assert found.sbp == (S(0), S(0))
    assert [(move.route, move.bytes) for move in moves] == [("halo", 3 * 8)]


def test_a_graph_takes_rows_of_neighbours_for_a_view() -> None:
    line = flow.placement("cpu:[0-1]")
    x = torch.randn(7, 64, 32, dtype=F64)

    def doubled(_: Any, x: Any) -> Any:
        return (x.to_global(sbp=S(0)).reshape(7 * 64, 32) * 2).to_global(sbp=S(0))

    step = flow.compile(torch.nn.Identity(), doubled, placement=line)
    with torch.no_grad(), flow.record() as moves:
        found = step(flow.tensor(x, placement=line, sbp=S(0)))
    torch.testing.assert_close(found.full_tensor(), x.reshape(-1, 32) * 2)
    assert [(move.route, move.bytes) for move in moves if move.bytes] == [("halo", 64 * 32 * 8)]
