"""Pools: what ranks make of what their windows see is their part of what one device makes, gradients too."""

from itertools import product
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import S
from sbpflow.sbp.check import check_rule

torch.manual_seed(1)
F64 = torch.float64
F: Any = torch.nn.functional
PLANE = torch.randn(2, 7, 9, dtype=F64)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "ceil", "count"),
    [*product([5, 8, 13, 17], [2, 3, 5], [1, 2, 3], [0, 1], [False, True], [False, True])],
)
def test_pools_of_a_line(size: int, kernel: int, stride: int, padding: int, ceil: bool, count: bool) -> None:
    x = torch.randn(2, size, dtype=F64)
    assert not check_rule("avg_pool1d", x, [kernel], [stride], [padding], ceil, count).wrong
    if size + 2 * padding > (1 + count) * (kernel - 1):  # else torch refuses what is wider than the line
        assert not check_rule("max_pool1d_with_indices", x, [kernel], [stride], [padding], [1 + count], ceil).wrong


@pytest.mark.parametrize("op", ["max_pool2d", "max_pool2d_with_indices", "avg_pool2d"])
@pytest.mark.parametrize("ceil", [False, True])
def test_pools_of_a_plane(op: str, ceil: bool) -> None:
    rest = ([2, 1], ceil) if "max" in op else (ceil, False)
    assert not check_rule(op, PLANE, [3, 2], [2, 3], [1, 1], *rest).wrong


def test_a_divisor_of_ones_own() -> None:
    assert not check_rule("avg_pool2d", PLANE, [3, 3], [2, 2], [1, 1], True, True, 7).wrong


@pytest.mark.parametrize("size", [[1, 1], [1, 3], [7, 3], [2, 1]], ids=str)
def test_pools_that_adapt(size: list[int]) -> None:
    report = check_rule("adaptive_avg_pool2d", PLANE, size)
    assert not report.wrong


def test_whole_numbers_have_a_least_one() -> None:
    where = flow.placement("cpu:[0-2]")
    x = torch.randint(-9, 9, (1, 2, 12, 4))
    split: Any = torch.nn.functional.max_pool2d(flow.tensor(x, placement=where, sbp=S(2)), 3, 1, 1)
    assert split.sbp == (S(2),)
    assert torch.equal(split.full_tensor(), torch.nn.functional.max_pool2d(x, 3, 1, 1))


def test_a_pool_of_whole_pieces_sends_nothing() -> None:
    where = flow.placement("cpu:[0-3]")
    x = flow.tensor(torch.randn(1, 2, 16, 4), placement=where, sbp=S(2))
    with flow.record() as moves:
        pooled: Any = torch.nn.functional.max_pool2d(x, 2)
    assert pooled.sbp == (S(2),)
    assert len(moves) == 0


@pytest.mark.parametrize("size", [[1, 1], [1, 3], [7, 3], [2, 1], [7, 9]], ids=str)
def test_maxima_that_adapt(size: list[int]) -> None:
    assert not check_rule("adaptive_max_pool2d", PLANE, size).wrong
    assert not check_rule("adaptive_max_pool1d", PLANE, size[1:]).wrong
    assert not check_rule("adaptive_max_pool3d", PLANE[None], [2, *size]).wrong


def test_maxima_that_adapt_say_where_in_the_whole_they_are() -> None:
    x, where, pool = torch.randn(1, 2, 16, 9, dtype=F64), flow.placement("cpu:[0-3]"), F.adaptive_max_pool2d
    split: Any = flow.tensor(x, placement=where, sbp=S(2)).requires_grad_()
    with flow.record() as moves:
        values, at = pool(split, (8, 4), return_indices=True)
    assert not moves
    plain: Any = x.clone().requires_grad_()
    want, places = pool(plain, (8, 4), return_indices=True)
    assert torch.equal(values.full_tensor(), want)
    assert torch.equal(at.full_tensor(), places)
    values.square().sum().backward()
    want.square().sum().backward()
    assert torch.equal(split.grad.full_tensor(), plain.grad)
