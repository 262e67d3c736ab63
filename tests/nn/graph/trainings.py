"""Trainings drawn at random: a model of layers of several kinds, its optimizer and its loss, in plain torch, eager or
as a compiled step. Drawn by one seed they are alike, whatever runs them.
"""

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S

__all__ = ["FACTORS", "OPTIMIZERS", "WAYS", "Training", "Way", "drawn_layer", "halved_states", "numbers", "whole"]

WIDTH, WORDS, OUT = 6, 11, 4
FACTOR = 1.0  # globals of the loss functions, which each training has of its own
FACTORS: dict[str, Any] = {"more": [1.0, 0.5]}


def numbers(draw: Random, *shape: int) -> Tensor:
    flat = [draw.uniform(-0.5, 0.5) for _ in range(math.prod(shape))]
    return torch.tensor(flat, dtype=torch.float64).reshape(shape)


def whole(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, flow.GlobalTensor) else x.detach()


# Layers, from rows of WIDTH to rows of WIDTH


class Scaled(nn.Module):
    """A layer that goes by settings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.scale, self.act = 1.0, torch.tanh
        self.cfg: dict[str, Any] = {"k": 1.0, "powers": [1.0, 0.5]}
        self.config = SimpleNamespace(factor=1.0)

    def mixed(self, x: Tensor) -> Tensor:
        factor: float = self.scale * sum(self.cfg["powers"])
        return x * factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.act(self.mixed(self.linear(x)))) * self.cfg["k"] * self.config.factor
        return y + x if getattr(self, "skips", False) else y


class Closed(nn.Module):
    """A layer with a function that closes over a number, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        factor = 1.0

        def twisted(x: Tensor) -> Tensor:
            return x * factor

        def put(value: float) -> None:
            nonlocal factor
            factor = value

        self.twisted, self.put = twisted, put

    def forward(self, x: Tensor) -> Tensor:
        return self.twisted(x) * self.weight


class Shifted(nn.Module):
    """A layer with a parameter of no dims, and buffers of which it writes one as it trains."""

    shift: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.counts:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1)
        return x * self.gate + self.shift * (1 - self.mean)

    counts = True


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.LayerNorm(WIDTH),
    nn.Tanh,
    lambda: nn.Dropout(0.0),
    Scaled,
    Closed,
    Shifted,
    lambda: Residual(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)),
    lambda: Residual(Scaled()),
]


def drawn_layer(draw: Random, training: "Training") -> Any:
    """A layer of some kind with values of its own, as the training has its layers."""
    layer = draw.choice(LAYERS)()
    fill(layer, draw)
    return training.taken(layer)


def fill(module: nn.Module, draw: Random) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(numbers(draw, *p.shape))


