"""State: copies, pickles and checkpoints of global tensors, and torch's own tools around modules and optimizers."""

# mypy: disallow-untyped-calls=False

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils as tools
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import swa_utils

from tests.nn.either import Maker, X, Y, differs, net

LAWS: dict[str, Callable[[Maker], Any]] = {}


def law(function: Callable[[Maker], Any]) -> Callable[[Maker], Any]:
    LAWS[function.__name__.replace("_", " ")] = function
    return function


def saved(value: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def train(make: Maker, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[Tensor]:
    x = make(X)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(x) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]
    return list(model.parameters())


@law
def a_deep_copy_is_a_leaf_of_its_own(make: Maker) -> Any:
    x: Any = make(X, True)
    (x * x).sum().backward()
    x.note = [1]
    y = copy.deepcopy(x)
    y.data.add_(1)
    y.note.append(2)
    a, b = copy.deepcopy([x, x])
    return x, y, y.grad, x.note, y.note, y.is_leaf, a is b


@law
def what_is_computed_has_no_deep_copy(make: Maker) -> Any:
    copy.deepcopy(make(X, True) * 2)


@law
def a_copied_module_shares_nothing(make: Maker) -> Any:
    model = make.module(net())
    other = copy.deepcopy(model)
    nn.init.zeros_(other[0].weight)  # type: ignore[index]
    return list(model.parameters()), list(other.parameters()), [isinstance(p, nn.Parameter) for p in other.parameters()]


@law
def a_pickle_keeps_values_and_what_trains(make: Maker) -> Any:
    x, p = pickle.loads(pickle.dumps((make(X, True), nn.Parameter(make(Y)))))
    return x, p, isinstance(p, nn.Parameter)


@law
def a_saved_state_is_read_with_weights_only(make: Maker) -> Any:
    model = make.module(net())
    return [dict(saved(model.state_dict(), weights_only)) for weights_only in (False, True)]


@law
def training_goes_on_from_a_saved_state(make: Maker) -> Any:
    model = make.module(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(make, model, optimizer, 2)
    state = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, True)
    model = make.module(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return train(make, model, optimizer, 2)


@law
def plain_values_are_loaded_into_global_weights(make: Maker) -> Any:
    model = make.module(net())
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in net().state_dict().items()})
    return list(model.parameters())


@law
def a_wrong_state_is_refused(make: Maker) -> Any:
    model = make.module(net())
    state = model.state_dict()
    state["0.weight"] = make(torch.ones(2, 2))
    model.load_state_dict(state)


@law
def what_is_missing_is_told(make: Maker) -> Any:
    model = make.module(net())
    state = model.state_dict()
    del state["0.weight"]
    state["other"] = make(X)
    told = model.load_state_dict(state, strict=False)
    return told.missing_keys, told.unexpected_keys


@law
def vectors_of_parameters(make: Maker) -> Any:
    model = make.module(net())
    vector = tools.parameters_to_vector(model.parameters())
    tools.vector_to_parameters(vector * 2, model.parameters())
    return vector, list(model.parameters())


@law
def lists_of_parameters(make: Maker) -> Any:
    held = nn.ParameterList([make(X), make(Y)])
    return [isinstance(p, nn.Parameter) for p in held], list(held)


@law
def zeroed_gradients(make: Maker) -> Any:
    model = make.module(net())
    model(make(X)).sum().backward()
    model.zero_grad(set_to_none=False)
    zeros = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return zeros, [p.grad for p in model.parameters()]


@law
def clipped_values(make: Maker) -> Any:
    model = make.module(net())
    model(make(X)).pow(2).sum().backward()
    tools.clip_grad_value_(model.parameters(), 0.3)
    return [p.grad for p in model.parameters()]


