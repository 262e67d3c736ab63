"""No optimizer computes something else because its parameters and states lie in pieces, of whatever sizes."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_map

import sbpflow as flow
from sbpflow import B, S
from sbpflow.nn.graph.optimizer import on_shards
from sbpflow.nn.graph.optimizer.on_shards import ALONE
from sbpflow.placement.errors import SbpError
from tests.counts import calls
from tests.nn.graph.alike import eager, same, same_model

DATA = flow.placement("cpu:[0-3] as (data=4)")


class Lamb(optim.Optimizer):
    """Adam's step, scaled by norms of a whole parameter and of its whole step."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                m, v = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.99 ** state["t"])
                update = m / (v.sqrt() + 1e-6) + 0.01 * p
                p.add_(update * (p.norm() / update.norm()).clamp(max=10.0), alpha=-group["lr"])


class Shampoo(optim.Optimizer):
    """A preconditioner for each dim, of all of a gradient, which is no shape that a piece has."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                step = p.grad
                for d in range(p.ndim):
                    sums = self.state[p].setdefault(d, 1e-3 * torch.eye(p.size(d), dtype=p.dtype))
                    rows = step.transpose(0, d)
                    flat = rows.reshape(p.size(d), -1)
                    sums += flat @ flat.t()
                    values, vectors = torch.linalg.eigh(sums)
                    root = vectors @ torch.diag(values.clamp_min(1e-12) ** (-0.5 / p.ndim)) @ vectors.t()
                    step = (root @ flat).reshape(rows.shape).transpose(0, d)
                p.add_(step, alpha=-group["lr"])


class Counting(optim.SGD):
    """Torch's own step, and something of the user's with all of a parameter: no class is taken for what it inherits."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= p.grad.abs().max()
        return super().step(closure)


MAKES: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, 0.1, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, 0.1),
    "AdamW one by one": lambda p: optim.AdamW(p, 0.1, foreach=False),
    "AdamW fused": lambda p: optim.AdamW(p, 0.1, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1, initial_accumulator_value=0.1, lr_decay=0.1),
    "Adagrad fused": lambda p: optim.Adagrad(p, 0.1, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "NAdam": lambda p: optim.NAdam(p, 0.1, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, 0.1),
    "Adamax": lambda p: optim.Adamax(p, 0.1, maximize=True),
    "Adadelta": lambda p: optim.Adadelta(p, 0.5),
    "Rprop": lambda p: optim.Rprop(p),
    "ASGD": lambda p: optim.ASGD(p, weight_decay=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, 0.1),
    "Lamb": Lamb,
    "Shampoo": Shampoo,
    "Counting": lambda p: Counting(p, 0.1, momentum=0.9),
}
LIES: dict[str, tuple[Any, Any]] = {  # of weights and states
    "pieces of rows": ({"*": B}, {"*": {"data": S(0)}}),
    "pieces of columns": ({"*": B}, {"*": {"data": S(-1)}}),
    "rows": ({"*": S(0)}, {}),
    "columns": ({"*": S(-1)}, {}),
}


