"""Moves of filled rows: the value is that of the move itself, and bytes are those of rows that hold something."""

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow.boxing import gather, scatter
from sbpflow.boxing.exchange.execute import transport
from sbpflow.boxing.exchange.filled_rows import box_filled
from sbpflow.placement import placement
from sbpflow.sbp import layout
from tests.ranks import Ranks

STATES = ["S(0)", "S(1)", "S(2)", "B"]


def sparse(shape: tuple[int, ...], filled: float, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    rows = torch.rand(shape[:-1], generator=made) < filled
    return torch.randn(shape, generator=made, dtype=torch.float64) * rows[..., None]


def moved(x: Tensor, src: str, dst: str, name: str = "cpu:[0-3]") -> tuple[Tensor, list[int]]:
    here = placement(name)
    ends = [layout(here, lie, tuple(x.shape), x.dtype) for lie in (src, dst)]
    before = transport().sent.bytes.total()
    with flow.record() as moves, torch.no_grad():
        shards = box_filled(scatter(x, ends[0]), *ends)
    told = transport().sent.bytes.total() - before
    return gather(shards, ends[1]), [moves[-1].boxing.total, told]


@pytest.mark.parametrize("shape", [(4, 8, 3), (5, 7, 3), (1, 6, 4), (4, 2, 1), (0, 4, 3)], ids=str)
@pytest.mark.parametrize("filled", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("src", "dst"), [(a, b) for a in STATES for b in STATES if a != b])
@pytest.mark.sampled(20)
def test_the_value_is_that_of_the_move_and_the_record_has_the_bytes_that_went(
    src: str, dst: str, filled: float, shape: tuple[int, ...]
) -> None:
    x = sparse(shape, filled)
    found, (recorded, sent) = moved(x, src, dst)
    assert torch.equal(found, x)
    assert recorded == sent


def test_bytes_are_those_of_filled_rows_and_a_mark_for_each_row() -> None:
    x = sparse((4, 8, 16), 0.3)
    stays = sum(int((x[i, 2 * i : 2 * i + 2] != 0).any(-1).sum()) for i in range(4))
    crossing = int((x != 0).any(-1).sum()) - stays
    found, (recorded, _) = moved(x, "S(1)", "S(0)")
    assert torch.equal(found, x)
    assert recorded == crossing * 16 * 8 + 4 * 8 * 3 // 4


def test_what_is_not_a_number_is_sent() -> None:
    x = torch.zeros(4, 4, 2)
    x[0, 3, 1], x[3, 0, 0] = torch.nan, torch.inf
    found, _ = moved(x, "S(1)", "S(0)")
    torch.testing.assert_close(found, x, rtol=0, atol=0, equal_nan=True)


def test_on_other_axes_rows_lie_as_they_do() -> None:
    x = sparse((4, 6, 4), 0.5)
    found, _ = moved(x, "(S(2), S(1))", "(S(2), S(0))", "cpu:[0-3] as (data=2, expert=2)")
    assert torch.equal(found, x)


def own_bytes() -> tuple[bool, int, int]:
    x = sparse((4, 8, 16), 0.3)
    found, (recorded, sent) = moved(x, "S(1)", "S(0)")
    return torch.equal(found, x), recorded, sent


def test_processes_send_as_many_and_each_records_its_own(ranks4: Ranks) -> None:
    answers = ranks4(own_bytes)
    _, (together, _) = moved(sparse((4, 8, 16), 0.3), "S(1)", "S(0)")
    assert all(right for right, _, _ in answers)
    assert sum(recorded for _, recorded, _ in answers) == together == sum(sent for *_, sent in answers)
