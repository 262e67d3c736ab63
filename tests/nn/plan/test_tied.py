"""Tied parameters have one tensor under two names, and lines for either are of that tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.sbp import Sbp


class Tied(nn.Module):
    """Words whose table is that of the head, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(words))
        return out


@pytest.mark.parametrize(
    ("lines", "lies"),
    [
        ("head.weight: tensor=S(0)", S(0)),
        ("words.weight: tensor=S(0)", S(0)),
        ("words: tensor=S(1)\nhead: tensor=S(0)", S(0)),
        ("head: tensor=S(0)\nwords: tensor=S(1)", S(1)),
    ],
)
def test_a_line_for_one_of_tied_names_is_of_the_tensor_and_the_last_counts(lines: str, lies: Sbp) -> None:
    """The first name's line was lost: the second's, which no line named, was whole."""
    model: Any = Tied()
    step = flow.compile(model, lambda model, words: model(words).sum(), plan=f"grid (tensor=2)\n{lines}\n")
    step(torch.arange(8).reshape(2, 4))
    assert model.words.weight is model.head.weight
    assert model.words.weight.sbp == (lies,)
