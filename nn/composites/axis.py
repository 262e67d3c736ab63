"""The axis of a composite: the words it is written in.

A composite is a function of an axis and of the arguments of the op that it stands for. It runs no kernel and moves
nothing: it says which calls each rank makes, how their inputs and results lie on this axis, and which values go round
it. Moves, their order beside the calls, all gradients, memory and prices follow from that as for any other op.

One that is over several axes says for each of them how a value lies: {row: S(0), col: S(1)}.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.errors import PlacementError, SbpError, ShapeError
from ...placement.structure import leaves, mapped
from ...sbp import B, S, Sbp, Split, State
from ...sbp.call import Indices, Ref, in_order, map_tensors, tensors_in
from ...sbp.logical import AxisSwap, AxisTurn, Fixed, LogicalOp, Round, Seen, Stripes
from ...sbp.state import Window
from ...sbp.text import Pin
from ..model.inside import Left

__all__ = ["Axis", "AxisLine", "AxisValue", "HeldIndices"]


@dataclass(frozen=True)
class AxisLine:
    """One of the axes that a composite is over: its place in the grid, its ranks and its name."""

    at: int
    size: int
    over: str | int


LineEntry: TypeAlias = Sbp | Stripes | Seen
# On the only axis; on each of several, of which those with B are left out.
LineEntries: TypeAlias = LineEntry | tuple[tuple[AxisLine, LineEntry], ...]
LineEntriesLike: TypeAlias = LineEntry | Mapping[AxisLine, LineEntry]


@dataclass(frozen=True)
class AxisValue:
    """A value, how it is to lie on the axis where a call takes it, and how far on it went before."""

    number: int
    like: Tensor  # a tensor of its shape and dtype, without values
    grad: bool
    sbp: LineEntries = B
    turn: AxisTurn | AxisSwap | None = None  # a turn of this axis of the grid; -1: of the only one
    name: str = ""  # the name of a parameter, buffer or argument
    share: float | None = None  # the share of its rows expected to hold something, where no others are sent

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)

    @property
    def ndim(self) -> int:
        return self.like.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    def lying(self, sbp: LineEntriesLike) -> "AxisValue":
        """The same value, moved to lie so on the axis, or on each of several; dims may be counted from the end."""
        return replace(self, sbp=_counted(sbp, self.ndim), turn=None, share=None)

    def striped(self, dim: int, count: int) -> "AxisValue":
        """The same value with a dim cut in so many stripes; every rank has a piece of each."""
        return self.lying(Stripes(dim, count) if count > 1 else S(dim))

    def seen(self, dim: int, size: int, first: int, last: int) -> "AxisValue":
        """The same value as a dim of `size` sees it.

        Place o of a rank's part of that dim sees those from o + first to o + last. Elements that a rank lacks come from
        its neighbours, and gradients go back there."""
        return self.lying(Seen(dim, Window(size, first, last)))

    def turned(self, places: int, axis: AxisLine | None = None) -> "AxisValue":
        """The value so many steps round the axis, or round this one of several.

        Rank i has the piece of rank i - places.

        It goes one place at a time, in each round of calls the next, and its gradient comes back the same way.
        """
        self._check_pieces(axis, "go round it", "turned(places)")
        return replace(self, turn=AxisTurn(-1 if axis is None else axis.at, places))

    def swapped(self, distance: int, axis: AxisLine | None = None) -> "AxisValue":
        """The same value after ranks have changed it in pairs: rank i has the piece of rank i with this bit changed.

        The ranks of the axis are a multiple of twice the distance, which is 1, 2, 4 and so on.
        """
        self._check_pieces(axis, "change hands", "swapped(distance)")
        return replace(self, turn=AxisSwap(-1 if axis is None else axis.at, distance))

    def filled(self, share: float) -> "AxisValue":
        """The same value, moved so that only rows of the last dim that hold something are sent.

        The number of these is known only as it runs; the price goes by `share`, the part of all that is expected.
        """
        return replace(self, share=share)

    def _check_pieces(self, axis: AxisLine | None, what: str, word: str) -> None:
        on = _on(self.sbp, axis)
        if not isinstance(on, Split | Stripes):
            raise SbpError(
                f"a value of shape {self.shape} is {on} on the axis, and cannot {what}\n"
                f"  only pieces can: x.lying(flow.S(dim)).{word}"
            )

    def indices(self, dim: int) -> "HeldIndices":
        """In an argument of a call: [first, end, first, end, ...], the places of this dim that a rank has of it."""
        return HeldIndices(self, dim % self.ndim)


@dataclass(frozen=True)
class HeldIndices:
    """The places of a dim that a rank has of a value, which every rank is told of its own."""

    value: AxisValue
    dim: int


class Axis:
    """The axis of the placement that an op runs on, or several, and the calls that a composite makes in its place."""

    def __init__(
        self,
        placement: Placement,
        axes: Sequence[int],
        op: LogicalOp,
        fresh: Callable[[], int],
        use: str,
        pins: Mapping[str, Any],
        lies: Mapping[AxisLine, Sbp] = MappingProxyType({}),
        made: Callable[[int], Tensor | None] = lambda number: None,
    ) -> None:
        names = placement.names or range(placement.ndim)
        self.axes = tuple(AxisLine(axis, placement.shape[axis], names[axis]) for axis in axes)
        self.placement, self.op = placement, op
        self.name, self.module = op.name, op.origin.module
        self.size, self.over = self.axes[0].size, self.axes[0].over  # of the only one
        self._fresh, self._use, self._pins, self._lies, self._made = fresh, use, pins, lies, made
        self.calls: list[LogicalOp] = []

    def run(
        self, op: Any, *args: Any, gives: Any, round: int = 0, grad: bool = True, nested: bool = False, **kwargs: Any
    ) -> Any:
        """A call that each rank makes of what it has of its inputs, and how its results lie on the axis.

        `op` is an op of torch or one of yours, such as `torch.ops.mylib.part.default`; on other axes its rule counts.
        Calls of one round run together, and the moves for the next go on meanwhile. Without `grad` no gradient flows.
        A `nested` call may be of pieces of the same dims that other axes cut: it does to each what it does to all.
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
        given: list[LineEntriesLike] = list(gives) if several else [gives] * len(made)
        if len(given) != len(made):
            raise SbpError(
                f"{self._use}: {overload} makes {len(made)} tensors\n  gives= says how {len(given)} of them lie"
            )
        lies = [_counted(sbp, y.ndim) for sbp, y in zip(given, made, strict=True)]
        fixed = Fixed(
            tuple(self._entries(x.sbp) for x in inputs),
            tuple(map(self._entries, lies)),
            tuple(self._turn(x.turn) for x in inputs),
            Round(tuple(axis.at for axis in self.axes), round),
            tuple(x.share for x in inputs) if any(x.share for x in inputs) else (),
            nested,
        )
        slots = {(x.number, x.sbp, x.turn): slot for slot, x in reversed(list(enumerate(inputs)))}
        args, kwargs = mapped((args, kwargs), HeldIndices, lambda of: self._slot(of, slots))
        values = self._put(overload, args, kwargs, made, lies, fixed=fixed, lies=self._pin(self._lies), grad=grad)
        return values[0] if len(values) == 1 and not several else values

    def call(
        self,
        op: torch._ops.OpOverload,
        *args: Any,
        lies: Mapping[AxisLine, Sbp] | Sbp,
        round: int | None = None,
        **kwargs: Any,
    ) -> AxisValue:
        """A call made by the op's rule. Its one result lies so on the axis, or on each of several."""
        made = self._likes(op, args, kwargs)
        said = {**self._lies, **(lies if isinstance(lies, Mapping) else {self.axes[0]: lies})}
        count = len(leaves((args, kwargs), AxisValue))
        fixed = None if round is None else Fixed(((),) * count, ((),), (None,) * count, Round((), round))
        (value,) = self._put(op, args, kwargs, made, [B], lies=self._pin(said), fixed=fixed)
        return value

    def within(self, axis: AxisLine, lies: Mapping[AxisLine, Sbp] = MappingProxyType({})) -> "Axis":
        """One of several axes, for what composites of one axis do; results of all calls lie on the others as said."""
        inner = Axis(self.placement, (axis.at,), self.op, self._fresh, self._use, self._pins, lies)
        inner.calls = self.calls
        return inner

    def _pin(self, lies: Mapping[AxisLine, Sbp]) -> Pin | None:
        if not lies:
            return None
        said = {axis.at: sbp for axis, sbp in lies.items()}
        what = f"the result of {self._use} in {self.module or 'the graph'}"
        return Pin(tuple(said.get(at) for at in range(self.placement.ndim)), what=what)

    def _put(
        self,
        op: Any,
        args: Any,
        kwargs: Any,
        made: Sequence[Tensor],
        lying: Sequence[LineEntries],
        grad: bool = True,
        **said: Any,
    ) -> tuple[AxisValue, ...]:
        """The values of one call more."""
        flows = self.op.grad and grad
        wanted = flows and any(x.grad for x in leaves((args, kwargs), AxisValue))
        args, kwargs = mapped((args, kwargs), AxisValue, lambda x: Ref(x.number))
        numbers = tuple(self._fresh() for _ in made)
        self.calls.append(
            LogicalOp(op, args, kwargs, tuple(made), numbers, flows, self.op.origin, self.placement, **said)
        )
        return tuple(
            AxisValue(n, y, wanted and y.dtype.is_floating_point, sbp)
            for n, y, sbp in zip(numbers, made, lying, strict=True)
        )

    def rest(self, x: AxisValue, axis: AxisLine | None = None) -> Sbp | None:
        """The signature that a parameter is hinted, or an argument has, on the axis; None where nothing is said of
        it."""
        known = self._pins.get(x.name)
        if isinstance(known, State):
            known = known.sbp(self.placement.ndim)
        return None if known is None else known[(axis or self.axes[0]).at]

    def constant(self, x: AxisValue) -> Tensor | None:
        """The numbers of a value that is made of nothing from outside, such as many masks; else None."""
        return self._made(x.number)

    def leave(self, why: str, fix: str) -> Left:
        """To be returned by a composite that is not for this call; it is an error only if all calls are left."""
        return Left(why, fix)

    def refuse(self, why: str, fix: str) -> SbpError:
        """The error that says that the composite cannot stand for this call, with its module and line."""
        where = f"{self.module or 'the graph'}, at {self.op.origin.line or 'no line'}"
        return SbpError(f"inside {self.module or 'the model'} use {self._use}: {why}\n  called in {where}\n  {fix}")

    def _entries(self, lying: LineEntries) -> tuple[LineEntry, ...]:
        """An entry for each axis."""
        if not isinstance(lying, tuple):
            if lying is not B and len(self.axes) > 1:
                raise SbpError(
                    f"{self._use}: {lying} on which of {len(self.axes)} axes?\n"
                    "  say so, as in x.lying({axis.axes[0]: flow.S(0)})"
                )
            return (lying,) * len(self.axes)
        known = dict(lying)
        return tuple(known.get(axis, B) for axis in self.axes)

    def _turn(self, turn: AxisTurn | AxisSwap | None) -> AxisTurn | AxisSwap | None:
        if turn is None:
            return None
        axis = self.axes[0] if turn.axis < 0 else next(each for each in self.axes if each.at == turn.axis)
        if isinstance(turn, AxisSwap):
            try:
                self.placement.swapped(axis.at, turn.distance)
            except PlacementError as error:
                raise PlacementError(f"inside {self.module or 'the model'} use {self._use}: {error}") from None
            return turn._replace(axis=axis.at)
        places = turn.places % axis.size
        return AxisTurn(axis.at, places) if places else None

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


def _counted(sbp: LineEntriesLike, ndim: int) -> LineEntries:
    """A signature with its dims counted from the front."""
    if isinstance(sbp, Mapping):
        return tuple((axis, _counted_entry(entry, ndim)) for axis, entry in sbp.items() if entry is not B)
    return _counted_entry(sbp, ndim)


def _counted_entry(sbp: LineEntry, ndim: int) -> LineEntry:
    if not isinstance(sbp, Split | Stripes | Seen):
        return sbp
    if not -ndim <= sbp.dim < ndim:
        raise ShapeError(f"{sbp} of a tensor with {ndim} dims\n  dims are {-ndim} to {ndim - 1}")
    return S(sbp.dim % ndim) if isinstance(sbp, Split) else replace(sbp, dim=sbp.dim % ndim)


def _on(lying: LineEntries, axis: AxisLine | None) -> LineEntry:
    """The entry of a value on one of several axes, or on the only one."""
    if not isinstance(lying, tuple):
        return lying
    return dict(lying).get(axis, B) if axis is not None else B
