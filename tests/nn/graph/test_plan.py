"""Planning changes nothing: what has no values gets none, and what a graph decided is looked at before it runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import sbpflow as flow
from sbpflow import B, S
from sbpflow.nn.graph.compiler import backends
from sbpflow.sbp.call import tensors_in

LINE = flow.placement("cpu", range(4))
CUDA = flow.placement("cuda", [[0, 1], [2, 3]], names=("data", "tensor"))


class RMSNorm(nn.Module):
    """As people write it: nothing in it can fill the weight again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def large(width: int = 4096) -> nn.Sequential:
    """Some 200 MB for each layer, on meta."""
    with torch.device("meta"):
        layers = [nn.Sequential(RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU()) for _ in range(3)]
        return nn.Sequential(*(part for layer in layers for part in (*layer, nn.Linear(4 * width, width))))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


def step_of(model: nn.Module, where: flow.Placement | None, **options: Any) -> flow.nn.Graph:
    adamw = torch.optim.AdamW(model.parameters())
    return flow.compile(model, loss_fn, adamw, placement=where, **options)


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of the largest tensor with memory that is made meanwhile, by ops that were not on fakes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tensors_in(made):
            if type(x) in (Tensor, nn.Parameter) and not x.is_meta:
                self.most = max(self.most, x.untyped_storage().nbytes())
        return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", [LINE, CUDA], ids=["cpu", "cuda"])
def test_planning_a_model_on_meta_makes_no_weights_and_compiles_nothing(
    where: flow.Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(backends, "compiled", lambda *given: compiled.append(given))
    monkeypatch.setattr("sbpflow.nn.graph.compiler.compiled_segments.compiled", lambda *given: compiled.append(given))
    model = large()
    before = dict(model.named_parameters())
    step = step_of(model, where)
    x = torch.empty(64, 4096, device="meta")
    with Allocated() as made:
        step.plan_for(x)
        planned = step.explain()
        assert "memory" in str(planned)
        assert planned.html()
        step.text()
    assert made.most < 4096  # not one row of a weight
    assert not compiled
    assert all(value is before[name] and value.is_meta for name, value in model.named_parameters())
    assert step.optimizer.param_groups[0]["params"] == list(before.values())  # type: ignore[attr-defined]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("type_", ["cpu", "cuda"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "pipedream"])
def test_a_pipeline_on_meta_is_looked_at_before_it_runs(type_: Any, schedule: str, tmp_path: Path) -> None:
    model = large(64)
    flow.nn.pipeline(list(model), [flow.placement(type_, [0, 1]), flow.placement(type_, [2])], schedule)
    step = step_of(model, None, micro_batches=4, schedule=schedule)
    step.plan_for(torch.empty(8, 64, device="meta"))
    assert all(value.is_meta for value in model.parameters())
    memory = step.explain().memory
    assert memory is not None
    assert len(memory.ranks) == 3
    assert step.draw(tmp_path / "step.svg").exists()
    assert step.draw_actors(tmp_path / "actors.svg").exists()
    assert step.explain().save(tmp_path / "step.html").stat().st_size
    assert all(value.is_meta for value in model.parameters())


def test_a_plan_for_cuda_where_there_is_none_says_so_when_it_is_to_run() -> None:
    if torch.cuda.is_available():
        assert step_of(nn.Sequential(nn.Linear(4, 4)), flow.placement("cuda", [0]))(torch.ones(8, 4)).item() >= 0
        return
    model: Any = nn.Sequential(nn.Linear(4, 4))
    step = step_of(model, CUDA).plan_for(torch.ones(8, 4))
    with pytest.raises(flow.SbpflowError, match="needs CUDA"):
        step(torch.ones(8, 4))
    assert type(model[0].weight) is nn.Parameter


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def alone(model: nn.Module, x: Tensor, steps: int = 2) -> list[float]:
    adamw, losses = torch.optim.AdamW(model.parameters()), []
    for _ in range(steps):
        adamw.zero_grad()
        loss = loss_fn(model, x)
        loss.backward()  # type: ignore[no-untyped-call]
        adamw.step()
        losses.append(loss.item())
    return losses


X = torch.linspace(-1, 1, 32).reshape(8, 4)


def test_what_is_said_between_plan_and_run_counts() -> None:
    model = net()
    step = step_of(model, LINE).plan_for(X)
    flow.nn.shard(model, {"0.weight": S(1)})
    losses = [step(X).item() for _ in range(2)]
    assert model[0].weight.sbp == (S(1),)
    assert losses == pytest.approx(alone(net(), X))


def test_what_became_global_between_plan_and_run_stays_as_it_lies() -> None:
    model = net()
    step = flow.compile(model, loss_fn, placement=LINE).plan_for(X)
    flow.nn.to_global(model, LINE, {"0.weight": S(1)})
    assert step(X).item() == pytest.approx(loss_fn(net(), X).item())
    assert model[0].weight.sbp == model[0].weight.grad.sbp == (S(1),)


def test_two_plans_of_one_model_run_one_after_the_other() -> None:
    model = net()
    train, guess = step_of(model, LINE).plan_for(X), flow.compile(model, placement=LINE)
    with torch.no_grad():
        assert torch.allclose(guess.plan_for(X[:3])(X[:3]).full_tensor(), net()(X[:3]))
    assert [train(X).item() for _ in range(2)] == pytest.approx(alone(net(), X))


def test_a_model_that_got_values_of_its_own_between_plan_and_run_keeps_them() -> None:
    with torch.device("meta"):
        model = nn.Sequential(RMSNorm(4), nn.Linear(4, 4))
    step = flow.compile(model, loss_fn, placement=LINE).plan_for(X)
    model.load_state_dict({"0.weight": torch.ones(4), "1.weight": torch.eye(4), "1.bias": torch.ones(4)}, assign=True)
    assert step(X).item() == pytest.approx(F.mse_loss(RMSNorm(4)(X) + 1, X).item())


def test_a_model_that_got_another_dtype_after_it_was_planned_is_planned_anew() -> None:
    def converted(model: Any, x: Tensor) -> Tensor:
        made: Tensor = model(x.to(model[0].weight.dtype))
        return made.square().mean()

    model = net()
    step = flow.compile(model, converted, torch.optim.AdamW(model.parameters()), placement=LINE).plan_for(X)
    model.double()
    assert step(X).dtype is torch.float64


def test_micro_batches_of_several_sizes_are_planned_on_one_layout_of_the_weights() -> None:
    model = net()
    step = step_of(model, LINE, micro_batches=3, schedule="1f1b").plan_for(X)
    assert type(model[0].weight) is nn.Parameter
    assert [step(X).item() for _ in range(2)] == pytest.approx(alone(net(), X), rel=1e-5)


def test_hints_that_were_said_twice_differently_are_an_error_of_the_plan() -> None:
    model = net()
    flow.nn.shard(model, {"0.weight": B})
    flow.nn.to_global(model, LINE, {"0.weight": S(0)})
    with pytest.raises(flow.SbpflowError, match="is to be"):
        step_of(model, LINE).plan_for(X)


def test_a_graph_without_an_optimizer_may_run_before_the_one_that_trains() -> None:
    model = net()
    adamw = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        flow.compile(model, placement=LINE)(X)
    step = flow.compile(model, loss_fn, adamw, placement=LINE)
    assert [step(X).item() for _ in range(2)] == pytest.approx(alone(net(), X))
