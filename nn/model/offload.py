"""Offload: what lies in the host's memory or on its disk while the device does not need it.

    flow.nn.offload(model, "*")                                    optimizer states and master weights
    flow.nn.offload(model, "layers.*", "saved", to="cpu", ahead=2) what forwards keep for their backwards

Both are notes that modules keep, like those of `place` and `shard`.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Literal, TypeAlias, get_args

from torch import nn

from ...placement.errors import SbpError
from ...sbp.logical import OffloadPlace, SavedOffload
from .annotate import note
from .paths import meant_path
from .slots import TensorSlot, joined_path, module_notes, parameter_notes, parameters

__all__ = ["OffloadKind", "offload", "saved_offloads", "state_offloads"]

OffloadKind: TypeAlias = Literal["states", "saved", "weights", "grads"]

STATES = "_sbpflow_offload_states"  # of parameters that the module itself holds, by their short names
SAVED = "_sbpflow_offload_saved"  # of the module itself
# Why the other kinds stay, and what does as much.
STAY = {
    "weights": ("the forward and the backward read them", "cut them, which gathers each before its use"),
    "grads": ("the backward adds to them", "cut them, which brings each together in pieces"),
}


def offload(
    model: nn.Module,
    patterns: str | Iterable[str],
    what: OffloadKind = "states",
    to: OffloadPlace | None = "cpu",
    ahead: int | None = None,
) -> nn.Module:
    """Say what lies on the host while the device does not need it. It lies in memory ("cpu") or in files ("disk"); None
    takes that back. The model is returned.

    `states` of parameters: what an optimizer keeps of them, and the values that it changes. It steps on the host; the
    gradient goes there, and the changed parameter comes back. `saved` of modules: what their forwards keep for their
    backwards, brought back so many segments `ahead` of its use, or one.

    A pattern names parameters or modules, for all that is in them; `*` is any part of a name, with its dots. Of what
    is said of the same thing the last counts.
    """
    _check(what, to, ahead)
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    paths = dict(model.named_modules(remove_duplicate=False))
    known = parameters({"": model}) if what == "states" else []
    for pattern in listed:
        if not isinstance(pattern, str):
            raise SbpError(
                f"offload: expected names of modules or parameters, found {type(pattern).__name__}\n"
                '  write one, or several, as in flow.nn.offload(model, ["layers.*", "head"])'
            )
        inside = {path for path in paths if fnmatchcase(path, pattern)}
        if what == "states":
            _note_states(model, known, pattern, inside, to)
        else:
            _note_saved(model, pattern, inside, paths, None if to is None else SavedOffload(to, ahead or 1))
    return model


def _check(what: object, to: object, ahead: object) -> None:
    if isinstance(what, str) and what in STAY:
        reads, instead = STAY[what]
        raise SbpError(
            f"offload: {what} rest on the device: {reads}\n"
            f'  {instead}, as in flow.nn.shard(model, {{"*": flow.S(0)}}, kind="{what}")\n'
            '  what an optimizer keeps can be offloaded ("states"), and what forwards keep ("saved")'
        )
    if what not in ("states", "saved"):
        raise SbpError(f"offload: what={what!r}\n  known are 'states' and 'saved'")
    if not (to is None or to in get_args(OffloadPlace)):
        raise SbpError(f"offload: to={to!r}\n  write 'cpu' or 'disk'; None takes it back")
    if ahead is not None and (what == "states" or type(ahead) is not int or ahead < 1):
        why = "states are stepped where they lie, and nothing is brought back ahead of its use; leave it out"
        raise SbpError(
            f"offload: ahead={ahead!r} of {what}\n"
            f"  {why if what == 'states' else 'write how many segments before its use it comes back, from 1'}"
        )


def _note_states(
    model: nn.Module, known: Sequence[TensorSlot], pattern: str, inside: set[str], to: OffloadPlace | None
) -> None:
    fits = {
        id(slot.value) for slot in known if fnmatchcase(slot.full, pattern) or inside.intersection(_around(slot.full))
    }
    if not fits:
        raise _nothing_called(model, pattern, [*(slot.full for slot in known), *_paths(model)], "parameter or module")
    for slot in known:
        if id(slot.value) in fits:  # a tied one under all its names
            kept = {**slot.module.__dict__.get(STATES, {}), slot.name: to}
            note(slot.module, STATES, {name: said for name, said in kept.items() if said is not None} or None)


def _note_saved(
    model: nn.Module, pattern: str, inside: set[str], paths: Mapping[str, nn.Module], said: SavedOffload | None
) -> None:
    if not inside:
        whose = [slot.full for slot in parameters({"": model}) if fnmatchcase(slot.full, pattern)]
        more = f"\n  {whose[0]} is a parameter: name the module whose forward reads it" if whose else ""
        raise _nothing_called(model, pattern, _paths(model), "module", more)
    for path in inside:
        for part in paths[path].modules():
            note(part, SAVED, said)


def _around(full: str) -> list[str]:
    """The paths of the modules that a parameter is in, from the model itself inwards."""
    return ["", *accumulate(full.split(".")[:-1], joined_path)]


def _paths(model: nn.Module) -> list[str]:
    return [path for path, _ in model.named_modules(remove_duplicate=False) if path]


def _nothing_called(model: nn.Module, pattern: str, names: Sequence[str], of: str, more: str = "") -> SbpError:
    return SbpError(
        f"offload: {type(model).__name__} has no {of} called {pattern!r}{more}\n  {meant_path(pattern, names)}"
    )


def state_offloads(modules: Mapping[str, nn.Module]) -> dict[str, OffloadPlace]:
    """The place of offloaded optimizer states, by full names of their parameters; a tied parameter has each of its
    own."""
    known = parameters(modules)
    said: dict[int, OffloadPlace] = parameter_notes(known, STATES, "places for its states")
    return {slot.full: said[id(slot.value)] for slot in known if id(slot.value) in said}


def saved_offloads(modules: Mapping[str, nn.Module]) -> dict[str, SavedOffload]:
    """The place of what forwards of modules keep, by the paths of modules for which it was said."""
    return module_notes(modules, SAVED)
