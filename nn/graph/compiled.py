"""The graph of a model and its loss function, typed as these are: what `compile` makes."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ...placement.errors import ArgumentError, SbpError
from ..eager.refusals import run_untraced
from .capture.arguments import parameter_names
from .captures import Captures
from .graph import StepGraph
from .options import GivenOptions

__all__ = ["CompiledGraph", "M", "Args", "Result"]

M = TypeVar("M", bound=nn.Module)
Args = ParamSpec("Args")
Result = TypeVar("Result")


class CompiledGraph(StepGraph, Generic[M, Args, Result]):
    """The graph that `compile` makes: it takes what the loss function takes besides the model, and returns its result.

    `build` of a subclass of `Graph` is the user's, and no type of `Graph.__call__` can follow it; here it is known.
    """

    model: M

    def __init__(
        self,
        model: M,
        loss: Callable[..., Any] | None,
        optimizer: Any,
        options: GivenOptions,
        captures: Captures | None = None,
    ) -> None:
        options["name"] = options.get("name") or type(model).__name__
        super().__init__(**options)
        self.model, self.loss, self.optimizer, self._captures = model, loss, optimizer, captures

    def _names(self) -> tuple[str, ...]:
        return parameter_names(self.model.forward) if self.loss is None else parameter_names(self.loss)[1:]

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        result: Result = super().__call__(*args, **kwargs)
        return result

    def build(self, *args: Any, **kwargs: Any) -> Any:
        if self.loss is None:
            return self.model(*args, **kwargs)
        _check_taken(self.loss, self.model, *args, **kwargs)
        result = self.loss(self.model, *args, **kwargs)
        if torch.is_grad_enabled():
            torch.autograd.backward(_first(result))
        return result


def _check_taken(loss: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Refuse arguments of a step that its loss function does not take, in the words of a step."""
    try:
        of = signature(loss)
    except ValueError:  # of a function that is not Python's
        return
    try:
        of.bind(model, *args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(type(each).__name__ for each in args), *(f"{name}=" for name in kwargs)])
        raise ArgumentError(
            f"the loss function takes {of}, and is called with the model and what the step was given: {error}\n"
            f"  the step was given ({given}): call it with what the loss function takes behind the model"
        ) from None


def _first(result: Any) -> Tensor:
    """The loss: the result, or the first of several."""
    first = result
    while isinstance(first, list | tuple | Mapping) and first:
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    if not isinstance(first, Tensor):
        found = f"{type(first).__name__}, which is no tensor"
    elif first.numel() != 1:
        found = f"a tensor {tuple(first.shape)} first"
    elif not first.requires_grad:
        found = "a loss that depends on nothing that requires grad"
    else:
        return first
    raise SbpError(
        f"the loss function returned {found}\n"
        "  it is to return the loss, one number computed from the model's parameters, or several results of which the "
        "loss is the first"
    )


run_untraced(CompiledGraph.__call__)
