"""Edits: what users change of a model, its optimizer, its loss and its data between two steps; each by its name.

A scene is one model with all that belongs to it, in plain torch, eager on global tensors, or as a compiled step. The
same edits of each have to leave all of them alike.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters

import sbpflow as flow
from sbpflow import S
from tests.nn.graph.paths import Path
from tests.nn.graph.trainings import halved_states

__all__ = ["EDITS", "Edit", "Scene", "numbers"]

SCALE = 1.0  # globals of the loss function, which every scene has of its own
SETTINGS: dict[str, Any] = {"weight": 1.0, "powers": [1.0, 0.5]}


def helper(x: Tensor) -> Tensor:
    return x.square()


@dataclass
class Config:
    factor: float = 1.0
    bias: bool = True


class Block(nn.Module):
    """A layer that goes by settings of all kinds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.0)
        self.scale, self.act = 1.0, torch.tanh
        self.cfg: dict[str, Any] = {"k": 1.0, "more": {"list": [1.0, 0.5]}}
        self.config = Config()
        self.register_buffer("shift", torch.full((width,), 0.1))
        self.table = torch.full((width,), 0.2)
        self.register_buffer("later", None)
        self.settings: Any = type("Settings", (), {"factor": 1.0})
        self.array = np.ones(2)

    shift: Tensor
    later: Tensor | None

    def mixed(self, x: Tensor) -> Tensor:
        x = x * self.settings.factor * float(self.array[1])
        return x * self.scale + self.shift + self.table + (0.0 if self.later is None else self.later)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(x)) * self.cfg["k"] * self.cfg["more"]["list"][1]
        out: Tensor = self.drop(self.mixed(y)) * self.config.factor + (x if getattr(self, "skips", False) else 0.0)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(6, 8), Block(8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 6)
        self.named = nn.ModuleDict({"one": nn.Tanh(), "other": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.block(self.first(x)))
        for layer in self.named.values():
            x = layer(x)
        out: Tensor = self.last(x) * getattr(self, "also", 1.0)
        return out


def made_loss() -> tuple[Callable[..., Tensor], dict[str, Any], Callable[[float], None]]:
    """A loss function, its globals, and what sets the number that it closes over."""
    alpha = 1.0

    def loss(model: Any, x: Tensor, y: Tensor, beta: float = 0.1) -> Tensor:
        error = helper(model(x) - y).mean() * SCALE * SETTINGS["weight"] * SETTINGS["powers"][0]
        made: Tensor = error * alpha + beta * model.first.bias.square().sum()
        return made

    def put(value: float) -> None:
        nonlocal alpha
        alpha = value

    own = {**globals()}
    return FunctionType(loss.__code__, own, "loss", loss.__defaults__, loss.__closure__), own, put


def whole(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, flow.GlobalTensor) else x.detach()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


@dataclass
class Scene:
    """One model in training. `mode` is plain, eager or graph, which may go a path of its own."""

    mode: str
    optimizer_of: Callable[..., Any] = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    ranks: int = 2
    path: Path | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = type("Own", (Net,), {})()
        self.where = flow.placement("cpu", range(self.ranks))
        self.loss, self.globals, self.put_alpha = made_loss()
        if self.mode == "eager":
            flow.nn.to_global(self.model, self.where, {"*.weight": S(0)})
        self.optimizer = self.optimizer_of(self.model.parameters())
        self.kept: dict[str, Any] = {}  # by edits, for those that come later
        self.dtype, self.count = torch.float32, 0
        if self.mode == "graph":
            options: Any = {"placement": self.where} if self.path is None else self.path.options
            if self.path is not None:
                self.path.placed(self.model, ["first", "block"])
            self.step: Any = flow.compile(self.model, self.loss, self.optimizer, **options)

    def new(self, module: nn.Module) -> Any:
        """A new module with values of its own, which an eager model has on ranks as all others."""
        with torch.no_grad():
            for at, p in enumerate(module.parameters()):
                p.copy_(numbers(*p.shape, seed=at))
        module.to(self.dtype)
        return flow.nn.to_global(module, self.where) if self.mode == "eager" else module

    def like(self, value: Tensor, other: Tensor) -> Tensor:
        """A tensor to put in the place of another."""
        value = value.to(other.dtype)
        if isinstance(other, flow.GlobalTensor):
            return flow.tensor(value, placement=other.placement, sbp=other.sbp)
        return value

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; its loss."""
        self.count += 1
        x, y = x.to(self.dtype), y.to(self.dtype)
        if self.mode == "graph":
            return whole(self.step(x, y))
        if self.mode == "eager":
            x, y = (flow.tensor(each, placement=self.where, sbp=S(0)) for each in (x, y))
        loss = self.loss(self.model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return whole(loss)

    def values(self) -> dict[str, Tensor]:
        return {name: whole(x) for name, x in [*self.model.named_parameters(), *self.model.named_buffers()]}


@dataclass(frozen=True)
class Edit:
    """A change; `says` is how the docs tell of it, `eager` whether global tensors can do it in eager code, and `staged`
    whether it can be of a model on two stages."""

    name: str
    says: str
    change: Callable[[Scene], Any]
    eager: bool = True
    again: bool = True  # whether it may be made twice
    staged: bool = True


EDITS: list[Edit] = []


def edit(says: str, **how: Any) -> Callable[[Callable[[Scene], Any]], Callable[[Scene], Any]]:
    def note(change: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
        EDITS.append(Edit(change.__name__, says, change, **how))
        return change

    return note


# Modules


@edit("a layer replaced, its parameters added to the optimizer")
def layer_replaced(s: Scene) -> None:
    s.model.layers[2] = s.new(nn.Linear(8, 8))
    s.optimizer.add_param_group({"params": list(s.model.layers[2].parameters())})


@edit("a layer appended")
def layer_appended(s: Scene) -> None:
    s.model.layers.append(nn.Tanh())


@edit("a layer removed", again=False)
def layer_removed(s: Scene) -> None:
    del s.model.layers[1]


@edit("layers in another order")
def layers_swapped(s: Scene) -> None:
    s.model.layers[0], s.model.layers[-1] = s.model.layers[-1], s.model.layers[0]


@edit("")
def named_in_another_order(s: Scene) -> None:
    name = next(iter(s.model.named))
    s.model.named[name] = s.model.named.pop(name)


@edit("`module.forward = f`")
def forward_replaced(s: Scene) -> None:
    before = s.model.block.forward
    s.model.block.forward = lambda x: before(x) * 0.5


@edit("a method of the class")
def class_method_replaced(s: Scene) -> None:
    s.kept["forward"] = before = s.kept.get("forward", Net.forward)
    s.count += 1
    factor = 1.0 + 0.1 * s.count
    type(s.model).forward = lambda self, x: before(self, x) * factor


@edit("the class of a module")
def class_replaced(s: Scene) -> None:
    class Shifted(type(s.model.block)):  # type: ignore[misc]
        def mixed(self, x: Tensor) -> Tensor:
            out: Tensor = super().mixed(x) + 0.3
            return out

    s.model.block.__class__ = Shifted


@edit("an attribute: a number, a function, one that was not there")
def attribute(s: Scene) -> None:
    s.model.block.scale = s.model.block.scale + 0.25


@edit("")
def function_attribute(s: Scene) -> None:
    s.model.block.act = torch.sigmoid if s.model.block.act is torch.tanh else torch.tanh


@edit("")
def new_attribute(s: Scene) -> None:
    s.model.block.skips = not getattr(s.model.block, "skips", False)


@edit("an entry of a dict or list that a module holds, however deep")
def dict_entry(s: Scene) -> None:
    s.model.block.cfg["k"] += 0.25


@edit("")
def nested_entry(s: Scene) -> None:
    s.model.block.cfg["more"]["list"][1] += 0.25


@edit("an attribute of an object that a module holds, such as its config")
def config_attribute(s: Scene) -> None:
    s.model.block.config.factor += 0.25


@edit("a setting of a class that a module holds, and one that was not there")
def class_setting(s: Scene) -> None:
    s.model.block.settings.factor += 0.25


@edit("")
def new_class_setting(s: Scene) -> None:
    type(s.model).also = 0.5 + 0.1 * s.count


@edit("an array of numpy, written to")
def array(s: Scene) -> None:
    s.model.block.array[1] += 0.25


@edit("`dropout.p`, where the module trains or not")
def dropout(s: Scene) -> None:
    s.model.block.drop.eval()
    s.model.block.drop.p = 0.5


@edit("`train()`, `eval()`: plans of both are kept")
def evaluated(s: Scene) -> None:
    s.model.train(not s.model.training)


@edit("`requires_grad_`")
def frozen(s: Scene) -> None:
    s.model.layers[0].requires_grad_(not s.model.layers[0].weight.requires_grad)


# Hooks


def half(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 0.5


@edit("forward hooks and pre-hooks, put on or taken off")
def forward_hook(s: Scene) -> None:
    s.kept.setdefault("handles", []).append(s.model.block.register_forward_hook(half))


@edit("")
def forward_pre_hook(s: Scene) -> None:
    s.kept.setdefault("handles", []).append(s.model.block.register_forward_pre_hook(lambda m, args: (args[0] + 0.1,)))


@edit("")
def hook_removed(s: Scene) -> None:
    if s.kept.get("handles"):
        s.kept["handles"].pop().remove()


@edit("hooks of parameters, and of optimizers")
def parameter_hook(s: Scene) -> None:
    s.model.last.weight.register_hook(lambda grad: grad * 0.5)


@edit("")
def optimizer_hook(s: Scene) -> None:
    def hook(optimizer: Any, *args: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    s.optimizer.register_step_pre_hook(hook)


# Parameters and buffers


@edit("a parameter replaced, and the optimizer told")
def parameter_replaced(s: Scene) -> None:
    s.model.last = s.new(nn.Linear(8, 6))
    s.optimizer.add_param_group({"params": [*s.model.last.parameters()]})


@edit("weights tied, or not any more")
def tied(s: Scene) -> None:
    layers = s.model.layers
    if layers[0].weight is layers[-1].weight:
        layers[-1].weight = nn.Parameter(layers[0].weight.detach().clone())
        s.optimizer.add_param_group({"params": [layers[-1].weight]})
    else:
        layers[-1].weight = layers[0].weight


@edit("values written: `copy_`, `mul_`, `load_state_dict`")
def written(s: Scene) -> None:
    with torch.no_grad():
        s.model.first.weight.mul_(0.5)
        s.model.last.bias.copy_(s.like(numbers(6), s.model.last.bias))


@edit("")
def loaded(s: Scene) -> None:
    s.model.load_state_dict({name: x * 0.9 for name, x in s.values().items() if name in s.model.state_dict()})


@edit("other memory: `p.data = x`, `p.set_(x)`, `vector_to_parameters`, `load_state_dict(assign=True)`")
def data(s: Scene) -> None:
    for at, p in enumerate(s.model.parameters()):
        p.data = s.like(numbers(*p.shape, seed=at), p)


@edit("")
def data_cloned(s: Scene) -> None:
    for p in s.model.parameters():
        p.data = p.data.clone()


@edit("")
def plain_data(s: Scene) -> None:
    s.model.first.weight.data = numbers(8, 6).to(s.dtype)


@edit("")
def memory_set(s: Scene) -> None:
    with torch.no_grad():
        s.model.first.weight.set_(s.like(numbers(8, 6), s.model.first.weight))


@edit("", staged=False)
def vector(s: Scene) -> None:
    vector_to_parameters(parameters_to_vector(s.model.parameters()) * 0.5, s.model.parameters())


@edit("a buffer: replaced, or written to")
def buffer_replaced(s: Scene) -> None:
    s.model.block.shift = s.like(numbers(8), s.model.block.shift)


@edit("")
def buffer_put_in(s: Scene) -> None:
    s.model.block.later = s.like(numbers(8), s.model.block.shift)


@edit("")
def buffer_written(s: Scene) -> None:
    s.model.block.shift.add_(0.1)


@edit("a tensor that is a plain attribute, of whatever shape", eager=False)
def tensor_attribute(s: Scene) -> None:
    s.model.block.table = numbers(8).to(s.dtype) if s.model.block.table.ndim == 0 else torch.tensor(0.3, dtype=s.dtype)


@edit("parametrizations, `weight_norm`, pruning", again=False)
def weight_norm(s: Scene) -> None:
    parametrizations.weight_norm(s.model.last)
    s.optimizer.add_param_group({"params": list(s.model.last.parametrizations.parameters())})


@edit("", again=False)
def weight_norm_removed(s: Scene) -> None:
    if parametrize.is_parametrized(s.model.last):
        parametrize.remove_parametrizations(s.model.last, "weight")
        s.optimizer.add_param_group({"params": [s.model.last.weight]})


@edit("", again=False)
def pruned(s: Scene) -> None:
    prune.l1_unstructured(s.model.first, "weight", amount=5)  # type: ignore[no-untyped-call]


@edit("a copy, loaded later (EMA)")
def averaged(s: Scene) -> None:
    if "average" in s.kept:
        with contextlib.suppress(RuntimeError):  # a model of other parts by now
            s.model.load_state_dict(s.kept.pop("average").state_dict())
    else:
        s.kept["average"] = copy.deepcopy(s.model)


@edit("`model.double()`", again=False)
def doubled(s: Scene) -> None:
    s.model.double()
    s.model.block.table = s.model.block.table.double()
    s.dtype = torch.float64


# Optimizers


@edit("rates and other settings of groups")
def rate(s: Scene) -> None:
    for group in s.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.01


@edit("`optimizer.load_state_dict`")
def optimizer_loaded(s: Scene) -> None:
    s.optimizer.load_state_dict(halved_states(s.optimizer))


@edit("another optimizer: `step.optimizer = ...`")
def another_optimizer(s: Scene) -> None:
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.05)
    if s.mode == "graph":
        s.step.optimizer = s.optimizer


# The loss function


@edit("a number that the loss function closes over, or a default")
def closure(s: Scene) -> None:
    s.put_alpha(1.0 + 0.1 * s.count)


@edit("")
def default(s: Scene) -> None:
    s.loss.__defaults__ = (0.2 + 0.01 * s.count,)


@edit("globals that it reads: numbers, entries, functions")
def global_number(s: Scene) -> None:
    s.globals["SCALE"] += 0.1


@edit("")
def global_entry(s: Scene) -> None:
    s.globals["SETTINGS"] = {**s.globals["SETTINGS"], "weight": 1.0 + 0.1 * s.count}


@edit("")
def global_nested(s: Scene) -> None:
    s.globals["SETTINGS"] = before = copy.deepcopy(s.globals["SETTINGS"])
    before["powers"][0] += 0.1


@edit("")
def global_function(s: Scene) -> None:
    s.globals["helper"] = torch.abs if s.globals["helper"] is helper else helper


@edit("another loss function: `step.loss = f`")
def another_loss(s: Scene) -> None:
    before = s.loss
    s.loss = lambda model, x, y: before(model, x, y) * 0.5
    if s.mode == "graph":
        s.step.loss = s.loss
