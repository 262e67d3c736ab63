"""Annotations of a model, which do not change it: where its modules live, and how its parameters lie.

    flow.nn.place(model.blocks[:6], pipe.at(pipe=0))           modules and all that is in them
    flow.nn.shard(model, {"blocks.*.attn.qkv": flow.S(0)})     parameters, by names

Both are notes that modules keep; they stay in copies and pickles, are in no state_dict, and nothing runs otherwise.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...placement import Placement
from ...placement.errors import PlacementError, SbpError, ShapeError
from ...sbp import B, Broadcast, Partial, Sbp, SbpLike, Split
from ...sbp.text import _one, parse
from .slots import TensorSlot, joined_path, slots

__all__ = [
    "Hint",
    "LayerMoves",
    "checked_hints",
    "chunk_of",
    "hints_of",
    "near",
    "note",
    "place",
    "placement_of",
    "shard",
    "spared",
]

Hint: TypeAlias = Sbp | tuple[Sbp, ...] | dict[str, Sbp]
LayerMoves: TypeAlias = Mapping[
    nn.Module, tuple[Placement, int]
]  # modules elsewhere than is said of them, and their chunks
Modules: TypeAlias = Mapping[str, nn.Module]  # by what their paths begin with
Placed = TypeVar("Placed", bound=nn.Module | Sequence[nn.Module])

PLACE = "_sbpflow_place"  # said of the module itself
PART = "_sbpflow_place_as_part"  # said of a list that it is in: slices are lists of their own, which are not kept
CHUNK = "_sbpflow_chunk"  # of a pipeline
CUT = "_sbpflow_cut"  # of a layer, where nobody said at which layers the stages of a pipeline end
HINTS = "_sbpflow_hints"  # of the parameters that the module itself holds, by their short names


def place(modules: Placed, placement: Placement | None, *, chunk: int | None = None) -> Placed:
    """Say that a module, or each of several, lives on a placement with all that is in it; None takes it back.

    What is said of a module counts for those in it that nothing is said of, in whatever order it is said. A slice of a
    ModuleList or a Sequential stands for the modules in it; of slices that overlap the later counts.
    Layers of a pipeline on one placement are one chunk of it, unless they are said to be of different ones.
    """
    each = [modules] if isinstance(modules, nn.Module) else modules
    wrong = next((m for m in each if not isinstance(m, nn.Module)), None) if isinstance(each, list | tuple) else each
    if wrong is not None:
        raise PlacementError(
            f"place: expected a module or a list of modules, found {type(wrong).__name__}\n"
            "  pass what is in the model, as in flow.nn.place(model.blocks[:6], placement)"
        )
    if not (placement is None or isinstance(placement, Placement)):
        raise PlacementError(
            f"place: expected a placement, found {placement!r}\n"
            '  make one, as in flow.placement("cpu:[0-3] as (data=2, tensor=2)"); None takes a placement back'
        )
    if not (chunk is None or (isinstance(chunk, int) and chunk >= 0)):
        raise PlacementError(
            f"place: chunk={chunk!r}\n  give the number of a chunk of the pipeline, from 0, or leave it out"
        )
    for module in each:
        note(module, PLACE, placement)
        note(module, CHUNK, chunk)
        note(module, CUT, None)  # now somebody did
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for child in module.children():
                note(child, PART, placement)
    return modules


def note(module: nn.Module, key: str, value: object) -> None:
    """Have a module keep what is said of it; None takes it back."""
    if value is None:
        module.__dict__.pop(key, None)
    else:
        module.__dict__[key] = value


def placement_of(modules: Modules, moved: LayerMoves = {}) -> dict[str, Placement]:  # noqa: B006
    """Where every module lives that has a place, its own or that of a module around it, by its path."""
    return _inherited(modules, {module: place for module, (place, _) in moved.items()}, PLACE, PART)


def chunk_of(modules: Modules, moved: LayerMoves = {}) -> dict[str, int]:  # noqa: B006
    """The chunk of every module that has one, its own or that of a module around it, by its path."""
    return _inherited(modules, {module: chunk for module, (_, chunk) in moved.items()}, CHUNK)


def _inherited(modules: Modules, instead: Mapping[nn.Module, Any], *keys: str) -> dict[str, Any]:
    """The word said of every module under the first of these keys, or else of a module around it, by its path; of some
    something else instead."""
    found: dict[str, Any] = {}

    def visit(module: nn.Module, path: str, outer: object) -> None:
        here = next((said for key in keys if (said := module.__dict__.get(key)) is not None), outer)
        here = instead.get(module, here)
        if here is not None:
            found[path] = here
        for name, child in module._modules.items():
            if child is not None:
                visit(child, joined_path(path, name), here)

    for prefix, root in modules.items():
        visit(root, prefix, None)
    return found


def _parameters(modules: Modules) -> list[TensorSlot]:
    """The parameters under each of their names."""
    return [slot for slot in slots(modules) if slot.kind == "parameter"]


def shard(model: nn.Module, patterns: Mapping[str, SbpLike | None]) -> nn.Module:
    """Say how parameters are to lie; what is not said is chosen. The model is returned.

    A pattern names parameters, or modules for all parameters in them; `*` is any part of a name, with its dots. Of the
    patterns of one dict the first that fits a parameter counts, of several calls the last. None takes a hint back.
    One entry, such as `S(0)`, is meant for every axis of a placement. Where a pattern is meant for many, those without
    dims are B instead of split. A tied parameter has one hint under all its names.
    """
    known = _parameters({"": model})
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    said: dict[int, Hint | None] = {}
    for pattern, sbp in patterns.items():
        hint = None if sbp is None else _read(sbp)
        inside = {path for path in paths if fnmatchcase(path, pattern)}
        fits = [s for s in known if fnmatchcase(s.full, pattern) or inside.intersection(_around(s.full))]
        if not fits:
            raise _nothing_called(pattern, model, known, paths)
        for slot in fits:
            if id(slot.value) not in said:
                mine = hint if hint is None or slot.full == pattern else spared(hint, slot.value)
                _check_dims(slot, pattern, mine)
                said[id(slot.value)] = mine
    for slot in known:
        if id(slot.value) in said:
            kept = {**slot.module.__dict__.get(HINTS, {}), slot.name: said[id(slot.value)]}
            note(slot.module, HINTS, {name: hint for name, hint in kept.items() if hint is not None} or None)
    return model


def _around(full: str) -> list[str]:
    """The paths of the modules that a parameter is in."""
    return list(accumulate(full.split(".")[:-1], lambda path, name: f"{path}.{name}"))


def _read(sbp: SbpLike) -> Hint:
    """A signature in any spelling, of which the placement is not known yet."""
    given = parse(sbp) if isinstance(sbp, str) else sbp
    if isinstance(given, Mapping):
        return {axis: _one(entry) for axis, entry in given.items()}
    if isinstance(given, tuple | list):
        return tuple(map(_one, given))
    return _one(given)


def spared(sbp: Any, value: Tensor) -> Any:
    """A hint for many tensors, as it is for one of them: what has no dims cannot be split, and is B."""
    if is_lazy(value) or value.ndim:
        return sbp
    given = parse(sbp) if isinstance(sbp, str) else sbp
    if isinstance(given, Mapping):
        return {axis: spared(entry, value) for axis, entry in given.items()}
    if isinstance(given, tuple | list):
        return tuple(spared(entry, value) for entry in given)
    return B if isinstance(given, Split) else given


def _entries(hint: Hint | None) -> Iterable[Sbp]:
    if isinstance(hint, dict):
        return hint.values()
    return (hint,) if isinstance(hint, Split | Broadcast | Partial) else hint or ()


def _check_dims(slot: TensorSlot, pattern: str, hint: Hint | None) -> None:
    if is_lazy(slot.value):  # its shape comes with the first batch
        return
    shape = tuple(slot.value.shape)
    for entry in _entries(hint):
        if isinstance(entry, Split) and not -len(shape) <= entry.dim < len(shape):
            dims = f"its dims are 0 to {len(shape) - 1}" if len(shape) > 1 else f"it has {len(shape) or 'no'} dim"
            raise ShapeError(
                f"shard: {entry} of {slot.full} {shape}, which the pattern {pattern!r} names\n  {dims}\n"
                f"  give it a signature of its own before that pattern, as in "
                f'flow.nn.shard(model, {{"{slot.full}": flow.B, ...}})'
            )


def _nothing_called(pattern: str, model: nn.Module, known: list[TensorSlot], paths: list[str]) -> SbpError:
    names, number = [slot.full for slot in known], len({id(slot.value) for slot in known})
    found = near(pattern, [*names, *paths])
    return SbpError(
        f"shard: {type(model).__name__} has no parameter or module called {pattern!r}\n"
        f"  it has {number} parameters" + (f", such as {', '.join(names[:4])}" if names else "") + "\n"
        f"  {f'did you mean {found}?' if found else 'see all names: print(flow.nn.annotations(model))'}"
    )


def near(asked: str, names: Iterable[str]) -> str:
    """The names that are spelled most like one, with stars for numbers where it has stars; empty if there are none."""
    kinds = (re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names) if "*" in asked else names
    return " or ".join(map(repr, get_close_matches(asked, list(dict.fromkeys(kinds)), 2, 0.7)))


def hints_of(modules: Modules) -> dict[str, SbpLike]:
    """The hints of all parameters that have one, by their full names; a tied one is there under each of its names."""
    known = _parameters(modules)
    said: dict[int, tuple[str, Hint]] = {}
    for slot in known:
        hint = slot.module.__dict__.get(HINTS, {}).get(slot.name)
        if hint is None:
            continue
        first, other = said.setdefault(id(slot.value), (slot.full, hint))
        if other != hint:
            raise SbpError(
                f"one parameter has two hints\n  as {first}: {other!r}\n  as {slot.full}: {hint!r}\n"
                f'  say it once after the two were tied, as in flow.nn.shard(model, {{"{first}": ...}})'
            )
    return {slot.full: said[id(slot.value)][1] for slot in known if id(slot.value) in said}


def checked_hints(modules: Modules, placement_by_param: Mapping[str, Placement]) -> dict[str, tuple[Sbp, ...]]:
    """The hints as signatures, one entry an axis, once it is known where the parameters live."""
    found: dict[str, tuple[Sbp, ...]] = {}
    hints = hints_of(modules)
    for slot in _parameters(modules):
        if slot.full not in hints:
            continue
        hint, where = hints[slot.full], placement_by_param.get(slot.full)
        shape = tuple(slot.value.shape)
        if where is None:
            raise SbpError(
                f"{slot.full} {shape} is to be {hint!r}, but has no placement\n"
                "  say where it lives, as in flow.nn.place(model, placement)"
            )
        anew = f'say it anew: flow.nn.shard(model, {{"{slot.full}": ...}})'
        found[slot.full] = slot.laid(
            hint, where, f"{slot.full} {shape} is to be {hint!r} on {where!r}\n  ", f"\n  {anew}"
        ).sbp
    return found
