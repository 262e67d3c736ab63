"""Experts without rooms: an op and a composite of one's own, by which each rank computes its experts' tokens.

Tokens are gathered, and results reduced and scattered, so that no size depends on who chose whom: none is left out.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S
from tests.ranks import Ranks

from .mixtures import EXPERTS, F64, WIDTH, sent


def shares(chosen: Tensor, experts: Sequence[int]) -> list[Tensor]:
    """The tokens of each of a range of experts."""
    first, end = (experts[0], experts[-1]) if experts else (0, 0)
    return [(chosen == expert).nonzero()[:, 0] for expert in range(first, end)]


@torch.library.custom_op("experts_test::mlp", mutates_args=())
def mlp(x: Tensor, chosen: Tensor, up: Tensor, down: Tensor, experts: Sequence[int]) -> Tensor:
    """Each token through its expert; zero where that is none of these, whose weights are given."""
    out = torch.zeros_like(x)
    for n, mine in enumerate(shares(chosen, experts)):
        out[mine] = (x[mine] @ up[n]).relu() @ down[n]
    return out


@torch.library.custom_op("experts_test::mlp_backward", mutates_args=())
def mlp_backward(
    above: Tensor, x: Tensor, chosen: Tensor, up: Tensor, down: Tensor, experts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dup, ddown = torch.zeros_like(x), torch.zeros_like(up), torch.zeros_like(down)
    for n, mine in enumerate(shares(chosen, experts)):
        hidden = x[mine] @ up[n]
        inner = (above[mine] @ down[n].T) * (hidden > 0)
        dx[mine], dup[n], ddown[n] = inner @ up[n].T, x[mine].T @ inner, hidden.relu().T @ above[mine]
    return dx, dup, ddown


@mlp.register_fake
def _(x: Tensor, chosen: Tensor, up: Tensor, down: Tensor, experts: Sequence[int]) -> Tensor:
    return torch.empty_like(x)


@mlp_backward.register_fake
def _(
    above: Tensor, x: Tensor, chosen: Tensor, up: Tensor, down: Tensor, experts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(up), torch.empty_like(down)


def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.experts = inputs[4]


def back(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
    x, chosen, up, down = ctx.saved_tensors
    dx, dup, ddown = torch.ops.experts_test.mlp_backward(above.contiguous(), x, chosen, up, down, ctx.experts)
    return dx, None, dup, ddown, None


mlp.register_autograd(back, setup_context=remember)


@flow.nn.composite("own_experts", of="experts_test::mlp")
def own_experts(axis: Any, x: Any, chosen: Any, up: Any, down: Any, experts: Any) -> Any:
    """Each rank its own experts' tokens, of all there are; a token's result is made by one rank."""
    mine = up.lying(S(0))
    given = x.lying(B), chosen.lying(B), mine, down.lying(S(0)), mine.indices(0)
    made = axis.run(torch.ops.experts_test.mlp, *given, gives=P)
    return axis.call(torch.ops.aten.alias.default, made, lies=S(0))


class Chooses(nn.Module):
    def __init__(self, favourite: int | None = None, experts: int = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, experts, dtype=F64)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH, dtype=F64) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH, dtype=F64) / 6)
        if favourite is not None:
            self.gate.bias.data[favourite] += 100.0

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        made = torch.ops.experts_test.mlp(x, share.argmax(-1), self.up, self.down, [0, len(self.up)])
        out: Tensor = x + made * share.amax(-1, keepdim=True)
        return out


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def trained(favourite: int | None, experts: int = EXPERTS, rows: int = 32) -> list[tuple[str, int]]:
    model = Chooses(favourite, experts)
    alone = copy.deepcopy(model)
    flow.nn.inside(model, use="own_experts", over="data")
    flow.nn.shard(model, {"up": S(0), "down": S(0)})
    where = flow.placement("cpu:[0-3] as (data=4)")
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1), dtype=F64)
    laid = flow.tensor(x, placement=where, sbp=S(0)).requires_grad_()
    step = flow.compile(model, squares, placement=where)
    with flow.record() as moves:
        loss: Any = step(laid)
    want = squares(alone, x.requires_grad_())
    want.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss.full_tensor(), want.detach(), rtol=1e-11, atol=1e-11)
    pairs: list[tuple[Any, Any]] = [(laid, x), *zip(model.parameters(), alone.parameters(), strict=True)]
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-10, atol=1e-11)
    return sent(moves)


@pytest.mark.parametrize("favourite", [None, 0, EXPERTS - 1], ids=["all over", "all to the first", "all to the last"])
def test_every_token_meets_its_expert_however_many_choose_the_same(favourite: int | None) -> None:
    moves = trained(favourite)
    tokens = 32 * WIDTH * 8 * 3  # bytes of all ranks, gathered or scattered
    assert [total for route, total in moves if route == "reduce_scatter" and total == tokens] == [tokens] * 2
    assert [total for route, total in moves if route == "all_gather" and total == tokens] == [tokens] * 2


@pytest.mark.parametrize(
    ("experts", "rows"), [(6, 13), (3, 5), (8, 1)], ids=["uneven", "fewer than ranks", "one token"]
)
def test_experts_and_tokens_need_not_divide(experts: int, rows: int) -> None:
    trained(None, experts, rows)


def test_processes_do_the_same(ranks4: Ranks) -> None:
    ranks4(trained, 0)
