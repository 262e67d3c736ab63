"""Matches written with labels: each dim is called something, and dims called the same are one factor."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..call import NEVER, Call, LocalFunction, Match

__all__ = ["Labels", "aligned", "broadcast", "called_with", "labelled", "named", "position"]

Labels: TypeAlias = Sequence[Hashable]  # of a tensor's dims; None is a dim that is never split


def labelled(
    call: Call,
    inputs: Iterable[Labels],
    outputs: Iterable[Labels],
    *,
    reduced: Mapping[Hashable, str] | None = None,
    linear: Iterable[Iterable[int]] = (),
    addends: Iterable[int] = (),
    shared: Mapping[Hashable, tuple[int, Iterable[int]]] | None = None,
    hollow: bool = False,
    local: LocalFunction | None = None,
    reads: Collection[Hashable] | None = None,
) -> Match:
    """The match of tensors whose dims have these labels; a factor that some output lacks must be reduced.

    `reads` are those that `local` looks for places of: all, unless it is said.
    """
    numbers: dict[Hashable, int] = {}
    sizes: list[int] = []
    sides: list[tuple[tuple[int, ...], ...]] = []
    for tensors, names in ((call.inputs, list(inputs)), (call.outputs, list(outputs))):
        side = []
        for tensor, labels in zip(tensors, names, strict=True):
            assert len(labels) == tensor.dim(), (call.name, labels, tensor.shape)
            for label, size in zip(labels, tensor.shape, strict=True):
                if label is not None and label not in numbers:
                    numbers[label] = len(numbers)
                    sizes.append(size)
            side.append(tuple(NEVER if label is None else numbers[label] for label in labels))
        sides.append(tuple(side))
    return Match(
        sides[0],
        sides[1],
        tuple(sizes),
        {numbers[label]: kind for label, kind in (reduced or {}).items() if label in numbers},
        tuple(tuple(group) for group in linear),
        frozenset(addends),
        {numbers[label]: (parts, frozenset(which)) for label, (parts, which) in (shared or {}).items()},
        hollow,
        local,
        unread=frozenset(numbers[label] for label in numbers if reads is not None and label not in reads),
    )


def named(call: Call, **labels: Labels | Sequence[Labels]) -> list[Labels]:
    """The labels of the tensor arguments in the order of the schema; what is absent or no tensor is left out."""
    found: list[Labels] = []
    for name, value in call.bound.items():
        if isinstance(value, Tensor):
            found.append(labels[name])
        elif isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
            parts = zip(value, labels[name], strict=True)
            found += [part for tensor, part in parts if isinstance(tensor, Tensor)]  # type: ignore[misc]
    return found


def position(call: Call, name: str) -> int:
    """The place of an argument among the call's tensor inputs."""
    at = 0
    for other, value in call.bound.items():
        if other == name:
            return at
        at += isinstance(value, Tensor)
    raise KeyError(name)


def aligned(shape: Sequence[int], whole: Sequence[int], labels: Labels) -> list[Hashable]:
    """The labels of a tensor that broadcasts to `whole`: from the right, none where it is repeated.

    >>> aligned((3, 1), (2, 3, 4), "abc"), aligned((1,), (1,), "a")
    (['b', None], ['a'])
    """
    skip = len(whole) - len(shape)
    wanted = zip(shape, whole[skip:], labels[skip:], strict=True)
    return [label if size == full else None for size, full, label in wanted]


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape of what these broadcast to.

    >>> broadcast((3, 1), (2, 1, 4))
    (2, 3, 4)
    """
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def called_with(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], **changed: Any) -> Any:
    """Call an op with some of its arguments, by their names in the schema, replaced."""
    args, rest = list(args), {**kwargs, **changed}
    for at, parameter in enumerate(op._schema.arguments[: len(args)]):
        if parameter.name in changed:
            args[at] = rest.pop(parameter.name)
    return op(*args, **rest)
