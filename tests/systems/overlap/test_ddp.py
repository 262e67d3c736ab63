"""DDP: gradients go home in buckets, and the step is that of one process."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.device import family

from .stages import loss_fn

PAIR = flow.placement("cpu:[0-1]")


def compiled(count: int, width: int, rest: Any) -> tuple[Any, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])
    one = copy.deepcopy(model)
    flow.nn.shard(model, {"*": rest})
    flow.nn.flow(list(model), result=S(0), input=S(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return flow.compile(model, loss_fn, optimizer, placement=PAIR, inputs={"x": S(0), "y": S(0)}), one


@pytest.mark.parametrize("count", [4, 5])
def test_gradients_go_in_buckets_of_up_to_a_limit(count: int) -> None:
    """Of 256 KiB each, on a CPU by the MiB; on cards by 25 of these."""
    assert family("cuda").bucket == 25 << 20
    step, one = compiled(count, 256, B)
    x = torch.randn(2048, 256)
    step(x, x)
    loss_fn(one, x, x).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    for mine, other in zip(step.model.parameters(), one.parameters(), strict=True):
        assert torch.allclose(mine.full_tensor(), other, atol=1e-6)
    with flow.record() as moves:
        step(x, x)
    many = math.ceil(count * 256 * 256 * 4 / family("cpu").bucket)
    alone = sum(move.op.startswith("d ") for move in moves)  # a bucket of one is no bucket
    assert sum(move.op == "bucket" for move in moves) + alone == many
