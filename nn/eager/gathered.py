"""Running a function on gathered tensors: right for anything, and visible in the record as what it is."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...placement.device import family
from ...placement.errors import PlacementError, SbpError
from ...placement.world import owned
from ...sbp import Layout
from ...sbp.call import refilled, tensors_in
from ...sbp.layout import memory_order
from ..tensors import seeds
from ..tensors.handle import has_grad
from ..tensors.memory_formats import shares_memory
from ..tensors.moves import describe, flat, shards_as, whole
from ..tensors.tensor import GlobalTensor, wrap
from ..tensors.tokens import pass_tokens
from .moved_views import Torn, after_write, any_severed, bring_back, keep, sever
from .recipe import Recipe, each_rank, own_memory

__all__ = ["Whole", "gathered", "strided", "strided_copy", "strided_scatter"]


class Whole(Recipe):
    """Every rank runs the function on whole tensors. What it changed in place is brought back to where it lay.

    `adds_up`: its backward may take addends of a gradient. Of a function that nothing is known of it may not.
    """

    def __init__(self, name: str, *, writes: bool = False, adds_up: bool = False) -> None:
        self.name, self.changes, self.adds_up = name, writes, adds_up
        self.fakes: Any = None  # the result on fakes, where there is one, for processes that own no rank
        self.copies: tuple[bool, ...] = ()  # which results are none of views, where that is known

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        where, label = tensors[0].placement, f"{self.name} (gathered)"
        layouts, partial = gathered([x._layout for x in tensors], self.adds_up)
        shards = [shards_as(x, to, label, implicit=True) for x, to in zip(tensors, layouts, strict=True)]
        shards = [self._as_in_memory(held, x) for held, x in zip(shards, tensors, strict=True)]
        if self.changes:  # others may use the gathered copies too, and views of one exchange cannot be written to
            shards = [
                held if held[0] is x._shards[0] else tuple(s.clone() for s in held)
                for x, held in zip(tensors, shards, strict=True)
            ]
        if not owned(where):
            return self._elsewhere(tensors, partial)
        before = [_versions(held) for held in shards]
        with seeds.watched(where):
            results = same_random(func, list(each_rank(args, kwargs, shards)), [s.device for s in shards[0]])
        for x, held, stamp in zip(tensors, shards, before, strict=True):
            unseen = self.changes and held[0].is_inference()  # these have no version, so that a write does not show
            if unseen or _versions(held) != stamp or held[0].shape != x.shape:
                bring_back(x, held, partial)
                if any_severed([x]):
                    after_write(x)
        results = [self._alone(result, [held[i] for held in shards]) for i, result in enumerate(results)]
        result, bases = _global(results, shards, tensors, partial)
        for at, (y, base) in enumerate(zip(tensors_in(result), bases, strict=True)):
            if base is None or not isinstance(y, GlobalTensor):
                continue
            if shares_memory(y._shards[0], base._shards[0]):
                keep(y, base)
            else:
                sever(y, Torn(base, func, args, kwargs, at))
        return result

    def _alone(self, result: Any, given: Sequence[Tensor]) -> Any:
        """A rank's results, in memory of their own where one device would make a copy."""
        if not any(self.copies):
            return result
        made = tensors_in(result)
        for at, copied in enumerate(self.copies):
            if copied:
                made[at] = own_memory(made[at], given)
        return refilled(result, made)

    def _as_in_memory(self, held: tuple[Tensor, ...], x: GlobalTensor) -> tuple[Tensor, ...]:
        """Copies with the strides of one device, where it may matter: numbers are drawn in their order."""
        order = x._layout.order
        same = all(memory_order(s) == order for s in held)
        if same or ((not order or self.changes) and held[0] is x._shards[0]):
            return held
        order = order or tuple(range(x.ndim))
        back = sorted(range(len(order)), key=order.__getitem__)
        return tuple(s.permute(order).contiguous().permute(back) for s in held)

    def _elsewhere(self, tensors: Sequence[GlobalTensor], partial: tuple[int, ...]) -> Any:
        """Tokens of the results; their shapes must be known without the values."""
        found = tensors_in(self.fakes)
        if not found:
            raise PlacementError(
                f"{self.name} on {tensors[0].placement!r}: this process owns none of its ranks, and what comes out "
                "depends on the values\n  call it on a tensor that every process has: x.to_global(placement=...)"
            )
        tokens = pass_tokens([x._shards[0] for x in tensors], [fake.dtype for fake in found])
        layouts = [whole(fake, tensors[0].placement, partial) for fake in found]
        return refilled(self.fakes, [wrap((token,), of) for token, of in zip(tokens, layouts, strict=True)])


