"""Making a recipe: capture the call, ask the rule book, choose the cheapest way, and say how results lie."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ...placement.world import owned
from ...sbp import Layout
from ...sbp.call import (
    Call,
    LocalFunction,
    Piece,
    Ref,
    Rewritten,
    Way,
    fill,
    map_tensors,
    numbered,
    refilled,
    refs_in,
    tensors_in,
)
from ...sbp.logical import Logical, LogicalOp
from ...sbp.precision import adds_up
from ..tensors.factories import whole_everywhere
from ..tensors.meeting import name_of
from ..tensors.memory_formats import shares_memory
from ..tensors.moves import shards_as
from ..tensors.tensor import GlobalTensor
from .capture import asks_for_grad, capture
from .choice import Verdict, cast_first, lies, statistics, verdict
from .gathered import Whole
from .handlers import handler
from .recipe import Outputs, Recipe, Single, assembled, wants_grad

__all__ = ["CallSequence", "first", "is_one_op", "single"]


def first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[GlobalTensor]) -> Recipe:
    """The recipe of a call that was not seen before."""
    if kwargs.get("out") is not None:
        return _Into()
    if kwargs.get("requires_grad"):
        return _AsLeaf()
    own = getattr(func, "recipe", None)
    if own is not None:  # not captured: it says by itself how it is answered, as functions.Applied does
        made: Recipe = own(args, tensors)
        return made
    if asks_for_grad(func):
        return Whole(name_of(func))
    if func is torch.Tensor.view and not tensors[0]._layout.in_rows:  # fakes view what torch refuses to
        of = tensors[0]._layout
        torch.empty_strided(of.shape, of.strides, dtype=of.dtype, device="meta").view(*args[1:], **kwargs)
    named = numbered((args, kwargs))
    try:
        seen = capture(func, named[0], named[1], [x._layout for x in tensors])
    except Exception:  # data decides the shape, torch has no fake of it, or the call is wrong: then running it tells
        return Whole(name_of(func), writes=name_of(func).endswith("_") and name_of(func) != "__getitem__")
    if is_one_op(seen):
        made = _of_op(func, seen, tensors)
        if isinstance(made, Single):
            made.result = fill(seen.result, seen.fakes)
        elif isinstance(made, Whole):
            made.fakes = fill(seen.result, seen.fakes)
            made.copies = _copies(seen)
        elif isinstance(made, CallSequence) and type(seen.result) is tuple:  # its op, taken apart, returns a list
            made.result = tuple(made.result)
        return made
    if len(seen.ops) == 1 and len(tensors) == 2:
        return _swapped(func, seen, tensors) or CallSequence(seen)
    return CallSequence(seen)


def _swapped(func: Any, seen: Logical, tensors: Sequence[GlobalTensor]) -> Single | None:
    """The recipe of a function that hands its two tensors on the other way round, as `F.embedding` does."""
    turned = replace(seen.map({0: 1, 1: 0}), sources=seen.sources[::-1])
    (op,) = turned.ops
    if op.op._schema.is_mutable or not is_one_op(turned) or min(op.numbers) < 2:
        return None
    made = _of_op(func, turned, tensors[::-1])
    if not isinstance(made, Single) or made.slots is None:
        return None
    made.result = fill(seen.result, seen.fakes)
    made.slots = made.slots[::-1]
    made.targets = made.targets and made.targets[::-1]
    made.views = tuple(base if base is None else 1 - base for base in made.views)
    return made


def is_one_op(seen: Logical) -> bool:
    """Whether a captured function does just what one op does, with the same tensors in the same order."""
    if len(seen.ops) != 1:
        return False
    (op,) = seen.ops
    return (
        op.grad
        and handler(op.op) is None
        and refs_in((op.args, op.kwargs)) == list(range(len(seen.sources)))
        and not tensors_in((op.args, op.kwargs))
        and tuple(refs_in(seen.result)) == op.numbers
    )


def _of_op(func: Any, seen: Logical, tensors: Sequence[GlobalTensor]) -> Recipe:
    found = verdict(seen, tensors)
    call = found.call
    if (found.formula is not None or found.apart is not None) and _is_widened(call):
        return _Cast(_widened)
    if found.formula is not None:
        return found.formula
    if found.way is not None:
        return _unless_rounded(single(func, found, tensors), call, tensors)
    if found.apart is not None:
        return CallSequence(found.apart)
    writes = call.op._schema.is_mutable or bool(statistics(call))
    return Whole(name_of(func), writes=writes, adds_up=adds_up(call.op, call.inputs, call.outputs))


def single(func: Any, found: Verdict, tensors: Sequence[GlobalTensor]) -> Recipe:
    """The recipe of one call under the chosen way."""
    op, call, way = found.op, found.call, found.way
    assert way is not None
    targets, outs = lies(way, found, tensors)
    # An output that is an input comes back as it, unless it had to be moved first.
    mutable = call.op._schema.is_mutable
    same = tuple(n if n < len(tensors) and (mutable or targets[n] is tensors[n]._layout) else None for n in op.numbers)
    stay = all(to is x._layout for to, x in zip(targets, tensors, strict=True))
    views = tuple(_base_of(y, call) if n >= len(tensors) else None for y, n in zip(op.outputs, op.numbers, strict=True))
    alone = tuple(
        s is None and b is None and _may_view(y, call) for y, s, b in zip(op.outputs, same, views, strict=True)
    )
    outputs = Outputs(outs, same, (False,) * len(outs), alone, (False,) * len(outs))
    name = name_of(func)
    pieces = [Piece(rank, targets, outs) for rank in owned(tensors[0].placement)]
    calls = _calls(func, op, way, pieces)
    writes = tuple(n for n in same if n is not None) if mutable else ()  # one that comes back may be as it was
    if way.local is not None and calls is None:
        shared = RuleCall(name, targets, outputs, views, way.local, op, pieces)
        shared.writes = writes
        return shared
    made = Single(name, None if stay else targets, outputs, views)
    made.writes, made.bookish = writes, call.op.namespace == "aten"
    if calls is not None:
        made.calls, made.slots = calls
    made.any_float = torch.Tag.pointwise in call.op.tags
    return made


def _calls(
    func: Any, op: LogicalOp, way: Way, pieces: Sequence[Piece]
) -> tuple[list[tuple[Callable[..., Any], list[Any]]], tuple[int, ...]] | None:
    """The function that each rank calls instead, where it is known for good: a rule's local function, or torch's own.

    Functions written in Python only prepare one ATen call; ranks make that call at once.
    """
    if isinstance(way.local, Rewritten):
        made = [way.local.rewrite(piece, *op.args, **op.kwargs) for piece in pieces]
    elif way.local is None and isinstance(func, FunctionType) and not op.kwargs:
        bound = builtin(op.op)
        if bound is None or torch.Tag.pointwise in op.op.tags:
            return None
        made = [(bound, op.args)] * len(pieces)
    else:
        return None
    if not made:
        return None
    args = made[0][1]
    places = {a.number: at for at, a in enumerate(args) if isinstance(a, Ref)}
    if len(refs_in(list(args))) != len(places) or len(places) != len(refs_in((op.args, op.kwargs))):
        return None
    return [(function, list(mine)) for function, mine in made], tuple(places[k] for k in sorted(places))


def builtin(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """torch's own binding of an op, which is called at half the price of the op itself.

    Those of losses do not know the op's own reduction where none is said.
    """
    if any(argument.name == "reduction" for argument in op._schema.arguments):
        return None
    name = op._schema.name.removeprefix("aten::")
    for space in (torch._C._VariableFunctions, torch._C._nn):
        if hasattr(space, name):
            return getattr(space, name)  # type: ignore[no-any-return]
    return None


def _base_of(y: Tensor, call: Call) -> int | None:
    """The input that an output is a view of. What an unsafe_ op gives shares memory too, and yet stands for itself."""
    if "unsafe_" in call.name:
        return None
    return next((i for i, x in enumerate(call.inputs) if shares_memory(x, y)), None)


def _copies(seen: Logical) -> tuple[bool, ...]:
    """For each result of one op, whether it is neither a view nor an input."""
    (op,) = seen.ops
    given = [seen.fakes[n] for n in range(len(seen.sources))]
    if "unsafe_" in op.op._schema.name:
        return ()
    return tuple(not any(shares_memory(y, x) for x in given) for y in op.outputs)


def _may_view(y: Tensor, call: Call) -> bool:
    """Whether an op that makes a copy would make a view of an input that lies otherwise, as `reshape` does."""
    if "unsafe_" in call.name or not any(of.alias_info is not None for of in call.op._schema.returns):
        return False
    return any(x.dtype is y.dtype for x in call.inputs)


class RuleCall(Single):
    """One ATen call by a rule's local function, which is told what its rank holds."""

    def __init__(
        self,
        name: str,
        targets: tuple[Layout, ...],
        outputs: Outputs,
        views: tuple[int | None, ...],
        local: LocalFunction,
        op: LogicalOp,
        pieces: Sequence[Piece],
    ) -> None:
        super().__init__(name, targets, outputs, views, local)
        self.pieces = pieces
        self.op = op

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        assert self.targets is not None
        assert self.local is not None
        if self.elsewhere:
            return self.pass_on(tensors)
        shards = [shards_as(x, to, self.name, implicit=True) for x, to in zip(tensors, self.targets, strict=True)]
        results = []
        for i, piece in enumerate(self.pieces):
            mine = [held[i] for held in shards]
            result = self.local(piece, *fill(self.op.args, mine), **fill(self.op.kwargs, mine))
            results.append(self._mended(result, mine) if self.mends else result)
        return self.finished(assembled(results, self.outputs, tensors), func, args, kwargs, tensors)


