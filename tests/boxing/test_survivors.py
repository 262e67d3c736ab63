"""Survivors: where ranks are lost, what is left has every element that any rank left has, or there is nothing."""

import itertools

import pytest
import torch

from sbpflow.boxing.survivors import survivors
from sbpflow.placement import Placement, placement
from sbpflow.sbp import layout

GRID = placement("cpu", [[0, 1, 2], [3, 4, 5]], names=("data", "tensor"))
SBP = ["(B, B)", "(S(0), B)", "(B, S(0))", "(S(0), S(1))", "(S(0), S(0))"]


@pytest.mark.parametrize("sbp", SBP)
@pytest.mark.parametrize("many", range(1, 4))
def test_what_is_left_has_all_or_a_part_is_gone(sbp: str, many: int) -> None:
    of = layout(GRID, sbp, (4, 7), torch.float32)
    for lost in itertools.combinations(range(6), many):
        full = [rank for rank in range(6) if all(of.spans(rank))]
        held, alive = {of.spans(rank) for rank in full}, {of.spans(rank) for rank in full if rank not in lost}
        left = survivors(of, lost)
        assert (left is None) == (held != alive), lost
        if left is not None:
            assert not {*left.placement.flat} & {*lost} & {*full}
            assert {left.spans(rank) for rank in left.placement.flat if rank in full} == held
            assert all(left.spans(rank) == of.spans(rank) for rank in left.placement.flat)


def test_of_many_copies_all_but_the_lost_one_are_kept() -> None:
    of = layout(Placement("cpu", (0, 1, 2, 3), (4,), None), "B", (8,), torch.float32)
    assert survivors(of, [2]) is layout(Placement("cpu", (0, 1, 3), (3,), None), "B", (8,), torch.float32)
    assert survivors(of, []) is of


def test_copies_that_are_no_grid_are_taken_one_of_each_part() -> None:
    of = layout(GRID, "(B, S(0))", (6, 2), torch.float32)
    left = survivors(of, [0, 4])  # of neither row all is left
    assert left is not None
    assert left.placement.flat == (3, 1, 2)


def test_addends_of_a_lost_rank_are_lost() -> None:
    of = layout(GRID, "(P, B)", (6, 2), torch.float32)
    assert survivors(of, [0]) is not None  # rank 1 has the same addend
    assert survivors(of, [0, 1, 2]) is None
