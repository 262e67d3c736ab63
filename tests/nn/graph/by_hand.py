"""Mixed precision by hand, on one device: few bits compute, and a master and its states have many."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 5
Loss = Callable[..., Any]


def mixed(model: nn.Module, weights: Any = "bf16", grads: Any = "fp32", states: Any = "fp32") -> Any:
    flow.nn.cast(model, {"*": weights})
    flow.nn.cast(model, {"*": grads}, kind="grads")
    return flow.nn.cast(model, {"*": states}, kind="states")


class ByHand:
    """One device: a bf16 copy that computes, and a master that Adam changes; gradients of pieces of a batch are added
    up in the type that is said."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype = BF16,
        grads: torch.dtype = FP32,
        *,
        pieces: int = 1,
        scale: float = 1,
    ) -> None:
        self.master = copy.deepcopy(model)
        self.copy: Any = copy.deepcopy(model).to(dtype)
        for mine, whole in zip(self.copy.modules(), self.master.modules(), strict=True):
            mine._buffers.update(copy.deepcopy(whole._buffers))  # rotary frequencies and statistics stay fp32
        self.grads, self.pieces, self.scale = grads, pieces, scale
        self.optimizer = torch.optim.Adam(self.master.parameters(), lr=1e-2)

    def step(self, loss_fn: Loss, *batch: Tensor) -> Tensor:
        total = torch.zeros(())
        pairs = list(zip(self.master.parameters(), self.copy.parameters(), strict=True))
        sums = [torch.zeros_like(p, dtype=self.grads) for p, _ in pairs]
        for piece in zip(*(x.chunk(self.pieces) for x in batch), strict=True):
            loss = loss_fn(self.copy, *piece) / self.pieces
            (loss * self.scale).backward()
            total += loss.detach()
            for into, (_, mine) in zip(sums, pairs, strict=True):
                into += 0 if mine.grad is None else mine.grad.to(self.grads)
                mine.grad = None
        for (master, _), grad in zip(pairs, sums, strict=True):
            master.grad = grad.to(master.dtype) / self.scale
        self.optimizer.step()
        with torch.no_grad():
            for master, mine in pairs:
                mine.copy_(master)
        return total


def net(width: int = 16) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 4)
    )


def half_in(x: Tensor, model: nn.Module) -> Tensor:
    """The casts that a cast model makes by itself, and one that was made bf16 by hand does not."""
    dtype = next(model.parameters()).dtype
    return x if dtype is FP32 else x.to(dtype)


def square_loss(model: nn.Module, x: Tensor) -> Any:
    return model(half_in(x, model)).float().square().mean()


def batches(many: int = STEPS, rows: int = 16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 8, generator=draw) for _ in range(many)]


def trained(
    model: nn.Module, where: Any, loss_fn: Loss = square_loss, data: Any = None, **options: Any
) -> tuple[Any, torch.optim.Optimizer, list[Tensor]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = flow.compile(model, loss_fn, optimizer, placement=where, **options)
    rows = data if data is not None else [(x,) for x in batches()]
    return step, optimizer, [step(*each).detach().full_tensor() for each in rows]


def masters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def same(found: Any, hand: ByHand, losses: list[Tensor], wanted: list[Tensor], tol: float) -> None:
    torch.testing.assert_close(torch.stack(losses).float(), torch.stack(wanted).float(), rtol=tol, atol=tol)
    for p, q in zip(masters(found), hand.master.parameters(), strict=True):
        assert p.dtype is FP32
        torch.testing.assert_close(p.full_tensor().detach(), q.detach(), rtol=tol, atol=tol)
