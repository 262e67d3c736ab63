"""The content of a checkpoint as one process has it: tensors with their names, and all else as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...placement import Placement
from ...placement.errors import SbpError
from ...placement.world import world
from ..files.held import me
from ..graph.optimizer.kept_errors import refuse_unsaved
from ..model.slots import slots, tied
from ..tensors.agreement import checksum
from ..tensors.tensor import GlobalTensor
from .entries import NamedTensor
from .random_state import random_state
from .states.saved_states import described, exact_masters
from .trees import Json, encoded

__all__ = ["Content", "collected", "extra_state_modules", "keeps_state"]


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint. All processes have `alike` the same and `own` each for itself; by `plain`, numbers,
    they compare what each has whole."""

    entries: list[NamedTensor]
    alike: dict[str, Json]
    states: dict[str, Json]
    random: Json
    plain: dict[str, int]


class _Tensors:
    """Tensors that were put aside, each under one name."""

    def __init__(self) -> None:
        self.entries: dict[str, NamedTensor] = {}
        self.plain: dict[str, int] = {}

    def put(self, name: str, value: Tensor, where: Placement | None = None) -> None:
        if name in self.entries:
            raise SbpError(f"flow.save: two tensors are called {name}\n  name one otherwise")
        self.entries[name] = NamedTensor.of(name, value, where)
        if world().rank is not None and not isinstance(value, GlobalTensor):
            self.plain[name] = checksum(value)

    def own(self, name: str, value: Tensor) -> None:
        """One that no other process has."""
        here = Placement("cpu", (me(),), (1,), None)
        self.entries[name] = NamedTensor.of(name, value, here)


def collected(
    model: nn.Module, optimizers: Sequence[Optimizer], extra: Mapping[str, Any] | None, plan: str | None, step: int
) -> Content:
    """All that is to be saved; nothing is copied, but what is partial is added up."""
    refuse_unsaved(optimizers, extra)
    tensors = _Tensors()
    alike: dict[str, Json] = {"step": step, "plan": plan}
    alike["tied"] = _model(model, tensors)
    alike["modules"] = {
        path: encoded(module.get_extra_state(), f"model.{path}._extra_state", tensors.put)
        for path, module in extra_state_modules(model).items()
    }
    exact_masters(model, tensors.put)
    alike["optimizers"], states = described(optimizers, model, tensors.put)
    alike["extra"] = {name: _extra(name, value, tensors) for name, value in (extra or {}).items()}
    random = encoded(random_state(), f"extra.random.{me()}", tensors.own)
    return Content(list(tensors.entries.values()), alike, states, random, tensors.plain)


def _model(model: nn.Module, tensors: _Tensors) -> Json:
    """Its parameters and buffers, each once; returns the other names of those that are tied."""
    others: dict[str, Json] = {}
    for group in tied(slots({"": model})).values():
        held = [slot for slot in group if slot.in_state_dict]
        if held:
            tensors.put(f"model.{held[0].full}", held[0].value)
            others |= {slot.full: held[0].full for slot in held[1:]}
    return others


def extra_state_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that keep more than tensors, by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def keeps_state(value: Any) -> bool:
    """Whether it gives and takes a state of its own."""
    return not isinstance(value, Tensor) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _extra(name: str, value: Any, tensors: _Tensors) -> Json:
    if type(name) is not str or not name:
        raise SbpError(f"flow.save: extra has the key {name!r}\n  name what is saved, as in extra=dict(scheduler=...)")
    return encoded(value.state_dict() if keeps_state(value) else value, f"extra.{name}", tensors.put)
