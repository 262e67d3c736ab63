"""Changed pieces go to where parameters lie in few exchanges, and come out as each alone would."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing import between, box
from sbpflow.boxing.graph.buckets import gathered, packed
from sbpflow.sbp import Layout, Sbp, layout
from tests.ranks import Ranks

X = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
WAYS: list[tuple[tuple[Sbp, ...], tuple[Sbp, ...]]] = [  # how pieces lie, and how the parameter does
    ((S(0), B), (B, B)),
    ((S(1), B), (B, B)),
    ((S(0), S(0)), (B, S(0))),
    ((S(1), S(0)), (B, S(0))),
    ((S(0), S(1)), (B, S(1))),
    ((S(0), S(0)), (B, B)),
    ((S(1), S(1)), (B, B)),
    ((S(0), S(1)), (B, B)),
    ((S(0), S(0)), (S(0), B)),
    ((B, S(1)), (B, B)),
]


def lie(sbp: tuple[Sbp, ...], shape: tuple[int, ...]) -> Layout:
    return layout(GRID, sbp, shape, torch.float64)


def test_what_goes_together_comes_out_as_each_alone() -> None:
    """All ways at once, of sizes that divide, that do not, and of none."""
    shapes = [(8, 4), (4, 8), (12, 4), (6, 3), (0, 4)]
    ways = [(lie(a, shape), lie(b, shape)) for shape in shapes for a, b in WAYS]
    wholes = [torch.randn(src.shape, dtype=torch.float64) for src, _ in ways]
    held = [[whole[src.slices(rank)] for rank in range(4)] for whole, (src, _) in zip(wholes, ways, strict=True)]
    groups = gathered(ways)
    assert sorted(number for group in groups for number in group) == list(range(len(ways)))
    assert max(map(len, groups)) > 4
    for group in (group for group in groups if len(group) > 1):
        one = packed([ways[number] for number in group])
        parts = [one.pack([held[number][rank] for number in group], None) for rank in range(4)]
        come = [one.unpack(x) for x in box(parts, one.src, one.dst)]
        for at, number in enumerate(group):
            for rank in range(4):
                want = wholes[number][ways[number][1].slices(rank)]
                assert torch.equal(come[rank][at].reshape(want.shape), want)
        assert between(one.src, one.dst).total == sum(between(*ways[number]).total for number in group)


def test_a_bucket_has_a_limit() -> None:
    ways = [(lie((S(0), B), (8, 4)), lie((B, B), (8, 4)))] * 5
    assert gathered(ways, limit=2 * 8 * 4 * 8) == [[0, 1], [2, 3], [4]]


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 3)).double()  # 3 do not divide


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().mean()


@pytest.mark.parametrize("grid", ["(data=4)", "(data=2, tensor=2)"])
def test_zero_1_gathers_once_for_many_parameters(grid: str) -> None:
    step = trained(f"grid {grid}\n**: data=B\nstates **: data=S(0)")
    with flow.record() as moves:
        step(X)
    sent = Counter(m.boxing.route for m in moves if m.boxing.sends)
    told = Counter(row.boxing.route for row in step.plan_for(X).explain().moves for _ in range(row.count) if row.total)
    assert sent == told
    assert sent["all_gather"] <= 3  # all that divide, and one or two that do not


def test_stages_gather_on_their_ranks(ranks4: Ranks) -> None:
    ranks4(staged)


def staged() -> None:
    trained("grid (pipe=2, data=2)\npipe {0,1,2,3,4,5,6} over pipe by 1f1b, 2 micro-batches\nstates **: data=S(0)")


def trained(plan: str) -> Any:
    """A step that has trained as one device does."""
    model = deep()
    alone = copy.deepcopy(model)
    step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters()), plan=plan)
    optimizer = torch.optim.AdamW(alone.parameters())
    for _ in range(3):
        step(X)
        loss_fn(alone, X).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine, flow.GlobalTensor)
        assert torch.allclose(mine.full_tensor(), other, rtol=0, atol=1e-12)
    return step
