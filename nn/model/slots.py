"""Slots: where modules hold parameters and buffers, and what becomes of them all when a model is made global.

A tied value has several slots, and one of a module that is in two places several names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ...placement import Placement
from ...placement.errors import SbpError, SbpflowError
from ...sbp import Layout, SbpLike, layout
from ...sbp.text import on_all_axes
from ..tensors.tensor import GlobalTensor

__all__ = ["TensorSlot", "joined_path", "module_notes", "parameter_notes", "parameters", "put", "slots", "tied"]


@dataclass(frozen=True, eq=False, slots=True)
class TensorSlot:
    """A parameter or buffer where a module holds it, under one of its names."""

    full: str
    kind: Literal["parameter", "buffer"]
    module: nn.Module
    table: dict[str, Any]  # that the module has for them
    name: str
    value: Tensor

    @property
    def in_state_dict(self) -> bool:
        """Whether a state_dict has it."""
        return self.kind == "parameter" or self.name not in self.module._non_persistent_buffers_set

    def put(self, value: Tensor) -> None:
        self.table[self.name] = value

    def laid(self, sbp: SbpLike, where: Placement, head: str, tail: str = "") -> Layout:
        """The layout of the tensor under a signature, or an error that says this of it."""
        try:
            return layout(where, on_all_axes(sbp, where), tuple(self.value.shape), self.value.dtype)
        except SbpflowError as error:
            raise type(error)(f"{head}{error}{tail}") from None


def joined_path(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def slots(modules: Mapping[str, nn.Module], *, once: bool = False) -> Iterator[TensorSlot]:
    """All slots of modules that are named so, by each of their names, or with each of their modules once."""
    for prefix, root in modules.items():
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=once):
            for kind, table in _tables(module):
                for name, value in table.items():
                    if value is not None:
                        yield TensorSlot(joined_path(path, name), kind, module, table, name, value)


def parameters(modules: Mapping[str, nn.Module]) -> list[TensorSlot]:
    """The slots of parameters, under each of their names."""
    return [slot for slot in slots(modules) if slot.kind == "parameter"]


def parameter_notes(
    known: Iterable[TensorSlot],
    key: str,
    what: str,
    *,
    show: Callable[[Any], str] = repr,
    again: Callable[[str], str] = lambda first: "",
) -> dict[int, Any]:
    """The notes that modules have under a key for their own parameters, by ids of these. A tied one must not have two:
    the error says `what` they are, shows both, and says of the first of its names how to say it `again`."""
    said: dict[int, tuple[str, Any]] = {}
    for slot in known:
        note = slot.module.__dict__.get(key, {}).get(slot.name)
        if note is None:
            continue
        first, other = said.setdefault(id(slot.value), (slot.full, note))
        if other != note:
            raise SbpError(
                f"one parameter has two {what}\n  as {first}: {show(other)}\n  as {slot.full}: {show(note)}\n"
                f"  say it once after the two were tied{again(first)}"
            )
    return {value: note for value, (_, note) in said.items()}


def module_notes(modules: Mapping[str, nn.Module], key: str) -> dict[str, Any]:
    """The notes that modules have under a key, by the paths of those that have one."""
    found: dict[str, Any] = {}
    for prefix, root in modules.items():
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            if key in module.__dict__:
                found[path] = module.__dict__[key]
    return found


def _tables(module: nn.Module) -> Iterator[tuple[Literal["parameter", "buffer"], dict[str, Any]]]:
    yield "parameter", module._parameters
    yield "buffer", module._buffers


def tied(found: Iterable[TensorSlot]) -> dict[int, list[TensorSlot]]:
    """The slots of each value, by its id."""
    groups: dict[int, list[TensorSlot]] = {}
    for slot in found:
        groups.setdefault(id(slot.value), []).append(slot)
    return groups


def put(group: Sequence[TensorSlot], made: GlobalTensor, by: str, fix: str) -> None:
    """Put a value's new tensor into all its slots. Errors tell who still has the old one what made the new, and the
    fix."""
    first = group[0]
    made._path = first.full
    for slot in group:
        slot.put(made)
    _stale[first.value] = first.full, by, fix


# What was a module's parameter before it became global, or was laid otherwise, its name, by what, and the fix: an
# optimizer made before still holds it.
_stale: Any = WeakTensorKeyDictionary()


def _look_for_stale(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before an optimizer steps: does it hold what nothing uses any more? It would never change a weight."""
    if not _stale:
        return
    for group in optimizer.param_groups:
        for value in group["params"]:
            if value.grad is None and value in _stale:
                name, by, fix = _stale[value]
                raise SbpError(
                    f"the optimizer was made before {by}, and holds the {name} that was replaced by it\n  {fix}"
                )


register_optimizer_step_pre_hook(_look_for_stale)
