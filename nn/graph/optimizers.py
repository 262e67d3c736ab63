"""Optimizers of a graph: theirs are the graph's parameters, or, where their state lies in pieces, pieces of these."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...boxing import box
from ...placement.errors import SbpError
from ...sbp import Layout
from ..tensor import GlobalTensor, wrap

__all__ = ["Trained", "adopt", "states_of"]

# How many tensors of a parameter's size an optimizer keeps beside it; what is not here is taken for Adam's two.
KEPT = {"SGD": 0, "RMSprop": 1, "Adagrad": 1, "Rprop": 2, "Adadelta": 2, "Lion": 1, "Muon": 1, "Adafactor": 0}


def states_of(optimizers: Sequence[Optimizer]) -> int:
    """Tensors that an optimizer keeps for each parameter, for the price of its step and its memory."""
    return max((_kept(each) for each in optimizers), default=0)


def _kept(optimizer: Optimizer) -> int:
    name = type(optimizer).__name__
    if name == "SGD":
        return int(any(group.get("momentum") for group in optimizer.param_groups))
    return KEPT.get(name, 2)


class Trained:
    """A parameter, and what its optimizer changes: itself, or a piece of it on each rank (ZeRO-1)."""

    def __init__(self, parameter: GlobalTensor, home: Layout) -> None:
        self.parameter, self.home = parameter, home
        plain = parameter._layout.with_state(parameter._layout.state)
        self.lies = plain
        self.master = parameter if plain.state == home.state else self._pieces()

    def _pieces(self) -> GlobalTensor:
        """Views into the parameter where its pieces are contiguous, so that the step changes it in place."""
        with torch.no_grad():
            shards = [shard.detach() for shard in self.parameter._shards]
            made = wrap(box(shards, self.lies, self.home, op="optimizer pieces"), self.home)
        made._is_param = True
        return made.requires_grad_()

    def give(self, shards: tuple[Tensor, ...], *, add: bool) -> None:
        """The gradient of a step; with `add` to what is there, as `backward` does."""
        new = wrap(shards, self.home)
        held = self.master.grad
        self.master.grad = new if held is None or not add else held + new  # type: ignore[assignment]

    def settle(self) -> None:
        """After a step of the optimizer: the changed pieces go where the parameter lies."""
        if self.master is self.parameter:
            return
        with torch.no_grad():
            pieces = tuple(shard.detach() for shard in self.master._shards)
            for mine, new in zip(
                self.parameter._shards, box(pieces, self.home, self.lies, op="optimizer pieces"), strict=True
            ):
                mine.detach().copy_(new)
        self.parameter._moved = None


def adopt(optimizers: Sequence[Optimizer], known: Mapping[int, Trained]) -> None:
    """Put the graph's parameters in the place of those that optimizers were made with; `known` goes by their ids.

    One that could go through its parameters one by one or all at once, and was not told, does the latter.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [_adopted(optimizer, value, known) for value in group["params"]]
            if "foreach" in group and group["foreach"] is None and not (group.get("fused") or group["differentiable"]):
                group["foreach"] = True


def _adopted(optimizer: Optimizer, value: Tensor, known: Mapping[int, Trained]) -> Tensor:
    trained = known.get(id(value))
    if trained is None:
        if isinstance(value, GlobalTensor):
            return value
        raise SbpError(
            f"{type(optimizer).__name__} holds a parameter {tuple(value.shape)} that no module of the graph has\n"
            "  make the optimizer of the graph's own modules, as in AdamW(self.model.parameters())"
        )
    state = optimizer.state.pop(value, None)
    if state:
        optimizer.state[trained.master] = {name: _state(part, value, trained) for name, part in state.items()}
    return trained.master


def _state(part: Any, value: Tensor, trained: Trained) -> Any:
    """What an optimizer that has stepped already kept for a parameter, as it lies from now on."""
    if not isinstance(part, Tensor) or part.shape != value.shape or part.ndim == 0:
        return part
    of = trained.home
    there = Layout(of.placement, of.state, of.shape, part.dtype)
    if isinstance(part, GlobalTensor):
        return part if part._layout.state == there.state else part.to_global(sbp=there.sbp)
    from ..factories import whole_everywhere

    whole = whole_everywhere(part, of.placement)
    with torch.no_grad():
        return wrap(tuple(shard.clone() for shard in box(whole._shards, whole._layout, there, op="optimizer")), there)
