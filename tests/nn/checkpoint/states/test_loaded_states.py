"""States of optimizers of any kind: from any layout into any other, before the first step of a graph and after it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

import sbpflow as flow
from sbpflow import B, S
from tests.nn.checkpoint.plans import states, whole
from tests.nn.graph.pipes import mlp, numbers, square_loss

Make = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: Adam(m.parameters(), amsgrad=True),
    "adamw": lambda m: AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "rmsprop": lambda m: RMSprop(m.parameters(), momentum=0.9, centered=True),
    "adagrad": lambda m: Adagrad(m.parameters()),
    "adadelta": lambda m: Adadelta(m.parameters()),
    "adamax": lambda m: Adamax(m.parameters()),
    "nadam": lambda m: NAdam(m.parameters()),
    "radam": lambda m: RAdam(m.parameters()),
    "asgd": lambda m: ASGD(m.parameters()),
    "rprop": lambda m: Rprop(m.parameters()),
    "adafactor": lambda m: Adafactor(m.parameters()),
    "muon": lambda m: Muon([p for p in m.parameters() if p.ndim == 2]),
}
LINE, GRID = flow.placement("cpu", range(3)), flow.placement("cpu:[0-3] as (a=2, b=2)")


def model(*, meta: bool = False) -> nn.Module:
    torch.manual_seed(5)
    with torch.device("meta" if meta else "cpu"):
        return mlp(2).double()


def cut(model: nn.Module) -> nn.Module:
    flow.nn.shard(model, {"*": S(0)})
    return model


def plain_step(model: nn.Module, optimizer: Optimizer, at: int) -> None:
    square_loss(model, *numbers(at)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def all_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    held = {f"weight {name}": whole(value) for name, value in model.named_parameters()}
    params = [x for group in optimizer.param_groups for x in group["params"]]
    for at, x in enumerate(params):
        held |= {f"{at} {key}": whole(part) for key, part in optimizer.state.get(x, {}).items()}
    return held


def close(mine: dict[str, Any], others: dict[str, Any], tolerance: float) -> None:
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, others[name], rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert value == others[name], name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("into", ["plain", "eager global", "noted", "trained"])
@pytest.mark.parametrize("start", ["plain", "eager global", "graph"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_anywhere(tmp_path: Path, name: str, start: str, into: str) -> None:
    make = OPTIMIZERS[name]
    one = model()
    if start == "eager global":
        flow.nn.to_global(one, GRID, lambda name, value: (B, S(0)))
    optimizer = make(one)
    step = flow.compile(cut(one), square_loss, optimizer, placement=LINE) if start == "graph" else None
    for at in range(2):
        step(*numbers(at)) if step else plain_step(one, optimizer, at)
    flow.save(tmp_path / "a", one, optimizer=optimizer)
    wanted = all_of(one, optimizer)

    other = model(meta=into == "noted")
    if into == "eager global":
        flow.nn.to_global(other, LINE, lambda name, value: S(0))
    optimizer2 = make(other)
    step2 = None
    if into in ("noted", "trained"):
        step2 = flow.compile(cut(other), square_loss, optimizer2, placement=GRID)
        step2(*numbers(9)) if into == "trained" else None
    flow.load(tmp_path / "a", other, optimizer=optimizer2)
    if step2 is not None:
        planned = step2.plan_for(*numbers(2)).planned
        if planned.runner is None:
            planned.prepare()
    close(all_of(other, optimizer2), wanted, 0)
    step(*numbers(2)) if step else plain_step(one, optimizer, 2)
    step2(*numbers(2)) if step2 else plain_step(other, optimizer2, 2)
    close(all_of(other, optimizer2), all_of(one, optimizer), 1e-2 if name == "muon" else 1e-9)


def test_lists_of_tensors_that_an_optimizer_keeps(tmp_path: Path) -> None:
    one, other = model(), model()
    optimizers = [LBFGS(m.parameters(), max_iter=3) for m in (one, other)]

    def step(m: nn.Module, optimizer: Optimizer, at: int) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = square_loss(m, *numbers(at))
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        optimizer.step(closure)

    step(one, optimizers[0], 0)
    flow.save(tmp_path / "a", one, optimizer=optimizers[0])
    flow.load(tmp_path / "a", other, optimizer=optimizers[1])
    step(one, optimizers[0], 1)
    step(other, optimizers[1], 1)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


MIXED = "grid cpu (data=4)\n**: data=S(0)\ncast ** to bf16\ncast {grads,states} ** to fp32"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("before", [MIXED, "grid cpu (data=2)"], ids=["mixed", "fp32"])
@pytest.mark.parametrize("trained", [False, True], ids=["noted", "trained"])
@pytest.mark.parametrize("after", [MIXED, "grid cpu (data=3)"], ids=["mixed", "fp32"])
def test_masters_keep_the_digits_that_weights_have_not(tmp_path: Path, before: str, after: str, trained: bool) -> None:
    one = model().float()
    optimizer = AdamW(one.parameters(), lr=0.01)
    step = flow.compile(one, square_loss, optimizer, plan=before)
    for at in range(2):
        step(*numbers(at, dtype=torch.float32))
    flow.save(tmp_path / "a", one, optimizer=optimizer)
    exact = [whole(x) for x in optimizer.param_groups[0]["params"]]
    assert all(x.dtype is torch.float32 for x in exact)

    other = model(meta=not trained).float()
    optimizer2 = AdamW(other.parameters())
    step2 = flow.compile(other, square_loss, optimizer2, plan=after)
    if trained:
        step2(*numbers(7, dtype=torch.float32))
    flow.load(tmp_path / "a", other, optimizer=optimizer2)
    if not trained:
        step2.plan_for(*numbers(2, dtype=torch.float32)).planned.prepare()
    assert all(map(torch.equal, (whole(x) for x in optimizer2.param_groups[0]["params"]), exact))
    for weight, x in zip(other.parameters(), exact, strict=True):
        assert torch.equal(whole(weight), x.to(weight.dtype))
        assert (weight.dtype is torch.bfloat16) == (after == MIXED)
    kept = states(other, optimizer2)
    for name, value in states(one, optimizer).items():
        assert torch.equal(kept[name], value), name
    if before == after == MIXED:
        batch = numbers(2, dtype=torch.float32)
        assert float(step2(*batch)) == float(step(*batch))
        assert all(map(torch.equal, map(whole, other.parameters()), map(whole, one.parameters())))


def test_weights_of_a_model_in_bf16_get_their_masters(tmp_path: Path) -> None:
    one = model().bfloat16()
    optimizer = AdamW(one.parameters(), lr=0.01)
    plan = "grid cpu (data=2)\ncast {grads,states} ** to fp32"
    step = flow.compile(one, square_loss, optimizer, plan=plan)
    batch = numbers(0, dtype=torch.bfloat16)
    step(*batch)
    flow.save(tmp_path / "a", one, optimizer=optimizer)
    exact = [whole(x) for x in optimizer.param_groups[0]["params"]]
    assert exact[0].dtype is torch.float32
    assert not torch.equal(exact[0], exact[0].bfloat16().float())
    other = model(meta=True).bfloat16()
    optimizer2 = AdamW(other.parameters())
    flow.load(tmp_path / "a", other, optimizer=optimizer2)
    step2 = flow.compile(other, square_loss, optimizer2, plan=plan)
    step2.plan_for(*batch).planned.prepare()
    assert all(map(torch.equal, (whole(x) for x in optimizer2.param_groups[0]["params"]), exact))


def test_a_loss_scale_goes_on(tmp_path: Path) -> None:
    plan = "grid cpu (data=2)\ncast ** to fp16\ncast {grads,states} ** to fp32"
    batch = numbers(0, dtype=torch.float32)
    one, other = model().float(), model(meta=True).float()
    optimizer, optimizer2 = AdamW(one.parameters()), AdamW(other.parameters())
    step = flow.compile(one, square_loss, optimizer, plan=plan)
    step(*batch)
    step._scale.value, step._scale.good = 4096.0, 17
    flow.save(tmp_path / "a", one, optimizer=optimizer)
    flow.load(tmp_path / "a", other, optimizer=optimizer2)
    step2 = flow.compile(other, square_loss, optimizer2, plan=plan)
    step2.plan_for(*batch).planned.prepare()
    assert (step2.loss_scale, step2._scale.good) == (4096.0, 17)
    step._scale.value = 2.0
    flow.load(tmp_path / "a", one, optimizer=optimizer)
    assert step.loss_scale == 4096.0


def test_two_optimizers_of_a_class_have_each_their_own(tmp_path: Path) -> None:
    one = model()
    parameters = list(one.parameters())
    two = [torch.optim.SGD(parameters[:1]), torch.optim.SGD(parameters[1:])]
    for number, optimizer in enumerate(two):
        optimizer.state["seen"] = number  # type: ignore[index]
    flow.save(tmp_path / "a", one, optimizer=two)
    for optimizer in two:
        optimizer.state.clear()
    flow.load(tmp_path / "a", one, optimizer=two)
    assert [optimizer.state["seen"] for optimizer in two] == [0, 1]  # type: ignore[index]


@pytest.mark.parametrize("name", ["adamw", "nadam", "asgd"])
def test_states_of_a_weight_without_dims_lie_as_it_does(tmp_path: Path, name: str) -> None:
    def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer]:
        one = nn.Module()
        one.scale = nn.Parameter(torch.ones((), dtype=dtype))
        return one, OPTIMIZERS[name](flow.nn.to_global(one, LINE))

    def trained(one: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        (one.scale * one.scale).backward()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        return dict(optimizer.state[one.scale])  # type: ignore[index]

    (one, optimizer), (other, optimizer2) = made(), made()
    state = trained(one, optimizer)
    flow.save(tmp_path / "a", one, optimizer=optimizer)
    flow.load(tmp_path / "a", other, optimizer=optimizer2)
    kinds = {key: type(value) for key, value in state.items()}
    assert {key: type(value) for key, value in optimizer2.state[other.scale].items()} == kinds  # type: ignore[index]
    trained(other, optimizer2), trained(one, optimizer)
    close(all_of(other, optimizer2), all_of(one, optimizer), 0)
    narrow, optimizer3 = made(torch.bfloat16)
    flow.load(tmp_path / "a", narrow, optimizer=optimizer3)
    trained(narrow, optimizer3)


class Scaled(nn.Module):
    """A layer, and a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.scale
        return y


