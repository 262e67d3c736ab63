"""`flow.explicit`: inside, what would move by itself is an error, which shows all that met and a fix that was tried."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ...boxing import between
from ...boxing.boxing import Boxing
from ...placement.errors import SbpError
from ...sbp import B, Layout, S, layout
from ...sbp.call import map_tensors, tensors_in
from ..eager.abstract import ghost
from ..tensors import moves as moving
from ..tensors.meeting import name_of
from ..tensors.moves import Refused, describe
from ..tensors.tensor import GlobalTensor
from .explain import explain
from .explanation import CallReport

__all__ = ["explicit"]

PLAIN = (S(0), S(1), B)  # of these one for all inputs is tried, on one axis


@contextlib.contextmanager
def explicit() -> Iterator[None]:
    """Inside, a move that an op would need is an error that names it; only `to_global` and its kin move."""
    with moving.explicit(), _Telling():
        yield


class _Telling(TorchFunctionMode):
    """Says of a call that was refused what it was given and what would have helped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Refused as refused:
            raise _told(refused, func, args, kwargs or {}) from None


class Fix(NamedTuple):
    """Layouts under which nothing has to move, and what it takes to get there."""

    inputs: tuple[Layout, ...]
    moves: tuple[Boxing, ...]
    seconds: float


def _told(refused: Refused, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SbpError:
    tensors = [t for t in tensors_in((args, kwargs)) if isinstance(t, GlobalTensor)]
    said = explain(func, *args, **kwargs)
    first = next((step for step in said.steps if step.inputs == tuple(x._layout for x in tensors)), None)
    names = first.names if first is not None else tuple(f"input {i}" for i in range(len(tensors)))
    lines = [f"{name_of(func)} would move a tensor, inside flow.explicit()"]
    lines += [f"  {name.ljust(max(map(len, names)))}  {describe(x)}" for name, x in zip(names, tensors, strict=True)]
    inside = [step.op for step in said.steps if step.chosen is not None and step.chosen.bytes]
    if inside and (len(said.steps) > 1):
        lines.append(f"  it is made of several calls, of which these would move: {', '.join(dict.fromkeys(inside))}")
    fix = _fix(func, args, kwargs, tensors, said)
    if fix is None:
        return SbpError("\n".join([*lines, *str(refused).splitlines()[1:]]))
    for name, x, to, way in zip(names, tensors, fix.inputs, fix.moves, strict=True):
        if to is not x._layout:
            back = between(to.dual, x._layout.dual).bytes if x.requires_grad and torch.is_grad_enabled() else 0
            costs = f"{way.route} of {way.bytes} bytes a rank" + (f", and {back} for its gradient" if back else "")
            grad = f", grad_sbp={to.dual.sbp}" if to.grad_partial and back else ""
            lines.append(f"  try {name}.to_global(sbp={to.sbp}{grad}): {costs}")
    return SbpError("\n".join(lines))


def _fix(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[GlobalTensor],
    said: CallReport,
) -> Fix | None:
    """The cheapest of some layouts of the inputs for which the call was explained once more, and did not move."""
    tried = [step.chosen.inputs for step in said.steps if step.chosen and len(step.chosen.inputs) == len(tensors)]
    where = tensors[0].placement
    alone = [
        tuple(entry if a == axis else B for a in range(where.ndim)) for axis in range(where.ndim) for entry in PLAIN
    ]
    for sbp in dict.fromkeys(alone):
        if all(x.ndim >= 2 or not x.ndim or S(1) not in sbp for x in tensors):
            there = [x._layout if not x.ndim else layout(where, sbp, x._layout.shape, x.dtype) for x in tensors]
            tried.append(tuple(there))
    found = [fix for inputs in tried if (fix := _moves_nothing(func, args, kwargs, tensors, inputs)) is not None]
    return min(found, key=lambda fix: fix.seconds, default=None)


def _moves_nothing(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[GlobalTensor],
    inputs: tuple[Layout, ...],
) -> Fix | None:
    where = tensors[0].placement
    if any(x._layout.shape != to.shape or x.placement is not where for x, to in zip(tensors, inputs, strict=True)):
        return None
    said_by_sbp = [layout(where, to.sbp, to.shape, to.dtype) for to in inputs]
    if any(a.state != b.state for a, b in zip(inputs, said_by_sbp, strict=True)):
        return None  # not to be written as a signature
    put = iter([ghost(to, x.requires_grad, lambda *_: None) for x, to in zip(tensors, inputs, strict=True)])
    moved, named = map_tensors((args, kwargs), lambda t: next(put) if isinstance(t, GlobalTensor) else t)
    said = explain(func, *moved, **named)
    if said.bytes or said.bytes_back or said.ends:
        return None
    ways = tuple(between(x._layout, to) for x, to in zip(tensors, inputs, strict=True))
    back = sum(
        between(to.dual, x._layout.dual).price.time for x, to in zip(tensors, inputs, strict=True) if x.requires_grad
    )
    return Fix(inputs, ways, sum(way.price.time for way in ways) + back)
