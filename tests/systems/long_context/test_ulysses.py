"""Ulysses, and with the ring over another axis: attention of one device, four all_to_alls each way."""

from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.errors import SbpError
from tests.ranks import Ranks

from .sequences import attended, numbers, three

LINE = "cpu:[0-3] as (context=4)"
ROWS = [{"context": S(2)}] * 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    ("length", "heads", "shared"),
    [(16, 4, 4), (13, 4, 4), (3, 8, 8), (16, 8, 2), (13, 16, 1), (9, 17, 17)],
    ids=["even", "uneven", "short", "shared", "one_key_head", "uneven_heads"],
)
def test_heads_in_the_place_of_the_sequence(length: int, heads: int, shared: int, causal: bool) -> None:
    given = three(length, heads=heads, shared=shared)
    attended(LINE, "ulysses", "context", given, ROWS, is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("shape", [(13, 13), (1, 13), (2, 4, 13, 13)])
def test_masks_hide(shape: tuple[int, ...]) -> None:
    mask = numbers(*shape, seed=5) > -0.5
    attended(LINE, "ulysses", "context", three(13), ROWS, mask)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_a_link_fall_with_the_ranks(ranks: int) -> None:
    """In the paper a rank sends 4 N h / P elements forward, of which it keeps one P-th; a gather sends (P - 1) as many.
    Here all ranks send (P - 1) / P of queries, keys, values and result, and backward of their gradients."""
    n, whole = 16, 2 * 4 * 16 * 4 * 8
    moves = attended(f"cpu:[0-{ranks - 1}] as (context={ranks})", "ulysses", "context", three(n), ROWS)
    crossed = [nbytes for route, nbytes in moves if route == "all_to_all"]
    assert crossed == [whole * (ranks - 1) // ranks] * 8


def test_shared_heads_that_are_fewer_than_ranks_are_gathered() -> None:
    moves = attended(LINE, "ulysses", "context", three(16, heads=8, shared=2), ROWS, enable_gqa=True)
    assert [route for route, _ in moves][:4].count("all_gather") == 2


def test_heads_may_be_split_on_another_axis_too() -> None:
    lies: Any = [{"tensor": S(1), "context": S(2)}] * 3
    grid = "cpu:[0-7] as (data=2, tensor=2, context=2)"
    moves = attended(grid, "ulysses", "context", three(12), [{"data": S(0), **each} for each in lies], is_causal=True)
    assert {route for route, _ in moves} <= {"all_to_all", *(route for route, _ in moves if "all_reduce" in route)}


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "heads": (3, {}, r'3 heads cannot be split over the 4 ranks of context.*\n.*\n.*use="ring"'),
    "six heads": (6, {}, r'6 heads cannot be split.*\n.*\n.*use="usp" over an axis of 2 ranks and one of 2'),
    "dropout": (4, {"dropout_p": 0.5}, "dropout_p=0.5 draws"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_and_a_fix(case: str) -> None:
    heads, how, said = REFUSED[case]
    with pytest.raises(SbpError, match=said):
        attended(LINE, "ulysses", "context", three(16, heads=heads), ROWS, **how)


def test_the_fix_for_six_heads_works() -> None:
    attended("cpu:[0-3] as (heads=2, context=2)", "usp", ("heads", "context"), three(16, heads=6), BOTH)


BOTH: Any = [{"heads": S(2), "context": S(2)}] * 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("length", [16, 13, 5])
@pytest.mark.parametrize("grid", ["(heads=2, context=4)", "(context=4, heads=2)", "(heads=4, context=2)"])
def test_heads_over_one_axis_and_the_ring_over_another(grid: str, length: int, causal: bool) -> None:
    attended(f"cpu:[0-7] as {grid}", "usp", ("heads", "context"), three(length), BOTH, is_causal=causal)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grid", ["(heads=2, context=2)", "(context=2, heads=2)"])
@pytest.mark.parametrize("shared", [4, 2, 1])
def test_both_with_masks_and_shared_heads(grid: str, shared: int) -> None:
    given, mask = three(13, heads=8, shared=shared), numbers(13, 13, seed=5) > -0.5
    attended(f"cpu:[0-3] as {grid}", "usp", ("heads", "context"), given, BOTH, mask, enable_gqa=True)


@pytest.mark.parametrize("grid", ["(heads=2, context=4)", "(context=4, heads=2)"])
def test_the_ring_of_both_sends_what_its_ranks_have(grid: str) -> None:
    """U x R ranks: 4 all_to_alls over U, and R - 1 turns of keys and values that are a U x R-th each."""
    u, r, whole = 2, 4, 2 * 4 * 16 * 4 * 8
    moves = attended(f"cpu:[0-7] as {grid}", "usp", ("heads", "context"), three(16), BOTH)
    assert [nbytes for route, nbytes in moves if route == "all_to_all"] == [whole * (u - 1) // u] * 8
    assert [nbytes for route, nbytes in moves if route == "transfer"] == [whole] * (2 * (r - 1) * 3)


def on_ranks() -> None:
    given = three(13, heads=8, shared=2)
    attended(LINE, "ulysses", "context", given, ROWS, is_causal=True, enable_gqa=True)
    attended("cpu:[0-3] as (heads=2, context=2)", "usp", ("heads", "context"), three(13), BOTH, is_causal=True)


def test_processes_do_the_same(ranks4: Ranks) -> None:
    ranks4(on_ranks)


def test_one_rank_runs_it_as_it_is() -> None:
    assert attended("cpu:[0-0] as (context=1)", "ulysses", "context", three(5), [{"context": B}] * 3) == []
    with torch.no_grad():
        assert flow.nn.inside(torch.nn.Linear(2, 2), use=None)
