"""Axes with lengths: every rule of the book on runs of samples, each of which is a rank to the rule."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from sbpflow.sbp.call import Way, tensors_in
from sbpflow.sbp.check import check_runs, check_way
from sbpflow.sbp.state import Runs, State
from tests.sbp.book import test_grids
from tests.sbp.test_book import COMPLETE

F64 = torch.float64
ATEN = torch.ops.aten
VIEWS: list[tuple[Any, ...]] = [
    ("view", torch.randn(8, 3, 6, dtype=F64), [24, 6]), ("reshape", torch.randn(3, 8, 6, dtype=F64), [24, 6]),
    ("view", torch.randn(24, 5, dtype=F64), [8, 3, 5]), ("view", torch.randn(48, dtype=F64), [8, 6]),
    ("flatten.using_ints", torch.randn(2, 8, 3, dtype=F64), 0, 1), ("reshape", torch.randn(8, 12, dtype=F64), [16, 6]),
]  # fmt: skip
CALLS = [*COMPLETE, *VIEWS, *test_grids.CALLS]


def parted(n: int, draw: random.Random) -> tuple[int, ...]:
    """So many samples in two or three runs of different lengths."""
    ends = sorted(draw.sample(range(1, n), min(2, n - 1)))
    return tuple(hi - lo for lo, hi in zip([0, *ends], [*ends, n], strict=True))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("call", CALLS, ids=[f"{i}_{call[0]}" for i, call in enumerate(CALLS)])
def test_a_rule_for_single_samples_holds_for_runs_of_them(call: tuple[Any, ...]) -> None:
    draw = random.Random(0)
    args, kwargs = (call[1:-1], call[-1]) if isinstance(call[-1], dict) else (call[1:], {})
    sizes = sorted({n for x in tensors_in(list(args)) for n in x.shape if n > 1})
    for n in sizes if len(sizes) < 4 else draw.sample(sizes, 3):
        assert check_runs(Runs((parted(n, draw),)), call[0], *args, **kwargs) == []


def test_runs_of_samples_and_of_tokens() -> None:
    runs, x = Runs(((2, 1), (1, 3))), torch.randn(3, 4, 2, dtype=F64)
    for call in (("view", x, [12, 2]), ("view", x.flatten(0, 1), [3, 4, 2]), ("sum.dim_IntList", x, [0, 1]),
                 ("mean", x), ("permute", x, [1, 0, 2]), ("linear", x, torch.randn(5, 2, dtype=F64))):  # fmt: skip
        assert check_runs(runs, *call) == []


def test_a_run_that_is_cut_as_one_piece_is_found() -> None:
    """Shapes fit, and the loss was wrong by a percent: samples and heads in one dim, heads outside."""
    x = torch.randn(2, 8, 3, dtype=F64)
    wrong = Way((State(((), (0,), ())),), (State(((0,), ())),), lambda piece, x, *_: x.reshape(-1, 3))
    right = Way((State(((), (0,), ())),), (State(((-2, 0), ())),), lambda piece, x, *_: x.reshape(-1, 3))
    runs = Runs(((3, 1, 4),))
    assert check_way(ATEN.view.default, (x, [16, 3]), {}, wrong, runs=runs)
    assert check_way(ATEN.view.default, (x, [16, 3]), {}, right, runs=runs) is None


def test_a_number_that_each_run_adds_is_found() -> None:
    x: Tensor = torch.randn(8, dtype=F64)
    way = Way((State(((0,),)),), (State((), (0,)),))
    assert check_way(lambda x: x.sum() + 1, (x,), {}, way, runs=Runs(((3, 1, 4),)))
    assert check_way(lambda x: x.sum() * 2, (x,), {}, way, runs=Runs(((3, 1, 4),))) is None
