"""Ways to compute: notes on modules that say by which composite their ops run, and over which axis.

    flow.nn.inside(model.layers, use="ring", over="context")

A note counts for all that is in the module; of notes for the same op that of the innermost module, and of one module
the last. Nothing else of a module changes.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...placement import Placement
from ...placement.errors import PlacementError, SbpError, did_you_mean
from ...sbp.logical import Logical, LogicalOp
from .annotate import Placed, note
from .slots import joined_path

__all__ = ["COMPOSITES", "Composite", "CompositeSite", "CompositeUse", "Left", "inside", "uses_of", "uses_said"]

USES = "_sbpflow_inside"  # said of the module itself
PART = "_sbpflow_inside_as_part"  # said of a list that it is in: slices are lists of their own, which are not kept


@dataclass(frozen=True)
class Left:
    """A call that a composite leaves as it is, why, and what would make it one for it."""

    why: str
    fix: str


@dataclass(frozen=True)
class Composite:
    """A way to compute some ops along axes; `noun` says in errors what it was looking for, and what it `takes` stands
    behind its name. One that computes something else than the op does so `alone` too, on one rank."""

    name: str
    ops: frozenset[str]  # as rules name them
    noun: str
    axes: tuple[int, ...]  # over how many it may be
    takes: tuple[str, ...]
    alone: bool

    def calls(self, site: "CompositeSite") -> list[LogicalOp] | Left:
        """The calls that it makes in the place of an op, the last of which make the op's own values."""
        raise NotImplementedError


COMPOSITES: dict[str, Composite] = {}  # by name


def composite_named(use: str) -> Composite:
    """The composite of a name, behind which may stand what it takes."""
    name = use.partition("(")[0].strip() if isinstance(use, str) else use
    found = COMPOSITES.get(name) if isinstance(name, str) else None
    if found is None:
        raise SbpError(
            f"there is no composite {name!r}; flow.nn.composite adds one\n  {did_you_mean(str(name), COMPOSITES)}"
        )
    return found


def settings_of(use: str) -> dict[str, object]:
    """The settings that stand behind a composite's name, by name.

    >>> settings_of("capacity(1.25)"), settings_of("ring")
    ({'factor': 1.25}, {})
    """
    composite = composite_named(use)
    try:
        read = ast.parse(use.strip(), mode="eval").body
        call = read if isinstance(read, ast.Call) else ast.Call(read, [], [])
        said = dict(zip(composite.takes, map(ast.literal_eval, call.args), strict=False))
        more = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        call, said, more = None, {}, {}
    settings = said | more
    if call is None or set(settings) != set(composite.takes) or len(settings) < len(call.args) + len(call.keywords):
        takes = ", ".join(f"{name}=..." for name in composite.takes)
        fix = f"it takes {takes}, as in {composite.name}({takes})" if takes else f"it takes nothing: {composite.name}"
        raise SbpError(f"{use!r} is not how {composite.name} is said\n  {fix}")
    return settings


@dataclass(frozen=True)
class CompositeUse:
    """A composite used in a module over an axis; as `part`, in a module of a list that was noted."""

    path: str
    use: str
    over: tuple[str | int, ...]
    part: bool = False

    @property
    def composite(self) -> Composite:
        return composite_named(self.use)

    @property
    def settings(self) -> dict[str, object]:
        """The settings that its text says, by name."""
        return settings_of(self.use)

    def __str__(self) -> str:
        return f"inside {self.path or 'the model'} use {self.use} over {', '.join(map(str, self.over))}"


@dataclass(frozen=True)
class CompositeSite:
    """An op that a composite stands for, on these axes of its placement. The composite may go by names of values from
    outside, and by hints of parameters, by name. `fresh` gives numbers to new values."""

    op: LogicalOp
    logical: Logical
    names: Mapping[int, str]
    placement: Placement
    axes: tuple[int, ...]
    use: CompositeUse
    pins: Mapping[str, Any]
    fresh: Callable[[], int]


def inside(modules: Placed, *, use: str | None, over: str | int | Sequence[str | int] | None = None) -> Placed:
    """Say that ops of a module, or of each of several, are computed by a composite over an axis of their placement.

    `use` is the name of one, such as "ring" or "chunked", with what it takes behind it, as in "capacity(1.25)"; None
    takes all back that was said of the module. Some are
    over several axes, as in over=("row", "col"). It must stand for something that is called there, which is known when
    a graph is made. Eager calls go on as they are. A slice of a ModuleList or a Sequential stands for the modules in
    it.
    """
    each = [modules] if isinstance(modules, nn.Module) else modules
    wrong = next((m for m in each if not isinstance(m, nn.Module)), None) if isinstance(each, Sequence) else each
    if not isinstance(each, nn.ModuleList | nn.Sequential) and wrong is not None:
        raise PlacementError(
            f"inside: expected a module or a list of modules, found {type(wrong).__name__}\n"
            '  pass what is in the model, as in flow.nn.inside(model.layers, use="ring", over="context")'
        )
    axes = () if use is None else _axes(use, over)
    for module in each:
        _say(module, USES, use, axes)
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for child in module.children():
                _say(child, PART, use, axes)
    return modules


def _axes(use: str, over: str | int | Sequence[str | int] | None) -> tuple[str | int, ...]:
    """The axes that a composite is to be over, as many as it can be over."""
    counts = composite_named(use).axes
    settings_of(use)
    axes = tuple(over) if isinstance(over, list | tuple) else (over,)
    said = f"inside: use={use!r} over={over!r}"
    if not all(isinstance(axis, str | int) and not isinstance(axis, bool) for axis in axes):
        one = "context" if counts == (1,) else tuple("abcdefgh"[: counts[0]])
        raise PlacementError(
            f"{said}\n  say over which axis of the placement, as in flow.nn.inside(module, use={use!r}, over={one!r})"
        )
    if len(axes) not in counts:
        many = " or ".join(map(str, counts))
        fix = f"as in over={tuple('abcdefgh'[: counts[0]])!r}" if counts != (1,) else 'as in over="context"'
        raise PlacementError(
            f"{said}\n  {use} is over {many} {'axis' if counts == (1,) else 'axes'} of the placement: name them, {fix}"
        )
    if len(set(axes)) < len(axes):
        raise PlacementError(f"{said}\n  an axis is named twice; name others")
    return axes


def _say(module: nn.Module, key: str, use: str | None, over: tuple[str | int, ...]) -> None:
    """Have a module keep one note more, as the last."""
    known = dict(module.__dict__.get(key, {}))
    known.pop(use, None)
    note(module, key, None if use is None else {**known, use: over})


def uses_of(modules: Mapping[str, nn.Module]) -> dict[str, tuple[CompositeUse, ...]]:
    """The notes of all modules that have some, by their paths; the last first."""
    return {path: found for path, module in _all(modules) if (found := uses_said(path, module))}


def uses_said(path: str, module: nn.Module) -> tuple[CompositeUse, ...]:
    """The notes of one module at a path, the last first."""
    return tuple(
        CompositeUse(path, use, over, key == PART)
        for key in (USES, PART)
        for use, over in reversed([*module.__dict__.get(key, {}).items()])
    )


def _all(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for prefix, root in modules.items():
        for path, module in root.named_modules(remove_duplicate=False):
            yield joined_path(prefix, path), module
