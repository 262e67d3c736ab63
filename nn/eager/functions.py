"""Custom autograd Functions: run on shards where they have a rule, gathered where they have none.

`Function.apply` never asks __torch_function__, and would run a global tensor's shell. So it is replaced by one that
looks for global tensors among its arguments and otherwise goes on as before.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import handle_torch_function
from torch.utils import checkpoint

from ...boxing.record import user_line
from ...placement.errors import SbpError
from ...sbp.call import Ref, fill, map_tensors, numbered, tensors_in
from ...sbp.logical import Logical, LogicalOp
from ...sbp.registry import known
from ..eager import refusals
from ..model.recompute.around import replace_around, saved_by_turns, saving_shards
from ..tensors import copies
from ..tensors.meeting import adopt, meeting, name_of
from ..tensors.tensor import GlobalTensor
from ..transforms import flex_attention, levels
from ..transforms.stand_in import StandIn, is_open, lifted, lowered
from .capture import capturing, fakes_of, sources_of
from .choice import verdict
from .dispatch import dispatch
from .gathered import Whole
from .prepare import single
from .recipe import Recipe

__all__ = ["Applied", "FunctionOp", "applied", "captured", "function_name", "install"]

_apply = Function.__dict__["apply"]  # a classmethod in Python before torch 2.14, one in C++ since
_applied: dict[type[Function], "Applied"] = {}


def applied(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """`apply` as torch has it."""
    return _apply.__get__(None, cls)(*args, **kwargs)


class Applied:
    """`MyFunction.apply` as a function that dispatch can hold in a key, and modes can call."""

    def __init__(self, cls: type[Function]) -> None:
        self.cls, self.__name__ = cls, cls.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        of = [a for a in args if isinstance(a, GlobalTensor)]
        return handle_torch_function(self, of, *args, **kwargs) if of else applied(self.cls, *args, **kwargs)

    def recipe(self, args: tuple[Any, ...], tensors: Sequence[GlobalTensor]) -> Recipe:
        """By the Function's rule if it has one."""
        if function_name(self.cls) not in known():
            return Whole(name_of(self))
        found = verdict(captured(self, args, tensors), tensors)
        return Whole(name_of(self)) if found.way is None else single(self, found, tensors)


class FunctionOp:
    """A Function as rules look at an op: a schema made from the signature of `forward` and a call."""

    tags: tuple[()] = ()
    _overloadname = "default"
    namespace = "function"

    def __init__(self, cls: type[Function], args: Sequence[Any], outputs: int) -> None:
        names = [name for name in inspect.signature(cls.forward).parameters if name != "ctx"]
        if len(names) < len(args) or any(n in ("args", "kwargs") for n in names):
            names = [f"arg{i}" for i in range(len(args))]
        kinds = ["Tensor" if isinstance(a, Tensor) else "Any" for a in args]
        said = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, names, strict=False))
        results = ", ".join(["Tensor"] * outputs)
        returns = results if outputs == 1 else f"({results})"
        self._schema = torch._C.parse_schema(f"{function_name(cls)}({said}) -> {returns}")

    def _can_decompose(self) -> bool:
        return False


def function_name(cls: type[Function]) -> str:
    """Under which name a Function's rule is in the book.

    >>> function_name(Function)
    'function::Function'
    """
    return f"function::{cls.__qualname__.replace('.', '_').replace('<locals>', 'locals')}"


def captured(func: Applied, args: tuple[Any, ...], tensors: Sequence[GlobalTensor]) -> Logical:
    """A Function's call as it would have been captured; only its forward runs, on fakes."""
    fakes = fakes_of([x._layout for x in tensors])
    named = numbered(args)
    faked = fill(named, fakes)
    with torch.no_grad():
        made = func(*faked)
    outputs = tuple(tensors_in(made))
    numbers = tuple(range(len(tensors), len(tensors) + len(outputs)))
    op: Any = FunctionOp(func.cls, faked, len(outputs))
    order = iter(numbers)
    result = map_tensors(made, lambda _: Ref(next(order)))
    return Logical(sources_of(fakes), (LogicalOp(op, named, {}, outputs, numbers),), result)


def _global_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(a, StandIn) for a in args):
        return _below_transforms(cls, *args, **kwargs)
    if is_open():
        return applied(cls, *map_tensors(args, lifted), **kwargs)
    if not any(isinstance(a, GlobalTensor) for a in args):
        if capturing():  # its own backward would be lost among the calls that its forward makes
            raise LookupError(f"{cls.__name__} is not captured")
        return applied(cls, *args, **kwargs)
    if cls is BackwardHookFunction:
        raise SbpError(
            f"a module's full backward hook sees single shards, not global tensors, at {user_line()}\n"
            "  put a hook on the tensor: x.register_hook(...), or module.register_forward_hook to get at it"
        )
    if cls.__module__ == "torch.utils.checkpoint":
        if cls is checkpoint.CheckpointFunction:  # saves and replays by itself, on one device's tensors
            run, preserve, *rest = args
            return checkpoint.checkpoint(run, *rest, use_reentrant=False, preserve_rng_state=preserve)
        return applied(cls, *args, **kwargs)  # only keeps its inputs
    func = _applied.get(cls)
    if func is None:
        func = _applied[cls] = Applied(cls)
    return func(*args, **kwargs)


def _below_transforms(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """A Function that torch applies once all transforms are off; the ones that it makes for vmap live for one call."""
    args = map_tensors(args, lowered)
    with torch._C._EnableTorchFunction():
        if cls.__module__.startswith("torch._functorch"):
            func = Applied(cls)
            where = meeting(func, [x for x in tensors_in(args) if isinstance(x, GlobalTensor)])
            args = map_tensors(args, lambda t: adopt(func, t, where))
            made = Whole(cls.__name__).run(func, args, kwargs, tensors_in(args))  # type: ignore[arg-type]
        else:
            made = cls.apply(*args, **kwargs)
    return map_tensors(made, lifted)


def install() -> None:
    """Put ours in the place of torch's, once."""
    GlobalTensor.__torch_function__ = classmethod(dispatch)  # type: ignore[assignment,method-assign]
    Function.apply = classmethod(_global_apply)  # type: ignore[assignment,method-assign]
    replace_around(saving_shards)
    saved_by_turns()
    refusals.install()
    levels.install(dispatch)
    flex_attention.install()
    copies.install()
