"""Annotations of a model, which do not change it: where its modules live, and how its parameters lie.

    flow.nn.place(model.blocks[:6], pipe.at(pipe=0))           modules and all that is in them
    flow.nn.shard(model, {"blocks.*.attn.qkv": flow.S(0)})     parameters, by names
    flow.nn.shard(model, {"*": flow.S(0)}, kind="states")      what optimizers keep of them

Both are notes that modules keep; they stay in copies and pickles, are in no state_dict, and nothing runs otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...placement import Placement
from ...placement.errors import PlacementError, SbpError, ShapeError
from ...sbp import B, Broadcast, Partial, Sbp, SbpLike, Split
from ...sbp.text import _one, parse
from ..tensors.tensor import GlobalTensor
from .folds import FOLD, folded
from .paths import PathPattern, meant_path
from .slots import TensorSlot, joined_path, parameter_notes, parameters

__all__ = [
    "KINDS",
    "Hint",
    "HintKind",
    "LayerMoves",
    "PLACES",
    "checked_hints",
    "checked_rests",
    "chunk_of",
    "hints_of",
    "note",
    "place",
    "place_alone",
    "placed_by_slice",
    "placement_of",
    "shard",
    "spared",
]

Hint: TypeAlias = Sbp | tuple[Sbp, ...] | dict[str, Sbp | None]  # by axis: None leaves it to be chosen
HintLike: TypeAlias = SbpLike | Mapping[str, Sbp | str | None]
HintKind: TypeAlias = Literal["weights", "grads", "states"]
LayerMoves: TypeAlias = Mapping[
    nn.Module, tuple[Placement, int]
]  # modules elsewhere than is said of them, and their chunks
Modules: TypeAlias = Mapping[str, nn.Module]  # by what their paths begin with
Placed = TypeVar("Placed", bound=nn.Module | Sequence[nn.Module])

PLACE = "_sbpflow_place"  # said of the module itself
PART = "_sbpflow_place_as_part"  # said of a list that it is in: slices are lists of their own, which are not kept
SAID = "_sbpflow_place_said"  # the number of what was said of its place: it grows
CHUNK = "_sbpflow_chunk"  # of a pipeline
CUT = "_sbpflow_cut"  # of a layer, where nobody said at which layers the stages of a pipeline end
PLACES = frozenset(
    {PLACE, PART, SAID, CHUNK, CUT}
)  # read when all is captured: where a module is changes no call in it
# Of the parameters that the module itself holds, by their short names.
HINTS = {"weights": "_sbpflow_hints", "grads": "_sbpflow_grads", "states": "_sbpflow_states"}
KINDS: tuple[HintKind, ...] = get_args(HintKind)


def place(modules: Placed, placement: Placement | None, *, chunk: int | None = None) -> Placed:
    """Say that a module, or each of several, lives on a placement with all that is in it; None takes it back.

    What is said of a module counts for those in it that nothing is said of, in whatever order it is said. A slice of a
    ModuleList or a Sequential stands for the modules in it, and of what is said of one of these the later counts.
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
        said = place_alone(module, placement, chunk)
        note(module, CUT, None)  # now somebody did
        for child in _listed(module):
            note(child, PART, _PlaceAsPart(placement, chunk, said))
    return modules


def place_alone(module: nn.Module, placement: Placement | None, chunk: int | None) -> int:
    """Note where a module lives, behind all that was said of it, and return the number of that."""
    before = [part.__dict__.get(SAID, 0) for part in (module, *_listed(module))]
    before += [part.__dict__[PART].said for part in (module, *_listed(module)) if PART in part.__dict__]
    said: int = 1 + max(before)
    note(module, PLACE, placement)
    note(module, CHUNK, chunk)
    note(module, SAID, said)
    return said


def _listed(module: nn.Module) -> list[nn.Module]:
    return list(module.children()) if isinstance(module, nn.ModuleList | nn.Sequential) else []


class _PlaceAsPart(NamedTuple):
    """The place of a module as one of a list, and the number under which that was said of the list."""

    placement: Placement | None
    chunk: int | None
    said: int


def placed_by_slice(module: nn.Module, around: nn.Module | None) -> "_PlaceAsPart | None":
    """The placement that counts for a module because it was in a slice, which is part of no model. None where the
    module's own is newer, or where it was said of the list around it."""
    part: _PlaceAsPart | None = module.__dict__.get(PART)
    if part is None or (around is not None and around.__dict__.get(SAID) == part.said):
        return None
    if around is None and PLACE in module.__dict__:  # the list around it, if there is one, cannot be seen
        return None
    return part if part.said > module.__dict__.get(SAID, 0) else None