def strided(x: GlobalTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """`as_strided`: elements by where one device would have them in memory, of which every rank needs the whole."""
    laid, _ = _in_memory("as_strided", x, size, stride, storage_offset)
    return GlobalTensor.__torch_function__(  # type: ignore[no-untyped-call]
        _of_line, (), (laid.reshape(-1), tuple(size), tuple(stride), storage_offset or 0)
    )


def strided_copy(x: GlobalTensor, *where: Any, **named: Any) -> Any:
    return strided(x, *where, **named).clone()


def strided_scatter(
    x: GlobalTensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """`as_strided_scatter`, by torch's own function on the memory as a line, and with its gradient."""
    laid, back = _in_memory("as_strided_scatter", x, size, stride, storage_offset)
    if x.requires_grad and torch.is_grad_enabled() and not x.is_contiguous():
        raise SbpError(
            f"as_strided_scatter: torch has no gradient of it where memory is not row by row\n  {describe(x)}\n"
            "  take it of x.contiguous()"
        )
    made = GlobalTensor.__torch_function__(  # type: ignore[no-untyped-call]
        _into_line, (), (laid.reshape(-1), src, tuple(size), tuple(stride), storage_offset or 0)
    )
    return made.reshape(laid.shape).permute(back)


def _in_memory(
    name: str, x: GlobalTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> tuple[Tensor, list[int]]:
    """A view with its dims from the outermost in memory, and how they go back; refused where memory is not known."""
    of, offset = x._layout, storage_offset or 0
    asked = f"{name}(size={tuple(size)}, stride={tuple(stride)}" + (f", storage_offset={offset})" if offset else ")")
    one = torch.empty_strided(of.shape, of.strides, device="meta")
    if not torch.ops.aten.is_non_overlapping_and_dense(one):
        raise SbpError(
            f"{asked} of a view with gaps: what lies between its elements is not known\n  {describe(x)}\n"
            "  take it of x.clone(), which has none, or index x by slices"
        )
    part = x._torn is not None or any(s.untyped_storage().nbytes() > s.nbytes for s in x._shards)
    if storage_offset is not None and part:
        raise SbpError(
            f"{asked} of a view counts from the start of a memory that is not known here\n  {describe(x)}\n"
            "  leave storage_offset out, which then counts from the view's first element, or index the tensor itself"
        )
    if 0 not in size and offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= x.numel():
        raise SbpError(f"{asked} goes beyond the {x.numel()} elements of\n  {describe(x)}\n  give it less")
    order = sorted(range(x.ndim), key=lambda d: (-of.strides[d], of.shape[d] == 1))
    return x.permute(order), sorted(range(x.ndim), key=order.__getitem__)


def _of_line(line: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return torch.as_strided(line, size, stride, int(line.storage_offset()) + offset)


def _into_line(line: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return torch.as_strided_scatter(line, src, size, stride, int(line.storage_offset()) + offset)


_of_line.recipe = lambda args, tensors: Whole("as_strided", adds_up=True)  # type: ignore[attr-defined]
_into_line.recipe = lambda args, tensors: Whole("as_strided_scatter", adds_up=True)  # type: ignore[attr-defined]


def gathered(given: Sequence[Layout], adds_up: bool) -> tuple[list[Layout], tuple[int, ...]]:
    """The layouts of inputs that each rank has whole, and the axes on which all their gradients are addends. There are
    such axes only if the function adds up; gradients of outputs are addends there too."""
    floats, shape = [of for of in given if has_grad(of)], given[0].placement.shape
    axes = [a for a, n in enumerate(shape) if n > 1 and adds_up and floats]
    partial = tuple(a for a in axes if all(a in of.grad_partial for of in floats))
    return [flat(of, grad_partial=partial if has_grad(of) else ()) for of in given], partial


def _versions(shards: tuple[Tensor, ...]) -> list[int]:
    return [0 if s.is_inference() else s._version for s in shards]


def same_random(func: Any, calls: list[Any], devices: Sequence[torch.device]) -> list[Any]:
    """The function for every rank owned here, each seeing the same random numbers on its device.

    Torch's generators are left as one call on the first device leaves them.
    """
    if len(calls) == 1:
        return [func(*calls[0][0], **calls[0][1])]
    kind = family(devices[0].type)
    generators = [g for _, kwargs in calls[:1] for g in kwargs.values() if isinstance(g, torch.Generator)]
    state, states = kind.random_state(devices[0]), [g.get_state() for g in generators]
    others = {device: kind.random_state(device) for device in devices if device != devices[0]}  # cards have their own
    results = []
    for (args, kwargs), device in zip(calls, devices, strict=True):
        kind.set_random_state(state, device)
        for generator, saved in zip(generators, states, strict=True):
            generator.set_state(saved)
        results.append(func(*args, **kwargs))
    for device, drawn in others.items():
        kind.set_random_state(drawn, device)
    return results


def _global(
    results: Sequence[Any],
    shards: Sequence[tuple[Tensor, ...]],
    tensors: Sequence[GlobalTensor],
    partial: tuple[int, ...],
) -> tuple[Any, list[GlobalTensor | None]]:
    """The local results as global tensors that are whole on every rank, and what each is a view of.

    An input that came back is itself.
    """
    per_rank = [tensors_in(result) for result in results]
    where = tensors[0].placement
    made: list[Tensor] = []
    bases: list[GlobalTensor | None] = []
    for pieces in zip(*per_rank, strict=True):
        same = next((x for x, held in zip(tensors, shards, strict=True) if held[0] is pieces[0]), None)
        out = same if same is not None else wrap(pieces, whole(pieces[0], where, partial))
        viewed = (x for x, held in zip(tensors, shards, strict=True) if _is_view(pieces, held))
        bases.append(None if out is same else next(viewed, None))
        made.append(out)
    return refilled(results[0], made), bases


def _is_view(pieces: Sequence[Tensor], held: Sequence[Tensor]) -> bool:
    """Whether a result is a view of an input or, where that was gathered, of the copy."""
    if pieces[0].layout is not torch.strided or held[0].layout is not torch.strided:
        return False
    return shares_memory(pieces[0], held[0])
