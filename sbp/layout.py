"""Layouts: one logical tensor's shape and dtype, its placement, and how it lies there.

A layout is all that is known of a tensor but its values, and all that boxing needs to plan. On each axis the gradient
lies as the *dual* of the tensor; a B is of two kinds, since ranks may each hold the whole gradient or an addend of it:

    tensor             S(d)   P   B (gradient B)   B (gradient P)   P("max")
    its gradient       S(d)   B        B                P              P
"""

from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from math import prod
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..placement import Placement
from ..placement.errors import SbpError, ShapeError
from ..placement.grid import placement as make_placement
from ..placement.ranks import grid_table
from .signature import B, P, Partial, S, Sbp, Split
from .state import Lie, Runs, Spans, State, state_of
from .text import SbpLike, signature

__all__ = ["Layout", "RunLayout", "dense_strides", "layout", "memory_gaps", "memory_order"]

_interned: "WeakValueDictionary[tuple[object, ...], Layout]" = WeakValueDictionary()
_lock = Lock()


class Layout:
    """How a tensor lies; equal layouts are the same object, so that plans are looked up at the speed of identity.

    >>> from ..placement import placement
    >>> rows = layout(placement("cpu:[0-3] as (data=2, tensor=2)"), "(S(0), B)", (5, 3))
    >>> rows
    float32 (5, 3) as (S(0), B) on cpu:[0-3] as (data=2, tensor=2)
    >>> rows.local_shape(0), rows.local_shape(3), rows.offset(3)
    ((3, 3), (2, 3), (3, 0))
    """

    placement: Placement
    state: State
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad_partial: tuple[int, ...]  # the B axes on which the gradient is partial
    sbp: tuple[Sbp, ...]
    order: tuple[int, ...]  # the dims from the outermost in one device's memory; empty where that is row by row
    gaps: tuple[
        int, ...
    ]  # one device's strides where a view leaves gaps or repeats; empty where they follow from `order`
    memo: dict[Any, Any]  # what upper floors remember about this layout

    def __new__(
        cls,
        placement: Placement,
        state: State,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        grad_partial: tuple[int, ...] = (),
        sbp: tuple[Sbp, ...] | None = None,
        order: tuple[int, ...] = (),
        gaps: tuple[int, ...] = (),
    ) -> "Layout":
        sbp = sbp or state.sbp(placement.ndim)
        key = (placement, state, shape, dtype, grad_partial, sbp, order, gaps)
        with _lock:
            known = _interned.get(key)
            if known is None:
                if prod(shape) * dtype.itemsize >= 1 << 63:
                    raise ShapeError(f"a tensor of shape {shape} and {dtype} has more bytes than can be counted: 2**63")
                known = super().__new__(cls)
                known.placement, known.state, known.shape, known.dtype, known.grad_partial = key[:5]
                known.sbp, known.order, known.gaps = sbp, order, gaps
                known.memo = {}
                _interned[key] = known
            return known

    def __reduce__(self) -> tuple[object, ...]:
        lie = self.placement, self.state, self.shape, self.dtype, self.grad_partial, self.sbp, self.order, self.gaps
        return Layout, lie

    def __copy__(self) -> "Layout":
        return self

    def __deepcopy__(self, memo: object) -> "Layout":
        return self

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape} as {self.lie} on {self.placement}"

    @cached_property
    def lie(self) -> str:
        """The signature as one reads it, with what it leaves open where that is not the usual: order, holes, gradient.

        >>> from ..placement import placement
        >>> Layout(placement("cpu:[0-3] as (2, 2)"), State(((1, 0),)), (8,), torch.float32).lie
        '(S(0), S(0)) [dim 0: 1, 0]'
        >>> layout(placement("cpu:[0-1]"), B, (4,), grad_sbp=P).lie
        '(B,) with gradient (P,)'
        """
        gradient = f" with gradient {self.dual._signature}" if self.grad_partial else ""
        return self._signature + gradient

    @property
    def _signature(self) -> str:
        text = "(" + ", ".join(map(repr, self.sbp)) + ("," if len(self.sbp) == 1 else "") + ")"
        odd = [(d, f) for d, f in enumerate(self.state.dims) if list(f) != sorted(f) or any(x < 0 for x in f)]
        names = self.placement.names or tuple(map(str, range(self.placement.ndim)))
        notes = [f"dim {d}: " + ", ".join(names[x] if x >= 0 else f"all {-x}" for x in f) for d, f in odd]
        notes += [f"dim {d} seen from {w}" for d, w in enumerate(self.state.windows) if w is not None]
        return text + (f" [{'; '.join(notes)}]" if notes else "")

    def held(self, rank: int) -> str:
        """The part that a rank holds, in words: the indices of each dim, and which addend where it is one."""
        indices = ", ".join(" + ".join(f"{lo}:{hi}" for lo, hi in dim) or "nothing" for dim in self.spans(rank))
        where = self.placement.coords(rank)
        number = ", ".join(str(where[axis]) for axis in self.state.partial)
        return f"[{indices}]" + (f" addend {number} ({self.state.reduction})" if number else "")

    def _repr_html_(self) -> str:
        return grid_table(self.placement, repr(self), self.held)

    @cached_property
    def numel(self) -> int:
        """Elements of the logical tensor."""
        return torch.Size(self.shape).numel()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the logical tensor."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Those of the tensor on one device; shards have their own.

        >>> from ..placement import placement
        >>> rows = layout(placement("cpu:[0-1]"), B, (2, 3, 4))
        >>> rows.strides, rows.in_order((0, 2, 1)).strides
        ((12, 4, 1), (12, 1, 3))
        """
        return self.gaps or dense_strides(self.shape, self.order)

    @property
    def in_rows(self) -> bool:
        """Whether one device's memory has the elements row by row, and nothing between them."""
        return not self.order and not self.gaps

    def in_order(self, order: tuple[int, ...]) -> "Layout":
        """The same with its dims in memory in this order, without gaps."""
        if order == self.order and not self.gaps:
            return self
        return Layout(self.placement, self.state, self.shape, self.dtype, self.grad_partial, self.sbp, order)

    def spans(self, rank: int) -> tuple[Spans, ...]:
        """For each dim, the index ranges that `rank` holds."""
        return self.state.spans(self.shape, self.placement.coords(rank), self.placement.shape)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of what `rank` holds; a dim shorter than its ranks leaves some with 0."""
        if self.even and rank in self.placement:
            return self._even_shape
        return tuple(sum(hi - lo for lo, hi in dim) for dim in self.spans(rank))

    @cached_property
    def _even_shape(self) -> tuple[int, ...]:
        """The shape of what each rank holds, where all hold as much."""
        sizes = self.placement.shape
        dims = zip(self.shape, self.state.dims, strict=True)
        return tuple(n // prod(sizes[f] for f in factors if f >= 0) for n, factors in dims)

    @cached_property
    def even(self) -> bool:
        """Whether every rank holds as much, and of the same shape, as all cuts leave no remainder."""
        if self.state.windows:
            return False
        sizes = self.placement.shape
        cuts = (prod(sizes[f] if f >= 0 else -f for f in factors) for factors in self.state.dims)
        return all(n % cut == 0 for n, cut in zip(self.shape, cuts, strict=True))

    def offset(self, rank: int) -> tuple[int, ...]:
        """The first index of `rank`'s piece in each dim of the logical tensor (0 for an empty piece)."""
        return tuple(dim[0][0] if dim else 0 for dim in self.spans(rank))

    def slices(self, rank: int) -> tuple[slice, ...]:
        """`whole[slices]` is what `rank` holds; only for layouts without holes.

        >>> from ..placement import placement
        >>> layout(placement("cpu:[0-1]"), "S(1)", (2, 5)).slices(1)
        (slice(0, 2, None), slice(3, 5, None))
        """
        return tuple(slice(*dim[0]) if dim else slice(0, 0) for dim in self.spans(rank))

    @cached_property
    def dual(self) -> "Layout":
        """The layout of the gradient. The dual of the dual is this layout again, but for P("max") and P("min")."""
        state, grad_partial = Lie(self.state, self.grad_partial).dual
        return Layout(self.placement, state, self.shape, self.dtype, grad_partial)

    def to(
        self, sbp: SbpLike | None = None, placement: Placement | None = None, grad_sbp: SbpLike | None = None
    ) -> "Layout":
        """The same tensor under another signature, placement or both.

        Where the gradient can lie in one way only, `grad_sbp` may say another: it is brought from there anyway.
        """
        where = placement or self.placement
        to = layout(where, self.sbp if sbp is None else sbp, self.shape, self.dtype)
        if grad_sbp is not None:
            axes = _grad_axes(to, grad_sbp, strict=False)
            to = Layout(where, to.state, self.shape, self.dtype, axes, to.sbp)
        return to.in_order(self.order)

    def with_state(self, state: State) -> "Layout":
        """The same tensor in another state on the same placement; what had to be moved has no gaps."""
        gaps = self.gaps if state == self.state else ()
        return Layout(self.placement, state, self.shape, self.dtype, order=self.order, gaps=gaps)

    def with_dtype(self, dtype: torch.dtype) -> "Layout":
        """The layout of a tensor of another dtype that is made anew, lying as this one does."""
        return Layout(self.placement, self.state, self.shape, dtype, order=self.order)


