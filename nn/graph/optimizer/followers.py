"""Followers: masters and states of optimizers, which go where the parameters go that are relocated.

    took stock   ->   parameters are relocated   ->   bring: to beside them, in the pieces that the next plan wants

A process that had no part of a parameter knows nothing of its state. So the first rank that has one says which tensors
there are, and how they lie; numbers, such as counts of steps, are told with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....boxing.exchange.execute import token
from ....boxing.exchange.refill import Filling, refill
from ....placement import Placement
from ....placement.errors import SbpError
from ....placement.world import device, owned, world
from ....sbp import Layout, State
from ...model.values.same_values import ranks_of
from ...owners.states import PLAIN, Described, dtype_of, heard
from ...tensors.agreement import told
from ...tensors.tensor import GlobalTensor, wrap
from .adopt import hand_over, owner_of, served, unknown_parameter
from .relocation import LIMIT, ModelMove, carried, filling
from .trained import Trained

__all__ = ["Followers"]


class _Follower:
    """A parameter as an optimizer holds it, and how it was trained before it moved."""

    def __init__(
        self, value: GlobalTensor, owner: GlobalTensor, before: Trained | None, group: Mapping[str, Any]
    ) -> None:
        self.value, self.owner, self.before, self.group = value, owner, before, group
        self.where = value.placement  # until it is moved
        self.exact = before is not None and before.rest.dtype is not before.lies.dtype and before.fresh


class Followers:
    """The masters and states that optimizers have of a model that is about to move. Making it refuses what could not
    follow."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        values: Mapping[str, Tensor],
        move: ModelMove,
        ranks: Placement,
        stays: str | None,
    ) -> None:
        """`stays` says of something of gradients that it cannot follow."""
        self.optimizers, self.lost = list(optimizers), move.lost
        known = {id(value): name for name, value in values.items()}
        self.names = known
        self.all: list[list[_Follower]] = []
        for optimizer in optimizers:
            trained, mine = served(optimizer), []
            for group in optimizer.param_groups:
                for value in group["params"]:
                    owner = owner_of(value)
                    if id(owner) not in known:
                        raise unknown_parameter(optimizer, value)
                    if isinstance(owner, GlobalTensor) and isinstance(value, GlobalTensor):
                        mine.append(_Follower(value, owner, trained.get(id(owner)), group))
            self.all.append(mine)
        there = [x.placement for x in values.values() if isinstance(x, GlobalTensor)]
        self.everybody = ranks_of([ranks, *there], ranks.type)
        self._refuse_gradients(values, stays)

    def _refuse_gradients(self, values: Mapping[str, Tensor], stays: str | None) -> None:
        held = [(self.names[id(x)], x.grad) for x in values.values()]
        held += [(self.names[id(each.owner)], each.value.grad) for mine in self.all for each in mine]
        left = next((name for name, grad in held if grad is not None), None)
        rows = (
            None
            if self.everybody is None
            else told([int(left is not None), int(stays is not None)], self.everybody, "gradients that are left")
        )
        if left is not None or (rows is not None and any(row[0] for row in rows)):
            raise SbpError(
                f"the model is to move, and {left or 'a parameter of another rank'} has a gradient\n"
                "  step the optimizer first, or drop it: model.zero_grad()"
            )
        if stays is not None or (rows is not None and any(row[1] for row in rows)):
            raise SbpError(
                f"the model is to move, and {stays or 'a compressed gradient has errors on another rank'}, where they "
                "would be left\n  forget them before, if they are not wanted: step.kept.reset()"
            )

    def bring(self, known: Mapping[int, Trained]) -> None:
        """Masters and states to where `known`, by the ids of parameters, has them from now on."""
        for optimizer, mine in zip(self.optimizers, self.all, strict=True):
            if not mine:
                continue
            now = [known.get(id(each.owner)) or _left_over(each) for each in mine]
            ways = [way for each, new in zip(mine, now, strict=True) for way in self._master(each, new)]
            states = self._states(optimizer, mine)
            arriving = []
            for number, parts in states.items():
                each, new = mine[number], now[number]
                made: dict[str, Any] = {}
                for name, part in parts.items():
                    there = _beside(part, new.held) if isinstance(part, GlobalTensor) else None
                    if there is None or (there is part._layout and not self.lost.intersection(part.placement.flat)):
                        made[name] = part
                        continue
                    way = filling(f"{self.names[id(each.owner)]}.{name}", part, there, self.lost)
                    ways.append(way)
                    made[name] = carried(way, there)
                arriving.append((each, new, made))
            refill(ways, LIMIT, "moved states")
            for each, new, made in arriving:
                optimizer.state.pop(each.value, None)
                if owned(new.held.placement):
                    optimizer.state[each.value] = made
            for each, new in zip(mine, now, strict=True):
                if each.exact:
                    new.stamped()
            hand_over(optimizer, {id(each.owner): new for each, new in zip(mine, now, strict=True)})

    def _master(self, each: _Follower, new: Trained) -> Sequence[Filling]:
        """The way of exact digits, where the parameter has fewer."""
        before = each.before
        if before is None or before is new or not each.exact or new.rest.dtype is not before.rest.dtype:
            return ()
        way = filling(f"the master of {self.names[id(each.owner)]}", before.master, new.held, self.lost)
        target = zip(owned(new.held.placement), new.master._shards, strict=False)
        return (way._replace(target={rank: shard.detach() for rank, shard in target}),)

    def _states(self, optimizer: Optimizer, mine: Sequence[_Follower]) -> dict[int, dict[str, Any]]:
        """All states by the numbers of their parameters; empty shells where this process has nothing of them."""
        here = {n: optimizer.state.get(each.value, {}) if owned(each.where) else {} for n, each in enumerate(mine)}
        speaks = {number: state for number, state in here.items() if state and self._speaks(mine[number])}
        words = None
        if world().rank is not None and self.everybody is not None:
            said: Described = {number: [_said(*part) for part in state.items()] for number, state in speaks.items()}
            words = heard(said, self.everybody, {}, as_told=False)
        if words is None:
            words = {n: [[name] for name in state] for n, state in here.items() if state}
        return {
            number: {name: _part(here[number].get(name), how, mine[number]) for name, *how in parts}
            for number, parts in sorted(words.items())
        }

    def _speaks(self, each: _Follower) -> bool:
        there = [rank for rank in each.where.flat if rank not in self.lost]
        return bool(there) and there[0] in owned(each.where)


