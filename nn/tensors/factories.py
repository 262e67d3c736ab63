"""Making global tensors: from plain ones, from shards, and by torch's own factories with a placement.

Every factory runs torch's function for the whole logical tensor and keeps what this process owns, so that random
numbers are those of one device whatever the placement and signature.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...boxing import box, layout_of
from ...boxing.exchange.execute import token
from ...boxing.record import user_line
from ...placement import Placement
from ...placement.errors import SbpError
from ...placement.world import device, owned
from ...sbp import B, Layout, SbpLike, layout
from ...sbp.layout import memory_order
from ..tensors import seeds
from .agreement import same, same_call
from .memory_formats import in_order, shares_memory
from .moves import to_all, whole
from .tensor import GlobalTensor, wrap

__all__ = [
    "arange",
    "declared_by",
    "empty",
    "eye",
    "from_local",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "whole_everywhere",
    "zeros",
]


# What makes the tensor of a function of a device, where a graph is captured; a seed of its own comes with its device.
Declare: TypeAlias = Callable[[Callable[[torch.device], Tensor], Placement, SbpLike, torch.device | None], Any]
_declare: Declare | None = None


@contextmanager
def declared_by(declare: Declare) -> Iterator[None]:
    """Inside, factories say what they would make and get what `declare` returns."""
    global _declare
    before, _declare = _declare, declare
    try:
        yield
    finally:
        _declare = before


def whole_everywhere(value: Tensor, where: Placement) -> GlobalTensor:
    """A plain tensor that every process has as one that is B; nothing is copied but to other devices."""
    _refuse_wrapped(value)
    value = value.detach()
    of = whole(value, where)
    return wrap(tuple(value.to(device(where, r)) for r in owned(where)) or (token(of),), of)


def check_values(value: Tensor, asked: str) -> None:
    """Refuse what has no values, and what keeps them otherwise than as rows of numbers."""
    check_dense(value, asked)
    if value.is_meta:
        raise SbpError(
            f"{asked}: a tensor {tuple(value.shape)} on meta, which has no values\n"
            "  for a model, flow.nn.place(model, placement), then flow.nn.materialise(model) makes each rank's part; "
            "for a tensor, flow.empty(shape, placement=, sbp=)"
        )


def _refuse_wrapped(value: Tensor) -> None:
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise SbpError(
            f"a tensor inside of a transform of torch.func is to be made global, at {user_line()}\n"
            "  it is a part of what the transform was given: make that global, before"
        )


def check_dense(value: Tensor, asked: str) -> None:
    """Refuse sparse and nested tensors."""
    _refuse_wrapped(value)
    if isinstance(value, GlobalTensor) or (value.layout is torch.strided and not value.is_nested):
        return
    kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    fix = "torch.nested.to_padded_tensor(x, 0.0), and a mask" if value.is_nested else "x.to_dense()"
    more = "" if value.is_nested else "; a sparse product is also out.index_add_(0, rows, values[:, None] * h[columns])"
    raise SbpError(f"{asked}: a {kind} tensor, and global tensors are dense\n  give it {fix}{more}")


def tensor(
    data: Any,
    *,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    grad_sbp: SbpLike | None = None,
) -> GlobalTensor:
    """The global tensor of a value that every process passes whole; shards are copies, and nothing is sent.

    >>> from ...placement import placement
    >>> x = tensor([[1.0, 2.0], [3.0, 4.0]], placement=placement("cpu:[0-1]"), sbp="S(0)")
    >>> x.sbp, x.to_local()
    ((S(0),), [tensor([[1., 2.]]), tensor([[3., 4.]])])
    """
    if isinstance(data, GlobalTensor):
        raise SbpError(
            "flow.tensor makes a global tensor from a plain value, found a global one\n  move it by x.to_global(...)"
        )
    value = data.detach() if isinstance(data, Tensor) else torch.tensor(data)
    check_values(value, "flow.tensor")
    if dtype is not None:
        value = value.to(dtype)
    if _declare is not None:
        copy: GlobalTensor = _declare(lambda on: value.clone(), placement, sbp, None)
        return copy.requires_grad_() if requires_grad else copy
    made = cut(value, placement, sbp, grad_sbp)
    same({"": value}, placement, f"flow.tensor at {made._made}", str(sbp))
    return made.requires_grad_() if requires_grad else made


def cut(value: Tensor, where: Placement, sbp: SbpLike, grad_sbp: SbpLike | None = None) -> GlobalTensor:
    """Copies of what this process owns of a whole value."""
    there = layout(where, sbp, tuple(value.shape), value.dtype, grad_sbp).in_order(memory_order(value))
    plain = layout(where, B, tuple(value.shape), value.dtype)
    with torch.no_grad():
        everywhere = tuple(value.to(device(where, r)) for r in owned(where)) or (token(plain),)
        shards = tuple(_fresh(shard, value, there) for shard in box(everywhere, plain, there, op="tensor"))
    made = wrap(shards, there)
    made._made = user_line()
    return made


def _fresh(shard: Tensor, source: Tensor, of: Layout) -> Tensor:
    """A tensor of its own memory, without gaps, its dims in the order of the layout."""
    dense = in_order(shard, of) if of.order else shard.contiguous()
    # A piece of what was copied to a card shares nothing with the source, and would have all of the copy stay.
    part = dense.untyped_storage().nbytes() > dense.nbytes
    if not part and not shares_memory(dense, source):
        return dense
    return dense.clone(memory_format=torch.preserve_format if of.order else torch.contiguous_format)


def from_local(
    shards: Tensor | Sequence[Tensor],
    *,
    placement: Placement,
    sbp: SbpLike,
    shape: Sequence[int] | None = None,
    grad_sbp: SbpLike | None = None,
) -> GlobalTensor:
    """The global tensor of which every process passes what it owns: one tensor, or one a rank if it owns several.

    The shards keep their graph and their memory, but for those whose dims lie in it in another order than on other
    ranks, which are copied; of leaves that require grad, which nothing may write to, the tensor is computed, as a copy.
    One tensor passed for several ranks that hold the same is one value, whose gradient counts once. All ranks compare
    shapes and dtypes first, so that a misfit is an error on each.
    """
    if _declare is not None:
        raise SbpError(
            f"flow.from_local at {user_line()}, where a graph is captured: tensors are whole there, and no rank's\n"
            "  make it before and pass it as an argument, or flow.tensor(whole, placement=..., sbp=...)"
        )
    pieces = (shards,) if isinstance(shards, Tensor) else tuple(shards)
    for piece in pieces:
        check_dense(piece, "from_local")
    if not owned(placement) and not pieces:
        pieces = (torch.empty(0, device="cpu"),)
    of = layout_of(pieces, placement, sbp, None if shape is None else tuple(shape), grad_sbp)
    held = tuple(in_order(piece, of) for piece in _computed(pieces, of)) if owned(placement) else (token(of),)
    made = wrap(held, of)
    made._made = user_line()
    return made


def _computed(pieces: tuple[Tensor, ...], of: Layout) -> tuple[Tensor, ...]:
    """Shards for a tensor that is no leaf: no leaves themselves, and each in memory of its own."""
    wants, state = torch.is_grad_enabled(), of.state
    alike = [a for a in range(of.placement.ndim) if a not in (*state.split, *state.partial, *of.grad_partial)]
    ranks: dict[Any, list[int]] = {}  # that were given one tensor, and hold the same
    for at, (shard, rank) in enumerate(zip(pieces, owned(of.placement), strict=True)):
        coords = (c for a, c in enumerate(of.placement.coords(rank)) if a not in alike)
        ranks.setdefault((id(shard), *coords), []).append(at)
    made = list(pieces)
    for members in ranks.values():
        shard = pieces[members[0]]
        if shard.requires_grad and wants and len(members) > 1:
            for at, copy in zip(members, to_all(shard, len(members)), strict=True):
                made[at] = copy
        else:
            for at in members:
                taken = any(shard is other for other in made[:at])
                leaf = shard.requires_grad and shard.is_leaf
                made[at] = shard.clone() if taken or (leaf and wants) else shard.detach() if leaf else shard
    return tuple(made)


def _generator(seed: int | None, generator: torch.Generator | None, where: Placement) -> dict[str, Any]:
    if _declare is not None and generator is not None:
        raise SbpError(
            f"generator= at {user_line()}, where a graph is captured: it would be drawn from once, not at each step\n"
            "  leave it out, to draw from torch's own; or give seed=, for the same numbers at each step"
        )
    if seed is None:
        if generator is not None:
            return {"generator": generator}
        if _declare is None:
            seeds.agree(where)
        return {}
    if generator is not None:
        raise SbpError("both seed= and generator= were given\n  a generator has its own seed; give one of them")
    return {"generator": torch.Generator(_here(where)).manual_seed(seed)}


def _here(where: Placement) -> torch.device:
    """The device on which this process makes whole tensors."""
    ranks = owned(where)
    return device(where, ranks[0]) if ranks else torch.device("cpu")


def _make(
    function: Any,
    args: tuple[Any, ...],
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None,
    requires_grad: bool,
    **more: Any,
) -> GlobalTensor:
    if _declare is not None:
        seeded = more["generator"].device if more else None
        noted: GlobalTensor = _declare(
            lambda on: function(*args, dtype=dtype, device=on, **more), placement, sbp, seeded
        )
        return noted.requires_grad_() if requires_grad else noted
    same_call(function.__name__, args, sbp, dtype, more.get("generator"), placement)
    with torch.no_grad():
        made = cut(function(*args, dtype=dtype, device=_here(placement), **more), placement, sbp)
    return made.requires_grad_() if requires_grad else made


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def zeros(
    *size: Any, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """torch.zeros on a placement; each rank makes its own piece only."""
    return full(_size(size), 0.0, placement=placement, sbp=sbp, dtype=dtype, requires_grad=requires_grad)


def ones(
    *size: Any, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """torch.ones on a placement; each rank makes its own piece only."""
    return full(_size(size), 1.0, placement=placement, sbp=sbp, dtype=dtype, requires_grad=requires_grad)


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """torch.full on a placement; each rank makes its own piece only."""
    kind = torch.full((), fill_value, dtype=dtype, device="cpu").dtype
    there = layout(placement, sbp, tuple(size), kind)
    if there.state.partial or _declare is not None:
        made = _make(torch.full, (tuple(size), fill_value), placement, sbp, dtype, False)
    else:
        same_call("full", (tuple(size), fill_value), sbp, dtype, None, placement)
        made = _pieces(there, lambda shape, on: torch.full(shape, fill_value, dtype=kind, device=on))
    return made.requires_grad_() if requires_grad else made


def _pieces(there: Layout, make: Callable[[tuple[int, ...], torch.device], Tensor]) -> GlobalTensor:
    """A tensor of which each rank makes its own piece."""
    shards = [make(there.local_shape(r), device(there.placement, r)) for r in owned(there.placement)]
    made = wrap(tuple(shards) or (token(there),), there)
    made._made = user_line()
    return made


def empty(
    *size: Any, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """torch.empty on a placement."""
    if _declare is not None:
        return _make(torch.empty, (_size(size),), placement, sbp, dtype, requires_grad)
    kind = dtype or torch.get_default_dtype()
    there = layout(placement, sbp, _size(size), kind)
    same_call("empty", _size(size), sbp, kind, None, placement)
    made = _pieces(there, lambda shape, on: torch.empty(shape, dtype=kind, device=on))
    return made.requires_grad_() if requires_grad else made


def arange(
    *range_: Any, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """torch.arange on a placement."""
    return _make(torch.arange, range_, placement, sbp, dtype, requires_grad)


def linspace(
    start: float,
    end: float,
    steps: int,
    *,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """torch.linspace on a placement."""
    return _make(torch.linspace, (start, end, steps), placement, sbp, dtype, requires_grad)


def eye(
    *size: int, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """torch.eye on a placement."""
    return _make(torch.eye, size, placement, sbp, dtype, requires_grad)


def rand(
    *size: Any,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> GlobalTensor:
    """torch.rand on a placement: the same numbers whatever the placement and signature."""
    more = _generator(seed, generator, placement)
    return _make(torch.rand, (_size(size),), placement, sbp, dtype, requires_grad, **more)


def randn(
    *size: Any,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> GlobalTensor:
    """torch.randn on a placement: the same numbers whatever the placement and signature."""
    more = _generator(seed, generator, placement)
    return _make(torch.randn, (_size(size),), placement, sbp, dtype, requires_grad, **more)


def randint(
    *bounds_and_size: Any,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> GlobalTensor:
    """torch.randint(low=0, high, size) on a placement."""
    more = _generator(seed, generator, placement)
    return _make(torch.randint, bounds_and_size, placement, sbp, dtype or torch.int64, False, **more)


def randperm(
    n: int,
    *,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> GlobalTensor:
    """torch.randperm on a placement."""
    more = _generator(seed, generator, placement)
    return _make(torch.randperm, (n,), placement, sbp, dtype or torch.int64, False, **more)
