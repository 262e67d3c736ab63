"""Casts: notes on a model that say in which types weights compute, gradients are added up, and states are kept.

    flow.nn.cast(model, {"*": torch.bfloat16})                        weights rest and compute in bf16
    flow.nn.cast(model, {"*": "fp32"}, kind="grads")                  gradients are brought together in fp32
    flow.nn.cast(model, {"*": "fp32"}, kind="states")                 an optimizer's states, and a master of weights

They are notes like those of `place` and `shard`: a graph reads them, and nothing else changes, eager code either.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ...placement.errors import SbpError
from ..tensors.tensor import GlobalTensor
from .annotate import KINDS, HintKind, note
from .fp8 import EIGHTS, note_eight
from .paths import meant_path
from .slots import TensorSlot, joined_path, slots

__all__ = ["DType", "Types", "Works", "cast", "in_half", "short", "types_of", "works_of"]

DType: TypeAlias = torch.dtype | str

NAMES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
WORKS = "_sbpflow_cast"  # said of the module itself
TYPES = "_sbpflow_casts"  # of the tensors that the module itself holds, by their short names
BEFORE = "before"  # among these: what the parameter was


class Works(NamedTuple):
    """The type in which a module computes, and that of the model around it, in which nobody said one."""

    dtype: torch.dtype
    before: torch.dtype


class Types(NamedTuple):
    """The types of a parameter: as it rests, of its gradient, of its master and states; and what it was before."""

    weights: torch.dtype
    grads: torch.dtype
    states: torch.dtype
    before: torch.dtype


def cast(
    model: nn.Module, patterns: Mapping[str, DType | None], *, kind: HintKind | Sequence[HintKind] = "weights"
) -> nn.Module:
    """Say in which type parameters of a model rest and compute, or what belongs to them is kept. The model is returned.

    A pattern names parameters, or modules with all that is in them; `*` is any part of a name, with its dots, and fits
    the model itself. Of the patterns of one dict the first that fits counts, of several calls the last; None takes it
    back. A type is torch's or one of bf16, fp16, fp32, fp64. A graph casts the float tensors that come into a
    module that is named, and what goes out back to the type of what is around it. A parameter that is named alone rests
    in its type, and is cast where it is used; so is a buffer that is named alone, while others stay as they are. An
    integer, a bool and a complex number are never cast.

    `kind="grads"` is the type in which gradients are brought together, added up over micro-batches and kept, "states"
    that of an optimizer's states and of the weights that it changes: a master, where weights are of another type, which
    begins as the exact weights were. Several kinds may be given at once. Gradients and states of which nothing is said
    are of the weights' type.

    With fp8 (one scale a tensor) and fp8_rowwise (one for each row and column) weights rest as they are, and the
    modules that are named compute products of rows and weights in 8 bits, forward and backward.
    """
    kinds = _kinds(kind)
    known = [slot for slot in slots({"": model}) if slot.value.dtype.is_floating_point]
    modules = dict(model.named_modules(remove_duplicate=False))
    before, weights = _most_of(known), "weights" in kinds
    said: dict[int, torch.dtype | None] = {}
    worked: dict[int, torch.dtype | None] = {}
    eights: dict[int, str | None] = {}
    for pattern, given in patterns.items():
        eight = _eight(given, pattern, kinds)
        dtype = None if given is None or eight else _read(given, pattern, kinds)
        inside = {path for path in modules if fnmatchcase(path, pattern)}
        fits = [slot for slot in known if _fits(slot, pattern, inside, kinds)]
        works = _within(modules, inside) if weights else []
        if not fits and not works:
            raise _nothing_called(pattern, model, known, modules, kinds)
        for module in (*works, *(slot.module for slot in fits)) if weights else ():
            eights.setdefault(id(module), eight)
        if eight:
            _check_multiplies(pattern, eight, fits)
            continue
        for slot in fits:
            said.setdefault(id(slot.value), dtype)
        for module in works:
            worked.setdefault(id(module), dtype)
    meant = [(slot, said[id(slot.value)]) for slot in known if id(slot.value) in said]
    for slot, dtype in meant if weights else ():
        _check_kept(slot, dtype)
    for slot, dtype in meant:
        _say(slot, kinds, dtype)
    for module in modules.values():
        if id(module) in worked:
            dtype, held = worked[id(module)], module.__dict__.get(WORKS)
            note(module, WORKS, None if dtype is None else Works(dtype, held.before if held else before))
        if id(module) in eights:
            note_eight(module, eights[id(module)])
    return model


def _kinds(kind: HintKind | Sequence[HintKind]) -> tuple[HintKind, ...]:
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    if not kinds or any(each not in KINDS for each in kinds):
        raise SbpError(
            f"cast: kind={kind!r}\n  known are {', '.join(map(repr, KINDS))}\n"
            "  give one of them, or several, as in kind=('grads', 'states')"
        )
    return kinds


def _fits(slot: TensorSlot, pattern: str, inside: set[str], kinds: Sequence[str]) -> bool:
    """Whether a pattern means a tensor: a parameter as such or with a module around it, a buffer only as such."""
    around = ["", *accumulate(slot.full.split(".")[:-1], joined_path)] if inside else []
    in_module = not inside.isdisjoint(around)
    if slot.kind == "parameter":
        return in_module or fnmatchcase(slot.full, pattern)
    return "weights" in kinds and not in_module and fnmatchcase(slot.full, pattern)


def _within(modules: Mapping[str, nn.Module], named: set[str]) -> list[nn.Module]:
    """The modules of these paths, and all that are in them."""
    found: dict[int, nn.Module] = {}
    for path in named:
        found.update((id(part), part) for part in modules[path].modules())
    return list(found.values())


def _say(slot: TensorSlot, kinds: Sequence[str], dtype: torch.dtype | None) -> None:
    held = {BEFORE: slot.value.dtype, **_noted(slot), **{kind: dtype for kind in kinds if dtype is not None}}
    if dtype is None:
        held = {kind: said for kind, said in held.items() if kind not in kinds}
    others = {name: types for name, types in slot.module.__dict__.get(TYPES, {}).items() if name != slot.name}
    mine = {slot.name: held} if held.keys() - {BEFORE} else {}
    note(slot.module, TYPES, {**others, **mine} or None)


def _check_kept(slot: TensorSlot, dtype: torch.dtype | None) -> None:
    """A refusal where a graph has cast a parameter already, and others may count on it."""
    wanted = dtype or _noted(slot).get(BEFORE, slot.value.dtype)
    if slot.kind == "parameter" and isinstance(slot.value, GlobalTensor) and slot.value.dtype is not wanted:
        raise SbpError(
            f"cast: {slot.full} is to be {short(wanted)}, and is global already as {short(slot.value.dtype)}\n"
            "  say it before the model is made global: before the first step of a graph, and before to_global"
        )


def _most_of(known: list[TensorSlot]) -> torch.dtype:
    """The type that most numbers of a model's parameters were of before anything was said."""
    found: dict[torch.dtype, int] = {}
    for slot in known:
        if slot.kind == "parameter":
            dtype = _noted(slot).get(BEFORE, slot.value.dtype)
            found[dtype] = found.get(dtype, 0) + (1 if _lazy(slot) else slot.value.numel())
    return max(found, key=lambda dtype: found[dtype]) if found else torch.get_default_dtype()


