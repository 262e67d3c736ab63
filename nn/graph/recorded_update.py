"""A recorded update: where all lies that it goes by, which is looked at before each replay, and why there is none."""

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from ..tensors.tensor import GlobalTensor
from .optimizer.adopt import has_hooks
from .optimizer.adopted_model import AdoptedModel
from .optimizer.on_shards import ALONE, known_shards
from .run.card_rates import rides

__all__ = ["Addresses", "host_update"]

_shards_of = operator.attrgetter("_shards")


class Addresses:
    """Where the values of a model lie, and with `optimizers` what these keep. It holds on to all of that."""

    def __init__(self, model: AdoptedModel, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        masters = [each.master for each in model.trained.values()] if optimizers else []
        self.parts = self._parts()
        globals = [x for x in (*model.held.values(), *masters, *self.parts) if isinstance(x, GlobalTensor)]
        self.globals: dict[int, GlobalTensor] = {id(x): x for x in globals}
        self.seen = list(map(_shards_of, self.globals.values()))
        plain = [x for x in self.parts if isinstance(x, Tensor) and not isinstance(x, GlobalTensor)]
        self.known = [known_shards(each) for each in optimizers]
        kept = [x for each in self.known if each is not None for x in each.memory]
        self.flat: list[Tensor] = [*chain.from_iterable(self.seen), *plain, *kept]
        self.at = list(map(Tensor.data_ptr, self.flat))

    def _parts(self) -> list[Any]:
        states: Iterable[dict[str, Any]] = chain.from_iterable(each.state.values() for each in self.optimizers)
        return list(chain.from_iterable(map(dict.values, states)))

    def hold(self) -> bool:
        """Whether all of it lies where it lay."""
        if not all(map(operator.is_, map(_shards_of, self.globals.values()), self.seen)):
            return False
        parts = self._parts()
        if len(parts) != len(self.parts) or not all(map(operator.is_, parts, self.parts)):
            return False
        for optimizer, known in zip(self.optimizers, self.known, strict=True):
            # Made anew it has other counts of ranks behind the first.
            if known is not None and known.several and known_shards(optimizer) is not known:
                return False
        return list(map(Tensor.data_ptr, self.flat)) == self.at


def host_update(model: AdoptedModel) -> str:
    """Why the host has to have the update in its hands, if it has."""
    if not model.stepping:
        return "gradients are left on parameters" if model.trained else ""
    if model.scale is not None:
        return "the loss scale of fp16 is looked at by the host; bf16 needs none"
    if model.skipped is not None:
        return "skip_nonfinite=True has the host look at gradients"
    if model.leaves:
        return "a parameter is trained that no optimizer holds"
    if any(each.parameter._hooks for each in model.trained.values()):
        return "a parameter has hooks"
    return next(filter(None, map(_host_step, model.stepping)), "")


def _host_step(optimizer: Optimizer) -> str:
    kind = type(optimizer).__name__
    if type(optimizer) not in ALONE:
        return f"{kind} steps on whole tensors, by code of its own"
    if has_hooks(optimizer):
        return f"{kind} has hooks"
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return f"the step of {kind} was replaced"
    if type(optimizer) is not SGD and not all(map(rides, optimizer.param_groups)):
        return f"{kind} counts its steps on the host: {kind}(..., capturable=True) counts them on the card"
    return ""
