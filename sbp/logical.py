"""The logical graph: what a model computes, as if there were one device. Values in, no signatures yet.

Values are numbered: first the sources, then what the ops make. Every op is functional: what wrote in place stands here
as a new value, and what a buffer holds after the step is in `writes`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..placement import Placement
from ..placement.structure import ByIdentity
from .call import Call, Ref, fill, in_order, refs_in, renumbered
from .signature import Sbp
from .state import State, Window
from .text import Pin
from .traits import traits

__all__ = [
    "Fixed",
    "Loss",
    "Logical",
    "LogicalOp",
    "OffloadPlace",
    "PART",
    "Origin",
    "Round",
    "SavedOffload",
    "Source",
    "Seen",
    "Stripes",
    "AxisSwap",
    "AxisTurn",
]

OffloadPlace: TypeAlias = Literal["cpu", "disk"]
PART = "eager"  # the namespace of eager parts


class SavedOffload(NamedTuple):
    """Where the saved values of a module lie meanwhile; they come back so many segments `ahead` of their use."""

    to: OffloadPlace
    ahead: int = 1


class Round(NamedTuple):
    """The round of a composite that a call belongs to. Calls with the same axes and number run together, and the next
    round's moves go on beside them."""

    axes: tuple[int, ...]
    number: int


class AxisTurn(NamedTuple):
    """A turn of a value around an axis by so many places, one at a time, before a call takes it."""

    axis: int
    places: int

    def path(self, where: Placement) -> list[Placement]:
        """The placements of the value after each of its moves, for a call that runs at `where`."""
        return [where.turned(self.axis, places) for places in range(1, self.places + 1)]

    def end(self, where: Placement) -> Placement:
        """The last of these."""
        return where.turned(self.axis, self.places)


class AxisSwap(NamedTuple):
    """Pairs of ranks along an axis send each other what they have: i, and i with the bit `distance` changed."""

    axis: int
    distance: int

    def path(self, where: Placement) -> list[Placement]:
        """The placement of the value after its one move."""
        return [self.end(where)]

    def end(self, where: Placement) -> Placement:
        """The one placement of the path."""
        return where.swapped(self.axis, self.distance)


@dataclass(frozen=True)
class Stripes:
    """A dim in so many stripes, each of which is split: every rank has a piece of each."""

    dim: int
    count: int

    def __str__(self) -> str:
        return f"S({self.dim}) of {self.count} stripes"


@dataclass(frozen=True)
class Seen:
    """A dim of which every rank has what its part of another dim sees, through a window."""

    dim: int
    window: Window

    def __str__(self) -> str:
        return f"S({self.dim}) as seen from {self.window}"


@dataclass(frozen=True)
class Fixed:
    """The signature of a call on the axes of its round, as a composite says it; on others it is chosen.

    Each tensor has an entry for each of these axes. Inputs lie so once they were sent on: `turns`, one for each. Of
    those with a number in `shares` only filled rows are sent, and that part of all is expected to be. Where it is
    `nested`, others may cut the same dims: each of their pieces is dealt with as the whole would be.
    """

    inputs: tuple[tuple[Sbp | Stripes | Seen, ...], ...]
    outputs: tuple[tuple[Sbp | Stripes | Seen, ...], ...]
    turns: tuple[AxisTurn | AxisSwap | None, ...]
    round: Round
    shares: tuple[float | None, ...] = ()
    nested: bool = False

    def place(self, slot: int, where: Placement) -> Placement:
        """The placement of an input of a call that runs at `where`."""
        turn = self.turns[slot]
        return turn.end(where) if turn else where


@dataclass(frozen=True)
class Origin:
    """The origin of an op in the user's program, for errors and pictures, and what the program said of it."""

    module: str = ""  # the path of the innermost module, such as `blocks.3.attn.qkv`
    line: str = ""  # the user's file and line
    block: str = ""  # the path of the outermost repeated module, such as `blocks.3`; those of equal blocks match
    recompute: str = ""  # the region with which the backward runs it again; none, if what it saves is kept
    kept_of: str = ""  # the region around it, of which its results are kept and what its backward reads is made again
    # Where what it saves lies between forward and backward; None: on the device.
    offload: SavedOffload | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class Source:
    """A value that is there before anything runs; its number is its place among the sources.

    An input's name is its path in the arguments (`0`, `1.mask`, `labels`), others' is that in the model. A constant is
    a plain tensor that a module holds as an attribute, read anew at each step.
    """

    name: str
    kind: Literal["input", "parameter", "buffer", "constant"]
    fake: Tensor
    requires_grad: bool = False
    placement: Placement | None = None  # where it was annotated to live
    grads: torch.dtype | None = None  # in which its gradient is brought together, where that is another
    states: torch.dtype | None = None  # in which an optimizer changes it, and keeps what it keeps
    offload: OffloadPlace | None = None  # where a parameter's master and the optimizer's states of it lie
    starts: bool = False  # whether the step goes by where an input starts in its memory


