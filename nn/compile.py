"""Making a recipe: capture the call, ask the rule book, choose the cheapest way, and say how results lie."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..placement import Placement, default_cluster
from ..placement.world import owned
from ..sbp import Layout
from ..sbp.call import Call, Local, Piece, Way, tensors_in
from ..sbp.choose import candidates, choose, quick
from ..sbp.registry import find, has_rule
from ..sbp.state import State
from .capture import Captured, Node, Ref, asks_for_grad, capture, map_tensors
from .composites import composite
from .dispatch import dispatch, name_of, on_first
from .factories import whole_everywhere
from .moving import shards_as
from .recipe import Outputs, Recipe, Severed, Single, assembled, check_writable
from .special import handler
from .tensor import GlobalTensor
from .whole import Whole

# Taken apart on fakes it may become another kernel than tensors that require grad would get.
_WHOLE = {"scaled_dot_product_attention"}

__all__ = ["Program", "first", "makers", "options", "price", "single"]


# For functions that are not captured: their type -> what makes their recipe.
makers: dict[type, Callable[[Any, tuple[Any, ...], Sequence[GlobalTensor]], Recipe]] = {}


def first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[GlobalTensor]) -> Recipe:
    """The recipe of a call that was not seen before."""
    if kwargs.get("out") is not None:
        return _Into()
    maker = makers.get(type(func))
    if maker is not None:
        return maker(func, args, tensors)
    if asks_for_grad(func):
        return Whole(name_of(func))
    number = iter(range(len(tensors)))
    named = map_tensors((args, kwargs), lambda _: Ref(next(number)))
    try:
        seen = capture(func, named[0], named[1], [x._layout for x in tensors])
    except Exception:  # data decides the shape, torch has no fake of it, or the call is wrong: then running it tells
        return Whole(name_of(func), writes=name_of(func).endswith("_"))
    if len(seen.nodes) == 1 and _is_the_node(seen, len(tensors)):
        made = _of_node(func, seen.nodes[0], tensors)
        if isinstance(made, Single):
            made.result = _fill(seen.result, seen.fakes)
        elif isinstance(made, Whole):
            made.fakes = _fill(seen.result, seen.fakes)
        return made
    return Program(seen)


def _refs(value: Any) -> list[int]:
    if isinstance(value, Ref):
        return [value.number]
    if isinstance(value, list | tuple):
        return [number for part in value for number in _refs(part)]
    if isinstance(value, dict):
        return [number for part in value.values() for number in _refs(part)]
    return []


def _is_the_node(seen: Captured, count: int) -> bool:
    """Whether a captured function does just what its one node does, with the same tensors in the same order."""
    (node,) = seen.nodes
    return (
        node.grad
        and handler(node.op) is None
        and _refs([node.args, node.kwargs]) == list(range(count))
        and len(tensors_in(node.fake_args)) + len(tensors_in(list(node.fake_kwargs.values()))) == count
        and tuple(_refs(seen.result)) == node.numbers
    )


def _of_node(func: Any, node: Node, tensors: Sequence[GlobalTensor]) -> Recipe:
    where = tensors[0].placement
    states = tuple(x._layout.state for x in tensors)
    call = Call(node.op, node.fake_args, node.fake_kwargs, node.outputs, states, where.shape)
    formula = composite(call, node)
    if formula is not None:
        return formula
    ways = [] if _draws(node.op) or _reshapes(call, node, tensors) else options(call)
    if node.op._schema.is_mutable:
        ways = _in_place(call, node, ways)
    elif statistics := _statistics(call):
        ways = [way for way in ways if all(way.inputs[i] == call.states[i] for i in statistics)]
    if ways:
        way, _ = choose(ways, price(tensors, where))
        return single(func, node, call, way, tensors)
    if (
        node.op._can_decompose()
        and not node.op._schema.is_mutable
        and call.name not in _WHOLE
        and not _statistics(call)
    ):
        number = iter(range(len(tensors)))
        named = map_tensors((node.fake_args, node.fake_kwargs), lambda _: Ref(next(number)))
        try:
            seen = capture(node.op.decompose, named[0], named[1], [x._layout for x in tensors], grad=True)
        except Exception:
            return Whole(name_of(func))
        return Program(seen)
    return Whole(name_of(func), writes=node.op._schema.is_mutable or bool(_statistics(call)))


def _draws(op: torch._ops.OpOverload) -> bool:
    """Whether an op draws random numbers, and only the rule of all pointwise ops would cover it: ranks must agree."""
    return torch.Tag.nondeterministic_seeded in op.tags and not has_rule(op)


def _reshapes(call: Call, node: Node, tensors: Sequence[GlobalTensor]) -> bool:
    """Whether an op changes the shape of what it writes to, so that the fake no longer shows what went in."""
    return any(
        n < len(tensors) and tuple(y.shape) != tensors[n]._layout.shape
        for n, y in zip(node.numbers, call.outputs, strict=True)
    )


def options(call: Call) -> list[Way]:
    """The ways that the rule book gives; none where it has nothing to say."""
    answer = find(call)
    return [] if answer is None else candidates(call, answer)


def _statistics(call: Call) -> list[int]:
    """Inputs that normalisations write to although their schema does not say so."""
    if not (call.bound.get("training") or call.bound.get("use_input_stats")):
        return []
    held = [call.bound.get(name) for name in ("running_mean", "running_var")]
    return [i for i, x in enumerate(call.inputs) if any(x is one for one in held)]


def _in_place(call: Call, node: Node, ways: Sequence[Way]) -> list[Way]:
    """Those in which what is written to may stay where it is."""
    written = [i for i, x in enumerate(call.inputs) if i in node.numbers]
    if len(written) != len(node.numbers):
        return []
    return [
        way
        for way in ways
        if all(way.inputs[i] == call.states[i] for i in written)
        and all(way.outputs[k] == call.states[i] for k, i in enumerate(node.numbers))
    ]


def active_axes(way: Way) -> set[int]:
    """The axes on which ranks hold different things."""
    return {a for state in way.inputs + way.outputs for a in (*state.split, *state.partial)}


def price(tensors: Sequence[GlobalTensor], where: Placement) -> Callable[[int, State], float]:
    """Seconds of bringing an input into a state, and its gradient back; each pair is looked at once."""
    cluster = default_cluster(where)
    known: dict[tuple[int, State], float] = {}

    def link(axis: int) -> tuple[float, float]:
        return cluster.link(where, (axis,))

    def seconds(i: int, dst: State) -> float:
        found = known.get((i, dst))
        if found is None:
            of = tensors[i]._layout
            size = of.dtype.itemsize
            found = quick(of.shape, size, of.state, dst, where.shape, link)
            if tensors[i].requires_grad and torch.is_grad_enabled():
                # Backward counts a little less, so that of two equal ways the one that moves later comes first.
                back = _dual(dst, of, where)
                found += 0.99 * quick(of.shape, size, back, of.dual.state, where.shape, link)
            known[i, dst] = found
        return found

    return seconds


def _dual(dst: State, of: Layout, where: Placement) -> State:
    """The gradient's state after a move to `dst`, as far as one input tells: B stays as it was, P becomes B."""
    still = [a for a in of.dual.state.partial if a not in dst.split and a not in dst.partial]
    return State(dst.dims, tuple(still))


