"""OneFlow: what boxing sends, as its paper's table has it, on one placement and between two."""

import pytest

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.signature import Sbp

P1, P2, ROWS = 4, 2, 1536
BYTES = ROWS * ROWS * 4  # of the tensor
SAME = [  # from, to, and bytes over all ranks
    (S(0), S(0), 0),
    (S(0), S(1), (P1 - 1) / P1 * BYTES),
    (S(0), B, (P1 - 1) * BYTES),
    (S(0), P, 0),
    (B, S(0), 0),
    (B, B, 0),
    (B, P, 0),
    (P, S(0), (P1 - 1) * BYTES),
    (P, B, 2 * (P1 - 1) * BYTES),
    (P, P, 0),
]
APART = [  # the ranks of the one are not those of the other
    (S(0), S(1), BYTES),
    (S(0), B, P2 * BYTES),
    (B, S(0), BYTES),
    (B, B, P2 * BYTES),
    (P, S(0), P1 * BYTES),
    (P, B, (P1 + P2 - 1) * BYTES),
]


def sent(src: Layout, dst: Layout) -> int:
    return flow.boxing.between(src, dst).total


@pytest.mark.parametrize(("src", "dst", "bytes_"), SAME, ids=str)
def test_bytes_on_one_placement_are_those_of_the_table(src: Sbp, dst: Sbp, bytes_: float) -> None:
    ranks = flow.placement("cuda", range(P1))
    assert sent(flow.layout(ranks, src, (ROWS, ROWS)), flow.layout(ranks, dst, (ROWS, ROWS))) == bytes_


@pytest.mark.parametrize(("src", "dst", "bytes_"), APART, ids=str)
def test_bytes_to_another_placement_are_those_of_the_table(src: Sbp, dst: Sbp, bytes_: float) -> None:
    here, there = flow.placement("cuda", range(P1)), flow.placement("cuda", range(P1, P1 + P2))
    assert sent(flow.layout(here, src, (ROWS, ROWS)), flow.layout(there, dst, (ROWS, ROWS))) == bytes_
