"""Arguments of a step that are no values of their own: parameters of the graph's modules."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.nn.graph.alike import LINE, batch, compiled, net, same_grads, same_model, sgd


@dataclass
class Held:
    weight: Tensor


PACKED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "itself": (lambda w: w, lambda w: w),
    "in a list and a dict": (lambda w: [{"w": w}, w], lambda given: given[0]["w"] + given[1]),
    "in a dataclass": (Held, lambda given: given.weight),
}


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["straight", "micro-batches"])
@pytest.mark.parametrize("name", PACKED)
def test_a_parameter_as_an_argument_is_trained(name: str, options: dict[str, Any]) -> None:
    pack, taken = PACKED[name]

    def loss(model: nn.Module, x: Tensor, given: Any) -> Tensor:
        made: Tensor = model(x).mean(1) + (x @ taken(given).T).mean(1)
        return made.square().mean()

    mine, one = net(), net()
    before, (x, _) = mine[0].weight, batch()
    step, ones = flow.compile(mine, loss, sgd(mine), placement=LINE, **options), sgd(one)
    for weight in (lambda: mine[0].weight, lambda: mine[0].weight, lambda: before):  # which it was once
        step(x, pack(weight()))  # type: ignore[no-untyped-call]
        ones.zero_grad()
        loss(one, x, pack(one[0].weight)).backward()  # type: ignore[no-untyped-call]
        ones.step()
        same_model(mine, one)
    assert compiled(step) == 1


def test_without_an_optimizer_its_gradient_is_all_of_it() -> None:
    def loss(model: nn.Module, x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = model(x).square().mean() + (x @ w.T).square().mean()
        return found

    mine, one, (x, _) = net(), net(), batch()
    flow.compile(mine, loss, placement=LINE)(x, mine[0].weight)
    loss(one, x, one[0].weight).backward()  # type: ignore[no-untyped-call]
    same_grads(mine, one)


def test_another_parameter_is_another_argument() -> None:
    model: Any = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    one, (x, _) = copy.deepcopy(model), batch(dtype=torch.float32)

    def loss(model: nn.Module, x: Tensor, w: Tensor) -> Tensor:
        loss: Tensor = (x @ w).square().mean()
        return loss

    step = flow.compile(model, loss, placement=LINE)
    for at in (0, 1, 0):
        step(x, model[at].weight)
        loss(one, x, one[at].weight).backward()  # type: ignore[no-untyped-call]
    for mine, wanted in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)
