"""Windows as a dim of their own, and dims that lose or gain places at their ends."""

from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import P, S
from sbpflow.sbp.check import check_rule

torch.manual_seed(1)
F64 = torch.float64
X = torch.randn(9, 4, dtype=F64)
CALLS: list[tuple[Any, ...]] = [
    ("unfold", X, 0, 3, 1), ("unfold", X, 0, 2, 3), ("unfold", X, 0, 9, 1), ("unfold", X, 1, 2, 2),
    ("slice.Tensor", X, 0, 1), ("slice.Tensor", X, 0, 0, -1), ("slice.Tensor", X, 0, 2, 8), ("narrow", X, 0, 3, 5),
    ("slice.Tensor", X > 0, 0, 1), ("constant_pad_nd", X, [0, 0, 2, 1]), ("constant_pad_nd", X, [1, 0, -2, 3], 4.0),
    ("constant_pad_nd", X, [0, 0, -1, -1]), ("constant_pad_nd", X, [0, 0]),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_the_rule_is_right(call: tuple[Any, ...]) -> None:
    assert not check_rule(*call).wrong


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 16])
def test_a_difference_of_neighbours_takes_one_row(rows: int) -> None:
    where, x = flow.placement("cpu:[0-3]"), torch.randn(rows, 5, dtype=F64, requires_grad=True)
    split: Any = flow.tensor(x.detach(), placement=where, sbp=S(0)).requires_grad_()
    with flow.record() as moves:
        found = split[1:] - split[:-1]
    want: Any = x[1:] - x[:-1]
    assert all(m.bytes <= 5 * 8 or rows < 8 for m in moves)
    torch.testing.assert_close(found.full_tensor(), want)
    found.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(split.grad.full_tensor(), x.grad)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("start", [0, 1, 2, 5])
@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 5, 7, 8, 12])
def test_slices_in_steps(size: int, step: int, start: int) -> None:
    for end in (size, size - 1):
        assert not check_rule("slice.Tensor", torch.randn(size, 3, dtype=F64), 0, start, end, step).wrong


@pytest.mark.parametrize(("rows", "sent"), [(16, 0), (14, 1), (15, 1), (6, 1), (5, 2)])
def test_places_that_interleave_are_pieces(rows: int, sent: int) -> None:
    """Each rank has whole pairs of rows, or lacks as much as a row of a neighbour."""
    x: Any = torch.randn(rows, 5, dtype=F64, requires_grad=True)
    split: Any = flow.tensor(x.detach(), placement=flow.placement("cpu:[0-3]"), sbp=S(0)).requires_grad_()
    with flow.record() as moves:
        even, odd = split[0::2], split[1::2]
    assert even.sbp == odd.sbp == (S(0),)
    assert {m.route for m in moves if m.bytes} <= {"halo"}
    assert max((m.bytes for m in moves), default=0) <= sent * 5 * 8
    for found, want in ((even, x[0::2]), (odd, x[1::2])):
        assert torch.equal(found.full_tensor(), want)
        found.pow(3).sum().backward()
        want.pow(3).sum().backward()
    torch.testing.assert_close(split.grad.full_tensor(), x.grad)


def test_a_small_part_is_left_as_addends() -> None:
    x: Any = flow.tensor(X, placement=flow.placement("cpu:[0-2]"), sbp=S(0))
    assert x[1:3].sbp == (P,)


def test_writing_to_a_part_writes_to_the_whole() -> None:
    x: Any = flow.tensor(X, placement=flow.placement("cpu:[0-2]"), sbp=S(0))
    plain = X.clone()
    for held in (x, plain):
        held[1:] += 1
        held[:-1].mul_(2)
    torch.testing.assert_close(x.full_tensor(), plain)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [(8, 5), (7, 3), (9, 4), (12, 1), (1, 9)], ids=str)
@pytest.mark.parametrize("how", [(3, 1, 1, 1), (2, 1, 0, 2), ((3, 1), 1, (1, 0), 1), ((1, 3), (1, 2), (0, 2), (1, 2))])
def test_columns_of_windows(size: tuple[int, int], how: Any) -> None:
    kernel, dilation, padding, stride = ([n, n] if isinstance(n, int) else list(n) for n in how)
    if all(n + 2 * p >= d * (k - 1) + 1 for n, k, d, p in zip(size, kernel, dilation, padding, strict=True)):
        for lead in ((2, 3), (3,)):
            assert not check_rule(
                "im2col", torch.randn(*lead, *size, dtype=F64), kernel, dilation, padding, stride
            ).wrong


@pytest.mark.parametrize(
    ("rows", "width", "kernel", "sent"), [(16, 6, 3, 2), (14, 3, 3, 2), (15, 3, 3, 2), (16, 6, 2, 0)]
)
def test_columns_take_the_rows_of_neighbours(rows: int, width: int, kernel: int, sent: int) -> None:
    """Rows of windows that the ranks divide, or of one window each."""
    x: Any = torch.randn(1, 2, rows, width, dtype=F64, requires_grad=True)
    split: Any = flow.tensor(x.detach(), placement=flow.placement("cpu:[0-3]"), sbp=S(2)).requires_grad_()
    how: Any = {"kernel_size": kernel, "padding": (kernel - 2 and 1, 0), "stride": (1 + (kernel == 2), 1)}
    with flow.record() as moves:
        found: Any = torch.nn.functional.unfold(split, **how)
    want: Any = torch.nn.functional.unfold(x, **how)
    assert found.sbp == (S(2),)
    assert {m.route for m in moves if m.bytes} <= {"halo"}
    assert max((m.bytes for m in moves), default=0) <= sent * 2 * width * 8
    torch.testing.assert_close(found.full_tensor(), want)
    found.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(split.grad.full_tensor(), x.grad)


def test_ranks_whose_windows_see_but_padding_have_columns_of_zeros() -> None:
    assert not check_rule("im2col", torch.randn(2, 3, 1, dtype=F64), [1, 1], [1, 1], [3, 0], [1, 1]).wrong


@pytest.mark.sampled(4)
@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("outer", [2, 3])
@pytest.mark.parametrize("rows", [2, 3, 5])
def test_slices_in_steps_of_several_runs(rows: int, outer: int, start: int, step: int) -> None:
    """A rank of a flattened dim whose inner one was split has a run of places for each of the outer ones."""
    x = torch.randn(outer, rows, 2, dtype=F64, requires_grad=True)
    split: Any = flow.tensor(x.detach(), placement=flow.placement("cpu:[0-1]"), sbp=S(1)).requires_grad_()
    found: Any = split.flatten(0, 1)[start::step]
    want: Any = x.flatten(0, 1)[start::step]
    torch.testing.assert_close(found.full_tensor(), want)
    found.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(split.grad.full_tensor(), x.grad)
