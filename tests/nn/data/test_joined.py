"""Batches that processes have read by themselves are one batch, of which each gets its rows back."""

from typing import Any

import pytest
import torch

import sbpflow as flow
from tests.ranks import Ranks

LINE, GRID = "cpu:[0-3] as (data=4)", "cpu:[0-3] as (data=2, tensor=2)"
WHOLE = torch.arange(20.0).reshape(10, 2)


@pytest.mark.parametrize(
    ("grid", "sizes"), [(LINE, (2, 2, 2, 2)), (LINE, (3, 3, 2, 2)), (LINE, (1, 1, 0, 0)), (GRID, (2, 2, 2, 2))], ids=str
)
def test_rows_of_processes_are_one_batch_and_come_back(grid: str, sizes: tuple[int, ...], ranks4: Ranks) -> None:
    for there_and_back in ranks4(joined_and_parted, grid, sizes):
        assert there_and_back


def joined_and_parted(grid: str, sizes: tuple[int, ...]) -> bool:
    rank = flow.init().rank or 0
    whole = WHOLE[: sum(sizes)]
    mine = torch.split(whole, list(sizes))[rank]
    where = flow.placement(grid)
    batch: dict[str, Any] = flow.data.joined({"x": mine, "name": "a"}, where)
    x, back = batch["x"], flow.data.parted((batch["x"] * 2, batch["x"].sum()), where)
    assert isinstance(x, flow.GlobalTensor)
    assert type(back[0]) is type(back[1]) is torch.Tensor
    rows = torch.equal(x.full_tensor(), whole) and torch.equal(torch.cat(gathered(back[0])), whole * 2)
    return rows and batch["name"] == "a" and back[1].item() == whole.sum()


def gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = [mine] * 4
    torch.distributed.all_gather_object(found, mine)
    return found


def test_other_shares_are_refused_on_all_ranks(ranks4: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"rank 0 holds a piece of shape \(1, 2\)(.*\n)*.*splits are balanced"):
        ranks4(joined_and_parted, LINE, (1, 2, 3, 4))


def test_numbers_have_no_rows(ranks4: Ranks) -> None:
    with pytest.raises(AssertionError, match="a number in the batch of a process has no rows"):
        ranks4(flow.data.joined, torch.ones(()), flow.placement("cpu:[0-3]"))


def test_one_process_has_the_whole_batch() -> None:
    batch = [WHOLE, 3]
    assert flow.data.joined(batch, flow.placement("cpu:[0-3]")) is batch
    x = flow.tensor(WHOLE, placement=flow.placement("cpu:[0-3]"), sbp=flow.S(0))
    assert torch.equal(flow.data.parted({"y": x}, x.placement)["y"], WHOLE)
