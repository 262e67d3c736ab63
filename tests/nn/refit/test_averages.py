"""`torch.optim.swa_utils` on models of any plan: averages, also of statistics, are those of one device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import sbpflow as flow
from sbpflow import S
from tests.ranks import Ranks

DATA = flow.placement("cpu:[0-3] as (data=4)")
EMA: Any = get_ema_multi_avg_fn
PLANS = {
    "ZeRO-3": "grid (data=4)\n**: data=S(0)",
    "pipeline": "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 1 micro-batches",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def averaged(how: str, ema: bool, buffers: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net().double()
    if how == "eager":
        flow.nn.to_global(model, DATA, S(0))
    data: dict[str, Any] = {"placement": DATA, "sbp": S(0)}
    batches: list[Any] = [torch.randn(8, 4).double() for _ in range(3)]
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    step: Any = None
    if how in PLANS:
        step = flow.compile(model, lambda model, x: model(x).square().mean(), optimizer, plan=PLANS[how])
    average: AveragedModel | None = None
    for x in batches:
        if step is not None:
            step(x)
        else:
            optimizer.zero_grad()
            model(flow.tensor(x, **data) if how == "eager" else x).square().mean().backward()
            optimizer.step()
        schedule.step()
        average = average or AveragedModel(model, multi_avg_fn=EMA(0.9) if ema else None, use_buffers=buffers)
        average.update_parameters(model)
    assert average is not None
    if not buffers and how != "pipeline":
        update_bn([x if how == "alone" else flow.tensor(x, **data) for x in batches], average)
    held = [x for name, x in average.module.state_dict().items() if how != "pipeline" or "num" not in name]
    return [x.full_tensor() if isinstance(x, flow.GlobalTensor) else x for x in held]


@pytest.mark.parametrize(("ema", "buffers"), [(False, False), (True, True)], ids=["mean", "EMA"])
@pytest.mark.parametrize("how", ["eager", "ZeRO-3"])
def test_an_average_is_that_of_one_device(how: str, ema: bool, buffers: bool) -> None:
    torch.testing.assert_close(averaged(how, ema, buffers), averaged("alone", ema, buffers))


def test_real_ranks_average(ranks4: Ranks) -> None:
    for found in ranks4(averaged, "ZeRO-3", True, True):
        torch.testing.assert_close(found, averaged("alone", True, True))


def stages() -> list[Tensor]:
    return averaged("pipeline", True, False)


def test_stages_average(ranks4: Ranks) -> None:
    assert len(stages()) == 8
    for found in ranks4(stages):
        torch.testing.assert_close(found, stages())
