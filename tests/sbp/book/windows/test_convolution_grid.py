"""Convolutions of every kind whose dims of space are split: each rank's part is that of one device, gradients too."""

from itertools import product
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import B, S
from sbpflow.sbp.check import check_rule

F64 = torch.float64
SPACE = [(1, 0, 1), (2, 1, 1), (3, 1, 1), (3, 1, 2), (5, 2, 1), (5, 0, 2)]  # kernel, padding, dilation


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("space", "stride", "groups", "size"), [*product(SPACE, [1, 2, 3], [1, 2], [9, 12, 17])], ids=str
)
def test_a_convolution_of_a_line(space: tuple[int, int, int], stride: int, groups: int, size: int) -> None:
    kernel, padding, dilation = space
    x, weight = torch.randn(2, 4, size, dtype=F64), torch.randn(6, 4 // groups, kernel, dtype=F64)
    bias = torch.randn(6, dtype=F64)
    assert not check_rule("conv1d", x, weight, bias, [stride], [padding], [dilation], groups).wrong
    if stride == 1:
        assert not check_rule("conv1d.padding", x, weight, bias, [1], "same", [dilation], groups).wrong


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("space", "stride", "groups", "size"), [*product(SPACE, [1, 2, 3], [1, 2], [5, 8, 11])], ids=str
)
def test_a_transposed_convolution_of_a_line(space: tuple[int, int, int], stride: int, groups: int, size: int) -> None:
    kernel, padding, dilation = space
    x, weight = torch.randn(2, 4, size, dtype=F64), torch.randn(4, 6 // groups, kernel, dtype=F64)
    more = 1 if stride > 1 or dilation > 1 else 0
    bias = torch.randn(6, dtype=F64)
    assert not check_rule("conv_transpose1d", x, weight, bias, [stride], [padding], [more], groups, [dilation]).wrong


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(1, 2, 1), (1, 3, 0), (2, 5, 3)])
def test_ranks_whose_places_nothing_adds_to_have_the_bias_alone(kernel: int, stride: int, padding: int) -> None:
    """A rank sees a place that adds beside all of its own, from which more is cut than there is."""
    where = flow.placement("cpu:[0-7]")
    x, weight, bias = (torch.randn(shape, dtype=F64) for shape in ((1, 2, 7), (2, 3, kernel), (3,)))
    laid: list[Any] = [flow.tensor(one, placement=where, sbp=lies) for one, lies in ((x, S(2)), (weight, B), (bias, B))]
    conv: Any = torch.nn.functional.conv_transpose1d
    y, want = conv(*laid, stride, padding), conv(x, weight, bias, stride, padding)
    for mine, other in zip(y.to_local(), flow.tensor(want, placement=where, sbp=y.sbp).to_local(), strict=True):
        torch.testing.assert_close(mine, other)


def trained(where: Any, sbp: Any, shape: tuple[int, ...], **how: Any) -> tuple[Any, ...]:
    """The layout of a convolution, and the routes and bytes of its moves; held to one device, with gradients."""
    channels = shape[1]
    given = torch.randn(shape, dtype=F64), torch.randn(4, channels, 3, 3, dtype=F64), torch.randn(4, dtype=F64)
    conv: Any = torch.nn.functional.conv2d
    plain = [x.clone().requires_grad_() for x in given]
    laid: list[Any] = [
        flow.tensor(x, placement=where, sbp=lies).requires_grad_() for x, lies in zip(given, (sbp, B, B), strict=True)
    ]
    with flow.record() as moves:
        found: Any = conv(*laid, **how)
    want = conv(*plain, **how)
    torch.testing.assert_close(found.full_tensor(), want)
    by = torch.randn_like(want)
    (found * by).sum().backward()
    (want * by).sum().backward()
    for mine, other in zip(laid, plain, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
    return found.sbp, [(m.route, m.bytes) for m in moves]


@pytest.mark.parametrize(("ranks", "rows"), [(2, 8), (4, 16), (4, 13), (8, 9), (4, 4)])
def test_rows_that_are_split_stay_so(ranks: int, rows: int) -> None:
    sbp, moves = trained(flow.placement("cpu", range(ranks)), S(2), (2, 3, rows, 6), padding=1)
    assert sbp == (S(2),)
    sides = min(2, ranks - 1)
    assert moves == [("halo", sides * 2 * 3 * 6 * 8)]


@pytest.mark.parametrize(("ranks", "rows"), [(4, 3), (4, 1), (8, 5)], ids=["three_of_four", "one_of_four", "five"])
def test_fewer_rows_than_ranks_are_gathered(ranks: int, rows: int) -> None:
    sbp, moves = trained(flow.placement("cpu", range(ranks)), S(2), (2, 3, rows, 6), padding=1)
    assert sbp == (B,)
    assert [route for route, _ in moves] == ["all_gather"]


def test_a_plane_in_four_sends_corners() -> None:
    where = flow.placement("cpu:[0-3] as (height=2, width=2)")
    sbp, moves = trained(where, (S(2), S(3)), (1, 3, 8, 8), padding=1)
    assert sbp == (S(2), S(3))
    assert moves == [("halo", (4 + 4 + 1) * 3 * 8)]


def test_two_axes_may_cut_the_same_rows() -> None:
    where = flow.placement("cpu:[0-3] as (outer=2, inner=2)")
    sbp, moves = trained(where, (S(2), S(2)), (1, 3, 12, 5), padding=1)
    assert sbp == (S(2), S(2))
    assert moves == [("halo", 2 * 3 * 5 * 8)]


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_other_paddings_are_gathered_and_right(mode: Any) -> None:
    where, x = flow.placement("cpu:[0-3]"), torch.randn(1, 3, 12, 6)
    layer: Any = torch.nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode)
    want = layer(x)
    flow.nn.to_global(layer, where)
    found = layer(flow.tensor(x, placement=where, sbp=S(2)))
    torch.testing.assert_close(found.full_tensor(), want)


def test_explain_has_the_price_of_a_halo() -> None:
    where = flow.placement("cpu:[0-3]")
    x = flow.ones(1, 3, 16, 8, placement=where, sbp=S(2))
    weight = flow.ones(4, 3, 3, 3, placement=where, sbp=B)
    said = str(flow.explain(torch.nn.functional.conv2d, x, weight, padding=1))
    line = next(
        line
        for line in said.splitlines()
        if line.strip().startswith("* (S(2),) [dim 2 seen from o-1 to o+1], B -> S(2)")
    )
    assert f"{2 * 3 * 8 * 4} bytes" in line