def single(func: Any, node: Node, call: Call, way: Way, tensors: Sequence[GlobalTensor]) -> Recipe:
    """The recipe of one call under one way."""
    where = tensors[0].placement
    active = active_axes(way)
    free = [a for a in range(where.ndim) if where.shape[a] > 1 and a not in active]
    floats = [x for x in tensors if x.dtype.is_floating_point or x.dtype.is_complex]
    flexible = {a for a in free if floats and all(a in x._layout.grad_partial for x in floats)}

    def grads(state: State, dtype: torch.dtype) -> tuple[int, ...]:
        if not (dtype.is_floating_point or dtype.is_complex):
            return ()
        kept = [a for a in range(where.ndim) if where.shape[a] > 1 and a not in state.split and a not in state.partial]
        return tuple(a for a in kept if a in active or a in flexible)

    targets = tuple(
        _same_or(x._layout, Layout(where, state, x._layout.shape, x.dtype, grads(state, x.dtype)))
        for x, state in zip(tensors, way.inputs, strict=True)
    )
    outs = tuple(
        Layout(where, state, tuple(y.shape), y.dtype, grads(state, y.dtype))
        for y, state in zip(node.outputs, way.outputs, strict=True)
    )
    # An output that is an input comes back as it, unless it had to be moved first.
    mutable = node.op._schema.is_mutable
    same = tuple(
        n if n < len(tensors) and (mutable or targets[n] is tensors[n]._layout) else None for n in node.numbers
    )
    stay = all(to is x._layout for to, x in zip(targets, tensors, strict=True))
    outputs = Outputs(outs, same, (False,) * len(outs))
    views = tuple(
        _base_of(y, call) if n >= len(tensors) else None for y, n in zip(node.outputs, node.numbers, strict=True)
    )
    name = name_of(func)
    if way.local is not None:
        return Shared(name, targets, outputs, views, way.local, node, outs)
    made = Single(name, None if stay else targets, outputs, views)
    made.whole = not active
    made.any_float = torch.Tag.pointwise in node.op.tags
    return made