def _lazy(slot: TensorSlot) -> bool:
    return bool(nn.parameter.is_lazy(slot.value))


def _noted(slot: TensorSlot) -> dict[str, torch.dtype]:
    noted: dict[str, torch.dtype] = slot.module.__dict__.get(TYPES, {}).get(slot.name, {})
    return noted


def _eight(given: DType | None, pattern: str, kinds: Sequence[str]) -> str | None:
    """How products are to be of 8 bits, where that is what is said."""
    said = EIGHTS[0] if given is torch.float8_e4m3fn else given
    if said not in EIGHTS:
        return None
    if tuple(kinds) != ("weights",):
        which = " and ".join(each for each in kinds if each != "weights")
        raise SbpError(
            f"cast: {which} of {pattern!r} are to be {said}\n"
            f"  torch adds no numbers of 8 bits: take bf16, fp16 or fp32 for {which}"
        )
    return str(said)


def _check_multiplies(pattern: str, how: str, fits: Sequence[TensorSlot]) -> None:
    """Refuse a type of products for what has no matrices."""
    if not any(slot.value.ndim == 2 for slot in fits if not _lazy(slot)) and not any(map(_lazy, fits)):
        raise SbpError(
            f"cast: {pattern!r} is to compute in {how}, and holds no matrix\n"
            f"  {how} is of products with weights; name modules that have such, as those of nn.Linear"
        )


