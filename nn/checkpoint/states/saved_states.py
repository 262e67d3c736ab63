"""States of optimizers in a checkpoint: by names of parameters, whatever pieces they lie in. A group's numbers go by
the parameters in it.

    optimizer.state.blocks.0.up.weight.exp_avg      a tensor
    optimizer.state.blocks.0.up.weight.master       the exact weight of one that rests in fewer bits
    optimizer.state.blocks.0.up.weight.late_mean    the mean of its late updates, which a pipeline's backward takes back
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....placement import Placement
from ....placement.world import owned
from ...graph.choose.parameters import exact_of
from ...graph.optimizer.adopt import served
from ...graph.optimizer.late_mean import late_mean
from ...graph.optimizer.loss_scale import scale_of
from ...graph.optimizer.trained import Trained
from ...model.slots import slots, tied
from ...tensors.tensor import GlobalTensor, wrap
from ..trees import Json, encoded
from .owners import HeldParameter, held_by

__all__ = ["HOW", "LATE_MEAN", "MASTER", "STATE", "Put", "described", "exact_masters", "trained_of"]

STATE, MASTER, LATE_MEAN = "optimizer.state", "master", "late_mean"
HOW = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}  # how it runs, and not what it does

Put = Callable[[str, Tensor, Placement | None], None]


def described(optimizers: Sequence[Optimizer], model: nn.Module, put: Put) -> tuple[list[Json], dict[str, Json]]:
    """All of optimizers but their tensors, which are `put` aside: a description of each, and states by parameters."""
    made: list[Json] = []
    states: dict[str, Json] = {}
    for optimizer, held in zip(optimizers, held_by(optimizers, model, "flow.save"), strict=True):
        for each in held:
            state = optimizer.state.get(each.value)
            where = each.value.placement if isinstance(each.value, GlobalTensor) else None
            if state and (where is None or owned(where)):  # else it is counted, and not kept, for a stage elsewhere
                states[each.name] = encoded(dict(state), f"{STATE}.{each.name}", partial(_beside, put, where))
            master = _master(optimizer, each)
            if master is not None:
                put(f"{STATE}.{each.name}.{MASTER}", master, None)
            mean = late_mean(each.owner)
            if mean is not None:
                put(f"{STATE}.{each.name}.{LATE_MEAN}", mean, None)
        made.append(_description(optimizer, held, len(made), put))
    return made, states


def _beside(put: Put, where: Placement | None, name: str, value: Tensor) -> None:
    put(name, value, where)


def _description(optimizer: Optimizer, held: Sequence[HeldParameter], number: int, put: Put) -> Json:
    groups: list[Json] = []
    for at, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name not in HOW}
        tree = encoded(options, f"optimizer.{number}.groups.{at}", partial(_beside, put, None))
        groups.append({"names": [each.name for each in held if each.group == at], "options": tree})
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    scale = scale_of(optimizer)
    return {
        "class": type(optimizer).__name__,
        "groups": groups,
        "others": encoded(others, f"optimizer.{number}.others", partial(_beside, put, None)),
        "scale": None if scale is None else {"value": scale.value, "good": scale.good},
    }


def trained_of(optimizer: Optimizer, each: HeldParameter) -> Trained | None:
    """The training of a parameter in a graph, if there is one."""
    return served(optimizer).get(id(each.owner))


def _master(optimizer: Optimizer, each: HeldParameter) -> Tensor | None:
    """The exact weight, where an optimizer has one that the parameter has not."""
    trained = trained_of(optimizer, each)
    if trained is None or trained.rest.dtype is trained.lies.dtype or not trained.fresh:
        return None
    return trained.master


def exact_masters(model: nn.Module, put: Put) -> None:
    """Exact weights that wait on parameters that were cast, for an optimizer that has not come yet."""
    for group in tied(slots({"": model})).values():
        parameter, exact = group[0].value, exact_of(group[0].value)
        if exact is not None:
            assert isinstance(parameter, GlobalTensor)
            with torch.no_grad():
                pairs = zip(exact._shards, parameter._shards, strict=True)
                known = tuple([torch.where(e.to(x.dtype) == x, e, x.to(e.dtype)) for e, x in pairs])
            put(f"{STATE}.{group[0].full}.{MASTER}", wrap(known, exact._layout), None)
