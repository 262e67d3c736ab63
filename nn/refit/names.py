"""The tensors of one model for those of another, by their names: what a state_dict has, tied ones once."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...placement import Placement
from ...placement.errors import DtypeError, SbpError, ShapeError, nearest, some_of
from ...placement.world import world
from ...sbp import Layout, State
from ..model.paths import meant_path
from ..model.slots import slots, tied
from ..tensors.tensor import GlobalTensor

__all__ = ["NewNames", "WeightPair", "lies", "paired"]

# From names of the source to those of the target, or None for what is not sent: a function, or a dict of names and
# patterns, in which a star stands for a part of one name, two for anything, and in the value for what these met.
NewNames: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]

MADE = "  give it values first: flow.nn.materialise(model), flow.nn.to_global(model, ...) or model.to_empty(...)"


class WeightPair(NamedTuple):
    """A tensor of the source, and the one of the target that gets its values, with their names."""

    name: str
    source: Tensor
    called: str
    target: Tensor


def paired(source: nn.Module, target: nn.Module, names: NewNames | None) -> tuple[list[WeightPair], list[str]]:
    """Every tensor of the target with that of the source for it, checked; and names of the source that it has not."""
    _check_models(source, target)
    there = [slot for slot in slots({"": target}) if slot.in_state_dict]
    given = {slot.full: slot for slot in slots({"": source}) if slot.in_state_dict}
    renamed = _renamed(list(given), names)
    found, missing = list[WeightPair](), list[str]()
    for group in tied(there).values():
        come = [(renamed[slot.full], slot) for slot in group if slot.full in renamed]
        if not come:
            missing.append(group[0].full)
            continue
        name, slot = come[0]
        other = next((other for other, _ in come if given[other].value is not given[name].value), None)
        if other is not None:
            raise SbpError(
                f"flow.refit: {slot.full} is one tensor with {' and '.join(s.full for s in group if s is not slot)}"
                f" in the target, and two in the source\n  {name} and {other}\n"
                f"  say which one is meant: names={{{other!r}: None}}"
            )
        found.append(WeightPair(name, given[name].value, slot.full, slot.value))
    taken = {slot.full for slot in there}
    unused = [name for called, name in renamed.items() if called not in taken]
    if missing:
        raise _other_names(target, missing, unused)
    for pair in found:
        _check_fit(pair)
    return [pair for pair in found if pair.source is not pair.target], unused


def lies(x: Tensor) -> Layout:
    """The layout of a tensor; a plain one of the one process that there is lies on rank 0."""
    if isinstance(x, GlobalTensor):
        of = x._layout
        return Layout(of.placement, of.state, of.shape, of.dtype)
    where = Placement(x.device.type, (0,), (1,), None)
    return Layout(where, State(((),) * x.ndim), tuple(x.shape), x.dtype)


def _check_models(source: object, target: object) -> None:
    for what, model in (("source", source), ("target", target)):
        if not isinstance(model, nn.Module):
            raise SbpError(
                f"flow.refit: the {what} is no module but of type {type(model).__name__}\n"
                "  pass modules; for a compiled step, the model that it was compiled with: flow.refit(model, other)"
            )
    if source is target:
        raise SbpError(
            "flow.refit: source and target are one model, which has its weights already\n"
            "  make another one for the target, as by copy.deepcopy(model) before it becomes global"
        )


def _renamed(given: list[str], names: NewNames | None) -> dict[str, str]:
    """The name of the source by that in the target, of all that are to be sent."""
    found: dict[str, str] = {}
    for name in given:
        called = name if names is None else names(name) if callable(names) else None
        if names is not None and not callable(names):
            called = next((new for new in _met(name, names)), name) if name not in names else names[name]
        if called is None:
            continue
        if called in found:
            raise SbpError(
                f"flow.refit: {found[called]} and {name} of the source are both called {called} in the target\n"
                f"  names= has to give each a name of its own, or None: names={{{name!r}: None}}"
            )
        found[called] = name
    for pattern in () if names is None or callable(names) else names:
        if not any(name == pattern or _regex(pattern).fullmatch(name) for name in given):
            meant = meant_path(pattern, given)
            raise SbpError(f"flow.refit: names= has {pattern!r}, and the source nothing called so\n  {meant}")
    return found


def _met(name: str, names: Mapping[str, str | None]) -> Iterator[str | None]:
    """The new names that patterns give it."""
    for pattern, new in names.items():
        match = _regex(pattern).fullmatch(name)
        if match is None or new is None:
            if match is not None:
                yield None
            continue
        parts = iter(match.groups())
        stars = len(re.findall(r"\*+", new))
        if stars > len(match.groups()):
            raise SbpError(
                f"flow.refit: names= has {pattern!r}: {new!r}, with more stars in the new name\n"
                "  each star of a new name stands for what the star at its place in the pattern met"
            )
        yield re.sub(r"\*+", lambda _, parts=parts: next(parts), new)  # type: ignore[misc]


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*\*", "(.*)").replace(r"\*", "([^.]*)"))


def _other_names(target: nn.Module, missing: list[str], unused: list[str]) -> SbpError:
    near = " or ".join(nearest(missing[0], unused))
    return SbpError(
        f"flow.refit: the source has nothing for {some_of(missing)} of the target's {type(target).__name__}\n"
        + (f"  of the source is not taken: {some_of(unused)}\n" if unused else "")
        + (f"  nearest: {near}\n" if near else "")
        + "  say what is called otherwise, names={'name in the source': 'name in the target'}"
        + "; stars stand for what they met"
    )


def _check_fit(pair: WeightPair) -> None:
    name, source, called, target = pair
    for what, full, x in (("source", name, source), ("target", called, target)):
        if is_lazy(x) or _on_meta(x):
            raise SbpError(f"flow.refit: {full} of the {what} is on meta, without values or memory for them\n{MADE}")
        if not isinstance(x, GlobalTensor) and world().rank is not None:
            raise SbpError(
                f"flow.refit: {full} of the {what} is a plain tensor, of which each process has its own\n"
                "  say where it lives: flow.nn.to_global(model, placement, sbp) or, of a step, run it once"
            )
    if tuple(source.shape) != tuple(target.shape):
        raise ShapeError(
            f"flow.refit: {name} is {tuple(source.shape)} in the source, and {called} {tuple(target.shape)} in the"
            " target\n  make both models with one config"
        )
    floats = source.is_floating_point() and target.is_floating_point()
    if source.dtype is not target.dtype and not floats:
        raise DtypeError(
            f"flow.refit: {name} is {source.dtype} in the source, and {called} {target.dtype} in the target\n"
            "  floats are converted to floats; give the two one dtype"
        )
    if not target.is_leaf:
        raise SbpError(
            f"flow.refit: {called} of the target is computed from other tensors, and gradients go back to these\n"
            f"  made by {type(target.grad_fn).__name__}\n"
            "  detach it where it is made, x.detach(), or refit the module that has what it is computed from"
        )


def _on_meta(x: Tensor) -> bool:
    return any(shard.is_meta for shard in x._shards) if isinstance(x, GlobalTensor) else x.is_meta
