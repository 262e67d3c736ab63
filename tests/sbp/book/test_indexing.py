"""Reading by index: split tables add up, indices split the result, all other dims pass."""

from typing import Any

import pytest
import torch

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
    index, inside = own(torch.tensor([5, 2, 3, 0]), 2, 4)
    assert index.tolist() == [0, 0, 1, 0]
    assert inside.tolist() == [False, True, True, False]


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["sum", "mean", "max"])
def test_bags_of_words_split_in_width(mode: int) -> None:
    words, starts = torch.tensor([6, 0, 3, 2, 2, 5]), torch.tensor([0, 2, 3])
    report = check_rule("embedding_bag.padding_idx", TABLE, words, starts, False, mode, False, None, False, None)
    assert not report.wrong
