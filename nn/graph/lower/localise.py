"""Local calls: what one rank runs of an op or a segment, by the rule book's functions bound once to its shards."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....boxing.graph.memory_order import MemoryOrder, strides_in
from ....boxing.graph.physical import Op, Physical, Value, Var
from ....placement import Placement
from ....placement.device import family
from ....placement.structure import mapped
from ....placement.world import device
from ....sbp import Layout
from ....sbp.book.filling import of_a_piece
from ....sbp.call import Call, Indices, Piece, Ref, Rewritten, Way, fill, frozen, tensors_in
from ....sbp.joint.fixed import fixed_way
from ....sbp.joint.options import way_of
from ....sbp.traits import traits
from .card_kernels import as_on_card
from .last_used import LastUsed
from .segments import Segment

__all__ = ["Local", "LocalCall", "Spec", "Localiser", "metas", "part", "renamed"]


class Spec(NamedTuple):
    """Shape, dtype and device of a local tensor, and the order in which its dims lie in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    order: MemoryOrder = None

    @property
    def strides(self) -> tuple[int, ...]:
        return strides_in(self.shape, self.order)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class LocalCall(NamedTuple):
    """A call on one rank; `Ref`s number the wires of its segment: the inputs first, then all that calls make."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    makes: tuple[Spec, ...]
    grad: bool


@dataclass(frozen=True, eq=False)
class Local:
    """A segment on one rank's shards. Two of equal `key` are the same program, and equal."""

    calls: tuple[LocalCall, ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[int, ...]  # wires
    returns: tuple[int, ...]  # which outputs gradients come back to
    wants: tuple[int, ...]  # which inputs they go on to

    @cached_property
    def key(self) -> Any:
        calls = tuple((same(c.function), frozen((c.args, c.kwargs)), c.makes, c.grad) for c in self.calls)
        return calls, self.inputs, self.outputs, self.returns, self.wants

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Local) and (self is other or self.key == other.key)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, under whatever autograd mode is on."""
        wires = list(inputs)
        for call in self.calls:
            with nullcontext() if call.grad else torch.no_grad():
                made = call.function(*fill(call.args, wires), **fill(call.kwargs, wires))
            wires.extend(tensors_in(made))
        return [wires[n] for n in self.outputs]

    @property
    def makes(self) -> list[Spec]:
        """The specs of all outputs."""
        wires = [*self.inputs, *(spec for call in self.calls for spec in call.makes)]
        return [wires[n] for n in self.outputs]


class Localiser:
    """Makes local calls of a graph's ops. An op that was seen before on such layouts gets the very same function, and
    ranks that hold as much and do the same get the very same segment: there may be thousands of them."""

    def __init__(self, graph: Physical) -> None:
        self.graph = graph
        self._calls: dict[Any, tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], bool]] = {}
        self._known: dict[tuple[int, torch.device], tuple[Segment, Local]] = {}  # by identity, which the segment keeps

    def segment(self, segment: Segment, rank: int) -> Local:
        """A segment as a rank runs it."""
        key = id(segment), there(segment.placement, rank)
        known = self._known.get(key)
        if known is not None:
            return known[1]
        wires = {name: n for n, name in enumerate(segment.inputs)}
        calls, alike = [], self._is_even(segment)
        for op in segment.ops:
            makes = tuple(spec_of(y, rank) for y in op.outputs)
            function, args, kwargs, everywhere = self._call(op, rank)
            alike &= everywhere
            numbers = [Ref(wires[name]) for name in op.inputs]
            calls.append(LocalCall(function, fill(args, numbers), fill(kwargs, numbers), makes, op.grad))
            wires.update({y.name: len(wires) + i for i, y in enumerate(op.outputs)})
        made = Local(
            tuple(calls),
            tuple(spec_of(self.graph.values[name], rank) for name in segment.inputs),
            tuple(wires[name] for name in segment.outputs),
            tuple(segment.outputs.index(name) for name in segment.returns),
            tuple(segment.inputs.index(name) for name in segment.wants),
        )
        if alike:
            self._known[key] = segment, made
        return made

    def _is_even(self, segment: Segment) -> bool:
        """Whether every rank holds as much of all values of a segment."""
        made = (y.name for op in segment.ops for y in op.outputs)
        return all(self.graph.layout(name).even for name in (*segment.inputs, *made))

    def call(self, op: Op, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
        """The call of a rank for an op; `Ref`s number the op's inputs."""
        return self._call(op, rank)[:3]

    def _call(self, op: Op, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], bool]:
        """The same, and whether it is that of all ranks with pieces of these shapes."""
        number: dict[str, int] = {}
        for i, name in enumerate(op.inputs):
            number.setdefault(name, i)
        args, kwargs = renamed((op.args, op.kwargs), number)
        layouts = tuple(self.graph.layout(name) for name in op.inputs), tuple(y.layout for y in op.outputs)
        kind = op.op, frozen((args, kwargs)), *layouts, op.round
        known = self._calls.get((kind, rank))
        if known is None:
            way = _way(op, args, kwargs, *layouts)
            mine = _bound(op, args, kwargs, way, Piece(rank, *layouts))
            known = self._calls[kind, rank] = (*mine, not op.round and _is_of_shapes(way))
        return known


def _is_of_shapes(way: Way | None) -> bool:
    """Whether a rank's call follows from the shapes of its pieces."""
    return way is not None and (way.local is None or (isinstance(way.local, Rewritten) and way.local.shapes))