def _left_over(each: _Follower) -> Trained:
    """The holding of a parameter that the next plan does not train, such as a frozen one."""
    before, of = each.before, each.owner._layout
    if before is not None and before.lies is of.with_state(of.state):
        return before
    dtype = of.dtype if before is None else before.rest.dtype
    return Trained(each.owner, None, Layout(of.placement, of.state, of.shape, dtype))


def _beside(part: GlobalTensor, held: Layout) -> Layout:
    """The layout of a state beside a parameter that is held so: in its pieces, or whole if of another shape."""
    shape = tuple(part.shape)
    state = held.state if shape == held.shape else State(((),) * len(shape))
    return Layout(held.placement, state, shape, part.dtype)


def _said(name: Any, part: Any) -> list[Any]:
    """A part of a state in words."""
    if isinstance(part, GlobalTensor):
        of = part._layout
        where = of.placement
        grid = [where.type, list(where.flat), list(where.shape), where.names and list(where.names)]
        return [name, "tensor", list(of.shape), _short(of.dtype), grid, [list(dim) for dim in of.state.dims]]
    if isinstance(part, Tensor) and part.ndim:
        return [name, "whole", list(part.shape), _short(part.dtype)]
    if isinstance(part, Tensor):
        return [name, "count", part.item(), _short(part.dtype)]
    if isinstance(part, PLAIN) and isinstance(name, int | str):
        return [name, "plain", part]
    raise SbpError(
        f"the optimizer keeps {name!r} of type {type(part).__name__}, and ranks that are to have it could not be told\n"
        "  keep tensors, numbers and texts in optimizer.state"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _part(held: Any, how: Sequence[Any], each: _Follower) -> Any:
    """A part of a state as this process has it, or hears of it: a number, or a tensor that lies somewhere."""
    if isinstance(held, GlobalTensor):
        return held
    if isinstance(held, Tensor) and held.ndim:  # every rank has all of it
        of = Layout(each.where, State(((),) * held.ndim), tuple(held.shape), held.dtype)
        return wrap(tuple([held] * len(owned(of.placement))) or (token(of),), of)
    if held is not None or not how:
        return held
    kind, value, *more = how
    if kind == "plain":
        return value
    if kind == "count":
        return torch.tensor(value, dtype=dtype_of(more[0]), device=_counts_on(each))
    shape, dtype = tuple(value), dtype_of(more[0])
    of = Layout(each.where, State(((),) * len(shape)), shape, dtype)
    if kind == "tensor":
        (type_, flat, grid, names), dims = more[1:]
        where = Placement(type_, tuple(flat), tuple(grid), names and tuple(names))
        of = Layout(where, State(tuple(map(tuple, dims))), shape, dtype)
    return wrap((token(of),), of)


def _counts_on(each: _Follower) -> torch.device:
    """The device of an optimizer's counts: its own if it is capturable or fused, and else the CPU."""
    here = owned(each.owner.placement)
    on_device = each.group.get("capturable") or each.group.get("fused")
    return device(each.owner.placement, here[0]) if on_device and here else torch.device("cpu")
