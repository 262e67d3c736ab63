"""A step with `cuda_graph=True` that cannot be recorded is refused when it is planned; tests/card runs others."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.placement.errors import SbpError

ALONE = "grid cuda:[0] as (data=1)"


def squares(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x).square().mean()
    return made


@flow.nn.eager
def looking(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


def by_part(model: nn.Module, x: Tensor) -> Tensor:
    return squares(lambda x: looking(model(x)), x)  # type: ignore[arg-type]


def hooked(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    y.register_hook(lambda grad: grad * 2)
    made: Tensor = y.square().mean()
    return made


REFUSED: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "a CPU": (
        squares,
        "grid cpu:[0] as (data=1)",
        {},
        r"lies on a CPU, which has no graphs of its own\n  place it on a card",
    ),
    "an eager part": (by_part, ALONE, {}, r"runs eagerly, at .*test_replayed_runner.py:\d+"),
    "a hook in the forward": (hooked, ALONE, {}, r"runs eagerly, at .*test_replayed_runner.py:\d+"),
    "offloaded states": (squares, ALONE + "\noffload states ** to cpu", {}, "lie on the cpu, where the host steps"),
    "micro-batches": (squares, ALONE, {"micro_batches": 2}, "micro-batches, whose actors the host runs"),
    "no bool": (squares, ALONE, {"cuda_graph": 1}, "cuda_graph=1\n  say True or False"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_have_is_told_when_it_is_planned(what: str) -> None:
    loss, plan, options, said = REFUSED[what]
    kind = "meta" if "cuda" in plan else "cpu"
    net, x = nn.Linear(8, 4, device=kind), torch.empty(8, 8, device=kind)

    def planned() -> None:
        given: dict[str, Any] = {"cuda_graph": True, **options}
        flow.compile(net, loss, torch.optim.SGD(net.parameters(), momentum=0.9), plan=plan, **given).plan_for(x)

    with pytest.raises(SbpError, match=said):
        planned()


def test_a_plan_for_a_card_says_when_it_will_be_recorded() -> None:
    net = nn.Linear(8, 4, device="meta")
    step = flow.compile(net, squares, torch.optim.SGD(net.parameters()), plan=ALONE, cuda_graph=True)
    assert "CUDA graph  recorded from the third call on" in str(
        step.plan_for(torch.empty(8, 8, device="meta")).explain()
    )
