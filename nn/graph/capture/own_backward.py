"""Functions with a backward of their own (torch.autograd.Function) as single ops of a graph.

Only a run of them shows their values, so a rank runs the very same Python. A dim may be split if forward and backward
call the same ops with the same arguments on the whole and on pieces of it, and each of these ops, by the rule book,
makes pieces of pieces. Where that cannot be seen every rank has the whole.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import Function

from ....boxing.record import user_line
from ....placement.errors import SbpError
from ....sbp.call import NEVER, Call, Match, Ref, Way, map_tensors, numbered, tensors_in
from ....sbp.choose import everywhere, way_by
from ....sbp.joint.options import answer_of
from ....sbp.logical import Logical
from ....sbp.state import State
from ...eager.capture import alone
from ...eager.functions import FunctionOp, applied
from .interceptor import Interceptor, functional
from .repeats.layer_reuse import like
from .tape import Tape

__all__ = ["OwnOp", "called"]

_log = logging.getLogger(__name__)


class OwnOp(FunctionOp):
    """A Function as an op. Its gradient need not be linear, so that gradients come to it added up."""

    def __init__(self, cls: type[Function], args: Sequence[Any], outputs: int) -> None:
        super().__init__(cls, args, outputs)
        self.cls = cls
        self._known: dict[Any, Match | None] = {}

    def __call__(self, *args: Any) -> Any:
        return applied(self.cls, *args)

    def __repr__(self) -> str:
        return self.cls.__name__

    def answer(self, call: Call) -> Match | None:
        """The dims of a call that may be split, where the rule book has no rule of this name."""
        named = numbered(list(call.args))
        key = str(named), tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in call.inputs)
        if key not in self._known:
            self._known[key] = _seen(self.cls, named, call.inputs)
        return self._known[key]


@cache
def _op(cls: type[Function], kinds: tuple[bool, ...], outputs: int) -> OwnOp:
    """One for all calls of a kind: equal layers have equal ops."""
    return OwnOp(cls, [torch.empty(0, device="cpu") if tensor else None for tensor in kinds], outputs)


def called(apply: Callable[..., Any], cls: Any, args: tuple[Any, ...], tape: Tape, watch: Interceptor) -> Any:
    """The result that a Function makes of fakes, with one op on the tape."""
    line = user_line()
    given = [watch.fake(x) if isinstance(x, Tensor) else x for x in args]
    before = [x._version for x in tensors_in(given)]
    with watch.paused():
        watch.drew = False
        try:
            made = apply(*given)
        except Exception:  # it needs values, whatever they are, for its shapes; or it is wrong, and fails once more
            with unset_fake_temporarily():
                zeros = [_zeros(x) if isinstance(x, Tensor) else x for x in given]
                with torch.no_grad():
                    shown = apply(*zeros)
            made = map_tensors(shown, lambda y: like(_fake(y, given)))
        drew = watch.drew
        if drew or [x._version for x in tensors_in(given)] != before:
            what, fix = "draws random numbers", "draw them before, and pass them to it"
            if not drew:
                what, fix = "writes to what it is given", "have it return a new tensor"
            raise SbpError(f"capture: {cls.__name__} has a backward of its own and {what}, at {line}\n  {fix}")
        old = {x.untyped_storage()._cdata for x in tensors_in(given)}
        made = map_tensors(made, lambda y: like(y) if y.untyped_storage()._cdata in old else y)
    outputs = tensors_in(made)
    tape.record(_op(cls, tuple(isinstance(x, Tensor) for x in args), len(outputs)), tuple(given), {}, made)  # type: ignore[arg-type]
    return made


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)


def _fake(y: Tensor, given: Sequence[Any]) -> Tensor:
    device = next(x.device for x in given if isinstance(x, Tensor))
    made = torch.empty(tuple(y.shape), dtype=y.dtype, device=device)
    return made.requires_grad_(y.is_floating_point() or y.is_complex())


# Dims that may be split


class _Context:
    """The context that forward and backward are given: it keeps what the one leaves to the other."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad, self.saved_tensors = tuple(needs), ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, on: bool) -> None:
        pass


def _both(cls: Any, needs: Sequence[bool]) -> Callable[..., Any]:
    """Forward and backward as one function of arguments; the gradients that come are ones like the outputs."""

    def run(*args: Any) -> Any:
        context = _Context(needs)
        with torch.no_grad():
            if cls.setup_context is Function.setup_context:
                made = cls.forward(context, *args)
            else:
                made = cls.forward(*args)
                cls.setup_context(context, args, made)
            outputs = tensors_in(made)
            # Tensors of their own, so that they lie as the outputs do and are no numbers that somebody may fold.
            given = [y.clone() for y in outputs]
            back = cls.backward(context, *given)
        back = back if isinstance(back, tuple) else (back,)
        return list(outputs), given, [g if x else None for g, x in zip(back, needs, strict=False)]

    return run


