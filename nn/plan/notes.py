"""Notes of a plan on a model: those that `flow.nn.place`, `shard` and their like would make; all or none.

A model keeps what its last plan noted, so that another plan takes it back first; notes made by hand stay, below those
of a plan.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from ...actors.schedules.published import published
from ...sbp import Sbp
from ..graph.options import GivenOptions
from ..model.annotate import place, shard
from ..model.balance import pipeline
from ..model.flows import flow
from ..model.folds import fold
from ..model.recompute.recomputation import Recomputing
from .assignment import Assignment
from .language.statement import Axes, outermost
from .language.statements import Kind, Statement

__all__ = ["kept_notes", "noted", "options_of", "take_back"]

PLAN = "_sbpflow_plan"  # an attribute of the model itself: its notes before a plan

Before = list[tuple[nn.Module, dict[str, Any], dict[str, bool]]]  # with the parameters that it has, and which train


def noted(made: Assignment, model: nn.Module) -> None:
    """Note on a model what a plan says of it; where that fails the notes are what they were."""
    before = take_back(model)
    known = _notes(model)
    try:
        for statement, action in _actions(made, model):
            try:
                action()
            except Exception as error:
                if statement is None:
                    raise
                raise made.wrong(statement, "", str(error)) from error
    except BaseException:
        _restore(known)
        _restore(before, trains=True)
        raise
    model.__dict__[PLAN] = known


def take_back(model: nn.Module) -> Before:
    """Take back what the last plan noted; returns the notes as they were with it."""
    now = _notes(model)
    before = model.__dict__.pop(PLAN, None)
    if before is not None:
        _restore(before)
    return now


@contextmanager
def kept_notes(model: nn.Module) -> Iterator[None]:
    """Notes that are made inside are gone at the end."""
    before = _notes(model)
    try:
        yield
    finally:
        _restore(before, trains=True)


def _notes(model: nn.Module) -> Before:
    def of(part: nn.Module) -> dict[str, Any]:
        return {key: value for key, value in part.__dict__.items() if _is_note(key, value)}

    def trains(part: nn.Module) -> dict[str, bool]:
        return {name: value.requires_grad for name, value in part._parameters.items() if value is not None}

    return [(part, of(part), trains(part)) for part in model.modules()]


def _restore(before: Before, *, trains: bool = False) -> None:
    """Put notes back; frozen parameters stay so, unless `trains` says that they are to train as before."""
    for part, notes, trained in before:
        for name, value in part._parameters.items() if trains else ():
            if value is not None and value.requires_grad is not trained.get(name, value.requires_grad):
                value.requires_grad_(trained[name])
        for key in [key for key, value in part.__dict__.items() if _is_note(key, value)]:
            del part.__dict__[key]
        part.__dict__.update(notes)


def _is_note(key: str, value: object) -> bool:
    return key.startswith("_sbpflow_") or isinstance(value, Recomputing)


def options_of(made: Assignment) -> GivenOptions:
    """The options of the whole step that a plan says, as a graph takes them."""
    options: Any = {"placement": made.grids.whole, **made.options}
    if made.inputs:
        options["inputs"] = {name: _entries(axes) for name, axes in made.inputs.items()}
    said: GivenOptions = options
    return said


def _actions(made: Assignment, model: nn.Module) -> Iterator[tuple[Statement | None, Callable[[], object]]]:
    """All that is to be noted, in order, each with the line that says it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if not made.pipes and not made.places:
        yield None, partial(place, model, made.grids.whole)  # what follows a folded module is back on the grid
    for path, (line, _) in made.places.items():
        yield line, partial(line.note, model, [path], made.grids)
    for number, piped in enumerate(made.pipes):
        yield piped.by, partial(_pipe, made, modules, number)
    for path in outermost(made.folded):
        how = made.grids.folds[made.folded[path]]
        yield None, partial(fold, modules[path], str(how.folds), how.name, int(how.size))
    yield from _rests(made, model)
    for (path, side), axes in made.flows.items():
        yield _last(axes), partial(flow, modules[path], **{side: _entries(axes)})
    for line, names in made.marks:
        yield line, partial(line.note, model, names, made.grids)


def _pipe(made: Assignment, modules: Mapping[str, nn.Module], number: int) -> None:
    """Place the layers of one line behind those of the lines before, with which they share the schedule's chunks."""
    listed = [[modules[name] for name in piped.layers] for piped in made.pipes]
    piped, before = made.pipes[number], [layer for layers in listed[:number] for layer in layers]
    stages = [made.grids.whole.at(**{piped.axis: at}) for at in piped.places]
    chunks = piped.chunks
    if len(listed) > 1 and not chunks:
        chunks = max(1, published(piped.schedule).v // len(listed))
    pipeline(listed[number], stages, piped.schedule, chunks=chunks, worth=1.0, behind=before)


def _rests(made: Assignment, model: nn.Module) -> Iterator[tuple[Statement | None, Callable[[], object]]]:
    """Hints for every parameter: those that no line names are whole, or the planner's under a limit."""
    weights = {n: made.rests["weights"].get(n, {}) for n in made.parameters if not made.whole(n)}
    kinds: tuple[Kind, ...] = ("weights", "grads", "states")
    for kind in kinds:
        by_line: dict[int, dict[str, Axes]] = {}
        for name, axes in (weights if kind == "weights" else made.rests[kind]).items():
            by_line.setdefault(id(_last(axes)), {})[name] = axes
        for named in by_line.values():
            hints = {name: _entries(axes) for name, axes in named.items()}
            yield _last(next(iter(named.values()))), partial(shard, model, hints, kind=kind)


def _last(axes: Axes) -> Statement | None:
    return next(reversed([pinned.by for pinned in axes.values()]), None)


def _entries(axes: Axes) -> dict[str, Sbp | None]:
    return {axis: pinned.entry for axis, pinned in axes.items()}
