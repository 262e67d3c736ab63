"""Belongings of a parameter stay with it when it becomes global: hooks, gradient, attributes, requires_grad."""

# mypy: disallow-untyped-calls=False

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.placement.errors import SbpError
from tests.nn.either import Maker, X, differs
from tests.ranks import Ranks

LAWS: dict[str, Callable[[Maker], Any]] = {}
LINE = flow.placement("cpu", range(4))


def law(function: Callable[[Maker], Any]) -> Callable[[Maker], Any]:
    LAWS[function.__name__.replace("_", " ")] = function
    return function


def linear() -> Any:
    torch.manual_seed(0)
    return nn.Linear(6, 4).double()


def grads(model: Any, x: Tensor) -> list[Any]:
    model(x).pow(2).sum().backward()
    return [w.grad for w in model.parameters()]


def double(w: Any) -> None:
    w.grad.mul_(2)


def negate(w: Any) -> None:
    w.grad.mul_(-1)


@law
def hooks_set_before_are_called_until_their_handles_remove_them(make: Maker) -> Any:
    model, seen = linear(), []
    model.bias.register_hook(lambda g: seen.append(g.sum().item()))
    handles = [model.weight.register_hook(lambda g: g * 3)]
    handles += [model.weight.register_post_accumulate_grad_hook(double)]
    make.module(model)
    first = [g.clone() for g in grads(model, make(X))]
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return first, grads(model, make(X)), seen


@law
def hooks_outlive_freezing(make: Maker) -> Any:
    model = linear()
    model.weight.register_hook(lambda g: g * 3)
    model.bias.register_post_accumulate_grad_hook(double)
    model.requires_grad_(False)
    make.module(model)
    frozen = [w.requires_grad for w in model.parameters()]
    model.requires_grad_(True)
    one = grads(model, make(X))
    model.zero_grad()
    model.requires_grad_(False).requires_grad_(True)
    return frozen, one, grads(model, make(X))


@law
def hooks_outlive_new_values(make: Maker) -> Any:
    w, seen = make(X, True), []
    w.register_hook(lambda g: g * 3)
    w.register_post_accumulate_grad_hook(lambda w: seen.append(1))
    w.data = w.data * 2
    (w * w).sum().backward()
    return w.grad, seen


@law
def a_gradient_that_was_there_is_added_to(make: Maker) -> Any:
    model = linear()
    grads(model, X)
    make.module(model)
    held = [w.grad.clone() for w in model.parameters()]
    return held, grads(model, make(X))


@law
def attributes_and_what_is_frozen_stay(make: Maker) -> Any:
    model = linear()
    model.weight.decay, model.bias.requires_grad, model.bias.note = 0.1, False, ["kept"]
    make.module(model)
    return model.weight.decay, model.bias.note, [w.requires_grad for w in model.parameters()], grads(model, make(X))


@law
def tied_weights_have_their_hooks_once(make: Maker) -> Any:
    model: Any = nn.Sequential(linear(), linear())
    square = nn.Linear(6, 6).double()
    model[0], model[1] = square, nn.Linear(6, 6).double()
    model[1].weight = square.weight
    torch.manual_seed(0)
    nn.init.normal_(square.weight)
    for w in (square.bias, model[1].bias):
        nn.init.zeros_(w)
    seen: list[float] = []
    square.weight.register_hook(lambda g: seen.append(g.sum().item()))
    make.module(model)
    return seen, grads(model, make(X)), model[0].weight is model[1].weight


@law
def a_buffer_that_is_trained_is_trained_on(make: Maker) -> Any:
    model = linear()
    model.register_buffer("scale", torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True))
    model.scale.register_hook(lambda g: g * 3)
    make.module(model)
    (model(make(X)) * model.scale).sum().backward()
    return model.scale.grad, [w.grad for w in model.parameters()]


@pytest.mark.parametrize("name", LAWS)
def test_what_hangs_on_a_parameter_stays(name: str) -> None:
    assert not differs(LAWS[name])


@pytest.mark.parametrize("sbp", [B, P, S(0)], ids=str)
def test_a_parameter_that_is_global_keeps_its_hooks_when_it_is_laid_otherwise(sbp: Any) -> None:
    plain, model = linear(), linear()
    flow.nn.to_global(model, LINE)
    for one in (plain, model):
        one.weight.register_hook(lambda g: g * 3)
        one.weight.tag = "kept"
    grads(model, flow.tensor(X, placement=LINE, sbp=S(0)))
    flow.nn.to_global(model, flow.placement("cpu", [0, 1]), sbp)
    found = grads(model, flow.tensor(X, placement=flow.placement("cpu", [0, 1]), sbp=S(0)))
    grads(plain, X)
    assert all(torch.allclose(a.full_tensor(), b) for a, b in zip(found, grads(plain, X), strict=True))
    assert model.weight.tag == "kept"


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))).double()