@dataclass(frozen=True, eq=False)
class LogicalOp:
    """One ATen call; its tensors are `Ref`s, and `outputs` fakes of what it makes, one for each of `numbers`."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    grad: bool = True  # whether gradients flow through it
    origin: Origin = Origin()
    placement: Placement | None = None  # as the program says, or that of the innermost annotated module around it
    lies: State | Pin | None = None  # how its result is to lie, where somebody says
    fixed: Fixed | None = None  # how all of it lies on some axes, where a composite says

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the tensors that go in, in the order of the schema."""
        return tuple(refs_in((self.args, in_order(self.op, self.kwargs))))

    @property
    def name(self) -> str:
        """The op as rules name it."""
        return Call(self.op, (), {}, ()).name

    def place(self, slot: int, there: Placement) -> Placement:
        """The placement where an input is wanted, if the call runs there."""
        return self.fixed.place(slot, there) if self.fixed else there

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return Call(self.op, self.args, self.kwargs, ()).draws

    @property
    def is_part(self) -> bool:
        """Whether it is an eager part, which runs whoever uses what it gives back: it may do more than that."""
        return self.op.namespace == PART

    @property
    def draws_unread(self) -> bool:
        """Whether it draws, and looks at no value for that."""
        return self.draws and (not self.inputs or "unread" in traits(self.name))

    def without_values(self, fakes: Mapping[int, Tensor], fresh: Iterator[int]) -> list["LogicalOp"]:
        """The same draw of numbers that nobody reads, nor draws again, and before it what it is drawn for."""
        origin = replace(self.origin, recompute="", kept_of="", offload=None)
        mine = replace(self, origin=origin, lies=None)
        if not {"unread", "drops"} & traits(self.name):
            return [mine]
        new = {n: next(fresh) for n in dict.fromkeys(self.inputs)}
        empties = []
        for n, number in new.items():
            like, kwargs = fakes[n], {"dtype": fakes[n].dtype, "device": fakes[n].device}
            args, empty = ([*like.shape], [*like.stride()]), torch.ops.aten.empty_strided.default
            empties.append(LogicalOp(empty, args, kwargs, (like,), (number,), False, origin, self.placement))
        return [*empties, mine.of(new)]

    def of(self, values: Mapping[int, int], **changes: Any) -> "LogicalOp":
        """The same call of other values, where `values` tells another, and with these fields changed."""
        made = object.__new__(LogicalOp)  # as replace makes it, in a fifth of the time: deep models have very many
        args, kwargs = renumbered((self.args, self.kwargs), values)
        inputs = tuple([values.get(n, n) for n in self.inputs])
        vars(made).update(vars(self), args=args, kwargs=kwargs, inputs=inputs, **changes)
        return made


@dataclass(frozen=True)
class Loss:
    """A value that `backward()` was called on, and the number of the gradient it was given (None: one)."""

    number: int
    gradient: int | None = None


def _same(result: Any) -> Any:
    return result


