"""The modules of a graph: where their parameters live, how these are to lie, and how they are made to."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ....placement import Placement
from ....placement.errors import SbpError
from ....sbp import Layout, Sbp, State
from ....sbp.logical import Logical
from ...model.annotate import LayerMoves, checked_hints, chunk_of, hints_of, placement_of
from ...model.materialise import make_global, plain_slots
from ...model.slots import slots
from ...tensors.tensor import GlobalTensor

__all__ = [
    "Reads",
    "became",
    "building",
    "default_placement",
    "globalised",
    "named_values",
    "pins_of",
    "placed",
    "reading",
    "said_of",
]


T = TypeVar("T")


def named_values(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """All parameters and buffers by their full names, tied ones under each of them."""
    return {slot.full: slot.value for slot in slots(modules)}


def default_placement(modules: Mapping[str, nn.Module], given: Placement | None) -> Placement | None:
    """Where what nobody placed lives: as the graph was told, or where a global parameter is."""
    if given is not None:
        return given
    return next((v.placement for v in named_values(modules).values() if isinstance(v, GlobalTensor)), None)


def placed(
    logical: Logical, modules: Mapping[str, nn.Module], homes: Mapping[str, Placement], moved: LayerMoves
) -> Logical:
    """The graph with the annotated placements on its ops and parameters; of some parameters it is known already, and
    some modules are elsewhere."""
    where = placement_of(modules, moved)
    held = named_values(modules)
    if not where and not homes and not any(isinstance(v, GlobalTensor) for v in held.values()):
        return logical

    def home(name: str) -> Placement | None:
        value = held.get(name)
        if isinstance(value, GlobalTensor):
            return value.placement
        return homes.get(name) or where.get(name.rpartition(".")[0])

    sources = tuple(
        s if s.kind == "input" else replace(s, placement=s.placement or home(s.name)) for s in logical.sources
    )
    ops = tuple(replace(op, placement=op.placement or where.get(op.origin.module)) for op in logical.ops)
    return replace(logical, sources=sources, ops=ops)


def said_of(modules: Mapping[str, nn.Module]) -> tuple[dict[str, Any], ...]:
    """All that annotations say of modules."""
    return placement_of(modules), chunk_of(modules), hints_of(modules)


def pins_of(
    modules: Mapping[str, nn.Module], inputs: Mapping[str, Tensor], homes: Mapping[str, Placement]
) -> dict[str, tuple[Sbp, ...] | State]:
    """The sources that must lie in a certain way: hinted parameters, and what is global already."""
    pins: dict[str, tuple[Sbp, ...] | State] = {
        **checked_hints(modules, _under_all_names(homes, named_values(modules)))
    }
    held = {**named_values(modules), **inputs}
    for name, sbp in pins.items():
        value = held[name]
        if isinstance(value, GlobalTensor):
            _check_kept(name, value, sbp)
    return pins | {name: value._layout.state for name, value in held.items() if isinstance(value, GlobalTensor)}


def _under_all_names(said: Mapping[str, T], values: Mapping[str, Tensor]) -> dict[str, T]:
    """Hints given under one name of a parameter, under all its names: a graph knows tied ones by the first."""
    known = {id(values[name]): what for name, what in said.items() if name in values}
    return {name: known[id(value)] for name, value in values.items() if id(value) in known}


def _check_kept(name: str, value: GlobalTensor, hint: Any) -> None:
    """A refusal where a global parameter would lie otherwise: another graph may count on it."""
    axes = [a for a, n in enumerate(value.placement.shape) if n > 1]
    if any(value.sbp[a] != hint[a] for a in axes):
        raise SbpError(
            f"{name} {tuple(value.shape)} is to be {hint}, and is global already as {value.sbp}\n"
            f"  a graph leaves it where it is; say it before the first, or move it: flow.nn.to_global(model, ...)"
        )


def globalised(modules: Mapping[str, nn.Module], layouts: Mapping[str, Layout], rest: Placement) -> dict[int, Tensor]:
    """Make all parameters and buffers global as told, in place; what the graph does not use is B on `rest`.

    Returns for the id of each tensor that was there before what stands in its place.
    """
    before = named_values(modules)
    layouts = _under_all_names(layouts, before)
    lies = {id(s.value): layouts.get(s.full) or _whole(s.value, rest) for s in plain_slots(modules)}
    make_global(modules, lies, torch.device(rest.type), "the graph's first step, which made the model global", _LATE)
    after = named_values(modules)
    became.update({value: ref(after[name]) for name, value in before.items() if after[name] is not value})
    return {id(value): after[name] for name, value in before.items()}


# What graphs have made of plain parameters, for optimizers that hold them: another graph may have come first.
became: Any = WeakTensorKeyDictionary()


def _whole(value: Tensor, rest: Placement) -> Layout:
    return Layout(rest, State(((),) * value.ndim), tuple(value.shape), value.dtype)


# What code may read of a module, or of the graph, that is no tensor and yet decides what is captured.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Reads:
    """The plain values that a capture read of modules, and of the graph itself; they must not have changed since.

    Layers that were not traced because they are like one that was are read alike, so that it goes by class.
    """

    def __init__(self) -> None:
        self.names: dict[type, set[str]] = {}
        self.values: list[tuple[dict[str, Any], str, Any]] = []

    def settle(self, owners: list[Any]) -> None:
        """Note what the attributes are, once all is known of which."""
        for owner in owners:
            for name in sorted(self.names.get(type(owner), ())):
                if name in vars(owner) and _is_plain(value := vars(owner)[name]):
                    self.values.append((vars(owner), name, value))

    def hold(self) -> bool:
        """Whether all of them are what they were."""
        for held, name, value in self.values:
            now = held.get(name)
            if now is not value and (type(now) is not type(value) or now != value):
                return False
        return True


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


_LATE = (
    "give it to the graph, as in flow.compile(model, loss_fn, optimizer); or make it after the first step, where the "
    "graph is to leave gradients only"
)
_building = 0


def building() -> bool:
    """Whether some graph is being captured right now."""
    return _building > 0


@contextmanager
def reading(reads: Reads, *classes: type) -> Iterator[None]:
    """Notes which attributes are read of instances of these classes."""
    global _building
    before = {cls: vars(cls).get("__getattribute__") for cls in classes}

    def watched(cls: type) -> Any:
        get: Any = cls.__getattribute__

        def read(self: Any, name: str) -> Any:
            reads.names.setdefault(type(self), set()).add(name)
            return get(self, name)

        return read

    for cls in classes:
        cls.__getattribute__ = watched(cls)  # type: ignore[method-assign]
    _building += 1
    try:
        yield
    finally:
        _building -= 1
        for cls, own in before.items():
            if own is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = own  # type: ignore[method-assign]
