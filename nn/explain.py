"""`flow.explain`: for each call that a function makes, the signatures it could have, their prices, and the choice.

The function runs on ghosts, which have a layout and no shards, so nothing is computed and nothing is sent. What is said
of a call comes from the same `verdict` that running it would go by.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import isinf
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ..boxing import plan
from ..placement.errors import SbpError
from ..sbp import Layout
from ..sbp.call import tensors_in
from .capture import Captured, Node, Ref, asks_for_grad, capture, filler, map_tensors
from .compile import is_the_node
from .composites import Handler
from .dispatch import meeting, name_of
from .explanation import Choice, Explanation, Step, ruling
from .functions import Applied, node_of
from .ghost import Ghost, Unknown, ghost
from .moving import flat
from .special import handler
from .tensor import GlobalTensor
from .verdict import Verdict, lies, price, verdict

__all__ = ["explain"]


def explain(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """What `func(*args, **kwargs)` would do on these global tensors; it prints itself. Nothing is computed or sent.

    `func` is a torch function, a module, or any function of tensors. What it does with plain tensors, it does.

    >>> from . import ones
    >>> from ..placement import placement
    >>> p = placement("cpu:[0-1]")
    >>> x, w = ones(4, 8, placement=p, sbp="S(1)"), ones(8, 2, placement=p, sbp="S(0)")
    >>> [(str(choice), choice.bytes) for choice in explain(torch.matmul, x, w).steps[0].choices]
    [('S(1), S(0) -> P', 0), ('B, B -> B', 96)]
    """
    found: list[Tensor] = []
    map_tensors((args, kwargs), found.append)
    if isinstance(func, nn.Module):
        found += [*func.parameters(), *func.buffers()]
    if not any(isinstance(t, GlobalTensor) for t in found):
        raise SbpError("explain looks at global tensors, and found none\n  make one: flow.tensor(x, placement=p, sbp=S(0))")
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
    return Explanation(tuple(told.steps), ends)


class Teller(TorchFunctionMode):
    """Sees every torch function of ghosts, answers it by other ghosts, and keeps what is to be said of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
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
        choice = Choice.of((x,), (there,), (there,), None)
        self.steps.append(Step("to_global", "moved", (x._layout,), ("x",), (choice,), choice, "", "", self.level))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        args, kwargs = map_tensors((args, kwargs), self.known)
        tensors: list[Any] = []
        map_tensors((args, kwargs), tensors.append)
        homes = [t for t in tensors if isinstance(t, Ghost)]
        if not homes:
            return func(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if handler(func) is not None:
            return self._own(func, args, kwargs)
        where = meeting(func, homes)

        def meet(t: Tensor) -> Tensor:
            if isinstance(t, Ghost):
                return t if t.placement is where else t.to_global(placement=where)
            return ghost(flat(Layout(where, (), tuple(t.shape), t.dtype)), False, self.moved)  # it counts as B

        args, kwargs = map_tensors((args, kwargs), meet)
        homes = []
        map_tensors((args, kwargs), homes.append)
        return self._call(func, args, kwargs, homes)

    def _own(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Functions that are answered without capture."""
        name, x = name_of(func), args[0]
        if name in ("to", "cpu", "cuda"):
            answer: Any = handler(func)
            with self:
                return answer.function(*args, **kwargs)
        if name.endswith("_like"):
            dtype = kwargs.get("dtype") or x.dtype
            made: Any = Ghost.drawn(x)
            made._layout = Layout(x.placement, made._layout.state, x._layout.shape, dtype)
        elif name.endswith("_") and isinstance(x, Ghost):
            made = x
        else:
            raise Unknown(f"{name} is not explained: only what goes forward is")
        step = Step(name, "drawn", (x._layout,), ("self",), (), None, "drawn for the whole, each rank keeps its part", "")
        self.steps.append(step._replace(level=self.level))
        return made

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Ghost]) -> Any:
        if isinstance(func, Applied):
            try:
                node = node_of(func, args, tensors)
            except Exception as error:
                return self._gathered(func, tensors, f"no rule, and its forward cannot run on fakes: {_line(error)}", None, None)
            return self._node(func, node, tensors, None)
        if asks_for_grad(func):
            return self._gathered(func, tensors, "it looks at requires_grad itself", None, None)
        number = iter(range(len(tensors)))
        named = map_tensors((args, kwargs), lambda _: Ref(next(number)))
        try:
            seen = capture(func, named[0], named[1], [x._layout for x in tensors])
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._gathered(func, tensors, "its shape depends on data", None, None)
        except Exception as error:
            return self._gathered(func, tensors, f"torch has no fake of it: {_line(error)}", None, None)
        if len(seen.nodes) == 1 and is_the_node(seen, len(tensors)):
            return self._node(func, seen.nodes[0], tensors, seen)
        if len(seen.nodes) == 1 and seen.nodes[0].op is func:
            return self._gathered(func, tensors, "no rule", seen, None)
        return self._parts(func, seen, tensors, "")

    def _node(self, func: Any, node: Node, tensors: Sequence[Ghost], seen: Captured | None) -> Any:
        """One ATen call; `seen` says what of its outputs the function returns, and how."""
        found = verdict(node, tensors)
        if found.apart is not None:
            return self._parts(func, found.apart, tensors, found.why)
        if found.way is None and found.formula is None:
            return self._gathered(func, tensors, found.why, seen, found)
        if found.formula is not None:
            assert isinstance(found.formula, Handler)
            self._say(found.call.name, "formula", tensors, found, why=_formula(found.formula))
            with self._inside(), self:
                return found.formula.run(func, (), {}, list(tensors))
        choices = []
        for way, seconds in zip(found.ways, found.costs, strict=True):
            if not isinf(seconds):
                choices.append(Choice.of(tensors, *lies(way, node, tensors), seconds))
                if way is found.way:
                    chosen = choices[-1]
        self._say(found.call.name, "rule", tensors, found, choices, chosen)
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        mutable = node.op._schema.is_mutable
        outs: dict[int, Ghost] = {}
        for n, of in zip(node.numbers, chosen.outputs, strict=True):
            if n < len(tensors) and (mutable or chosen.inputs[n] is tensors[n]._layout):
                outs[n] = tensors[n]
                outs[n]._layout = of
                outs[n]._needs = outs[n]._needs or learns
            else:
                outs[n] = ghost(of, learns and _has_grad(of), self.moved)
        if seen is None:
            made = tuple(outs.values())
            return made[0] if len(made) == 1 else made
        return filler([*tensors, *[outs.get(n) for n in range(len(tensors), len(seen.fakes))]])(seen.result) if not (
            set(outs) & set(range(len(tensors)))
        ) else filler([outs.get(n, tensors[n] if n < len(tensors) else None) for n in range(len(seen.fakes))])(seen.result)
