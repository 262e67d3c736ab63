"""Calls of experts: a module that tokens choose experts of is one op, where a note says how such ops are computed.

Which it is nobody has to say: it is called with tokens, numbers of experts and shares, and its weights have a dim of
experts. Its own forward is not captured, and may do what no capture can. What it computes is tried before.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .....boxing.record import user_line
from .....placement.errors import SbpError
from ....mixtures.expert_code import ExpertCode, keep_code
from ....mixtures.module_code import tensors_of
from ....mixtures.module_probe import NoExperts, SeenExperts, Shapes, TokenCall, seen_experts, touch
from ....mixtures.stacked_probe import seen_stacked
from ....model.inside import uses_said
from ..interceptor import Interceptor
from .likeness import Unlike, of_module

__all__ = ["ExpertCalls"]

OP = "sbpflow::module_experts"
Run = Callable[..., Any]


class _Given(NamedTuple):
    """Tokens, choices and shares that a layer of experts is called with, behind their places or names; or a row of
    every token for every expert."""

    keys: tuple[int | str, ...]
    tokens: Tensor
    chosen: Tensor | None = None
    share: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Known:
    """The code of a kind of module, under its name."""

    name: str
    seen: SeenExperts


_known: dict[Any, _Known] = {}  # by all that the code goes by
_names: dict[str, int] = {}  # how many kinds a class has


class ExpertCalls:
    """Stands in for the forward of layers of experts, in modules of which notes say how these are computed."""

    def __init__(self, modules: Mapping[str, nn.Module], watch: Interceptor) -> None:
        self.watch = watch
        said = {path: uses_said(path, module) for path, module in modules.items()}
        self.noted = [path for path, uses in said.items() if any(OP in use.composite.ops for use in uses)]

    def around(self, run: Run) -> Run:
        """A call of a module, with its forward replaced where it is a layer of experts."""
        if not self.noted:
            return run

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            held = vars(module)
            if not self._is_noted() or "forward" in held or _given(module, args, kwargs) is None:
                return run(module, *args, **kwargs)
            held["forward"] = lambda *args, **kwargs: self._forward(module, args, kwargs)
            try:
                return run(module, *args, **kwargs)
            finally:
                held.pop("forward", None)

        return called

    def _is_noted(self) -> bool:
        path = self.watch.module
        return any(not noted or path == noted or path.startswith(f"{noted}.") for noted in self.noted)

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op in the place of the module's forward."""
        del vars(module)["forward"]
        given = _given(module, args, kwargs)
        if given is None:  # hooks have made something else of it
            return module.forward(*args, **kwargs)
        held = tensors_of(module)
        kind, width = given.tokens.device.type, given.tokens.shape[-1]
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        try:
            with self.watch.paused():
                known = self._code(module, given, self._shapes(held), narrow)
        except NoExperts:  # it is captured as any other module
            return module.forward(*args, **kwargs)
        seen = known.seen.code.seen
        stacks = [
            held[name] if rows == 1 else held[name].view(seen.count, rows, *held[name].shape[1:])
            for name, rows in seen.stacks.items()
        ]
        shared = [held[name] for name in seen.shared]
        with torch.autocast(kind, enabled=False) if narrow else nullcontext():
            if given.chosen is None or given.share is None:
                rows = given.tokens.reshape(seen.count, -1, width)
                made: Tensor = torch.ops.sbpflow.stacked_experts(rows, stacks, shared, known.name)
            else:
                x, chosen, share = (
                    each.reshape(-1, each.shape[-1]) for each in (given.tokens, given.chosen, given.share)
                )
                made = torch.ops.sbpflow.module_experts(x, chosen, share, stacks, shared, known.name)
        return made.reshape(*given.tokens.shape[:-1], known.seen.width)

    def _shapes(self, held: Mapping[str, Tensor]) -> Shapes:
        """Shapes of tensors, and the dtypes in which ops get them."""
        found = list(held.values())
        if self.watch.used is not None:
            found, _ = self.watch.used(torch.ops.aten.cat.default, found, {})
        return {name: (tuple(x.shape), x.dtype) for name, x in zip(held, found, strict=True)}

    def _code(self, module: nn.Module, given: _Given, shapes: Shapes, narrow: torch.dtype | None) -> _Known:
        """The code of a module, of which everything counts as read."""
        for part in module.modules():
            for name in list(vars(part)):
                getattr(part, name)
        stacked = given.chosen is None or given.share is None
        types = given.tokens.dtype, (given.tokens if given.share is None else given.share).dtype
        dims = given.tokens.dim(), 2 if given.chosen is None else given.chosen.dim()
        call = TokenCall(dims, given.keys, given.tokens.shape[-1], types)
        kind = given.tokens.device.type
        key = _likeness(module, call, shapes, kind, narrow)
        known = _known.get(key)
        plain = torch._C.DisableTorchFunction()  # the modes of the capture see nothing of what is tried
        with plain, unset_fake_temporarily(), torch.autocast("cpu", narrow, enabled=narrow is not None):
            if known is not None:
                touch(known.seen.code, shapes, call)
                return known
            try:
                seen = (seen_stacked if stacked else seen_experts)(module, call, shapes)
            except NoExperts as error:
                if stacked:
                    raise
                title = self.watch.module or type(module).__name__
                raise SbpError(
                    f"inside {title}: {type(module).__name__} is no layer of experts whose tokens could be sent: "
                    f"{error}\n  called at {user_line()}\n  leave the line out for it, or write it by flow.nn.experts"
                ) from None
        known = _Known(keep_code(_name(module), _code_of(seen, kind, narrow)), seen)
        if key is not None:
            _known[key] = known
        return known


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Given | None:
    """The arguments of a call, if they are tokens, choices and shares and nothing else, of a module with weights."""
    each: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    if len(each) == 1 and isinstance(each[0][1], Tensor):
        ((key, rows),) = each
        stacks = any(w.dim() == 3 for w in module._parameters.values() if w is not None)
        fits = rows.is_floating_point() and rows.dim() in (2, 3)
        return _Given((key,), rows) if stacks and fits else None
    if len(each) != 3 or not all(isinstance(x, Tensor) and x.dim() >= 2 for _, x in each):
        return None
    whole = [(key, x) for key, x in each if not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)]
    floats = [(key, x) for key, x in each if x.is_floating_point()]
    if len(whole) != 1 or len(floats) != 2:
        return None
    ((chosen_key, chosen),) = whole
    for (key, x), (share_key, share) in (floats, floats[::-1]):
        fits = share.shape == chosen.shape and x.shape[:-1].numel() == chosen.shape[:-1].numel()
        if fits and any(w.dim() > 1 for w in tensors_of(module).values()):
            return _Given((key, chosen_key, share_key), x, chosen, share)
    return None


def _likeness(module: nn.Module, *more: Any) -> Any:
    """All that a module's code goes by; None where it may change."""
    numbers: list[Any] = []
    try:
        like = of_module(module, [], numbers)
    except (Unlike, RecursionError):
        return None
    call, shapes, kind, narrow = more
    return like, tuple((n.name, n.value) for n in numbers), call, tuple(shapes.items()), kind, narrow


def _name(module: nn.Module) -> str:
    """A name for the code of a module; each kind has its own."""
    name = type(module).__name__
    _names[name] = _names.get(name, 0) + 1
    return name if _names[name] == 1 else f"{name} {_names[name]}"


def _code_of(seen: SeenExperts, kind: str, narrow: torch.dtype | None) -> ExpertCode:
    def run(*given: Any) -> Tensor:
        with torch.autocast(kind, narrow, enabled=narrow is not None):
            return seen.code(*given)

    return ExpertCode(run, lambda x, stacks: (seen.width, seen.dtype), seen.linear)
