"""Views that had to be moved. They are copies, and yet behave as views: what is written to one side is carried over.

    y = x[1:3]        x is split there, so that y lies elsewhere
    y.add_(1)         y is changed, and then the same view of x is given y's value
    x.mul_(2)         x is changed, and then y is made anew

Only tensors that are written to while such a view is alive pay for it.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ...boxing import box
from ...placement.errors import SbpError
from ...placement.world import owned
from ...sbp.call import map_tensors, tensors_in
from ..tensors.moves import describe, flat, shards_as, whole
from ..tensors.tensor import GlobalTensor

__all__ = ["Torn", "after_write", "any_severed", "bring_back", "keep", "sever"]


class Torn(NamedTuple):
    """The making of a view: result `at` of a function of its base."""

    base: GlobalTensor
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: int


# The views that had to be moved, by the memory that they were views of. A view that is gone leaves its memory's list
# when that is next looked at.
_views: dict[int, list["ref[GlobalTensor]"]] = {}


def _memory(x: GlobalTensor) -> int:
    # Not the address of the data: pieces without elements all have none, and ranks must agree on what is a view.
    return int(x._shards[0].untyped_storage()._cdata)


def sever(view: GlobalTensor, torn: Torn) -> None:
    """Remember that a view is a copy."""
    view._torn = torn
    memory = _memory(torn.base)
    _views[memory] = [*(other for other in _views.get(memory, ()) if other() is not None), ref(view)]


def keep(view: GlobalTensor, base: GlobalTensor) -> None:
    """A view of a view that had to be moved: it shares that one's memory, and is written through it."""
    if base._torn is not None:
        view._torn, view._apart = (base._torn if isinstance(base._torn, GlobalTensor) else base), base._apart


def after_write(x: GlobalTensor, but: GlobalTensor | None = None) -> None:
    """Carry over what has been written to a tensor."""
    with torch.no_grad() if x._apart else nullcontext():
        if x._torn is not None:
            _write_through(x._torn if isinstance(x._torn, GlobalTensor) else x)
        _refresh(x, but)


def _refresh(x: GlobalTensor, but: GlobalTensor | None) -> None:
    """Make the moved views of a tensor anew, and those of them in turn."""
    if _views:
        memory = _memory(x)
        for other in _views.pop(memory, ()):
            view = other()
            # The base may have got other memory (`x.data = y`), and what is written to here that of before.
            if view is not None and _memory(view._torn.base) == memory:
                if view is not but:
                    _make_anew(view)
                    _refresh(view, but)
                sever(view, view._torn)


def _write_through(view: GlobalTensor) -> None:
    """Give the same view of the base the value that the copy has now."""
    base, func, args, kwargs, at = view._torn
    partial = base._layout.grad_partial
    copies = tuple(s.clone() for s in shards_as(base, flat(base._layout, grad_partial=partial), "write through"))
    values = shards_as(view, flat(view._layout, grad_partial=partial), "write through")
    for copy, value in zip(copies if owned(base.placement) else (), values, strict=True):
        there = _view(func, args, kwargs, base, copy)[at]
        once(there).copy_(once(value, like=there))
    bring_back(base, copies, partial)
    after_write(base, but=view)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: GlobalTensor, copy: Tensor) -> list[Tensor]:
    """The results of the view's function on a plain tensor in the place of its base."""
    here, there = map_tensors((args, kwargs), lambda t: copy if t is base else t)
    return tensors_in(func(*here, **there))


def _make_anew(view: GlobalTensor) -> None:
    _, func, args, kwargs, at = view._torn
    made = tensors_in(GlobalTensor.__torch_function__(func, (), args, kwargs))[at]  # type: ignore[no-untyped-call]
    assert isinstance(made, GlobalTensor)
    for shard, new in zip(view._shards, shards_as(made, view._layout, "view made anew"), strict=True):
        once(shard).copy_(once(new, like=shard))  # into the same memory, which views of this view share


def bring_back(x: GlobalTensor, held: tuple[Tensor, ...], partial: tuple[int, ...]) -> None:
    """Brings what a function wrote to gathered copies to where the tensor lies."""
    if held[0].shape != x.shape and x._torn is not None:
        raise SbpError(
            f"a view that had to be moved cannot change its shape in place\n  {describe(x)}\n"
            "  use the function that returns a new tensor, such as x.t() for x.t_()"
        )
    if held[0].shape != x.shape:  # resized or transposed in place: it lies whole from now on
        x._shards, x._layout, x._moved = held, whole(held[0], x.placement, partial), None
    if any(a is b for a, b in zip(held, x._shards, strict=True)):
        return
    back = box(held, flat(x._layout, grad_partial=partial), x._layout, op="write back")
    for shard, value in zip(x._shards, back, strict=True):
        once(shard).copy_(once(value, like=shard))
    x._moved = None


def once(shard: Tensor, like: Tensor | None = None) -> Tensor:
    """Each place in memory once: an expanded dim shows the same one many times, and may not be written to."""
    for dim, (size, step) in enumerate(zip(shard.shape, (shard if like is None else like).stride(), strict=True)):
        if step == 0 and size > 1:
            shard = shard.narrow(dim, 0, 1)
    return shard


def any_severed(tensors: Sequence[GlobalTensor]) -> bool:
    """Whether writing to one of these may have to be carried over."""
    return bool(_views) or any(x._torn is not None for x in tensors)