def _base_of(y: Tensor, call: Call) -> int | None:
    """Which input an output is a view of."""
    mine = y.untyped_storage()._cdata
    return next((i for i, x in enumerate(call.inputs) if x.untyped_storage()._cdata == mine), None)


def _same_or(have: Layout, to: Layout) -> Layout:
    """The layout a tensor has where it differs only in how it is written."""
    return have if have.state == to.state and have.grad_partial == to.grad_partial else to


class Shared(Single):
    """One ATen call by a rule's local function, which is told what its rank holds."""

    def __init__(
        self,
        name: str,
        targets: tuple[Layout, ...],
        outputs: Outputs,
        views: tuple[int | None, ...],
        local: Local,
        node: Node,
        outs: tuple[Layout, ...],
    ) -> None:
        super().__init__(name, targets, outputs, views, local)
        ranks = owned(targets[0].placement) if targets else ()
        self.pieces = tuple(Piece(rank, targets, outs) for rank in ranks)
        self.node = node

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        assert self.targets is not None
        assert self.local is not None
        if self.elsewhere:
            return self.pass_on(tensors)
        for number in self.writes:
            check_writable(self.name, tensors[number])
        shards = [shards_as(x, to, self.name, implicit=True) for x, to in zip(tensors, self.targets, strict=True)]
        results = []
        for i, piece in enumerate(self.pieces):
            mine = [held[i] for held in shards]
            results.append(self.local(piece, *_fill(self.node.args, mine), **_fill(self.node.kwargs, mine)))
        return assembled(results, self.outputs, tensors)


def _fill(value: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(value, Ref):
        return tensors[value.number]
    if isinstance(value, tuple):
        return tuple(_fill(part, tensors) for part in value)
    if isinstance(value, list):
        return [_fill(part, tensors) for part in value]
    if isinstance(value, dict):
        return {name: _fill(part, tensors) for name, part in value.items()}
    return value


class Program(Recipe):
    """Several captured calls, each answered on its own."""

    def __init__(self, seen: Captured) -> None:
        self.nodes, self.result, self.count = seen.nodes, seen.result, len(seen.fakes)
        self.instead: Recipe | None = None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        if self.instead is not None:
            return self.instead.run(func, args, kwargs, tensors)
        try:
            return self._each(tensors)
        except Severed:  # it writes through a view that had to be moved: gathered, the view is one again
            if any(x._severed for x in tensors):
                raise
            self.instead = Whole(name_of(func), writes=True)
            return self.instead.run(func, args, kwargs, tensors)

    def _each(self, tensors: Sequence[GlobalTensor]) -> Any:
        values: list[Any] = [*tensors, *[None] * (self.count - len(tensors))]
        for node in self.nodes:
            with nullcontext() if node.grad else torch.no_grad():
                out = _answer(node.op, _fill(node.args, values), _fill(node.kwargs, values))
            for number, tensor in zip(node.numbers, tensors_in(out), strict=True):
                values[number] = tensor
        where = tensors[0].placement
        return map_tensors(
            _fill(self.result, values), lambda t: t if isinstance(t, GlobalTensor) else whole_everywhere(t, where)
        )


def _answer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found: list[Tensor] = []
    map_tensors((args, kwargs), found.append)
    if any(isinstance(t, GlobalTensor) for t in found):
        return dispatch(op, args, kwargs)
    return op(*args, **kwargs)


class _Into(Recipe):
    """`out=`: the call without it, and its results written there."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        kwargs = dict(kwargs)
        out = kwargs.pop("out")
        result = func(*args, **kwargs)
        for to, value in zip(tensors_in(out), tensors_in(result), strict=True):
            _write(to, value)
        return out


def _write(to: Tensor, value: Any) -> None:
    if to.requires_grad:
        raise RuntimeError("out=... arguments don't support automatic differentiation, but one of them requires grad.")
    assert isinstance(to, GlobalTensor)
    if not torch.can_cast(value.dtype, to.dtype):
        raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {to.dtype}")
    if to.shape == value.shape:
        with torch.no_grad():
            to.copy_(value)
    else:  # as torch does: the tensor takes the size of the result
        moved = value.to(to.dtype).detach()
        to._shards, to._layout, to._moved = moved._shards, moved._layout, None


on_first(first)
