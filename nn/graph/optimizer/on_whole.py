"""An optimizer's step on whole tensors, where it may look at more of one than an element: norms, means, products.

For the time of the step it holds plain tensors, each whole, in the place of pieces; it does then what it does on one
device, to the digit, also where it computes in fewer bits than it keeps. Parameters and states go back to how they
rest, but a state of another shape than its parameter's stays whole. Offloaded ones are whole on the host.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....boxing import box
from ....placement.world import owned
from ....sbp import Layout, State
from ...owners.step import steps_owned
from ...tensors import seeds
from ...tensors.tensor import GlobalTensor, wrap
from ..host.states import KeptState
from .on_shards import ALONE
from .trained import Trained, lies_beside, on_host

__all__ = ["step_on_whole"]


def step_on_whole(
    optimizer: Optimizer, trained: Mapping[int, Trained], grads: Mapping[int, tuple[Tensor, ...]]
) -> bool:
    """One step with these gradients that have come home, by the ids of masters, and those that parameters have. False
    if it is to be made on global tensors.

    So is that of an optimizer of several placements: none of their ranks has all that it may look at.
    """
    places = {each.rest.placement for each in trained.values()}
    if type(optimizer) in ALONE or len(places) != 1 or not owned(*places) or steps_owned(optimizer):
        return False
    for each in trained.values():
        each.gather()
    known = {id(each.master): each for each in trained.values()}
    groups = [[known[id(x)] for x in group["params"] if id(x) in known] for group in optimizer.param_groups]
    whole = {
        each: _Whole(each, grads.get(key), optimizer.state.get(each.master, {}))
        for key, each in known.items()
        if key in grads or each.master.grad is not None
    }
    _step(optimizer, [[whole[each] for each in group if each in whole] for group in groups], trained.values())
    for each, made in whole.items():
        optimizer.state[each.master] = made.back()
        each.master.grad = None
    return True


class _Whole:
    """A parameter with its gradient and state, whole, as an optimizer has them on one device."""

    def __init__(self, of: Trained, come: tuple[Tensor, ...] | None, state: Mapping[str, Any]) -> None:
        self.of, self.held = of, state
        wide = of.rest.dtype is not of.lies.dtype
        x = of.master if wide or of.host is not None else of.parameter  # which may be whole already
        self.value = nn.Parameter(_plain(x))
        there = [] if come is None else [self.gradient(come)]
        held = of.master.grad  # from an eager backward, or a clipped one
        there += [_plain(held)] if isinstance(held, GlobalTensor) else []
        self.value.grad = sum(there[1:], start=there[0])
        self.state = {name: _plain(part) if isinstance(part, GlobalTensor) else part for name, part in state.items()}

    def gradient(self, come: tuple[Tensor, ...]) -> Tensor:
        """All of a gradient that has come home."""
        lies = self.of.home
        if self.of.host is not None:
            come, lies = tuple([shard.to("cpu") for shard in come]), on_host(lies)
        return _gathered(come, lies).to(self.of.rest.dtype)

    def back(self) -> Mapping[str, Any]:
        """The value put where the parameter and its master lie; the state as it rests."""
        of, value = self.of, self.value.detach()
        with torch.no_grad():
            for x, lies in ((of.master, of.held), (of.parameter, of.lies if of.host is None else on_host(of.lies))):
                for mine, new in zip(x._shards, _cut(value.to(lies.dtype), lies), strict=True):
                    mine.detach().copy_(new)
            of.parameter._moved = of.master._moved = None
            of.stamped()
            made = {name: self.rested(name, part) for name, part in self.state.items()}
        if of.host is None:
            return made
        kept = self.held if isinstance(self.held, KeptState) else of.host.kept({})
        for name, part in made.items():
            kept[name] = part
        return kept

    def rested(self, name: str, part: Any) -> Any:
        of = self.of.held
        like = isinstance(part, Tensor) and lies_beside(name, part.shape, of.shape)
        if not isinstance(part, Tensor) or not (part.ndim or like):
            return part
        state = of.state if like else State(((),) * part.ndim)
        lies = Layout(of.placement, state, tuple(part.shape), part.dtype)
        held, new = self.held.get(name), _cut(part.detach(), lies)
        if isinstance(held, GlobalTensor) and held._layout is lies:
            for mine, piece in zip(held._shards, new, strict=True):
                mine.copy_(piece)
            return held
        return wrap(tuple(piece.clone() for piece in new), lies)


def _plain(x: GlobalTensor) -> Tensor:
    """All of a tensor on this process's first rank; the memory is the tensor's own where it is whole."""
    return _gathered(tuple(shard.detach() for shard in x._shards), x._layout.with_state(x._layout.state))


def _gathered(shards: tuple[Tensor, ...], lies: Layout) -> Tensor:
    there = lies.with_state(State(((),) * len(lies.shape)))
    return box(shards, lies, there, op="optimizer whole")[0]


def _cut(value: Tensor, lies: Layout) -> tuple[Tensor, ...]:
    """A whole tensor that every rank has as ranks are to hold it."""
    whole = lies.with_state(State(((),) * value.ndim))
    return box([value] * len(owned(lies.placement)), whole, lies, op="optimizer whole")


def _step(optimizer: Optimizer, groups: list[list[_Whole]], trained: Iterable[Trained]) -> None:
    before, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    mine: dict[Any, Any] = defaultdict(dict, {key: held for key, held in state.items() if not isinstance(key, Tensor)})
    mine.update({one.value: one.state for group in groups for one in group if one.state})
    for each in trained:
        each.idle = True  # its pieces are not what is stepped
    for group, held in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [one.value for one in held]
    optimizer.state = mine  # type: ignore[assignment]
    (where,) = {each.rest.placement for each in trained}
    try:
        with seeds.watched(where):
            optimizer.step()
    finally:
        for each in trained:
            each.idle = False
        optimizer.state = state
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
    state.update({key: held for key, held in mine.items() if not isinstance(key, Tensor)})
    for one in (one for held in groups for one in held):
        one.state = mine.get(one.value, {})