class RunLayout(Layout):
    """How a tensor lies on ranks that hold runs of samples; nothing is sent by it, so it is not interned."""

    runs: Runs
    even = False  # runs may be of unequal lengths

    def __new__(cls, runs: Runs, state: State, shape: tuple[int, ...], dtype: torch.dtype) -> "RunLayout":
        made = object.__new__(cls)
        made.runs, made.placement, made.state, made.shape, made.dtype = runs, _grid(runs), state, shape, dtype
        return made

    def spans(self, rank: int) -> tuple[Spans, ...]:
        where = self.placement.coords(rank)
        return tuple(self.runs.spans(n, f, where) for n, f in zip(self.shape, self.state.dims, strict=True))


@cache
def _grid(runs: Runs) -> Placement:
    shape = tuple(map(len, runs.lengths))
    return make_placement("cpu", range(prod(shape))).reshape(shape)


def memory_order(t: torch.Tensor) -> tuple[int, ...]:
    """The dims of a tensor from the outermost in memory, as torch keeps them in what it makes like it.

    Random numbers are drawn in this order.

    >>> memory_order(torch.empty(2, 3, 4).mT), memory_order(torch.empty(2, 3))
    ((0, 2, 1), ())
    """
    return () if t.is_contiguous() else _order(tuple(t.shape), t.stride())