def _read(given: DType, pattern: str, kinds: Sequence[str]) -> torch.dtype:
    dtype = NAMES.get(given) or getattr(torch, given, None) if isinstance(given, str) else given
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SbpError(
            f"cast: {pattern!r} is to be {given!r}, which is no type of real numbers\n"
            f"  give it one of torch's, or its name: {', '.join((*NAMES, *EIGHTS))}"
        )
    if dtype.itemsize == 1:
        raise SbpError(
            f"cast: {pattern!r} is to be {short(dtype)}, in which no weights rest\n"
            f"  only products have 8 bits: {' and '.join(EIGHTS)}"
        )
    return dtype


def short(dtype: torch.dtype) -> str:
    """A type as it is called in plans, or else in torch."""
    return next((name for name, each in NAMES.items() if each is dtype), str(dtype).removeprefix("torch."))


def _nothing_called(
    pattern: str, model: nn.Module, known: list[TensorSlot], modules: Mapping[str, nn.Module], kinds: Sequence[str]
) -> SbpError:
    paths = [path for path in modules if path]
    names = [slot.full for slot in known if slot.kind == "parameter"]
    what = "parameter, module or buffer" if "weights" in kinds else "parameter or module with parameters"
    return SbpError(
        f"cast: {type(model).__name__} has no {what} of real numbers called {pattern!r}\n"
        f"  it has {len(names)} parameters" + (f", such as {', '.join(names[:4])}" if names else "") + "\n"
        f"  {meant_path(pattern, [*names, *paths])}"
    )


def works_of(modules: Mapping[str, nn.Module]) -> dict[int, Works]:
    """In which types modules compute, by their ids; those of which nothing is said are left out."""
    parts = (part for root in modules.values() for part in root.modules())
    return {id(part): said for part in parts if (said := part.__dict__.get(WORKS)) is not None}


def types_of(modules: Mapping[str, nn.Module]) -> dict[str, Types]:
    """The types of parameters and buffers for which some were said, by full name; a tied one has each of its names."""
    found: dict[str, Types] = {}
    met: dict[int, tuple[str, dict[str, Any]]] = {}
    for slot in slots(modules):
        said = _noted(slot)
        first, other = met.setdefault(id(slot.value), (slot.full, said))
        if other != said:
            raise SbpError(
                f"one parameter is cast in two ways\n  as {first}: {_told(other)}\n  as {slot.full}: {_told(said)}\n"
                f'  say it once after the two were tied, as in flow.nn.cast(model, {{"{first}": ...}})'
            )
        if said:
            weights = said.get("weights", slot.value.dtype)
            rest = said.get("grads", weights), said.get("states", weights)
            found[slot.full] = Types(weights, *rest, said[BEFORE])
    return found


def in_half(modules: Mapping[str, nn.Module]) -> bool:
    """Whether weights that are trained compute in fp16, which loses the small ones among gradients."""
    types = types_of(modules)
    trained = (s for s in slots(modules) if s.kind == "parameter" and s.value.requires_grad)
    rest = (types[s.full].weights if s.full in types else s.value.dtype for s in trained)
    return torch.float16 in rest or any(said.dtype is torch.float16 for said in works_of(modules).values())


def _told(said: Mapping[str, torch.dtype]) -> str:
    return ", ".join(f"{kind} {short(dtype)}" for kind, dtype in said.items() if kind != BEFORE) or "nothing"
