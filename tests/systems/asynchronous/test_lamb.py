"""LAMB: a step of each weight as long as the weight itself, so that norms are over all of it, however it lies."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import sbpflow as flow
from sbpflow import B, S

from .stages import WIDTH, layers, numbers, squares, whole

DATA = flow.placement("cpu:[0-3] as (data=4)")
STEPPED = Counter[tuple[int, ...]]()


class Lamb(Optimizer):
    """As the paper has it; it knows of one device."""

    def __init__(self, params: Any, lr: float = 0.01, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "betas": (0.9, 0.999), "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (a, b), lr, eps = group["betas"], group["lr"], group["eps"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                STEPPED[tuple(w.shape)] += 1
                state = self.state[w]
                if not state:
                    state.update(at=0, first=torch.zeros_like(w), second=torch.zeros_like(w))
                state["at"] += 1
                state["first"].lerp_(w.grad, 1 - a)
                state["second"].mul_(b).addcmul_(w.grad, w.grad, value=1 - b)
                first, second = state["first"] / (1 - a ** state["at"]), state["second"] / (1 - b ** state["at"])
                way = first / (second.sqrt() + eps) + group["decay"] * w
                w.sub_(way * (lr * w.norm() / way.norm()))


@flow.nn.steps_by_tensor
class OwnedLamb(Lamb):
    """Said to look at one tensor at a time, so that each has an owner."""


LIES = {
    "data parallel": "grid (data=4)\ninput * <- data=S(0)",
    "ZeRO-1": "grid (data=4)\ninput * <- data=S(0)\nstates **: data=S(0)",
    "ZeRO-3": "grid (data=4)\ninput * <- data=S(0)\n**: data=S(0)",
    "tensor": "grid (data=2, tensor=2)\ninput * <- data=S(0)\n*.0.weight: tensor=S(1)",
    "pipeline": "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 2 micro-batches\nstates **: data=S(0)",
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def alone(steps: int) -> list[Tensor]:
    model = Net()
    optimizer = Lamb(model.parameters())
    for at in range(steps):
        optimizer.zero_grad()
        squares(model, *numbers(16, at)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [x.detach() for x in model.parameters()]


def sharded(plan: str, make: type[Lamb], steps: int = 3) -> list[Tensor]:
    model = Net()
    step = flow.compile(model, squares, make(model.parameters()), plan=plan)
    for at in range(steps):
        step(*numbers(16, at))
    return [x.detach() for x in whole(model)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [Lamb, OwnedLamb])
@pytest.mark.parametrize("lies", LIES)
def test_sharded_is_unsharded(lies: str, make: type[Lamb]) -> None:
    plan = LIES[lies].replace("*.0.weight", "layers.*.0.weight")
    torch.testing.assert_close(sharded(plan, make), alone(3), rtol=0, atol=1e-12)


def test_an_owner_steps_each_weight_once() -> None:
    STEPPED.clear()
    sharded(LIES["ZeRO-1"], OwnedLamb, 2)
    assert {(WIDTH, WIDTH): 2 * 4, (WIDTH,): 2 * 4} == STEPPED


def test_pieces_send_their_norms_alone() -> None:
    """Run on global tensors, two norms of each weight are addends that become whole; all else is where it is."""
    model = flow.nn.to_global(layers(2), DATA, S(0))
    optimizer = Lamb(model.parameters())
    for x in model.parameters():
        x.grad = flow.ones(*x.shape, placement=DATA, sbp=S(0), dtype=x.dtype)
    with flow.record() as moves:
        optimizer.step()
    sent = [move.boxing for move in moves if move.boxing.total]
    assert [way.src.shape for way in sent] == [()] * 2 * 4
    assert all(way.total == 4 * 3 * 8 for way in sent)  # each of four ranks tells the others a number
    plain = layers(2)
    its = Lamb(plain.parameters())
    for x in plain.parameters():
        x.grad = torch.ones_like(x)
    its.step()
    torch.testing.assert_close(whole(model), [*plain.parameters()], rtol=0, atol=1e-12)
    assert B not in {x.sbp[0] for x in model.parameters()}  # type: ignore[attr-defined]
