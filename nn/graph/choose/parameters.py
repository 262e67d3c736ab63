"""The modules of a graph: where their parameters live, how these are to lie, and how they are made to."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ....placement import Placement
from ....placement.errors import PlacementError, SbpError
from ....sbp import Layout, State
from ....sbp.joint.demands import RestPins, SourcePin
from ....sbp.logical import Logical
from ....sbp.text import Pin
from ...eager_parts.marks import eager_of
from ...model.annotate import KINDS, LayerMoves, checked_hints, checked_rests, chunk_of, hints_of, placement_of
from ...model.cast import types_of, works_of
from ...model.compress import compressed_grads, compressed_hops
from ...model.flows import flows_of
from ...model.fp8 import eights_of
from ...model.inside import uses_of
from ...model.offload import saved_offloads, state_offloads
from ...model.recompute.recomputation import recomputed_of
from ...model.replacement import has_hooks
from ...model.replacement import replace as replaced
from ...model.slots import slots, tied
from ...model.values.materialise import make_global, plain_slots
from ...tensors.tensor import GlobalTensor, wrap

__all__ = [
    "became",
    "default_placement",
    "exact_of",
    "free_values",
    "globalised",
    "input_pins",
    "named_values",
    "pins_of",
    "placed",
    "rests_of",
    "said_of",
    "taken_exact",
]


T = TypeVar("T")


def named_values(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """All parameters and buffers by their full names, tied ones under each of them."""
    return {slot.full: slot.value for slot in slots(modules)}


def default_placement(
    modules: Mapping[str, nn.Module], given: Placement | None, inputs: Mapping[str, Tensor]
) -> Placement | None:
    """The placement of all that nobody placed: the given one, or else that of a global parameter.

    Without either, and where no module is placed, it is the one placement on which all global arguments are."""
    if given is not None:
        return given
    for value in named_values(modules).values():
        if isinstance(value, GlobalTensor):
            return value.placement
    places = dict.fromkeys(x.placement for x in inputs.values() if isinstance(x, GlobalTensor))
    return next(iter(places)) if len(places) == 1 and not placement_of(modules) else None


def placed(
    logical: Logical,
    modules: Mapping[str, nn.Module],
    homes: Mapping[str, Placement],
    moved: LayerMoves,
    *,
    free: bool = False,
) -> Logical:
    """The graph with the annotated placements and offloads on its ops and parameters.

    `homes` are placements of parameters known already, and `moved` has the modules that are elsewhere. Global
    parameters stay where they are, unless they are `free`."""
    logical = _offloaded(logical, modules)
    where = placement_of(modules, moved)
    held = {} if free else named_values(modules)
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


def _offloaded(logical: Logical, modules: Mapping[str, nn.Module]) -> Logical:
    """The graph with what is said of offloading on its parameters and ops."""
    states, saved = state_offloads(modules), saved_offloads(modules)
    if states:
        of = {s.name: states.get(s.name) if s.kind == "parameter" else None for s in logical.sources}
        logical = replace(logical, sources=tuple(replace(s, offload=of[s.name]) for s in logical.sources))
    if saved:
        origins = {
            id(op.origin): replace(op.origin, offload=saved[op.origin.module])
            for op in logical.ops
            if op.origin.module in saved
        }
        ops = tuple(replace(op, origin=origins.get(id(op.origin), op.origin)) for op in logical.ops)
        logical = replace(logical, ops=ops)
    return logical


def said_of(modules: Mapping[str, nn.Module]) -> tuple[dict[str, Any], ...]:
    """All that annotations say of modules."""
    works = {str(number): said for number, said in works_of(modules).items()}
    hints = (hints_of(modules, kind) for kind in KINDS)
    eights = {str(number): said for number, said in eights_of(modules).items()}
    said = types_of(modules), works, eights, flows_of(modules), recomputed_of(modules), uses_of(modules)
    offloads = state_offloads(modules), saved_offloads(modules)
    compressed = compressed_grads(modules), compressed_hops(modules)
    return placement_of(modules), chunk_of(modules), *hints, *said, eager_of(modules), *offloads, *compressed


def pins_of(
    modules: Mapping[str, nn.Module],
    inputs: Mapping[str, Tensor],
    homes: Mapping[str, Placement],
    *,
    free: bool = False,
) -> dict[str, SourcePin]:
    """The sources that must lie in a certain way: hinted parameters, and what is global already and not `free`."""
    pins: dict[str, SourcePin] = {**checked_hints(modules, _under_all_names(homes, named_values(modules)))}
    held = {**({} if free else named_values(modules)), **inputs}
    for name, sbp in pins.items():
        value = held.get(name)
        if isinstance(value, GlobalTensor):
            _check_kept(name, value, sbp)
    lying = {name: value for name, value in held.items() if isinstance(value, GlobalTensor)}
    # An argument may come on other ranks than those of the layers that use it, such as a batch for all stages.
    far = {path for path in lying.keys() & inputs.keys() if homes.get(path) not in (None, lying[path].placement)}
    return pins | {name: value._layout.state for name, value in lying.items() if name not in far}


def rests_of(
    modules: Mapping[str, nn.Module], homes: Mapping[str, Placement], *, states: bool, read: Collection[str] = ()
) -> dict[str, RestPins]:
    """The parameters of which is said how their gradients lie, or their `states` where there is an optimizer; those of
    `read` are wanted whole, and so are those that hooks are called with."""
    where = _under_all_names(homes, named_values(modules))
    hooked = {slot.full for slot in slots(modules) if has_hooks(slot.value)}
    grads, kept = (checked_rests(modules, where, kind) for kind in ("grads", "states"))
    return {
        name: RestPins(grads.get(name), kept.get(name) if states else None, name in read or name in hooked)
        for name in {**grads, **(kept if states else {})}
    }


def input_pins(
    flows: Mapping[str, Pin],
    inputs: Mapping[str, Tensor],
    homes: Mapping[str, Placement],
    cached: Collection[str] = (),
) -> dict[str, SourcePin]:
    """The layouts that `inputs=` asks of arguments; one that is global has to lie so already, unless a cache has it."""
    found: dict[str, SourcePin] = {}
    for path, pin in flows.items():
        value = inputs[path]
        try:
            entries = pin.on(homes[path], value.ndim)
        except (PlacementError, SbpError) as error:
            raise type(error)(f"{pin.what} is to lie as {pin}\n  {error}") from None
        if not isinstance(value, GlobalTensor) or value.placement is not homes[path] or path in cached:
            found[path] = entries
        else:
            for axis, entry in enumerate(entries):
                if homes[path].shape[axis] > 1 and entry not in (None, value.sbp[axis]):
                    raise SbpError(
                        f"{pin.what} is to lie as {pin}, and came as {value.sbp} on {value.placement}\n"
                        "  pass it so, by x.to_global(sbp=...), or leave it out of inputs="
                    )
    return found


def _under_all_names(said: Mapping[str, T], values: Mapping[str, Tensor]) -> dict[str, T]:
    """Hints given under one name of a parameter, under all its names: a graph knows tied ones by the first."""
    known = {id(values[name]): what for name, what in said.items() if name in values}
    return {name: known[id(value)] for name, value in values.items() if id(value) in known}


def _check_kept(name: str, value: GlobalTensor, hint: Any) -> None:
    """A refusal where a global parameter would lie otherwise: another graph may count on it."""
    axes = [a for a, n in enumerate(value.placement.shape) if n > 1 and hint[a] is not None]
    if any(value.sbp[a] != hint[a] for a in axes):
        raise SbpError(
            f"{name} {tuple(value.shape)} is to be {hint}, and is global already as {value.sbp}\n"
            f"  a step leaves it where an earlier one has put it: make the model anew, or move it by flow.nn.to_global"
        )


def globalised(modules: Mapping[str, nn.Module], layouts: Mapping[str, Layout], rest: Placement) -> dict[int, Tensor]:
    """Make all parameters and buffers global as told, in place; those that the graph does not use are B on `rest`.

    Those that are global already stay. Returned is the new tensor for the id of each that was there before.
    """
    before = named_values(modules)
    layouts = _under_all_names(layouts, before)
    plain = plain_slots(modules)
    lies = {id(s.value): _of(layouts.get(s.full) or _whole(s.value, rest), s.value.dtype) for s in plain}
    make_global(modules, lies, torch.device(rest.type), "the graph's first step, which made the model global", _LATE)
    _cast(modules)
    after = named_values(modules)
    became.update({value: ref(after[name]) for name, value in before.items() if after[name] is not value})
    return {id(value): after[name] for name, value in before.items()}


def free_values(
    modules: Mapping[str, nn.Module], layouts: Mapping[str, Layout], rest: Placement
) -> Iterator[tuple[str, GlobalTensor, Layout]]:
    """All global values, once, each with its layout to be; those that a graph does not use come to `rest`, whole."""
    held = named_values(modules)
    layouts = _under_all_names(layouts, held)
    for name, value in {id(value): (name, value) for name, value in held.items()}.values():
        if isinstance(value, GlobalTensor):
            there = layouts.get(name)
            stays = there is None and value.placement is rest
            yield name, value, value._layout if stays else there or _whole(value, rest)


def _of(layout: Layout, dtype: torch.dtype) -> Layout:
    if layout.dtype is dtype:
        return layout
    return Layout(layout.placement, layout.state, layout.shape, dtype, (), layout.sbp, layout.order)


def _cast(modules: Mapping[str, nn.Module]) -> None:
    """Have global parameters rest in the types that are said of them."""
    types = types_of(modules)
    for group in tied(slots(modules)).values() if types else ():
        exact, said = group[0].value, types.get(group[0].full)
        if group[0].kind == "buffer" or said is None or exact.dtype is said.weights:
            continue
        assert isinstance(exact, GlobalTensor)
        with torch.no_grad():
            shards = tuple(shard.detach().to(said.weights) for shard in exact._shards)
        made = replaced(exact, wrap(shards, _of(exact._layout, said.weights)))
        made._path = exact._path
        if said.states is not said.weights and made.requires_grad:  # a frozen one has no master that wants them
            vars(made)[EXACT] = exact.detach()
        for slot in group:
            slot.put(made)


EXACT = "_sbpflow_exact"  # on a parameter that was cast: its values before, until an optimizer's master has them


def exact_of(parameter: Tensor) -> GlobalTensor | None:
    """The same, left with it; digits that a cast has left out count only where nobody has written since."""
    exact: GlobalTensor | None = vars(parameter).get(EXACT) if isinstance(parameter, GlobalTensor) else None
    return exact


def taken_exact(parameter: GlobalTensor) -> GlobalTensor | None:
    """The values of a parameter before it was cast, which are taken from it; None where there are none any more."""
    exact: GlobalTensor | None = vars(parameter).pop(EXACT, None)
    return exact


# Global parameters by the plain ones that they were made of: an optimizer may hold these, if another graph came first.
became: Any = WeakTensorKeyDictionary()


def _whole(value: Tensor, rest: Placement) -> Layout:
    return Layout(rest, State(((),) * value.ndim), tuple(value.shape), value.dtype)


_LATE = (
    "give it to the graph, as in flow.compile(model, loss_fn, optimizer), with leave_gradients=True where you step it; "
    "or make it after the first step"
)