class CallSequence(Recipe):
    """Several captured calls, each answered on its own."""

    def __init__(self, seen: Logical) -> None:
        self.ops, self.result, self.count = seen.ops, seen.result, len(seen.fakes)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        return self._each(tensors)

    def _each(self, tensors: Sequence[GlobalTensor]) -> Any:
        values: list[Any] = [*tensors, *[None] * (self.count - len(tensors))]
        for op in self.ops:
            with nullcontext() if op.grad else torch.no_grad():
                out = _answer(op.op, fill(op.args, values), fill(op.kwargs, values))
            for number, tensor in zip(op.numbers, tensors_in(out), strict=True):
                values[number] = tensor
        where = tensors[0].placement

        def put(t: Tensor) -> Tensor:  # a plain one is a constant, which the next call must find as it was
            return t if isinstance(t, GlobalTensor) else whole_everywhere(t, where).clone()

        return map_tensors(fill(self.result, values), put)


def _answer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(t, GlobalTensor) for t in tensors_in((args, kwargs))):
        return GlobalTensor.__torch_function__(op, (), args, kwargs)  # type: ignore[no-untyped-call]
    return op(*args, **kwargs)


def _is_widened(call: Call) -> bool:
    """Whether autocast runs an op of half precision in single: of the parts that it is taken into it would not know."""
    if not torch._C._is_any_autocast_enabled():
        return False
    narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in _floats(call.inputs))
    return narrow and any(t.dtype is torch.float32 for t in _floats(call.outputs))