def note(module: nn.Module, key: str, value: object) -> None:
    """Have a module keep what is said of it; None takes it back."""
    if value is None:
        module.__dict__.pop(key, None)
    else:
        module.__dict__[key] = value


def placement_of(modules: Modules, moved: LayerMoves = {}) -> dict[str, Placement]:  # noqa: B006
    """The placement of every module that has one, its own or that of a module around it, by path."""
    return _inherited(modules, {module: place for module, (place, _) in moved.items()}, PLACE)


def chunk_of(modules: Modules, moved: LayerMoves = {}) -> dict[str, int]:  # noqa: B006
    """The chunk of every module that has one, its own or that of a module around it, by its path."""
    return _inherited(modules, {module: chunk for module, (_, chunk) in moved.items()}, CHUNK)


def _inherited(modules: Modules, instead: Mapping[nn.Module, Any], key: str) -> dict[str, Any]:
    """The place or chunk of every module, its own or that of a module around it, by path; `instead` replaces some."""
    found: dict[str, Any] = {}

    def visit(module: nn.Module, around: nn.Module | None, path: str, outer: Any) -> None:
        part = placed_by_slice(module, around)
        mine = module.__dict__.get(key) if part is None else part.placement if key == PLACE else part.chunk
        here = instead.get(module, outer if mine is None else mine)
        if key == PLACE and FOLD in module.__dict__:
            here = folded(here, module.__dict__[FOLD], path)
        if here is not None:
            found[path] = here
        for name, child in module._modules.items():
            if child is not None:
                visit(child, module, joined_path(path, name), here)

    for prefix, root in modules.items():
        visit(root, None, prefix, None)
    return found


def shard(
    model: nn.Module, patterns: Mapping[str, HintLike | None], kind: HintKind | Sequence[HintKind] = "weights"
) -> nn.Module:
    """Say how parameters are to lie; what is not said is chosen. The model is returned.

    Of kind "grads" it says where their gradients are brought together, added up and kept until the update, of kind
    "states" where the optimizer changes them and keeps its state; on axes that these do not name, they lie as the
    parameter does. Several kinds may be given at once. An axis whose entry is None is left to be chosen.

    A pattern names parameters, or modules for all parameters in them; `*` is any part of a name, with its dots, {a,b}
    one of several, [2:8] a range of numbers. Of the patterns of one dict the first that fits a parameter counts, of
    several calls the last. None takes a hint back. One entry, such as `S(0)`, is meant for every axis of a placement.
    Where a pattern is meant for many, those without dims are B instead of split. A tied parameter has one hint under
    all its names.
    """
    kinds = _kinds(kind)
    known = parameters({"": model})
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    said: dict[int, Hint | None] = {}
    below: dict[str, list[TensorSlot]] = {}  # parameters by their own names, and by those of the modules they are in
    for slot in known:
        for name in (slot.full, *_around(slot.full)):
            below.setdefault(name, []).append(slot)
    for pattern, sbp in patterns.items():
        hint = None if sbp is None else _read(sbp)
        if kinds != ("weights",):
            _refuse_addends(pattern, hint, kinds)
        fits = below.get(pattern)
        if fits is None:  # no name, but a pattern: all names are looked at
            meets = PathPattern.of(pattern, dots=True).regex([*paths, *(slot.full for slot in known)]).fullmatch
            inside = {path for path in paths if meets(path)}
            fits = [s for s in known if meets(s.full) or inside.intersection(_around(s.full))]
        if not fits:
            raise _nothing_called(pattern, model, known, paths)
        for slot in fits:
            if id(slot.value) not in said:
                mine = hint if hint is None or slot.full == pattern else spared(hint, slot.value)
                _check_dims(slot, pattern, mine)
                said[id(slot.value)] = mine
    for slot in known:
        if id(slot.value) in said:
            for each in kinds:
                kept = {**slot.module.__dict__.get(HINTS[each], {}), slot.name: said[id(slot.value)]}
                note(slot.module, HINTS[each], {name: hint for name, hint in kept.items() if hint is not None} or None)
    return model


def _kinds(kind: HintKind | Sequence[HintKind]) -> tuple[HintKind, ...]:
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    wrong = [each for each in kinds if each not in KINDS]
    if wrong or not kinds:
        raise SbpError(
            f"shard: kind={kind!r}\n  known are {', '.join(map(repr, KINDS))}\n"
            "  give one of them, or several, as in kind=('grads', 'states')"
        )
    return tuple(dict.fromkeys(kinds))


