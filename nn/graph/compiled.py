"""Compile: a graph of a model and its loss function, typed as these are."""

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...placement.errors import SbpError
from ..tensors.tensor import GlobalTensor
from .capture.arguments import parameter_names
from .graph import Graph
from .options import GivenOptions

__all__ = ["compile"]

M = TypeVar("M", bound=nn.Module)
Args = ParamSpec("Args")
Result = TypeVar("Result")


class _Compiled(Graph, Generic[M, Args, Result]):
    """The graph that `compile` makes: it takes what the loss function takes besides the model, and returns its result.

    `build` of a subclass of `Graph` is the user's, and no type of `Graph.__call__` can follow it; here it is known.
    """

    model: M

    def __init__(self, model: M, loss: Callable[..., Any] | None, optimizer: Any, options: GivenOptions) -> None:
        options["name"] = options.get("name") or type(model).__name__
        super().__init__(**options)
        self.model, self.loss, self.optimizer = model, loss, optimizer

    def _names(self) -> tuple[str, ...]:
        return parameter_names(self.model.forward) if self.loss is None else parameter_names(self.loss)[1:]

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        result: Result = super().__call__(*args, **kwargs)
        return result

    def build(self, *args: Any, **kwargs: Any) -> Any:
        if self.loss is None:
            return self.model(*args, **kwargs)
        result = self.loss(self.model, *args, **kwargs)
        if torch.is_grad_enabled():
            torch.autograd.backward(_first(result))
        return result


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


_Optimizers = Optimizer | list[Optimizer] | None


@overload
def compile(
    model: M,
    loss_fn: Callable[Concatenate[M, Args], Tensor],
    optimizer: _Optimizers = None,
    **options: Unpack[GivenOptions],
) -> _Compiled[M, Args, GlobalTensor]: ...
@overload
def compile(
    model: M,
    loss_fn: Callable[Concatenate[M, Args], Result],
    optimizer: _Optimizers = None,
    **options: Unpack[GivenOptions],
) -> _Compiled[M, Args, Result]: ...
@overload
def compile(
    model: M,
    loss_fn: Callable[..., Tensor],  # as of `loss_fn(model, **batch)`, whose arguments have no types of their own
    optimizer: _Optimizers = None,
    **options: Unpack[GivenOptions],
) -> _Compiled[M, ..., GlobalTensor]: ...
@overload
def compile(
    model: M,
    loss_fn: Callable[..., Any],
    optimizer: _Optimizers = None,
    **options: Unpack[GivenOptions],
) -> _Compiled[M, ..., Any]: ...
@overload
def compile(
    model: M, loss_fn: None = None, optimizer: None = None, **options: Unpack[GivenOptions]
) -> _Compiled[M, ..., Any]: ...
def compile(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: _Optimizers = None,
    **options: Unpack[GivenOptions],
) -> _Compiled[Any, ..., Any]:
    """A step of training a model: `step(*batch)` computes `loss_fn(model, *batch)`, its gradients, and steps.

    Without a loss function it is an inference: `step(*args)` is `model(*args)`. There are the options placement=,
    backend=, memory=, clip_grad_norm=, micro_batches=, schedule=, slices= and name=, as `Options` explains them.
    """
    if not isinstance(model, nn.Module):
        raise SbpError(
            f"compile of {type(model).__name__}\n  give it an nn.Module, as in flow.compile(model, loss_fn, optimizer)"
        )
    listed = optimizer if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    for each in listed:
        if not isinstance(each, Optimizer):
            raise SbpError(
                f"compile with {type(each).__name__} for an optimizer\n"
                "  give it one of torch.optim, as in torch.optim.AdamW(model.parameters())"
            )
    if optimizer is not None and loss_fn is None:
        raise SbpError("compile has an optimizer and no loss\n  give it loss_fn(model, *batch) -> loss")
    return _Compiled(model, loss_fn, optimizer, options)