def net() -> nn.Sequential:
    """Sizes that four ranks do not share out evenly; of 3 rows one has none."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def batch(at: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(at)
    x, y = (torch.randn(8, n, generator=draw, dtype=torch.float64) for n in (4, 3))
    return x, y


def laid(model: nn.Module, lies: str) -> nn.Module:
    weights, states = LIES[lies]
    flow.nn.shard(model, weights)
    return flow.nn.shard(model, states, kind="states") if states else model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("name", MAKES)
def test_steps_are_those_of_one_device(name: str, lies: str) -> None:
    model, one = laid(net(), lies), net()
    mine, ones = MAKES[name](model.parameters()), MAKES[name](one.parameters())
    step = flow.compile(model, loss_fn, mine, placement=DATA)
    tolerance = (
        1e-8 if name == "ASGD" else 1e-10
    )  # torch keeps its rate in float32, one by one and all at once otherwise
    for at in range(5):
        cut = (flow.tensor(x, placement=DATA, sbp=S(0)) for x in batch(at))
        same(step(*cut), eager(one, loss_fn, ones, *batch(at)), tolerance)
    same_model(model, one, tolerance)


def test_every_optimizer_of_torch_steps_in_one_way() -> None:
    known = {each for each in vars(optim).values() if inspect.isclass(each) and issubclass(each, optim.Optimizer)}
    whole = {optim.Optimizer, optim.Adafactor, optim.LBFGS, optim.SparseAdam, getattr(optim, "Muon", optim.LBFGS)}
    assert known == whole | ALONE.keys()
    assert not whole & ALONE.keys()


@pytest.mark.parametrize("lies", LIES)
def test_groups_and_rates_are_kept(lies: str) -> None:
    model, one = laid(net(), lies), net()

    def make(each: Any) -> tuple[optim.Optimizer, Any]:
        groups: list[Any] = [
            {"params": [each[0].weight], "weight_decay": 0.1},
            {"params": [each[0].bias, *each[2].parameters()]},
        ]
        made = optim.NAdam(groups, lr=0.1)
        return made, optim.lr_scheduler.StepLR(made, 2)

    (mine, rate), (ones, other) = make(model), make(one)
    step = flow.compile(model, loss_fn, mine, placement=DATA)
    for at in range(5):
        same(step(*batch(at)), eager(one, loss_fn, ones, *batch(at)))
        rate.step()
        other.step()
    same_model(model, one)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "RAdam", "Lamb", "Adafactor"])
def test_states_of_one_device_are_loaded_and_saved(name: str, lies: str) -> None:
    model, one = laid(net(), lies), net()
    mine, ones = MAKES[name](model.parameters()), MAKES[name](one.parameters())
    for at in range(2):
        eager(one, loss_fn, ones, *batch(at))
    model.load_state_dict(one.state_dict())
    mine.load_state_dict(copy.deepcopy(ones.state_dict()))  # torch keeps the tensors that it is given
    step = flow.compile(model, loss_fn, mine, placement=DATA)
    for at in range(2, 4):
        same(step(*batch(at)), eager(one, loss_fn, ones, *batch(at)))
    other = net()
    last = MAKES[name](other.parameters())
    other.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    last.load_state_dict(copy.deepcopy(tree_map(_plain, mine.state_dict())))
    for at in range(4, 6):
        same(eager(other, loss_fn, last, *batch(at)), eager(one, loss_fn, ones, *batch(at)))
    same_model(other, one)


def _plain(part: Any) -> Any:
    return part.full_tensor() if isinstance(part, flow.GlobalTensor) else part


@pytest.mark.parametrize("make", [optim.LBFGS, optim.SparseAdam])
def test_an_optimizer_that_no_graph_can_have(make: Any) -> None:
    model = net()
    with pytest.raises(SbpError, match=f"{make.__name__} (computes the loss several times|steps by sparse gradients)"):
        flow.compile(model, loss_fn, make(model.parameters()), placement=DATA).plan_for(*batch(0))


def test_shards_step_in_runs_of_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's family makes no more of a run of parameters than the run has."""
    runs: list[list[int]] = []

    def told(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        runs.append([sum(x.nbytes for x in group["params"]) for group in optimizer.param_groups])

    monkeypatch.setattr(on_shards, "AT_ONCE", 300)
    model, one = net(), net()
    mine, ones = (optim.AdamW(each.parameters(), lr=0.1) for each in (model, one))
    step = flow.compile(model, loss_fn, mine, placement=flow.placement("cpu", range(1)))
    mine.register_step_pre_hook(told)
    for at in range(3):
        same(step(*batch(at)), eager(one, loss_fn, ones, *batch(at)))
    same_model(model, one)
    assert runs == [[8 * 7 * 4 + 8 * 7, 8 * 3 * 7 + 8 * 3]] * 3


def trained(graph: bool) -> tuple[nn.Module, optim.Optimizer, Callable[[], Any]]:
    """Two layers that have trained a step in a graph, or plain, and what trains another."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(), torch.ones(4, 3).double()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = flow.compile(model, lambda model, x: model(x).square().mean(), optimizer, placement=DATA)

    def train() -> None:
        if graph:
            step(x)
        else:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    return model, optimizer, train


def test_states_are_seen_though_parameters_were_replaced_by_as_many() -> None:
    model, optimizer, train = trained(graph=True)
    model.load_state_dict({name: x.detach().clone() for name, x in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    train()
    assert all("momentum_buffer" in optimizer.state[p] for p in model.parameters())


def another_dict(state: Any, p: Any) -> None:
    state[p] = {"momentum_buffer": state[p]["momentum_buffer"] * 0}


def another_tensor(state: Any, p: Any) -> None:
    state[p]["momentum_buffer"] = state[p]["momentum_buffer"] * 0


@pytest.mark.parametrize("put", [another_dict, another_tensor])
def test_a_state_that_is_put_in_the_place_of_another_counts_at_the_next_step(put: Callable[[Any, Any], None]) -> None:
    found = []
    for graph in (False, True):
        model, optimizer, train = trained(graph)
        put(optimizer.state, optimizer.param_groups[0]["params"][0])
        train()
        found.append([x.full_tensor() if isinstance(x, flow.GlobalTensor) else x for x in model.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_states_that_stay_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer, train = trained(graph=True)
    monkeypatch.setattr(on_shards, "_Shards", None)  # which nobody makes
    for _ in range(3):
        train()
    assert len(optimizer.state) == 4


def test_one_more_parameter_costs_a_step_few_calls() -> None:
    """Of 17.5 a parameter, with what its layer computes, torch's own step makes ten; 44.5 were made."""

    def made(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        optimizer = optim.AdamW(model.parameters(), fused=True)
        where, x = flow.placement("cpu", [0]), torch.ones(2, 4)
        step = flow.compile(model, lambda model, x: model(x).square().sum(), optimizer, placement=where)
        for _ in range(3):
            step(x)
        return calls(lambda: step(x))

    few, many = made(4), made(20)
    assert many - few <= 18 * 2 * 16