def spec_of(value: Value, rank: int) -> Spec:
    of = value.layout
    return Spec(of.local_shape(rank), of.dtype, there(of.placement, rank), value.order)


def there(placement: Placement, rank: int) -> torch.device:
    """The device of a rank's tensors; the CPU stands for cards that are not here, for which a step is only planned."""
    if not family(placement.type).here:
        return torch.device("cpu")
    return device(placement, rank)


def renamed(value: Any, number: Mapping[str, int]) -> Any:
    """An argument with `Ref`s in the place of `Var`s."""
    return mapped(value, Var, lambda var: Ref(number[var.name]))


def same(function: Any) -> Any:
    """A function as part of a key, alike on ranks that do the same.

    A function of ours knows a rank by its piece alone, so the piece stands in the place of the rank. A function of the
    user's may ask for anything, so all of it stands."""
    if isinstance(function, partial):
        ours = getattr(function.func, "__module__", "").startswith(OURS)
        args = tuple(_told(x) if ours and isinstance(x, Piece) else frozen(x) for x in function.args)
        return function.func, args, frozen(function.keywords)
    return function


OURS = __name__.partition(".")[0] + "."


def _told(piece: Piece) -> Any:
    return tuple(_held(of, piece.rank) for of in (*piece.inputs, *piece.outputs)), len(piece.inputs)


def _held(of: Layout, rank: int) -> tuple[Any, ...]:
    where = of.placement.coords(rank)
    partial_here = tuple(where[axis] == 0 for axis in of.state.partial)
    return of.shape, of.dtype, of.state, of.placement.shape, of.spans(rank), partial_here


def metas(layouts: Sequence[Layout]) -> tuple[Tensor, ...]:
    """Tensors of the logical shapes, without values, for rules to look at."""
    return tuple(torch.empty(of.shape, dtype=of.dtype, device="meta") for of in layouts)


def _way(op: Op, args: Any, kwargs: Any, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> Way | None:
    """The rule book's way, which is the same wherever such layouts lie; an op of no tensor has none."""
    if not inputs:
        return None
    lies = tuple((of.shape, of.dtype, of.state) for of in (*inputs, *outputs))
    key = op.op, frozen((args, kwargs)), lies, len(inputs), inputs[0].placement.shape, op.round and op.round.axes
    return _ways.get(key) or _ways.put(key, _looked_up(op, args, kwargs, inputs, outputs))


_ways = LastUsed[Way](4096)


def _looked_up(op: Op, args: Any, kwargs: Any, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> Way:
    given = metas(inputs)
    states = tuple(of.state for of in inputs)
    call = Call(op.op, fill(args, given), fill(kwargs, given), metas(outputs), states, inputs[0].placement.shape)
    made = tuple(of.state for of in outputs)
    return fixed_way(call, made, op.round.axes) if op.round else way_of(call, made)


def _bound(
    op: Op, args: Any, kwargs: Any, way: Way | None, piece: Piece
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    if op.round:
        args, kwargs = mapped((args, kwargs), Indices, lambda of: of.of(piece.spans(of.slot, of.dim)))
    if way is None:
        kwargs = placed(op.op, kwargs, there(piece.outputs[0].placement, piece.rank))
        if "filled" in traits(Call(op.op, args, kwargs, ()).name) and not any(of.state.partial for of in piece.outputs):
            function, mine = of_a_piece(op.op).rewrite(piece, *args, **kwargs)
            return function, tuple(mine), {}
        return partial(_factory, op.op, piece), args, kwargs
    args, kwargs = mapped((args, kwargs), torch.device, lambda named: _own(named, piece))
    if way.local is None:
        # A piece that was moved lies row by row, of which another view may be a copy.
        return torch.ops.aten.reshape.default if op.op in _VIEWS else _run_there(op.op, piece), args, kwargs
    if isinstance(way.local, Rewritten):
        function, mine = way.local.rewrite(piece, *args, **kwargs)
        return _run_there(function, piece), tuple(mine), {}
    return partial(way.local, piece), args, kwargs


def _run_there(function: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
    """The function as the device of a piece runs it, also where that is a card that is not here."""
    return function if family(piece.outputs[0].placement.type).here else as_on_card(function)


def _own(named: torch.device, piece: Piece) -> torch.device:
    """The device that a call names, such as `to`: of a card, that of the rank and not of the one that was captured."""
    own = there((*piece.outputs, *piece.inputs)[0].placement, piece.rank)
    return own if own.type == named.type else named


_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


def _factory(op: Any, piece: Piece, *args: Any, **kwargs: Any) -> Any:
    """A rank's part of what an op makes of nothing."""
    wholes = tensors_in(op(*args, **kwargs))
    return [part(whole, of, piece.rank) for whole, of in zip(wholes, piece.outputs, strict=True)]


def placed(op: torch._ops.OpOverload, kwargs: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
    """The arguments of an op that makes tensors, with this device."""
    takes = any(parameter.name == "device" for parameter in op._schema.arguments)
    return {**kwargs, "device": where} if takes else dict(kwargs)


def part(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """The part of a whole tensor that a rank holds; a view where that is one."""
    if any(layout.placement.coords(rank)[axis] for axis in layout.state.partial) and layout.state.reduction == "sum":
        return whole.new_zeros(layout.local_shape(rank))
    for dim, spans in enumerate(layout.spans(rank)):
        if spans != ((0, layout.shape[dim]),):
            pieces = [whole.narrow(dim, lo, hi - lo) for lo, hi in spans] or [whole.narrow(dim, 0, 0)]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return whole