DATA = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)


def hooked(model: Any, seen: list[Any]) -> Any:
    """Gradients made small and counted, one thing before and one after they are added up."""

    def count(w: Any) -> None:
        assert w.grad is not None
        grad = w.grad.full_tensor() if isinstance(w, flow.GlobalTensor) else w.grad
        seen.append(grad.sum().item())

    model[0][0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    model[1][0].bias.register_hook(lambda g: g * 5)
    model[0][0].bias.register_post_accumulate_grad_hook(negate)
    model[1][0].weight.register_post_accumulate_grad_hook(count)
    return model


def stepped(model: Any, run: Callable[[Tensor], Any], zero: Callable[[], None], seen: list[Any]) -> list[Any]:
    losses = []
    for k in range(3):
        losses.append(float(run(DATA + k)))
        zero()
    weights = [w.full_tensor() if isinstance(w, flow.GlobalTensor) else w for w in model.parameters()]
    return [*losses, *seen, *[w.detach() for w in weights]]


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def plain_run(kind: Any) -> list[Any]:
    seen: list[Any] = []
    model = hooked(net(), seen)
    optimizer = kind(model.parameters(), lr=0.1)

    def run(x: Tensor) -> float:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return stepped(model, run, optimizer.zero_grad, seen)


def graph_run(kind: Any, late: bool, **options: Any) -> list[Any]:
    """Hooks on plain parameters, or on those of a graph that has run already."""
    seen: list[Any] = []
    model = net() if late else hooked(net(), seen)
    optimizer = kind(model.parameters(), lr=0.1)
    if "micro_batches" in options:
        flow.nn.pipeline(model, [flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])], "1f1b")
    else:
        flow.nn.place(model, LINE)
    graph = flow.compile(model, loss_of, optimizer, **options)
    if late:
        graph.plan_for(DATA)
        hooked(model, seen)
    return stepped(model, graph, lambda: None, seen)


def alike(found: list[Any], wanted: list[Any]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(torch.allclose(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"clip_grad_norm": 1e6}], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_hooks_on_parameters_are_called_in_a_graph(kind: Any, late: bool, options: Any) -> None:
    assert alike(graph_run(kind, late, **options), plain_run(kind))


@pytest.mark.sweep
def test_hooks_on_parameters_are_called_in_a_graph_of_many_processes(ranks4: Ranks) -> None:
    wanted = plain_run(torch.optim.SGD)
    for found in ranks4(graph_run, torch.optim.SGD, False):
        assert alike(found, wanted)


def test_what_cannot_come_along_is_an_error() -> None:
    class Marked(nn.Parameter):
        pass

    model = linear()
    model.weight = Marked(model.weight.data)
    with pytest.raises(SbpError, match=r"(?s)to_global: weight is a Marked.*module.weight = torch.nn.Parameter"):
        flow.nn.to_global(model, LINE)
    model = linear()
    model.register_buffer("twice", model.weight * 2)
    with pytest.raises(SbpError, match=r"twice .* was computed from something that requires grad"):
        flow.nn.to_global(model, LINE)
    assert not isinstance(model.weight, flow.GlobalTensor)


def own_gradients() -> str:
    model = linear()
    model.bias.grad = torch.full((4,), float(flow.boxing.owned(LINE)[0]), dtype=torch.float64)
    with pytest.raises(SbpError) as caught:
        flow.nn.to_global(model, LINE)
    return str(caught.value)


def test_gradients_that_differ_between_ranks_do_not_come_along(ranks4: Ranks) -> None:
    for text in ranks4(own_gradients):
        assert "ranks 0 and 1 have different values in bias.grad" in text


def test_a_module_may_read_what_hangs_on_its_parameters_in_a_graph() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight.scale  # type: ignore[no-any-return,attr-defined]

    model: Any = Scaled(8, 8).double()
    model.weight.scale = 3.0
    plain = copy.deepcopy(model)
    plain.weight.scale = 3.0
    flow.nn.place(model, LINE)
    for _ in range(2):
        assert torch.allclose(flow.compile(model)(DATA).full_tensor(), plain(DATA))