def _refuse_addends(pattern: str, hint: Hint | None, kinds: Sequence[HintKind]) -> None:
    if any(isinstance(entry, Partial) for entry in _entries(hint)):
        what = " and ".join(each for each in kinds if each != "weights")
        raise SbpError(
            f"shard: {what} of {pattern!r} are to be {hint!r}\n"
            "  gradients are added up before they are kept, and an optimizer changes sums, not addends of them\n"
            f"  write S(d) or B, as in flow.nn.shard(model, {{{pattern!r}: flow.S(0)}}, kind={kinds[-1]!r})"
        )


def _around(full: str) -> list[str]:
    """The paths of the modules that a parameter is in."""
    return list(accumulate(full.split(".")[:-1], lambda path, name: f"{path}.{name}"))


def _read(sbp: HintLike) -> Hint:
    """A signature in any spelling, of which the placement is not known yet."""
    given = parse(sbp) if isinstance(sbp, str) else sbp
    if isinstance(given, Mapping):
        return {axis: None if entry is None else _one(entry) for axis, entry in given.items()}
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
        return [entry for entry in hint.values() if entry is not None]
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
    return SbpError(
        f"shard: {type(model).__name__} has no parameter or module called {pattern!r}\n"
        f"  it has {number} parameters" + (f", such as {', '.join(names[:4])}" if names else "") + "\n"
        f"  {meant_path(pattern, [*names, *paths])}"
    )


def hints_of(modules: Modules, kind: HintKind = "weights") -> dict[str, Hint]:
    """The hints of all parameters that have one, by their full names; a tied one is there under each of its names."""
    known = parameters(modules)
    said: dict[int, Hint] = parameter_notes(
        known, HINTS[kind], "hints", again=lambda first: f", as in {_again(first, kind)}"
    )
    return {slot.full: said[id(slot.value)] for slot in known if id(slot.value) in said}


def checked_hints(modules: Modules, placement_by_param: Mapping[str, Placement]) -> dict[str, tuple[Sbp | None, ...]]:
    """The hints as signatures, one entry an axis, once it is known where the parameters live; None is to be chosen."""
    found: dict[str, tuple[Sbp | None, ...]] = {}
    hints = hints_of(modules)
    for slot in parameters(modules):
        if slot.full not in hints:
            continue
        hint, where = hints[slot.full], placement_by_param.get(slot.full)
        if where is None:
            raise SbpError(
                f"{slot.full} {tuple(slot.value.shape)} is to be {hint!r}, but has no placement\n"
                "  say where it lives, as in flow.nn.place(model, placement)"
            )
        entries = dict(_laid(slot, hint, where, "weights"))
        found[slot.full] = tuple(entries.get(axis, B) for axis in range(where.ndim))
    return found


def checked_rests(
    modules: Modules, placement_by_param: Mapping[str, Placement], kind: HintKind
) -> dict[str, tuple[tuple[int, Sbp | None], ...]]:
    """The hints for gradients or states: the axes that they name, by number, with their entries. Parameters that live
    nowhere are in no step, and have none."""
    hints = hints_of(modules, kind)
    return {
        slot.full: _laid(slot, hints[slot.full], placement_by_param[slot.full], kind)
        for slot in parameters(modules)
        if slot.full in hints and slot.full in placement_by_param
    }


def _laid(slot: TensorSlot, hint: Hint, where: Placement, kind: HintKind) -> tuple[tuple[int, Sbp | None], ...]:
    """The entries of a hint by axis, or an error where it does not fit the placement."""
    shape, of = tuple(slot.value.shape), "" if kind == "weights" else f"{kind} of "
    sbp: SbpLike = {axis: B if e is None else e for axis, e in hint.items()} if isinstance(hint, dict) else hint
    head = f"{of}{slot.full} {shape} is to be {hint!r} on {where!r}\n  "
    fix = f"say it anew: {_again(slot.full, kind)}"
    if isinstance(slot.value, GlobalTensor):
        fix = f"it lies there already: make the model anew, move it by flow.nn.to_global, or {fix}"
    laid = slot.laid(sbp, where, head, f"\n  {fix}").sbp
    if not isinstance(hint, dict):
        return tuple(enumerate(laid))
    named = {where.axis(name): entry for name, entry in hint.items()}
    return tuple((axis, None if entry is None else laid[axis]) for axis, entry in sorted(named.items()))


def _again(full: str, kind: HintKind) -> str:
    more = "" if kind == "weights" else f', kind="{kind}"'
    return f'flow.nn.shard(model, {{"{full}": ...}}{more})'
