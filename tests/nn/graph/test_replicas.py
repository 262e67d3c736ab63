"""Values made of buffers and constants alone are made where they are used, and do not travel between stages."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.boxing.graph.physical import Box
from tests.nn.graph.alike import F64, batch, same, same_model, sgd


class Angles(nn.Module):
    """Rotary angles of a buffer, and a causal mask of nothing, both made once at the front."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.register_buffer("speed", torch.tensor([1.0, 0.5], dtype=F64))
        self.speed: Tensor
        self.layers = nn.ModuleList(nn.Linear(4, 4).to(F64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(4)[:, None] * self.speed
        turned = torch.cat([angle.cos(), angle.sin()], 1)
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        for layer in self.layers:
            weights = layer(x)[:, :, None] * turned
            x = x + (weights.softmax(-1) * mask).sum(-1)
        return x


def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_angles_and_masks_are_made_on_each_stage() -> None:
    model = Angles()
    one, stages = copy.deepcopy(model), [flow.placement("cpu", [rank]) for rank in range(4)]
    for layer, where in zip(model.layers, stages, strict=True):
        flow.nn.place(layer, where)
    ones, step = sgd(one), flow.compile(model, loss_fn, sgd(model), micro_batches=2)
    for at in range(2):
        wanted = loss_fn(one, *batch(at=at))
        same(step(*batch(at=at)), wanted)
        wanted.backward()  # type: ignore[no-untyped-call]
        ones.step()
        ones.zero_grad()
    same_model(model, one)
    crossing = [
        box.source.partition("@")[0]
        for box in step.physical.steps
        if isinstance(box, Box) and step.physical.layout(box.source).placement is not box.output.layout.placement
    ]
    # The buffer goes to three, x from each to the next; targets are taken from the caller.
    assert sorted(crossing.count(name) for name in dict.fromkeys(crossing)) == [1, 1, 1, 3]
    assert crossing.count("speed") == 3
