"""Marks of eager parts: modules and functions that a compiled step runs as they are, on global tensors.

    flow.nn.eager(model.criterion)         a module: all that its forward does
    matched = flow.nn.eager(matched)       a function

Neither changes what eager code does. A graph makes one op of each call. As Python runs it at each step anew, it may
look at values: `x.item()`, `x[mask]`, an `if` on a tensor, numpy, scipy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, overload

from torch import nn

from ..model.recompute.own_forward import OwnForward, Run, check_called, forwards_of

__all__ = ["EagerForward", "EagerFunction", "EagerMark", "eager", "eager_of", "parts_by"]

Given = ParamSpec("Given")
Returned = TypeVar("Returned")
Marked = TypeVar("Marked", bound=nn.Module | Sequence[nn.Module])

_parts: Callable[["EagerMark", tuple[Any, ...], dict[str, Any]], Any] | None = None


@contextmanager
def parts_by(parts: Callable[["EagerMark", tuple[Any, ...], dict[str, Any]], Any] | None) -> Iterator[None]:
    """Inside, calls of eager parts are made by `parts`, as where a graph is captured; None: as Python makes them."""
    global _parts
    before, _parts = _parts, parts
    try:
        yield
    finally:
        _parts = before


class EagerForward(OwnForward):
    """The forward of a module that is an eager part."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mark = EagerMark(self.called(), self.inner)
        return mark(*args, **kwargs) if _parts is None else _parts(mark, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return EagerForward, (self._module(), self.inner)

    def __str__(self) -> str:
        return "eager"


class EagerFunction(Generic[Given, Returned]):
    """A function that is an eager part."""

    def __init__(self, function: Callable[Given, Returned]) -> None:
        self.function = function
        self.__name__: str
        update_wrapper(self, function)

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Returned:
        if _parts is None:
            return self.function(*args, **kwargs)
        result: Returned = _parts(EagerMark(None, self.function), args, kwargs)
        return result

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """One that stands in a class is a method."""
        return self if owner is None else EagerFunction(self.function.__get__(owner, kind))


class EagerMark:
    """The code of an eager part that was called: the forward of a module, or a function."""

    def __init__(self, module: nn.Module | None, inner: Run | None) -> None:
        self.module, self.inner = module, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        assert self.module is not None
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def name(self) -> str:
        """The name of the module's class, or of the function."""
        named = self.inner if self.module is None else type(self.module)
        return str(getattr(named, "__name__", type(named).__name__))


@overload
def eager(what: Marked, on: bool | None = True) -> Marked: ...  # type: ignore[overload-overlap]  # a module is called
@overload
def eager(what: Callable[Given, Returned], on: bool | None = True) -> Callable[Given, Returned]: ...
def eager(what: Any, on: bool | None = True) -> Any:
    """Say that compiled steps run a module, each of several, or a function eagerly, between what they capture.

    A module is marked in place; a function is returned marked, and `flow.nn.eager` may stand above its `def`.
    `eager(what, None)` takes it back. Values and gradients are those of eager code on global tensors. What a part gives
    back is always of the same shapes; where these depend on values, pad it.
    """
    if isinstance(what, EagerFunction):
        return what if on else what.function
    each = [what] if isinstance(what, nn.Module) else list(what) if isinstance(what, list | tuple) else None
    if each is None and callable(what):
        return EagerFunction(what) if on else what
    for module in each or [what]:
        check_called(module, "eager", "run", "a module, a list of modules, or a function", "model.criterion")
    for module in each or ():
        EagerForward.take_back(module)
        if on:
            module.__dict__["forward"] = EagerForward(module, vars(module).get("forward"))
    return what


def eager_of(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The modules that are eager parts, by path."""
    return forwards_of(modules, EagerForward)