def _seen(cls: Any, named: Any, inputs: Sequence[Tensor]) -> Match | None:
    """The factors of a call, each tried by itself; None if there are none."""
    needs = [isinstance(a, Ref) and inputs[a.number].is_floating_point() for a in named]
    try:
        whole = _captured(cls, named, needs, [tuple(x.shape) for x in inputs], inputs)
        found = list(_factors(cls, named, needs, inputs, whole))
    except Exception:  # it cannot be looked into
        _log.info("%s runs whole: its forward and backward cannot be looked into", cls.__name__, exc_info=True)
        return None
    if not found:
        return None
    outputs: Sequence[Tensor] = [whole.fakes[ref.number] for ref in whole.result[0]]
    ins, outs = [[NEVER] * x.ndim for x in inputs], [[NEVER] * y.ndim for y in outputs]
    sizes: list[int] = []
    for taken, made in found:
        if all(ins[i][d] == NEVER for i, d in taken.items()) and all(outs[o][d] == NEVER for o, d in made.items()):
            for i, d in taken.items():
                ins[i][d] = len(sizes)
            for o, d in made.items():
                outs[o][d] = len(sizes)
            (i, d), *_ = taken.items()
            sizes.append(inputs[i].shape[d])
    return Match(tuple(map(tuple, ins)), tuple(map(tuple, outs)), tuple(sizes))


def _captured(
    cls: Any, named: Any, needs: Sequence[bool], shapes: Sequence[tuple[int, ...]], like: Sequence[Tensor]
) -> Logical:
    layouts = [alone(shape, x.dtype) for shape, x in zip(shapes, like, strict=True)]
    return functional(_both(cls, needs), named, {}, layouts)


def _factors(
    cls: Any, named: Any, needs: Sequence[bool], inputs: Sequence[Tensor], whole: Logical
) -> Iterator[tuple[Mapping[int, int], Mapping[int, int]]]:
    """The dims of inputs that may be split together, and those of outputs that then are."""
    for first in range(len(inputs)):
        for dim, size in enumerate(inputs[first].shape):
            alike = {i: dim for i, x in enumerate(inputs) if x.ndim > dim and x.shape[dim] == size and i >= first}
            for taken in (alike, {first: dim}):
                made = _split(whole, named, taken) if size > 1 else None
                if made is None:
                    continue
                pieces = [_pieces(cls, named, needs, inputs, taken, n) for n in (1, -(-size // 2))]
                if all(_written(piece) == _written(whole) for piece in pieces):
                    yield taken, made
                    break


def _pieces(
    cls: Any, named: Any, needs: Sequence[bool], inputs: Sequence[Tensor], taken: Mapping[int, int], size: int
) -> Logical:
    shapes = [tuple(size if taken.get(i) == d else n for d, n in enumerate(x.shape)) for i, x in enumerate(inputs)]
    return _captured(cls, named, needs, shapes, inputs)


def _written(seen: Logical) -> list[Any]:
    """All that was called, without shapes."""
    return [(op.op, str(op.args), str(op.kwargs), op.numbers) for op in seen.ops]


def _split(seen: Logical, named: Any, taken: Mapping[int, int]) -> dict[int, int] | None:
    """The split dims of outputs where these of inputs are on two ranks. None if anything would have to move, or
    gradients would not lie as those of ops do."""
    states = {i: _on(taken.get(i), s.fake.ndim) for i, s in enumerate(seen.sources)}
    for op in seen.ops:
        made = _through(seen.call(op, tuple(states[n] for n in op.inputs), (2,)))
        if made is None or op.op._schema.is_mutable:
            return None
        states.update(zip(op.numbers, made, strict=True))
    outputs, given, back = seen.result
    places: dict[int, int] = {}
    for at, y in enumerate(outputs):
        dims = [d for d, factors in enumerate(states[y.number].dims) if factors]
        if len(dims) != 1 or states[y.number].partial or states[given[at].number] != states[y.number]:
            return None
        places[at] = dims[0]
    for ref, arg in zip(back, named, strict=False):
        if isinstance(ref, Ref):
            mine, back_there = states[arg.number], states[ref.number]
            if back_there != mine if mine.split else back_there.partial != (0,):
                return None
    return places


def _on(dim: int | None, ndim: int) -> State:
    return State(tuple((0,) if d == dim else () for d in range(ndim)))


def _through(call: Call) -> tuple[State, ...] | None:
    """The states of an op's results if its inputs stay as they lie; None if no rule allows that."""
    if not any(state.split or state.partial for state in call.states):
        return everywhere(call).outputs
    answer = answer_of(call)
    ways: list[Way | None] = []
    if isinstance(answer, Match):
        doings = [("split", f) for f in range(len(answer.sizes))] + [("linear", g) for g in range(len(answer.linear))]
        ways += answer.also
        ways += [way_by(call, answer, [doing], lambda factor, axes: tuple(axes)) for doing in doings]
    else:
        ways += answer or ()
    return next((way.outputs for way in ways if way is not None and way.inputs == call.states), None)
