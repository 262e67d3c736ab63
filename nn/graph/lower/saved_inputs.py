"""Saved inputs: those that a segment's backward reads, found by running it on tensors without values."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ....boxing.graph.physical import Physical
from ....placement.structure import mapped
from ....sbp.call import Indices, fill, frozen, tensors_in
from .last_used import LastUsed
from .localise import metas, renamed
from .segments import Segment

__all__ = ["read_again"]

_log = logging.getLogger(__name__)


def read_again(graph: Physical, segment: Segment) -> frozenset[str]:
    """The inputs that autograd keeps, or views of them. Logical shapes say it, so that all ranks find the same."""
    if not segment.wants:
        return frozenset()
    kind = _kind(graph, segment)
    found = _known.get(kind)
    if found is None:
        found = _known.put(kind, _read_again(graph, segment))
    return frozenset(segment.inputs[at] for at in found)


_known = LastUsed[tuple[int, ...]](1024)


def _kind(graph: Physical, segment: Segment) -> Any:
    """All that the answer depends on, names left out: repeated blocks are asked once."""
    number = {name: n for n, name in enumerate(segment.inputs)}
    calls = []
    for op in segment.ops:
        args, kwargs = renamed((op.args, op.kwargs), number)
        calls.append((op.op, frozen((args, kwargs)), op.grad, len(op.outputs)))
        number.update({y.name: len(number) + at for at, y in enumerate(op.outputs)})
    layouts = map(graph.layout, segment.inputs)
    given = tuple((of.shape, of.dtype, name in segment.wants) for of, name in zip(layouts, segment.inputs, strict=True))
    return tuple(calls), given


def _read_again(graph: Physical, segment: Segment) -> tuple[int, ...]:
    held = metas([graph.layout(name) for name in segment.inputs])
    values = {
        name: x.requires_grad_() if name in segment.wants else x for name, x in zip(segment.inputs, held, strict=True)
    }
    try:
        with _kept() as memory:
            _run(segment, values)
    except RuntimeError:  # an op without a meta function: then all it might read
        _log.info("the inputs that the backward of %s reads are not known: it keeps all", segment.ops, exc_info=True)
        return tuple(range(len(segment.inputs)))
    return tuple(n for n, name in enumerate(segment.inputs) if values[name].untyped_storage()._cdata in memory)


@contextmanager
def _kept() -> Iterator[set[int]]:
    """The memory of all tensors that autograd keeps meanwhile; they stay, so that no number is used twice."""
    held: list[Tensor] = []
    memory: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        held.append(x)
        memory.add(x.untyped_storage()._cdata)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield memory


def _run(segment: Segment, values: dict[str, Tensor]) -> None:
    for op in segment.ops:
        number = {name: i for i, name in enumerate(op.inputs)}
        given = [values[name] for name in op.inputs]
        args, kwargs = fill(renamed((op.args, op.kwargs), number), given)
        args, kwargs = mapped((args, kwargs), Indices, partial(_whole, given))
        if not given and "device" in {parameter.name for parameter in op.op._schema.arguments}:
            kwargs["device"] = "meta"
        with torch.set_grad_enabled(op.grad):
            made = op.op(*args, **kwargs)
        for y, value in zip(op.outputs, tensors_in(made), strict=True):
            values[y.name] = value


def _whole(given: Sequence[Tensor], of: Indices) -> list[int]:
    return [0, given[of.slot].shape[of.dim]]