class Net(nn.Module):
    """Rows or words in, OUT numbers a row out."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.front = nn.Linear(3, WIDTH) if draw.random() < 0.5 else nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(draw.choice(LAYERS)() for _ in range(draw.randint(1, 4)))
        self.head = nn.Linear(WIDTH, OUT)
        fill(self, draw)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x) * getattr(self, "also", 1.0)
        return out


# Losses and optimizers


def squares(x: Tensor) -> Tensor:
    return x.square()


def made_losses() -> tuple[list[Callable[..., Tensor]], dict[str, Any], Callable[[float], None]]:
    """Loss functions, the globals of all, and what sets the number that they close over."""
    alpha = 1.0

    def error(model: Any, x: Tensor, y: Tensor, beta: float = 0.1) -> Tensor:
        made = squares(model(x) - y).mean() * FACTOR * FACTORS["more"][0] * alpha
        whole: Tensor = made + model.head.bias.square().sum() * beta
        return whole

    def chosen(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x) * alpha, y.argmax(-1)) * FACTOR

    def smooth(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.smooth_l1_loss(model(x), y) * alpha

    def put(value: float) -> None:
        nonlocal alpha
        alpha = value

    own = {**globals(), "FACTORS": {"more": [1.0, 0.5]}}
    made: Any = [
        FunctionType(f.__code__, own, f.__name__, f.__defaults__, f.__closure__) for f in (error, chosen, smooth)
    ]
    return made, own, put


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda given: torch.optim.Adam(given, lr=0.02),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.02, weight_decay=0.1),
    "amsgrad": lambda given: torch.optim.Adam(given, lr=0.02, amsgrad=True),
}


@dataclass(frozen=True)
class Way:
    """How a training runs: in plain torch, eager or as a graph; on so many ranks, in stages or not, in pieces; of which
    one process plays all, or each process is one."""

    mode: str = "plain"
    ranks: int = 1
    stages: int = 1
    micro_batches: int = 1
    processes: bool = False


WAYS = {
    "eager 1": Way("eager"),
    "eager 2": Way("eager", 2),
    "graph 1": Way("graph"),
    "graph 2": Way("graph", 2),
    "pieces 1": Way("graph", 1, micro_batches=2),
    "pieces 2": Way("graph", 2, micro_batches=2),
    "stages": Way("graph", 2, 2, micro_batches=2),
    "one piece in stages": Way("graph", 2, 2),
    "eager of processes": Way("eager", 4, processes=True),
    "graph of processes": Way("graph", 4, processes=True),
    "graph of some processes": Way("graph", 2, processes=True),
    "stages of processes": Way("graph", 4, 2, micro_batches=2, processes=True),
}


@dataclass
class Training:
    """A training that a seed draws, to be compared with one in a way `beside`. What changes leave for later ones is in
    `kept`."""

    seed: int
    way: Way
    beside: Way

    def __post_init__(self) -> None:
        draw = Random(self.seed)
        self.dtype = draw.choice([torch.float64] * 4 + [torch.float32, torch.bfloat16])
        self.where = flow.placement("cpu", range(self.way.ranks))
        self.model: Any = type("Own", (Net,), {})(draw).to(self.dtype)
        for layer in self.model.modules():
            if isinstance(layer, Shifted):
                layer.counts = self.beside.micro_batches == 1  # else there are several writes a step
        if self.way.stages > 1:
            self._staged()
        if self.way.mode == "eager":
            flow.nn.to_global(self.model, self.where, {"*.weight": S(0)} if draw.random() < 0.5 else {})
        else:
            draw.random()
        self.kinds = list(OPTIMIZERS) if self.dtype is torch.float64 else ["sgd", "momentum"]
        self.optimizer = OPTIMIZERS[draw.choice(self.kinds)](self._groups(draw))
        self.losses, self.globals, self.put_alpha = made_losses()
        self.loss = draw.choice(self.losses)
        self.kept: dict[str, Any] = {}
        self.autocast = False
        self.fresh = False  # whether it has layers that no step has seen
        if self.way.mode == "graph":
            options: dict[str, Any] = {"inputs": {"x": S(0), "y": S(0)}} if self.way.ranks > self.way.stages else {}
            if self.way.stages == 1:
                options["placement"] = self.where
            if self.way.micro_batches > 1:
                options["micro_batches"] = self.way.micro_batches
            self.step: Any = flow.compile(self.model, self.loss, self.optimizer, **options)

    def _groups(self, draw: Random) -> Any:
        params = [*self.model.parameters()]
        if draw.random() < 0.6:
            return params
        cut = draw.randint(1, len(params) - 1)
        return [{"params": params[:cut]}, {"params": params[cut:], "lr": 0.03}]

    def _staged(self) -> None:
        each = self.way.ranks // 2
        first, last = (flow.placement("cpu", range(at * each, (at + 1) * each)) for at in range(2))
        self.where, layers = first, self.model.layers
        half = len(layers) // 2
        for at, stage in enumerate((first, last)):
            parts = [self.model.front, *layers[:half]] if at == 0 else [*layers[half:], self.model.head]
            for part in parts:
                flow.nn.place(part, stage)

    def taken(self, module: nn.Module) -> Any:
        """A new module as the model's own are."""
        module.to(self.dtype)
        for part in module.modules():
            if isinstance(part, Shifted):
                part.counts = self.beside.micro_batches == 1
        if self.way.stages > 1:
            flow.nn.place(module, self.where)
        self.fresh = True
        return flow.nn.to_global(module, self.where) if self.way.mode == "eager" else module

    def like(self, value: Tensor, other: Tensor) -> Tensor:
        """A tensor to put in the place of another."""
        value = value.to(other.dtype)
        if isinstance(other, flow.GlobalTensor):
            return flow.tensor(value, placement=other.placement, sbp=other.sbp)
        return value

    def batch(self, draw: Random, rows: int) -> tuple[Tensor, Tensor]:
        x = numbers(draw, rows, 3).to(self.dtype)
        if isinstance(self.model.front, nn.Embedding):
            x = torch.tensor([draw.randrange(WORDS) for _ in range(rows)])
        return x, numbers(draw, rows, OUT).to(self.dtype)

    def given(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Plain tensors as eager code of this training takes them."""
        if any(isinstance(p, flow.GlobalTensor) for p in self.model.parameters()):
            return tuple(flow.tensor(value, placement=self.where, sbp=S(0)) for value in values)
        return values

    def train(self, x: Tensor, y: Tensor, *, grad: bool = True) -> Tensor:
        """One step; its loss. Without gradients, that alone."""
        self.fresh = False
        on = torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with on, torch.set_grad_enabled(grad):
            if self.way.mode == "graph":
                return whole(self.step(x, y))
            loss = self.loss(self.model, *(self.given(x, y) if self.way.mode == "eager" else (x, y)))
        if grad:
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return whole(loss)

    def values(self) -> dict[str, Tensor]:
        """All that it holds: parameters, buffers, what the optimizer holds besides, and its states."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        states = self.optimizer.state
        for at, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"]):
            named[f"held {at}"] = p
            kept = {} if self.beside.processes else states.get(p, {})  # which a process has of what it owns
            named.update({f"{name} of held {at}": x for name, x in kept.items() if isinstance(x, Tensor)})
        return {name: whole(x) for name, x in named.items()}


def halved_states(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer, as it could have been saved, with tensors of half the values."""
    state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    for held in state["state"].values():
        held |= {name: x * 0.5 for name, x in held.items() if isinstance(x, Tensor) and x.ndim}
    return state