@lru_cache(4096)
def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    like = torch.empty_like(torch.empty_strided(shape, strides, device="meta"))
    strides = like.stride()
    return () if like.is_contiguous() else tuple(sorted(range(len(shape)), key=lambda d: -strides[d]))


def memory_gaps(t: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor that is not dense in its memory, such as a view with a step.

    >>> x = torch.empty(2, 6)
    >>> memory_gaps(x[:, ::2]), memory_gaps(x[0].expand(3, 6)), memory_gaps(x.T)
    ((6, 2), (0, 1), ())
    """
    if t.is_contiguous() or not t.numel():
        return ()
    return () if t.stride() == dense_strides(t.shape, memory_order(t)) else t.stride()


def dense_strides(shape: Sequence[int], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dims lie in memory in this order; 0 for a dim left out."""
    found, step = [0] * len(shape), 1
    for d in reversed(order or range(len(shape))):
        found[d] = step
        step *= max(shape[d], 1)
    return tuple(found)


def layout(
    placement: Placement,
    sbp: SbpLike,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype = torch.float32,
    grad_sbp: SbpLike | None = None,
) -> Layout:
    """The layout of a tensor of this shape and dtype under these signatures, checked.

    `grad_sbp` says how the gradient lies; only where the tensor is B is there a choice, B (the default) or P.

    >>> from ..placement import placement
    >>> layout(placement("cpu:[0-1]"), B, (4,), grad_sbp=P).dual
    float32 (4,) as (P,) on cpu:[0-1]
    """
    shape = tuple(shape)
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ShapeError(f"shape={shape}: sizes are whole numbers from 0")
    chosen = tuple(_positive(entry, shape) for entry in signature(sbp, placement))
    kinds = list(dict.fromkeys(entry for entry in chosen if isinstance(entry, Partial)))
    if len(kinds) > 1:
        fix = tuple(B if e in kinds[1:] else e for e in chosen)
        raise SbpError(
            f"sbp={chosen}: a sum of maxima is not the maximum of sums, so one tensor is partial in one way only\n"
            f"  make it B on the axes of the others first, as in sbp={fix}"
        )
    if dtype.is_complex and kinds and kinds[0] is not P:
        raise SbpError(f"sbp={chosen} of {dtype}: complex numbers have no order\n  only P, the sum, can be partial")
    plain = Layout(placement, state_of(chosen, len(shape), placement.shape), shape, dtype, (), chosen)
    if grad_sbp is None:
        return plain
    return Layout(placement, plain.state, shape, dtype, _grad_axes(plain, grad_sbp), chosen)


def _positive(entry: Sbp, shape: tuple[int, ...]) -> Sbp:
    if not isinstance(entry, Split) or 0 <= entry.dim < len(shape):
        return entry
    if -len(shape) <= entry.dim < 0:
        return S(entry.dim + len(shape))
    fix = f"dims are {-len(shape)} to {len(shape) - 1}" if shape else "a tensor without dims can be B or P"
    raise ShapeError(f"{entry} is out of range for a tensor of shape {shape}\n  {fix}")


def _grad_axes(plain: Layout, grad_sbp: SbpLike, *, strict: bool = True) -> tuple[int, ...]:
    """The B axes whose gradient is to be P; if strict, every other entry must be the dual it has anyway."""
    wanted = [_positive(entry, plain.shape) for entry in signature(grad_sbp, plain.placement)]
    axes = []
    for axis, (entry, want, dual) in enumerate(zip(plain.sbp, wanted, plain.dual.sbp, strict=True)):
        if entry is B and want is P:
            if plain.placement.shape[axis] > 1:
                axes.append(axis)
        elif strict and want is not dual and plain.placement.shape[axis] > 1:
            can = "B or P" if entry is B else repr(dual)
            raise SbpError(
                f"grad_sbp={tuple(wanted)} does not fit sbp={plain.sbp}\n"
                f"  on axis {axis} the tensor is {entry}, so its gradient is {can}, not {want}"
            )
    return tuple(axes)
