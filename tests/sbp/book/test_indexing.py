"""Reading by index: split tables add up, indices split the result, all other dims pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import S
from sbpflow.sbp.book.indexing import own
from sbpflow.sbp.check import check_rule

torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
F64 = torch.float64
X = torch.randn(5, 4, 6, dtype=F64)
I5, I34 = torch.tensor([4, 0, 3, 3, 1]), torch.tensor([[0, 3, 1, 2], [1, -1, 0, 3], [2, 2, -4, 0]])
TABLE = torch.randn(7, 4, dtype=F64)
WORDS = torch.tensor([[6, 0, 3], [2, 2, 5]])
AT = torch.tensor([[3, 0], [1, 2], [0, 3], [2, 2], [3, 1]])
CALLS: list[tuple[Any, ...]] = [
    ("embedding", TABLE, WORDS), ("embedding", TABLE, WORDS, 2), ("embedding", TABLE, WORDS[0], 6),
    ("index_select", X, 0, I5), ("index_select", X, -1, I5), ("index_select", torch.arange(9), 0, I5),
    ("index_select", X, 1, torch.tensor(2)), ("index_select", TABLE, -2, torch.tensor(6)),
    ("index.Tensor", X, [I5]), ("index.Tensor", X, [None, I34]), ("index.Tensor", X, [I34, None, I34 - 1]),
    ("index.Tensor", X, [I34, I34[:, :1]]), ("index.Tensor", X, [None, I34, I34 * 1]),
    ("index.Tensor", torch.arange(6) > 2, [torch.tensor([5, 0, 1, 4])]),
    ("gather", X, 1, I5.expand(4, 5).T.unsqueeze(-1).expand(5, 4, 6) % 4), ("gather", TABLE[:5], 1, AT),
    ("gather", TABLE, 1, AT), ("gather", TABLE, 0, torch.tensor([[6, 0, 2, 1], [0, 3, 5, 6], [4, 1, 3, 2]])),
    ("take", X, torch.tensor([[119, 0, 7], [33, 64, 2]])),
    ("one_hot", WORDS, 8),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_the_rule_is_right_and_complete(call: tuple[Any, ...]) -> None:
    report = check_rule(*call)
    assert not report.wrong
    assert not report.missing


def test_indices_of_others_read_the_first_row_and_are_masked() -> None:
    index, inside = own(torch.tensor([5, 2, 3, 0]), 2, 4, 6)
    assert index.tolist() == [0, 0, 1, 0]
    assert inside.tolist() == [False, True, True, False]


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["sum", "mean", "max"])
def test_bags_of_words_split_in_width(mode: int) -> None:
    words, starts = torch.tensor([6, 0, 3, 2, 2, 5]), torch.tensor([0, 2, 3])
    report = check_rule("embedding_bag.padding_idx", TABLE, words, starts, False, mode, False, None, False, None)
    assert not report.wrong


READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_select": lambda x, at: x.index_select(0, at),
    "gather": lambda x, at: x.gather(0, at[:, None].expand(-1, 4)),
    "x[at]": lambda x, at: x[at],
    "embedding": lambda x, at: torch.nn.functional.embedding(at, x),
    "cross_entropy": lambda x, at: torch.nn.functional.cross_entropy(x.T, at.repeat(2)),
}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("at", [(0, 4), (-5, 0), (1000, 3)], ids=str)
@pytest.mark.parametrize("read", READS)
def test_an_index_that_no_rank_holds_is_refused(read: str, at: tuple[int, ...], ranks: int) -> None:
    """Every rank had zeros for it, as for those that others hold."""
    x, index = torch.arange(16.0).reshape(4, 4), torch.tensor(at)
    split = flow.tensor(x, placement=flow.placement("cpu", range(ranks)), sbp=S(0))
    for each in (x, split):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|index"):
            READS[read](each, index)
