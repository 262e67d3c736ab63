"""States of optimizers from a checkpoint: read as parameters lie now, at once or when a graph adopts the optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....placement.world import device, owned
from ....sbp import Layout
from ....sbp.state import State
from ...files.reading import Reading
from ...files.values import Pieced
from ...graph.choose.parameters import exact_of
from ...graph.optimizer.adopt import owner_of, served, states_at_rest
from ...graph.optimizer.late_mean import put_mean, wide, wide_dtype
from ...graph.optimizer.on_shards import forget
from ...graph.optimizer.trained import Trained, lies_beside
from ...model.values.same_values import ranks_of
from ...tensors.tensor import GlobalTensor
from ..trees import Json, decoded
from .owners import HeldParameter
from .saved_states import LATE_MEAN, MASTER, STATE

__all__ = ["LoadedStates", "wide_weight"]


def wide_weight(tensors: Mapping[str, Pieced], name: str) -> Pieced:
    """The most exact weight that a checkpoint has: that of the optimizer, where it had one of its own."""
    return tensors.get(f"{STATE}.{name}.{MASTER}") or tensors[f"model.{name}"]


@dataclass(frozen=True, eq=False)
class LoadedStates:
    """The states that a checkpoint has for one optimizer; `places` has each parameter's group, place in it, and name
    there."""

    tensors: Mapping[str, Pieced]
    states: Mapping[str, Json]
    places: Sequence[tuple[int, int, str]] = field(repr=False)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Pieced],
        states: Mapping[str, Json],
        held: Sequence[tuple[HeldParameter, str]],
    ) -> "LoadedStates":
        return cls(tensors, states, [(each.group, each.place, name) for each, name in held])

    def give(self, optimizer: Optimizer) -> None:
        """Read all, where a graph has just adopted the optimizer."""
        values = [x for group in optimizer.param_groups for x in group["params"] if isinstance(x, GlobalTensor)]
        where = [x.placement for x in values]
        with Reading(ranks_of(where, where[0].type) if where else None) as files:
            self.read(optimizer, files)

    def read(self, optimizer: Optimizer, files: Reading) -> None:
        """Give each parameter its state, and none where it had none."""
        trained = {id(each.master): each for each in served(optimizer).values()}
        forget(optimizer)
        for group, place, name in self.places:
            value = optimizer.param_groups[group]["params"][place]
            of = trained.get(id(value))
            with torch.no_grad():
                self._master(value, of, name, files)
                state = self._state(optimizer, value, name, files)
                mean = self._late_mean(owner_of(value), name, files)
            if files.error is not None:
                continue
            put_mean(owner_of(value), mean)
            if state is None:
                optimizer.state.pop(value, None)
            else:
                optimizer.state[value] = state if of is None else states_at_rest(state, of)

    def _state(self, optimizer: Optimizer, value: Tensor, name: str, files: Reading) -> dict[str, Any] | None:
        tree = self.states.get(name)
        if tree is None:
            return None
        exact, device_steps = wide_weight(self.tensors, name).dtype, _steps_on_device(optimizer, value)
        held, prefix = optimizer.state.get(value, {}), f"{STATE}.{name}."

        def take(key: str) -> Tensor:
            into = held.get(key.removeprefix(prefix))
            return _read(self.tensors[key], value, exact, files, into, on_device=device_steps)

        found = decoded(tree, take)
        mine = not isinstance(value, GlobalTensor) or owned(value.placement)
        return dict(found) if mine else None

    def _late_mean(self, owner: Tensor, name: str, files: Reading) -> Tensor | None:
        """The mean of a parameter's late updates, as it lies now; whole where it is not global yet."""
        source = self.tensors.get(f"{STATE}.{name}.{LATE_MEAN}")
        if source is None:
            return None
        if isinstance(owner, GlobalTensor):
            return files.shards(source.name, (source,), wide(owner))
        made = torch.empty(source.shape, dtype=wide_dtype(owner.dtype), device="cpu")
        files.fill_whole(source.name, (source,), made)
        return made

    def _master(self, value: Tensor, of: Trained | None, name: str, files: Reading) -> None:
        """The exact weight to where there is one beside the parameter."""
        source = wide_weight(self.tensors, name)
        if of is not None and of.rest.dtype is not of.lies.dtype:
            if source.dtype is not of.lies.dtype:
                _fill(of.master, source, files)
                of.stamped()
            return
        exact = exact_of(value)
        if exact is not None:
            _fill(exact, source, files)


def _fill(there: GlobalTensor, source: Pieced, files: Reading) -> None:
    new = files.shards(source.name, (source,), there._layout)
    if files.error is None:
        for mine, come in zip(there._shards, new._shards, strict=True):
            mine.detach().copy_(come)


def _steps_on_device(optimizer: Optimizer, value: Tensor) -> bool:
    group = next((g for g in optimizer.param_groups if any(x is value for x in g["params"])), {})
    return bool(group.get("capturable") or group.get("fused"))


def _read(of: Pieced, beside: Tensor, exact: torch.dtype, files: Reading, into: object, *, on_device: bool) -> Tensor:
    """A tensor of a state as it lies beside its parameter: in its dtype, if it had that of the weight."""
    like = lies_beside(of.name.rpartition(".")[2], of.shape, beside.shape)
    with_dims = bool(of.shape) or like
    dtype = beside.dtype if of.dtype is exact and of.dtype.is_floating_point and with_dims else of.dtype
    if isinstance(beside, GlobalTensor) and with_dims:
        lies = beside._layout
        state = lies.state if like else State(((),) * len(of.shape))
        there = into if isinstance(into, GlobalTensor) and tuple(into.shape) == of.shape else None
        return files.shards(of.name, (of,), Layout(lies.placement, state, of.shape, dtype), there)
    home = beside.device if with_dims or on_device else torch.device("cpu")
    if isinstance(beside, GlobalTensor):
        here = owned(beside.placement)
        home = device(beside.placement, here[0]) if on_device and here else torch.device("cpu")
    made = torch.empty(of.shape, dtype=dtype, device=home)
    files.fill_whole(of.name, (of,), made)
    return made