def _floats(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t.dtype.is_floating_point]


class _Cast(Recipe):
    """The call with some of its tensors cast before."""

    def __init__(self, cast: Callable[[int, Tensor], Tensor], *, by_grad: bool = False) -> None:
        self.cast, self.by_grad = cast, by_grad

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        args, kwargs = refilled((args, kwargs), [self.cast(i, x) for i, x in enumerate(tensors)])
        return func(*args, **kwargs)


def _widened(at: int, t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _unless_rounded(made: Recipe, call: Call, tensors: Sequence[GlobalTensor]) -> Recipe:
    """The recipe, or one that casts some inputs before."""
    assert isinstance(made, Single)
    narrow = cast_first(call, made.targets or [x._layout for x in tensors])
    if any(wants_grad([tensors[i] for i in narrow])):
        dtype = call.outputs[0].dtype
        return _Cast(lambda i, x: x.to(dtype) if i in narrow else x, by_grad=True)
    made.by_grad = bool(narrow)
    return made


class _Into(Recipe):
    """`out=`: the call without it, and its results written there."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        kwargs = dict(kwargs)
        out = kwargs.pop("out")
        result = func(*args, **kwargs)
        for to, value in zip(tensors_in(out), tensors_in(result), strict=True):
            _write(to, value)
        return out


class _AsLeaf(Recipe):
    """`requires_grad=`: the call without it, and its result made a leaf, which is more than shards that are leaves."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        result = func(*args, **{name: value for name, value in kwargs.items() if name != "requires_grad"})
        fresh = result.detach() if any(result is x for x in tensors) else result
        return fresh.requires_grad_()


def _write(to: Tensor, value: Any) -> None:
    if to.requires_grad and torch.is_grad_enabled():
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