@dataclass(frozen=True, eq=False)
class Logical:
    """A captured step."""

    sources: tuple[Source, ...]
    ops: tuple[LogicalOp, ...]
    result: Any  # what the function returned, with Refs for tensors; flat where `fill` could not put it together again
    losses: tuple[Loss, ...] = ()
    writes: Mapping[str, int] = field(default_factory=dict)  # of buffers that change: name -> number of the new value
    rebuild: Callable[[Any], Any] = _same  # makes of the result, tensors in it, what the function returned
    deeds: tuple[Callable[[], None], ...] = ()  # what it did to Python's values, to be done again behind each step
    before: Mapping[tuple[ByIdentity, Any], Any] = field(
        default_factory=dict
    )  # numbers that it changed, by container and key

    @cached_property
    def fakes(self) -> dict[int, Tensor]:
        """A tensor of the shape and dtype of every value."""
        made = {n: y for op in self.ops for n, y in zip(op.numbers, op.outputs, strict=True)}
        return {**{n: s.fake for n, s in enumerate(self.sources)}, **made}

    @cached_property
    def reached(self) -> frozenset[int]:
        """The values that want gradients and that those of losses reach; all of them where there are no losses."""
        if not self.losses:
            return self.wants_grad
        found = {loss.number for loss in self.losses}
        for op in reversed(self.ops):
            if op.grad and not found.isdisjoint(op.numbers):
                found.update(n for n in op.inputs if n in self.wants_grad)
        return self.wants_grad & found

    @cached_property
    def wants_grad(self) -> frozenset[int]:
        """The values through which gradients reach a parameter (or an input that requires grad)."""
        found = {n for n, s in enumerate(self.sources) if s.requires_grad}
        for op in self.ops:
            if op.grad and any(n in found for n in op.inputs):
                floats = [n for n, y in zip(op.numbers, op.outputs, strict=True) if _differentiable(y)]
                found.update(floats)
        return frozenset(found)

    def __str__(self) -> str:
        """A line for each value: its number, the call that makes it, dtype, shape, and where it comes from."""
        lines = [f"%{n} = {s.kind} {s.name}: {_type(s.fake)}{_at(s.placement)}" for n, s in enumerate(self.sources)]
        for op in self.ops:
            args = ", ".join([*map(_text, op.args), *(f"{name}={_text(value)}" for name, value in op.kwargs.items())])
            made = ", ".join(f"%{n}" for n in op.numbers)
            types = ", ".join(map(_type, op.outputs))
            said = "  ".join(filter(None, (op.origin.module, op.origin.line)))
            lines.append(f"{made} = {op.op}({args}): {types}{_at(op.placement)}  # {said}")
        lines += [f"loss %{loss.number}" for loss in self.losses]
        lines += [f"write {name} = %{number}" for name, number in self.writes.items()]
        return "\n".join([*lines, f"return {_text(self.result)}"])

    @cached_property
    def ends(self) -> frozenset[int]:
        """The values that it is there for."""
        losses = [n for loss in self.losses for n in (loss.number, loss.gradient) if n is not None]
        return frozenset((*refs_in(self.result), *self.writes.values(), *losses))

    def map(self, numbers: Mapping[int, int]) -> "Logical":
        """The same graph with other numbers for these values; its sources stay what they are."""

        def new(number: int) -> int:
            return numbers.get(number, number)

        return replace(
            self,
            ops=tuple([op.of(numbers, numbers=tuple(map(new, op.numbers))) for op in self.ops]),
            result=renumbered(self.result, numbers),
            losses=tuple(
                Loss(new(loss.number), None if loss.gradient is None else new(loss.gradient)) for loss in self.losses
            ),
            writes={name: new(number) for name, number in self.writes.items()},
        )

    def pruned(self, more: Iterable[int] = ()) -> "Logical":
        """Without the ops whose results nobody uses, but for eager parts; `more` are values that somebody does."""
        used, kept = {*self.ends, *more}, []
        for op in reversed(self.ops):
            if op.is_part or not used.isdisjoint(op.numbers):
                used.update(op.inputs)
                kept.append(op)
        return replace(self, ops=tuple(kept[::-1]))

    def needed(self, fakes: Mapping[int, Tensor]) -> "Logical":
        """The same, but for ops that draw random numbers: those who draw after them would draw others. Where they read
        no values, they are given tensors without, so that what makes their inputs is left out."""
        used, kept, fresh = {*self.ends}, list[LogicalOp](), count(max(fakes, default=-1) + 1)
        for op in reversed(self.ops):
            made = [op]
            if used.isdisjoint(op.numbers):
                made = op.without_values(fakes, fresh) if op.draws else [op] if op.is_part else []
            used.update(n for each in made for n in each.inputs)
            kept += reversed(made)
        return replace(self, ops=tuple(kept[::-1]))

    def call(self, op: LogicalOp, states: tuple[State, ...] = (), sizes: tuple[int, ...] = ()) -> Call:
        """The op as rules look at it, where its inputs lie so on a grid of this shape."""
        return Call(op.op, fill(op.args, self.fakes), fill(op.kwargs, self.fakes), op.outputs, states, sizes)


def _type(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _at(placement: Placement | None) -> str:
    return f" on {placement}" if placement is not None else ""


def _text(value: Any) -> str:
    if isinstance(value, Ref):
        return f"%{value.number}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_text(part)}' for name, part in value.items())}}}"
    return str(value)


def _differentiable(y: Tensor) -> bool:
    return y.dtype.is_floating_point or y.dtype.is_complex
