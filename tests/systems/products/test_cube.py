"""3-D products: the result of one device, an eighth of the weight on each of 8 ranks, and three moves of the paper."""

import pytest

import sbpflow as flow
from sbpflow import S
from tests.nn.composites.ring import F64

from .blocks import count, linear, shares, total, trained

OVER = ("i", "j", "l")
RESTS = {"j": S(0), "l": S(1), "i": S(1)}
GRID = "cpu:[0-7] as (j=2, l=2, i=2)"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("grid", ["(j=2, l=2, i=2)", "(i=2, j=2, l=2)", "(i=3, j=1, l=2)"])
@pytest.mark.parametrize("shape", [(16, 8), (4, 4, 8), (12, 9, 16)])
def test_it_computes_what_one_device_does(grid: str, shape: tuple[int, ...]) -> None:
    size, shape = (6, tuple(12 for _ in shape)) if "3" in grid else (8, shape)  # that all ranks divide
    lies = {"i": S(0), "j": S(1 if len(shape) > 2 else 0), "l": S(len(shape) - 1)}
    trained(linear(shape[-1], 18, True), f"cpu:[0-{size - 1}] as {grid}", "cube", OVER, RESTS, lies, *shape)


def test_two_gathers_and_a_scatter_a_product() -> None:
    """Forward p - 1 times A, B and C: each rank gathers its block of A and of B from p ranks, and adds up a block of
    C with p. The backward gathers the gradient of C, A and B once more, and scatters those of A and B."""
    p, (b, s, inner), out = 2, (4, 4, 8), 12
    a, w, c = b * s * inner * 8, inner * out * 8, b * s * out * 8
    lies = {"i": S(0), "j": S(1), "l": S(2)}
    model = linear(inner, out)
    moves = trained(model, GRID, "cube", OVER, RESTS, lies, b, s, inner)
    assert total(moves, "all_gather") == (p - 1) * (2 * a + 2 * w + c)
    assert total(moves, "reduce_scatter") == (p - 1) * (c + a + w)
    assert count(moves)["all_gather"] == 5
    assert count(moves)["reduce_scatter"] == 3
    assert shares(model) == {inner * out // p**3}


def test_the_next_layer_changes_the_roles_of_two_axes_and_moves_nothing_between() -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, dtype=F64), nn.Tanh(), nn.Linear(16, 8, dtype=F64))
    flow.nn.inside(model[0], use="cube", over=("i", "j", "l"))
    flow.nn.inside(model[2], use="cube", over=("i", "l", "j"))
    flow.nn.shard(model, {"0.weight": {"j": S(0), "l": S(1), "i": S(1)}, "2.weight": {"l": S(0), "j": S(1), "i": S(1)}})
    where = flow.placement(GRID)
    x = flow.tensor(torch.randn(4, 4, 8, dtype=F64), placement=where, sbp={"i": S(0), "j": S(1), "l": S(2)})
    step = flow.compile(model, placement=where)
    with torch.no_grad(), flow.record() as moves:
        y = step(x)
    assert [move.boxing.route for move in moves if move.boxing.total] == [*["all_gather"] * 2, "reduce_scatter"] * 2
    assert y.layout == x.layout


@pytest.mark.parametrize("shape", [(5, 8), (1, 3), (4, 3, 8), (3, 1, 5)], ids=str)
def test_sizes_that_do_not_divide_are_fine(shape: tuple[int, ...]) -> None:
    lies = {"i": S(0), "j": S(1 if len(shape) > 2 else 0), "l": S(len(shape) - 1)}
    trained(linear(shape[-1], 3, True), GRID, "cube", OVER, RESTS, lies, *shape)
