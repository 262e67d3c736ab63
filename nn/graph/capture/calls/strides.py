"""Strides: as_strided counts in elements of one device's memory, of which ranks hold pieces.

Here it is taken of that memory as a row, a value like any other. The memory is that of the tensor, or else of a tensor
that this one is a view of.

    x.T.as_strided((2, 2), (4, 1), 1)     x.T.permute(1, 0).reshape(-1)[1:].as_strided((2, 2), (4, 1))
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from .....boxing.graph.memory_order import order_of, strides_in
from .....boxing.record import user_line
from .....placement.errors import SbpError
from .....sbp.layout import memory_gaps
from ....tensors.tensor import GlobalTensor
from ..tape import Tape, View

__all__ = ["STRIDED", "part_of_memory", "started", "strided"]

aten = torch.ops.aten
# Ops that take places in the memory of a tensor.
STRIDED = frozenset(
    {
        aten.as_strided.default,
        aten.as_strided_.default,
        aten.as_strided_copy.default,
        aten.as_strided_scatter.default,
    }
)


def strided(tape: Tape, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The result of an op by strides, taken of the memory as a row; None where its tensor is this row already."""
    named = dict(zip([a.name for a in op._schema.arguments], args, strict=False)) | {**kwargs}
    x, size, stride = named["self"], tuple(named["size"]), tuple(named["stride"])
    if len(size) != len(stride):  # torch says so
        return None
    said = named.get("storage_offset")
    view = tape.view(x)
    first = view.where.offset if said is None else said
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if prod(size) else first - 1
    if op is aten.as_strided.default and (size, stride, first) == (*_where(view),):
        same: Tensor = x.view_as(x)
        return same
    over = _over(view, first, last, said is not None)
    view.memory.counted |= said is not None
    refuse = partial(_refusal, op, x, tape.origin.line)
    if over is None:
        raise refuse("reads elements that are not the tensor's, nor of a captured one that it is a view of")
    if over is not view and x.requires_grad and torch.is_grad_enabled():
        raise refuse("reads beside the tensor, where its gradient does not go")
    start = first - over.where.offset
    if op is aten.as_strided_.default:
        if over is not view or not over.fake.is_contiguous() or start:
            raise refuse("makes a tensor another view of memory that does not lie row by row")
        return None
    row = over.fake.ndim == 1 and over.fake.is_contiguous()
    if row and over is view and not start and said is None and op is aten.as_strided.default:
        return None
    order = order_of(over.fake, repeats=False) or range(over.fake.ndim)
    line = over.fake if row else over.fake.permute(*order).reshape(-1)
    if line.requires_grad and not x.requires_grad:
        line = line.detach()
    if op is aten.as_strided_scatter.default:
        if over is not view:
            raise refuse("writes beside the tensor")
        # torch's own backward of this op is wrong for the tensor written to.
        numbers = torch.arange(line.numel(), device=line.device)[start:].as_strided(size, stride)
        made = line.scatter(0, numbers.flatten(), named["src"].flatten())
        back = made.view([over.fake.shape[d] for d in order])
        return back.permute([list(order).index(d) for d in range(len(order))])
    made = (line[start:] if start else line).as_strided(size, stride)
    return made.clone() if op is aten.as_strided_copy.default else made


def started(tape: Tape, x: Tensor) -> None:
    """Note that the program asks for a tensor's offset: the one in captured memory holds, or there is an error."""
    view = tape.view(x)
    if view.memory.part:
        raise SbpError(
            f"capture: storage_offset() of a tensor {tuple(x.shape)} in the memory of an argument that is a part of a "
            f"larger one, at {user_line()}\n"
            "  a graph has no memory but the argument's own elements\n"
            "  pass a copy, such as x.clone(), or pass the offset as a number"
        )
    view.memory.counted = True


def _where(view: View) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return view.where.shape, view.where.stride, view.where.offset


def part_of_memory(real: Tensor) -> str:
    """The part of its memory that a tensor is: all (an empty string), from a place on ("start"), or one with "gaps"."""
    if isinstance(real, GlobalTensor):
        return "gaps" if real._layout.gaps else ""
    if real.layout is not torch.strided or real.is_nested:
        return ""
    return "gaps" if memory_gaps(real) else "start" if real.storage_offset() else ""


def _over(view: View, first: int, last: int, by_number: bool) -> View | None:
    """The tensor, or one that it is a view of, whose memory is without gaps and has all of these places."""
    bits, at = view.where.bits, view
    while at.where.bits == bits:
        where = at.where
        dense = where.stride == strides_in(where.shape, order_of(at.fake, repeats=False))
        within = where.offset <= first and last < where.offset + prod(where.shape)
        # Captured memory of an argument that is a view itself has the view's elements alone, from the first on.
        outside = at.step is None and (at.memory.part == "gaps" or (at.memory.part == "start" and by_number))
        if dense and within and not outside:
            return at
        if at.step is None:
            break
        at = at.step.viewed
    return None


def _refusal(op: torch._ops.OpOverload, x: Tensor, line: str, why: str) -> SbpError:
    return SbpError(
        f"capture: {op} of a tensor {tuple(x.shape)} with strides {x.stride()} {why}\n"
        f"  called at {line}\n"
        "  index instead, as in x.flatten()[places], or take it of x.contiguous(), by the strides of that"
    )
