"""`flow.explain`: for each call that a function makes, the signatures it could have, their prices, and the choice.

The function runs on ghosts, which have a layout and no shards, so nothing is computed and nothing is sent. What is said
of a call comes from the same `verdict` that running it would go by.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import isinf
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ...placement import Placement
from ...placement.device import FAMILIES
from ...placement.errors import SbpError
from ...sbp import B, Layout
from ...sbp.call import Way, fill, map_tensors, numbered, tensors_in
from ...sbp.logical import Logical
from ...sbp.precision import adds_up
from ...sbp.recurrent import KINDS
from ..eager.abstract import Ghost, Unknown, ghost
from ..eager.capture import asks_for_grad, capture, sources_of
from ..eager.choice import Verdict, cast_first, lies, prices, verdict
from ..eager.formulas import Handler
from ..eager.functions import Applied, captured
from ..eager.gathered import gathered
from ..eager.handlers import handler
from ..eager.prepare import is_one_op
from ..eager.recipe import wants_grad
from ..tensors.handle import has_grad
from ..tensors.meeting import adopt, meeting, name_of
from ..tensors.moves import whole
from ..tensors.tensor import GlobalTensor
from .explanation import Answered, CallChoice, CallReport, ExplainedCall, input_names, suggested

__all__ = ["explain"]


def explain(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallReport:
    """The calls that `func(*args, **kwargs)` would make on global tensors; prints itself. Nothing is computed or sent.

    `func` is a torch function, a module, or any function of tensors. What it does with plain tensors, it does.

    >>> import sbpflow as flow
    >>> p = flow.placement("cpu:[0-1]")
    >>> x, w = flow.ones(4, 8, placement=p, sbp="S(1)"), flow.ones(8, 2, placement=p, sbp="S(0)")
    >>> [(str(choice), choice.bytes) for choice in explain(torch.matmul, x, w).steps[0].choices]
    [('S(1), S(0) -> P', 0), ('B, B -> B', 96)]
    """
    found = tensors_in((args, kwargs))
    if isinstance(func, nn.Module):
        found += [*func.parameters(), *func.buffers()]
    if not any(isinstance(t, GlobalTensor) for t in found):
        raise SbpError(
            "explain looks at global tensors, and found none\n  make one: flow.tensor(x, placement=p, sbp=S(0))"
        )
    told = Teller()
    args, kwargs = map_tensors((args, kwargs), told.known)
    ends = ""
    with torch.random.fork_rng(devices=()):  # whatever random numbers are drawn, the next are the same
        try:
            with told:
                if isinstance(func, nn.Module):
                    named = [*func.named_parameters(), *func.named_buffers()]
                    functional_call(func, {name: told.known(t) for name, t in named}, args, kwargs)
                else:
                    func(*args, **kwargs)
        except Unknown as reason:
            ends = str(reason)
    return CallReport(tuple(told.steps), ends)


class Teller(TorchFunctionMode):
    """Sees every torch function of ghosts, answers it by other ghosts, and keeps what is to be said of it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[ExplainedCall] = []
        self.level = 0
        self._ghosts: dict[int, tuple[Tensor, Ghost]] = {}

    def known(self, t: Tensor) -> Tensor:
        """The ghost of a global tensor, always the same one; plain tensors stay what they are."""
        if not isinstance(t, GlobalTensor) or isinstance(t, Ghost):
            return t
        if id(t) not in self._ghosts:
            self._ghosts[id(t)] = t, ghost(t._layout, t.requires_grad, self.moved)
        return self._ghosts[id(t)][1]

    def moved(self, x: Ghost, there: Layout) -> None:
        """An explicit move."""
        choice = CallChoice.of((x,), (there,), (there,))
        self._say("to_global", "moved", (x,), choices=(choice,), chosen=choice, names=("x",))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        args, kwargs = map_tensors((args, kwargs), self.known)
        found = [t for t in tensors_in((args, kwargs)) if isinstance(t, Ghost)]
        if not found:
            return func(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if handler(func) is not None and name_of(func) not in KINDS:
            return self._own(func, args, kwargs)
        where = meeting(func, found)
        args, kwargs = map_tensors((args, kwargs), lambda t: self._meet(t, where))
        homes: list[Any] = tensors_in((args, kwargs))
        return self._call(func, args, kwargs, homes)

    def _meet(self, t: Tensor, where: Placement) -> Ghost:
        """A tensor as one of this placement: a plain one counts as B, a single number comes over."""
        if isinstance(t, Ghost):
            return t if t.placement is where else t.to_global(placement=where, sbp=B)
        if t.requires_grad and torch.is_grad_enabled() and not isinstance(t, FakeTensor):
            adopt("explain", t, where)  # which says why not
        return ghost(whole(t, where), False, self.moved)

    def _own(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Functions that are answered without capture."""
        name, x = name_of(func), args[0]
        if name == "to" or name in FAMILIES:
            answer: Any = handler(func)
            with self:
                return answer.function(*args, **kwargs)
        if name.endswith("_like"):
            dtype = kwargs.get("dtype") or x.dtype
            made: Any = Ghost.drawn(x)
            made._layout = made._layout.with_dtype(dtype)
        elif name.endswith("_") and isinstance(x, Ghost):
            made = x
        else:
            raise Unknown(f"{name} is not explained: only what goes forward is")
        self._say(name, "drawn", (x,), why="drawn for the whole, each rank keeps its part", names=("self",))
        return made

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Ghost]) -> Any:
        if isinstance(func, Applied):
            try:
                seen = captured(func, args, tensors)
            except Exception as error:
                return self._gathered(func, tensors, f"no rule, and its forward cannot run on fakes: {_line(error)}")
            return self._op(func, seen, tensors)
        if asks_for_grad(func):
            return self._gathered(func, tensors, "it looks at requires_grad itself")
        named = numbered((args, kwargs))
        try:
            seen = capture(func, named[0], named[1], [x._layout for x in tensors])
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._gathered(func, tensors, "its shape depends on data")
        except Exception as error:
            return self._gathered(func, tensors, f"torch has no fake of it: {_line(error)}")
        if is_one_op(seen):
            return self._op(func, seen, tensors)
        if len(seen.ops) == 1 and seen.ops[0].op is func:
            return self._gathered(func, tensors, "no rule", seen)
        return self._parts(func, seen, tensors, "")

    def _op(self, func: Any, seen: Logical, tensors: Sequence[Ghost]) -> Any:
        """A function that is one op."""
        found = verdict(seen, tensors)
        if found.apart is not None:
            return self._parts(func, found.apart, tensors, found.why)
        if found.way is None and found.formula is None:
            return self._gathered(func, tensors, found.why, seen, found)
        if found.formula is not None:
            assert isinstance(found.formula, Handler)
            self._say(found.call.name, "formula", tensors, found, why=_about(found.formula))
            with self._inside(), self:
                return found.formula.run(func, (), {}, list(tensors))
        choices: dict[tuple[Any, ...], CallChoice] = {}
        for way, seconds in zip(found.ways, found.costs, strict=True):
            if not isinf(seconds):
                choices.setdefault(
                    (way.inputs, way.outputs), CallChoice.of(tensors, *lies(way, found, tensors), seconds)
                )
        assert found.way is not None
        chosen = choices[found.way.inputs, found.way.outputs]
        narrow = cast_first(found.call, chosen.inputs)
        if any(wants_grad([tensors[i] for i in narrow])):
            return self._cast(func, seen, tensors, narrow)
        self._say(found.call.name, "rule", tensors, found, tuple(choices.values()), chosen)
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        mutable = found.call.op._schema.is_mutable
        values: list[Any] = [*tensors, *[None] * (len(seen.fakes) - len(tensors))]
        for n, of in zip(found.op.numbers, chosen.outputs, strict=True):
            if n < len(tensors) and (mutable or chosen.inputs[n] is tensors[n]._layout):
                values[n]._layout = of
                values[n]._needs = values[n]._needs or learns
            else:
                values[n] = ghost(of, learns and has_grad(of), self.moved)
        return fill(seen.result, values)

    def _cast(self, func: Any, seen: Logical, tensors: Sequence[Ghost], narrow: tuple[int, ...]) -> Any:
        """A call some of whose inputs are cast before, so that their gradients are added up before they are rounded."""
        dtype = seen.ops[0].outputs[0].dtype
        self._say(name_of(func), "parts", tensors, why=f"a gradient is added up in {dtype} before it is rounded")
        with self._inside(), self:
            homes: list[Any] = [x.to(dtype) if i in narrow else x for i, x in enumerate(tensors)]
            wide = sources_of([s.fake.to(dtype) if i in narrow else s.fake for i, s in enumerate(seen.sources)])
            return self._op(func, replace(seen, sources=wide), homes)

    def _parts(self, func: Any, seen: Logical, tensors: Sequence[Ghost], why: str) -> Any:
        """Several calls, each answered on its own."""
        apart = bool(why) or len(seen.ops) > 1
        if apart:
            self._say(name_of(func), "parts", tensors, why=why)
        values: list[Any] = [*tensors, *[None] * (len(seen.fakes) - len(tensors))]
        with self._inside() if apart else nullcontext():
            for op in seen.ops:
                args, kwargs = fill(op.args, values), fill(op.kwargs, values)
                out: Any = op.outputs
                if any(isinstance(t, Ghost) for t in tensors_in((args, kwargs))):
                    with nullcontext() if op.grad else torch.no_grad():
                        out = self.__torch_function__(op.op, (), args, kwargs)
                for n, made in zip(op.numbers, tensors_in(out), strict=True):
                    values[n] = made
        where = tensors[0].placement
        return map_tensors(fill(seen.result, values), lambda t: self._meet(t, where))

    def _gathered(
        self, func: Any, tensors: Sequence[Ghost], why: str, seen: Logical | None = None, found: Verdict | None = None
    ) -> Any:
        """Every rank runs it on whole tensors."""
        where = tensors[0].placement
        linear = found is not None and adds_up(found.call.op, found.call.inputs, found.call.outputs)
        targets, partial = gathered([x._layout for x in tensors], linear)
        fakes = [y for n, y in seen.fakes.items() if n >= len(tensors)] if seen is not None else []
        outs = [whole(y, where, partial) for y in fakes]
        states = tuple(to.state for to in targets)
        seconds = prices(tensors, where, [Way(states, ())])
        choice = CallChoice.of(tensors, targets, outs, sum(sum(seconds(i, state)) for i, state in enumerate(states)))
        rule = suggested(found.call) if found is not None and found.why == "no rule" else ""
        self._say(found.call.name if found else name_of(func), "gathered", tensors, found, (choice,), choice, why, rule)
        if seen is None:
            raise Unknown(f"what follows depends on what {name_of(func)} gives")
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        made = [ghost(of, learns and has_grad(of), self.moved) for of in outs]
        return fill(seen.result, [*tensors, *made])

    def _say(
        self,
        op: str,
        how: Answered,
        tensors: Sequence[Ghost],
        found: Verdict | None = None,
        choices: Sequence[CallChoice] = (),
        chosen: CallChoice | None = None,
        why: str = "",
        rule: str = "",
        names: tuple[str, ...] = (),
    ) -> None:
        names = input_names(found.call) if found is not None else names
        names = names if len(names) == len(tensors) else tuple(f"input {i}" for i in range(len(tensors)))
        step = ExplainedCall(
            op, how, tuple(x._layout for x in tensors), names, tuple(choices), chosen, why, rule, self.level
        )
        self.steps.append(step)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.level += 1
        try:
            yield
        finally:
            self.level -= 1


def _line(error: Exception) -> str:
    """The first line of an error."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _about(formula: Handler) -> str:
    return f"the formula {formula.function.__name__} in torch's own functions"
