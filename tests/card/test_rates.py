"""Rates that are tensors lie on one card; steps of several cards, of stages and of the host read them there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import sbpflow as flow

from .host import as_on_host, batch, cross_entropy, net, steps, whole

MAKES: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": optim.SGD,
    "AdamW": optim.AdamW,
    "Adafactor": optim.Adafactor,
}
PLANS = {
    "copies": "grid (data=3)",
    "pieces": "grid (data=4)\n{grads,states} **: data=S(0)",
    "stages": "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 4 micro-batches",
    "on the host": "grid (data=2)\noffload states ** to cpu",
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("name", "clip"), [("AdamW", None), ("AdamW", 0.1), ("SGD", None), ("Adafactor", None)], ids=str
)
def test_every_card_steps_by_a_rate_that_lies_on_the_first(name: str, plan: str, clip: float | None) -> None:
    def program(kind: str) -> list[Tensor]:
        model = net()
        rate = torch.tensor(0.01, dtype=torch.float64, device=kind)
        mine = MAKES[name](model.parameters(), lr=rate)
        step: Any = flow.compile(
            model, cross_entropy, mine, plan=PLANS[plan].replace("grid (", f"grid {kind} ("), clip_grad_norm=clip
        )
        found = steps(model, step, kind, 2)
        rate.mul_(0.5)
        return [*found, *steps(model, step, kind, 2), mine.param_groups[0]["lr"]]

    as_on_host(program, 1e-10)


@pytest.mark.parametrize("plan", ["copies", "stages"])
@pytest.mark.parametrize("place", [True, False], ids=["in place", "another"])
def test_what_a_hook_of_the_step_does_to_it_stays(plan: str, place: bool) -> None:
    def program(kind: str) -> list[Tensor]:
        model = net()
        mine = optim.AdamW(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64, device=kind))

        def slower(optimizer: optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                if place:
                    group["lr"].mul_(0.5)
                else:
                    group["lr"] = group["lr"] * 0.5
                group["weight_decay"] *= 0.5

        mine.register_step_pre_hook(slower)
        step = flow.compile(model, cross_entropy, mine, plan=PLANS[plan].replace("grid (", f"grid {kind} ("))
        (group,) = mine.param_groups
        found = steps(model, step, kind)
        return [*found, group["lr"], torch.tensor(group["weight_decay"])]

    as_on_host(program, 1e-10)


def test_an_eager_step_reads_it_on_every_card() -> None:
    def program(kind: str) -> list[Tensor]:
        where = flow.placement(kind, range(3))
        model = flow.nn.to_global(net(), where, flow.B)
        mine = optim.AdamW(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64, device=kind))
        for at in range(2):
            x, y = (flow.tensor(each, placement=where, sbp=flow.B) for each in batch(at, kind))
            cross_entropy(model, x, y).backward()  # type: ignore[no-untyped-call]
            mine.step()
            mine.zero_grad()
        return whole(model)

    as_on_host(program, 1e-10)
