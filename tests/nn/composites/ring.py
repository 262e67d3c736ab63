"""Attention by the ring on any ranks, and plain attention on one device beside it."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.placement import Placement

F64 = torch.float64


class Attention(nn.Module):
    """Attention alone, with what it is told."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.how)
        return out


class Attends(nn.Module):
    """Attention behind a parameter, so that there is something to learn."""

    def __init__(self, width: int, dtype: torch.dtype, **how: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, dtype=dtype))
        self.attention = Attention(**how)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.attention(query * self.scale, key, value, mask)
        return out


def weighed(model: nn.Module, *given: Any) -> Tensor:
    query, key, value, by, mask = given
    out: Tensor = (model(query, key, value, mask).to(by.dtype) * by).sum()
    return out


def line(ranks: int) -> Placement:
    return flow.placement("cpu", range(ranks), names=("context",))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def compared(
    where: Placement,
    given: Sequence[Tensor],
    mask: Tensor | None = None,
    *,
    sbp: Any = None,
    over: str = "context",
    use: str = "ring",
    **how: Any,
) -> tuple[Any, Any]:
    """The loss and the gradients of query, key, value, mask and a parameter, by the ring and on one device."""
    query, _, value = given
    model = Attends(query.shape[-1], query.dtype, **how)
    alone = copy.deepcopy(model)
    flow.nn.inside(model.attention, use=use, over=over)
    lies = {over: S(query.ndim - 2)} if sbp is None else sbp
    by = numbers(*query.shape[:-1], value.shape[-1], seed=9)
    plain = [x.clone().requires_grad_() for x in given]
    plain += [] if mask is None else [mask.clone().requires_grad_(mask.is_floating_point())]
    laid: list[Any] = [flow.tensor(x.detach(), placement=where, sbp=lies).requires_grad_() for x in plain[:3]]
    laid += [flow.tensor(x.detach(), placement=where, sbp="B").requires_grad_(x.requires_grad) for x in plain[3:]]
    hides = laid[3] if mask is not None else None
    loss: Any = flow.compile(model, weighed, placement=where)(*laid[:3], by, hides)
    want = weighed(alone, *plain[:3], by, plain[3] if mask is not None else None)
    want.backward()  # type: ignore[no-untyped-call]
    found = [loss.full_tensor(), *(x.grad.full_tensor() for x in laid if x.requires_grad)]
    learnt: Any = model.scale.grad
    found.append(learnt.full_tensor())
    return found, [want.detach(), *(x.grad for x in plain if x.requires_grad), alone.scale.grad]


def close(pair: tuple[Any, Any], tolerance: float = 1e-11) -> None:
    """Sums are in another order, and nothing else differs."""
    for found, want in zip(*pair, strict=True):
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
