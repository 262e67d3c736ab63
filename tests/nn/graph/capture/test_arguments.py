"""Arguments of a step that are parameters of the graph's modules, and those that it writes to."""

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


def written(model: nn.Module, x: Tensor, more: Any) -> Tensor:
    x[:, 0].add_(1)
    more["y"].mul_(0.5)
    loss: Tensor = (model(x) * more["y"]).square().mean()
    return loss


@pytest.mark.sampled(5)
@pytest.mark.parametrize("given", ["plain", "split", "whole", "transposed"])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["straight", "micro-batches"])
def test_what_a_step_writes_to_its_arguments_reaches_who_passed_them(given: str, options: dict[str, Any]) -> None:
    mine, one, (x, y) = net(), net(), batch()
    y = torch.ones(len(x), 1, dtype=x.dtype)
    if given == "transposed":
        x = x.T.contiguous().T
    signatures: dict[str, str] = {"split": "S(0)", "whole": "B"}
    sbp = signatures.get(given)
    xs, ys = (
        z.clone(memory_format=torch.preserve_format) if sbp is None else flow.tensor(z, placement=LINE, sbp=sbp)
        for z in (x, y)
    )
    step = flow.compile(mine, written, sgd(mine), placement=LINE, **options)
    ones = sgd(one)
    for _ in range(2):
        step(xs, {"y": ys})
        ones.zero_grad()
        written(one, x, {"y": y}).backward()  # type: ignore[no-untyped-call]
        ones.step()
    for told, wanted in ((xs, x), (ys, y)):
        torch.testing.assert_close(told.full_tensor() if isinstance(told, flow.GlobalTensor) else told, wanted)
    same_model(mine, one)


def test_stages_that_write_to_an_argument_give_it_back() -> None:
    mine, (x, _) = net(), batch()
    flow.nn.place(mine[0], flow.placement("cpu", [0]))
    flow.nn.place(mine[1:], flow.placement("cpu", [1]))
    step = flow.compile(mine, written, sgd(mine), micro_batches=2, schedule="1f1b")
    wanted, y = x.clone(), torch.ones(len(x), 1, dtype=x.dtype)
    step(x, {"y": y})
    wanted[:, 0] += 1
    assert torch.equal(x, wanted)
    assert torch.equal(y, torch.full_like(y, 0.5))


class Written(flow.nn.Graph):
    def __init__(self, how: Callable[[Tensor], Any]) -> None:
        super().__init__(placement=LINE)
        self.how = how

    def build(self, x: Tensor, other: Tensor) -> Tensor:
        self.how(x)
        return x + other


WHOLE = torch.ones(4, 4)
REFUSED: dict[str, tuple[Callable[[Tensor], Any], Tensor, Tensor, str]] = {
    "the same twice": (lambda x: x.mul_(2), WHOLE, WHOLE, r"pass other\.clone\(\)|pass 1\.clone\(\)"),
    "a view of it": (lambda x: x.mul_(2), WHOLE, WHOLE[0], "lies in the same memory"),
    "another shape": (lambda x: x.unsqueeze_(0), torch.ones(4), torch.ones(4), "gets another shape by it"),
    "with a gradient": (lambda x: x.mul_(2), torch.ones(4, requires_grad=True) * 1, torch.ones(4), "requires grad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_that_cannot_reach_who_passed_the_argument_is_refused(name: str) -> None:
    how, x, other, said = REFUSED[name]
    before = x.detach().clone()
    with pytest.raises(flow.SbpError, match=said):
        Written(how)(x, other)
    assert torch.equal(x, before)


def test_arguments_without_elements_lie_in_no_memory() -> None:
    """Of two such the addresses are equal, which was taken for one memory."""
    first, second = torch.empty(0, 4), torch.empty(0, 4)
    assert Written(lambda x: x.mul_(2))(first, second).shape == (0, 4)