def clipped(model: nn.Module, optimizer: Optimizer, at: int) -> None:
    square_loss(model, *numbers(at)).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("after", ["clipped", "graph"])
@pytest.mark.parametrize("before", ["plain", "graph", "loaded", "noted"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "muon"])
def test_a_parameter_without_dims_goes_on_wherever_its_states_come_from(
    tmp_path: Path, name: str, before: str, after: str
) -> None:
    one, other = Scaled().double(), Scaled().double().to("meta" if before == "noted" else "cpu")
    optimizer, mine = OPTIMIZERS[name](one), OPTIMIZERS[name](other)
    train = flow.compile(other, square_loss, mine, placement=LINE) if before == "graph" else None
    for at in range(2):
        plain_step(one, optimizer, at)
        train(*numbers(at)) if train else plain_step(other, mine, at) if before == "plain" else None
    if before in ("loaded", "noted"):
        flow.save(tmp_path / "a", one, optimizer=optimizer)
        flow.load(tmp_path / "a", other, optimizer=mine)
    (clipped if after == "clipped" else plain_step)(one, optimizer, 2)
    limit = 0.01 if after == "clipped" else None
    flow.compile(other, square_loss, mine, placement=GRID if before != "graph" else LINE, clip_grad_norm=limit)(
        *numbers(2)
    )
    close(all_of(other, mine), all_of(one, optimizer), 1e-9)


def test_a_parameter_without_dims_is_stepped_eagerly_after_a_graph() -> None:
    one, other = Scaled().double(), Scaled().double()
    optimizer, mine = AdamW(one.parameters()), AdamW(other.parameters())
    plain_step(one, optimizer, 0)
    flow.compile(other, square_loss, mine, placement=LINE)(*numbers(0))
    plain_step(one, optimizer, 1)
    x, y = (flow.tensor(part, placement=LINE, sbp=B) for part in numbers(1))
    square_loss(other, x, y).backward()  # type: ignore[no-untyped-call]
    mine.step()
    close(all_of(other, mine), all_of(one, optimizer), 1e-9)
