"""A user's script, as type checkers see it."""

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


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    return loss


p = flow.placement("cpu", range(2), names=("data",))
x = flow.tensor(torch.ones(4, 4), placement=p, sbp=S(0))
y: flow.GlobalTensor = flow.randn(4, 4, placement=p, sbp=B)
z = x.to_global(sbp=P)
print(z.placement, z.sbp, x.full_tensor().shape, flow.sbp.split(0), y.to_local())
model: Net = flow.nn.to_global(Net(), p, B)
model.one.weight.sum()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = flow.compile(model, loss_fn, optimizer)
loss = step(torch.ones(4, 4))
loss.item()
with flow.record() as moves:
    x.to_global(sbp=B)
print(moves.bytes)
