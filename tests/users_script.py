"""A user's script, as type checkers see it."""

from typing import Any, NamedTuple, assert_type

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(x)
        return out


class Losses(NamedTuple):
    loss: Tensor
    weight: float


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    return loss


def losses(model: Net, x: Tensor, weight: float = 0.5) -> Losses:
    return Losses(model(x).sum() * weight, weight)


def by_name(model: nn.Module, **batch: Tensor) -> Tensor:
    loss: Tensor = model(batch["x"]).sum()
    return loss


class Training(flow.nn.Graph):
    def __init__(self, model: Net) -> None:
        super().__init__()
        self.model = model

    def build(self, x: Tensor) -> Tensor:
        return loss_fn(self.model, x)


p = flow.placement("cpu", range(2), names=("data",))
x = flow.tensor(torch.ones(4, 4), placement=p, sbp=S(0))
y: flow.GlobalTensor = flow.randn(4, 4, placement=p, sbp=B)
z = x.to_global(sbp=P)
print(z.placement, z.sbp, x.full_tensor().shape, flow.sbp.split(0), y.to_local())
model: Net = flow.nn.to_global(Net(), p, B)
model.one.weight.sum()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = flow.compile(model, loss_fn, optimizer)
assert_type(step.model, Net)
loss = step(torch.ones(4, 4))
assert_type(loss, flow.GlobalTensor)
print(loss.full_tensor().item(), step.plan_for(torch.ones(4, 4))(torch.ones(4, 4)).placement, step.explain().compute)
several = flow.compile(model, losses, [optimizer], micro_batches=2).plan_for(x)
assert_type(several(x), Losses)
assert_type(several(x, weight=1.0).loss, Tensor)
named = flow.compile(model, by_name, clip_grad_norm=1.0)
assert_type(named(x=x), flow.GlobalTensor)
flow.compile(model, lambda model, x: model(x).sum(), optimizer)(x).full_tensor()
assert_type(
    flow.compile(model, None, None, backend="auto")(x), Any
)  # as torch has it of `model(x)`, whose hooks may return anything
training = Training(model).plan_for(x)
assert_type(training, Training)
assert_type(training(x), Any)  # what `build` of a subclass takes and returns, its `__call__` cannot say


def mistakes() -> None:
    """Each is found: a comment that silences nothing is an error of its own."""
    step("words")  # type: ignore[arg-type]
    several(x, wait=1.0)  # type: ignore[call-arg]
    print(loss.full_tensors())  # type: ignore[attr-defined]


with flow.record() as moves:
    x.to_global(sbp=B)
print(moves.bytes)