@law
def averaged_weights(make: Maker) -> Any:
    model = make.module(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mean = swa_utils.AveragedModel(model)
    moving = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        train(make, model, optimizer, 1)
        mean.update_parameters(model)
        moving.update_parameters(model)
    return list(mean.parameters()), list(moving.parameters()), mean(make(X))


@law
def a_scaled_step_that_overflows_is_skipped(make: Maker) -> Any:
    model, seen = make.module(net()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        loss = (model(make(X)) ** 2).sum() * (math.inf if step == 2 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        tools.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), [p.detach().clone() for p in model.parameters()]]
    return seen


@law
def an_infinity_on_one_rank_skips_the_step_on_all(make: Maker) -> Any:
    w = make(X, True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    factor = torch.ones_like(X)
    factor[3, 5] = math.inf
    scaler.scale((w * make(factor)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return w, scaler.get_scale()


@law
def schedules(make: Maker) -> Any:
    model = make.module(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for _ in range(3):
        train(make, model, optimizer, 1)
        cosine.step()
        plateau.step(model(make(X)).sum().detach())
    return list(model.parameters()), optimizer.param_groups[0]["lr"]


@law
def calls_with_other_weights(make: Maker) -> Any:
    model = make.module(net())
    return torch.func.functional_call(model, {n: p * 2 for n, p in model.named_parameters()}, (make(X),))


@pytest.mark.parametrize("name", LAWS)
def test_state_is_that_of_one_tensor(name: str) -> None:
    assert not differs(LAWS[name])


@pytest.mark.parametrize(
    "said", ["to(torch.float32)", "half()", "double()", "cpu()", "requires_grad_(False)", "eval()"]
)
def test_a_module_changes_as_on_one_device(said: str) -> None:
    def change(make: Maker) -> Any:
        model = make.module(net())
        before = list(model.parameters())
        same = eval("model." + said, {"model": model, "torch": torch}) is model
        after = list(model.parameters())
        return same, after, [a is b for a, b in zip(before, after, strict=True)], model.training

    assert not differs(change)


@pytest.mark.parametrize("norm", [2, 1, 0.5, 3, math.inf, -math.inf, 0])
def test_clipping_takes_the_norm_of_all_gradients(norm: float) -> None:
    def clip(make: Maker) -> Any:
        model = make.module(net())
        model(make(X)).pow(2).sum().backward()
        total = tools.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm)
        return total, tools.clip_grad_norm_(model.parameters(), 1.0, norm), [p.grad for p in model.parameters()]

    assert not differs(clip)


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"lr": 0.1, "fused": True}),
    ("Adam", {"foreach": True, "amsgrad": True}),
    ("Adam", {"foreach": False}),
    ("AdamW", {"fused": True, "weight_decay": 0.1}),
    ("Adagrad", {"foreach": True}),
    ("Adagrad", {"fused": True}),
    ("RMSprop", {"foreach": True, "centered": True, "momentum": 0.9}),
    ("NAdam", {"foreach": True}),
    ("LBFGS", {"max_iter": 4}),
    ("LBFGS", {"max_iter": 4, "line_search_fn": "strong_wolfe"}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=lambda value: str(value))
def test_an_optimizer_steps_as_on_one_device_also_on_addends(name: str, options: dict[str, Any]) -> None:
    def steps(make: Maker) -> Any:
        model = make.module(net())
        return train(make, model, getattr(torch.optim, name)(model.parameters(), **options))

    assert not differs(steps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("first", ["global", "parametrized"])
def test_parametrized_weights_train_as_on_one_device(kind: str, first: str) -> None:
    def trained(make: Maker) -> Any:
        model: Any = make.module(net()) if first == "global" else net()
        torch.manual_seed(0)
        getattr(parametrizations, kind)(model[0])
        model = model if first == "global" else make.module(model)
        return train(make, model, torch.optim.SGD(model.parameters(), lr=0.01)), model[0].weight

    assert not differs(trained)


@pytest.mark.parametrize("said", ["zeros_(w)", "xavier_normal_(w)", "orthogonal_(w)"])
def test_a_weight_is_filled_in_place(said: str) -> None:
    def fill(make: Maker) -> Any:
        w = nn.Parameter(make(X))
        out = eval("nn.init." + said, {"nn": nn, "w": w})
        return w, out is w, w.is_leaf

    assert not differs(fill)
