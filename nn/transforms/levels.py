"""Where global tensors come into transforms of torch.func and levels of forward-mode differentiation, and out again.

entered     arguments that torch is about to wrap: stand-ins are wrapped in their place
met         global tensors that a function has from elsewhere: while a level is open, their calls go by stand-ins
left        what torch hands out, unwrapped: global tensors again
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from threading import Lock
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch._functorch.predispatch
import torch._functorch.vmap
from torch.autograd import forward_ad

from ...sbp.call import map_tensors, tensors_in
from ..tensors.tensor import GlobalTensor
from .stand_in import StandIn, is_open, lifted, lowered

__all__ = ["install"]

_grads, _batches = torch._functorch.eager_transforms, torch._functorch.vmap
# Where forward_ad looks for what wraps dual numbers: torch 2.11 looks among the functions of its core.
_duals: Any = next(each for each in (torch._functorch.predispatch, torch._VF) if hasattr(each, "_make_dual"))
_lock, _open = Lock(), 0


def _counted(change: int, inside: Any, outside: Any) -> None:
    """While any level is open anywhere, calls of global tensors ask whether one is open here."""
    global _open
    with _lock:
        _open += change
        GlobalTensor.__torch_function__ = inside if _open else outside  # type: ignore[method-assign]


def _inside(plain: Callable[..., Any]) -> Any:
    def answer(
        cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_open():
            return map_tensors(StandIn.__torch_function__(func, types, args, kwargs), lowered)
        if any(isinstance(x, StandIn) for x in tensors_in((args, kwargs or {}))):
            return StandIn.__torch_function__(func, types, args, kwargs)
        return plain(cls, func, types, args, kwargs)

    return classmethod(answer)


def _entered(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def enter(*args: Any, **kwargs: Any) -> Any:
        return inner(*map(lifted, args), **kwargs)

    return enter


def _left(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def leave(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(inner(*map(lifted, args), **kwargs), lowered)

    return leave


def _pulled(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients that a transform takes; those that are given to it come from outside."""

    @wraps(inner)
    def pull(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors((args, kwargs), lifted)
        return map_tensors(inner(*args, **kwargs), lowered)

    return pull


def install(plain: Callable[..., Any]) -> None:
    """Open transforms for global tensors, once; `plain` is what answers for them where no level is open."""
    outside: Any = classmethod(plain)
    inside = _inside(plain)

    def level(inner: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
        @contextmanager
        @wraps(inner)
        def nested(*args: Any, **kwargs: Any) -> Iterator[Any]:
            _counted(1, inside, outside)
            try:
                with inner(*args, **kwargs) as made:
                    yield made
            finally:
                _counted(-1, inside, outside)

        return nested

    def step(inner: Callable[..., Any], change: int) -> Callable[..., Any]:
        @wraps(inner)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            made = inner(*args, **kwargs)
            _counted(change, inside, outside)
            return made

        return stepped

    _put(_batches, "vmap_increment_nesting", level)
    _put(_grads, "grad_increment_nesting", level)
    _put(_grads, "jvp_increment_nesting", level)
    _put(forward_ad, "enter_dual_level", lambda inner: step(inner, 1))
    _put(forward_ad, "exit_dual_level", lambda inner: step(inner, -1))
    for module, name in ((_grads, "_wrap_for_grad"), (_batches, "_add_batch_dim"), (_duals, "_make_dual")):
        _put(module, name, _entered)
    for module, name in ((_grads, "_unwrap_for_grad"), (_batches, "_remove_batch_dim")):
        _put(module, name, _left)
    _put(_duals, "_unpack_dual", _left)
    _put(_grads, "_autograd_grad", _pulled)


def _put(module: Any, name: str, made_of: Callable[[Any], Any]) -> None:
    setattr(module, name, made_of(getattr(module, name)))
