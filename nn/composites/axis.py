"""The axis of a composite: the words it is written in.

A composite is a function of an axis and of the arguments of the op that it stands for. It runs no kernel and moves
nothing: it says which calls each rank makes, how what goes in and comes out lies on this axis, and which values go
round it. Moves, their order beside the calls, all gradients, memory and prices follow from that as for any other op.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.errors import SbpError, ShapeError
from ...sbp import B, S, Sbp, Split, State
from ...sbp.call import Indices, Ref, in_order, leaves, map_tensors, mapped, tensors_in
from ...sbp.logical import Fixed, LogicalOp, Round, Seen, Stripes
from ...sbp.state import Window

__all__ = ["Axis", "AxisValue", "HeldIndices", "Left"]


@dataclass(frozen=True)
class AxisValue:
    """A value, how it is to lie on the axis where a call takes it, and how many places on it went before."""

    number: int
    like: Tensor  # of its shape and dtype, without values
    grad: bool
    sbp: Sbp | Stripes | Seen = B
    turn: int = 0
    name: str = ""  # of a parameter, buffer or argument

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)

    @property
    def ndim(self) -> int:
        return self.like.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    def lying(self, sbp: Sbp) -> "AxisValue":
        """The same value, moved to lie so on the axis; dims may be counted from the end."""
        return replace(self, sbp=_counted(sbp, self.ndim), turn=0)

    def striped(self, dim: int, count: int) -> "AxisValue":
        """The same value with a dim cut in so many stripes, of each of which every rank has its piece."""
        whole = _counted(S(dim), self.ndim)
        return replace(self, sbp=Stripes(dim % self.ndim, count) if count > 1 else whole, turn=0)

    def seen(self, dim: int, size: int, first: int, last: int) -> "AxisValue":
        """The same value, of which every rank has what its part of a dim of `size` sees: place o of that sees those
        from o + first to o + last. What a rank lacks comes from its neighbours, and gradients go back there."""
        return replace(self, sbp=Seen(dim % self.ndim, Window(size, first, last)), turn=0)

    def turned(self, places: int) -> "AxisValue":
        """The same value after so many steps round the axis: rank i has the piece of rank i - places.

        It goes one place at a time, in each round of calls the next, and its gradient comes back the same way.
        """
        if not isinstance(self.sbp, Split | Stripes):
            raise SbpError(
                f"a value of shape {self.shape} is {self.sbp} on the axis, and cannot go round it\n"
                "  only pieces can: x.lying(flow.S(dim)).turned(places)"
            )
        return replace(self, turn=places)

    def indices(self, dim: int) -> "HeldIndices":
        """In an argument of a call: [first, end, first, end, ...], the places of this dim that a rank has of it."""
        return HeldIndices(self, dim % self.ndim)


@dataclass(frozen=True)
class HeldIndices:
    """The places of a dim that a rank has of a value, which every rank is told of its own."""

    value: AxisValue
    dim: int


@dataclass(frozen=True)
class Left:
    """A call that a composite leaves as it is, why, and what would make it one for it."""

    why: str
    fix: str


class Axis:
    """One axis of the placement that an op runs on, and the calls that a composite makes in the place of it."""

    def __init__(
        self,
        placement: Placement,
        axis: int,
        op: LogicalOp,
        fresh: Callable[[], int],
        use: str,
        pins: Mapping[str, Any],
        made: Callable[[int], Tensor | None] = lambda number: None,
    ) -> None:
        self.placement, self.axis, self.size, self.op = placement, axis, placement.shape[axis], op
        self.name, self.module = op.name, op.origin.module
        self.over = placement.names[axis] if placement.names else axis
        self._fresh, self._use, self._pins, self._made = fresh, use, pins, made
        self.calls: list[LogicalOp] = []

    def run(self, op: Any, *args: Any, gives: Any, round: int = 0, **kwargs: Any) -> Any:
        """A call that each rank makes of what it has of its inputs, and how its results lie on the axis.

        `op` is an op of torch or one of yours, such as `torch.ops.mylib.part.default`; on other axes its rule counts.
        Calls of one round run together, and the moves for the next go on meanwhile.
        """
        overload = getattr(op, "default", None) if isinstance(op, torch._ops.OpOverloadPacket) else op
        if not isinstance(overload, torch._ops.OpOverload):
            raise SbpError(
                f"{self._use}: axis.run of {op!r}\n  give it an op, such as torch.ops.aten.add.Tensor; "
                "torch.library makes one of a function"
            )
        inputs = leaves((args, in_order(overload, kwargs)), AxisValue)
        made = self._likes(overload, args, kwargs)
        several = isinstance(gives, list | tuple)
        given: list[Sbp | Stripes | Seen] = list(gives) if several else [gives] * len(made)
        if len(given) != len(made):
            raise SbpError(
                f"{self._use}: {overload} makes {len(made)} tensors\n  gives= says how {len(given)} of them lie"
            )
        fixed = Fixed(
            tuple(x.sbp for x in inputs),
            tuple(_counted(sbp, y.ndim) for sbp, y in zip(given, made, strict=True)),
            tuple(x.turn % self.size for x in inputs),
            Round(self.axis, round),
        )
        slots = {(x.number, x.sbp, x.turn): slot for slot, x in reversed(list(enumerate(inputs)))}
        args, kwargs = mapped((args, kwargs), AxisValue, lambda x: Ref(x.number))
        args, kwargs = mapped((args, kwargs), HeldIndices, lambda of: self._slot(of, slots))
        numbers = tuple(self._fresh() for _ in made)
        grad = self.op.grad and any(x.grad for x in inputs)
        self.calls.append(
            LogicalOp(
                overload, args, kwargs, tuple(made), numbers, self.op.grad, self.op.origin, self.placement, fixed=fixed
            )
        )
        values = tuple(
            AxisValue(n, y, grad and y.dtype.is_floating_point, sbp)
            for n, y, sbp in zip(numbers, made, fixed.outputs, strict=True)
        )
        return values[0] if len(values) == 1 and not several else values

    def rest(self, x: AxisValue) -> Sbp | None:
        """How a parameter is hinted to lie on the axis, or an argument lies there; None where nothing is said of it."""
        known = self._pins.get(x.name)
        if isinstance(known, State):
            known = known.sbp(self.placement.ndim)
        return None if known is None else known[self.axis]

    def constant(self, x: AxisValue) -> Tensor | None:
        """The numbers of a value that is made of nothing that comes from outside, as a mask often is; else None."""
        return self._made(x.number)

    def leave(self, why: str, fix: str) -> Left:
        """To be returned by a composite that is not for this call; it is an error only if all calls are left."""
        return Left(why, fix)

    def refuse(self, why: str, fix: str) -> SbpError:
        """The error that says that the composite cannot stand for this call, with its module and line."""
        where = f"{self.module or 'the graph'}, at {self.op.origin.line or 'no line'}"
        return SbpError(f"inside {self.module or 'the model'} use {self._use}: {why}\n  called in {where}\n  {fix}")

    def _slot(self, of: HeldIndices, slots: Mapping[Any, int]) -> Indices:
        slot = slots.get((of.value.number, of.value.sbp, of.value.turn))
        if slot is None:
            raise SbpError(f"{self._use}: indices of a value that the call does not take as it lies there")
        return Indices(slot, of.dim)

    def _likes(self, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
        """The shapes and dtypes of a call's results, as if there were one rank."""

        def whole(of: HeldIndices) -> list[int]:
            return [0, of.value.shape[of.dim]]

        args, kwargs = mapped((args, kwargs), HeldIndices, whole)
        args, kwargs = mapped((args, kwargs), AxisValue, lambda x: x.like)
        with torch.no_grad():
            try:
                made = op(*args, **kwargs)
            except (RuntimeError, TypeError, IndexError) as error:
                raise ShapeError(
                    f"inside {self.module} use {self._use}: {op} cannot be called so\n  {error}"
                ) from error
        return list(tensors_in(map_tensors(made, lambda y: y)))


def _counted(sbp: Sbp | Stripes | Seen, ndim: int) -> Any:
    """A signature with its dim counted from the front."""
    if not isinstance(sbp, Split | Stripes | Seen):
        return sbp
    if not -ndim <= sbp.dim < ndim:
        raise ShapeError(f"{sbp} of a tensor with {ndim} dims\n  dims are {-ndim} to {ndim - 1}")
    return Split(sbp.dim % ndim) if isinstance(sbp, Split) else replace(sbp, dim=sbp.dim % ndim)
