"""Graph: a training step or an inference, captured once for each shape of its inputs, planned as a whole, and run."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...boxing.graph.physical import Graph as Physical
from ...placement import Placement
from ...placement.errors import SbpError
from .backend import Backend
from .inputs import key_of
from .step import Step

__all__ = ["Graph", "compile"]


class Graph:
    """Subclass it, give it modules and optimizers as attributes, and write `build`; then call it like a function.

    `build` runs once for each shape of its arguments, on tensors without values. Where it calls `loss.backward()`, the
    graph trains: with an optimizer it steps, without one gradients are left on the parameters. Parameters become
    global tensors, and stay the modules' own.

    >>> import sbpflow as flow
    >>> class Double(Graph):
    ...     def build(self, x):
    ...         return x * 2
    >>> Double(placement=flow.placement("cpu", range(2)))(torch.ones(2)).numpy()
    array([2., 2.], dtype=float32)
    """

    def __init__(
        self,
        *,
        placement: Placement | None = None,
        backend: Backend = "auto",
        memory: float | None = None,
        clip_grad_norm: float | None = None,
        micro_batches: int = 1,
        schedule: str | None = None,
        name: str | None = None,
    ) -> None:
        if backend not in get_args(Backend):
            raise SbpError(f"backend={backend!r}\n  there are {', '.join(map(repr, get_args(Backend)))}")
        if micro_batches != 1 or schedule is not None:
            raise SbpError(
                f"micro_batches={micro_batches}, schedule={schedule!r}: a graph does not run in micro-batches yet\n"
                "  leave both out: layers on several placements then run one after the other"
            )
        self._placement, self._backend, self._memory = placement, backend, memory
        self._clip, self._name = clip_grad_norm, name or type(self).__name__
        self._steps: dict[Any, Step] = {}
        self._last: Step | None = None

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """What a step computes; every subclass has its own."""
        raise NotImplementedError(
            f"{type(self).__name__} has no build(self, ...)\n  write what one step computes there"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.step_for(*args, **kwargs).run(args, kwargs)

    def step_for(self, *args: Any, **kwargs: Any) -> Step:
        """The compiled step for arguments like these; made if there is none, and nothing is run."""
        key = key_of(args, kwargs, self._modes())
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = Step(
                self.build,
                args,
                kwargs,
                self._modules(),
                list(self._optimizers()),
                placement=self._placement,
                backend=self._backend,
                memory=self._memory,
                clip=self._clip,
                name=self._name,
            )
        self._last = step
        return step

    def plan(self, *args: Any, **kwargs: Any) -> "Graph":
        """Capture and choose for arguments like these (they may be on meta) without running; returns the graph."""
        self.step_for(*args, **kwargs)
        return self

    def _modules(self) -> dict[str, nn.Module]:
        found = {name: value for name, value in vars(self).items() if isinstance(value, nn.Module)}
        return {"": next(iter(found.values()))} if len(found) == 1 else found

    def _optimizers(self) -> Iterator[Optimizer]:
        for value in vars(self).values():
            listed = value if isinstance(value, list | tuple) else [value]
            yield from (each for each in listed if isinstance(each, Optimizer))

    def _modes(self) -> tuple[Any, ...]:
        """What of the modules decides what `build` does: which train, and which parameters do."""
        parts = [part for module in self._modules().values() for part in module.modules()]
        trains = tuple(part.training for part in parts)
        learns = tuple(p.requires_grad for part in parts for p in part._parameters.values() if p is not None)
        return (
            trains,
            learns,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        )

    @property
    def step(self) -> Step:
        """The step that ran last."""
        if self._last is None:
            raise SbpError(
                f"{self._name} was not called yet, so there is nothing to look at\n"
                "  call it, or graph.plan(*arguments) to see the plan before anything runs"
            )
        return self._last

    @property
    def physical(self) -> Physical:
        """The graph that runs."""
        return self.step.graph

    def text(self) -> str:
        """The physical graph as text, which `boxing.graph.from_text` reads back."""
        return self.step.text()

    def draw(self, path: str | Path, *, depth: int | None = None, focus: str | None = None) -> Path:
        """Write the boxing graph as a picture; the suffix says svg, png, pdf or dot."""
        return self.step.draw(path, depth=depth, focus=focus)

    def explain(self) -> Any:
        """What was chosen and why: signatures, moves, memory, what would have been next. Print it, or `.html(path)`."""
        return self.step.explain()

    def _repr_svg_(self) -> str | None:
        return None if self._last is None else self._last.svg()

    def __repr__(self) -> str:
        if self._last is None:
            return f"{self._name}: not called yet"
        return repr(self._last)


class _Compiled(Graph):
    """What `compile` returns."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any] | None, optimizer: Any, options: Mapping[str, Any]
    ) -> None:
        super().__init__(**options)
        self.model, self.loss, self.optimizer = model, loss, optimizer

    def build(self, *args: Any, **kwargs: Any) -> Any:
        if self.loss is None:
            return self.model(*args, **kwargs)
        result = self.loss(self.model, *args, **kwargs)
        if torch.is_grad_enabled():
            torch.autograd.backward(_first(result))
        return result


def _first(result: Any) -> Tensor:
    """The loss: the result, or the first of several."""
    while isinstance(result, list | tuple | dict) and result:
        result = next(iter(result.values() if isinstance(result, dict) else result))
    if not isinstance(result, Tensor):
        raise SbpError(
            f"the loss function returned {type(result).__name__}\n"
            "  it is to return the loss, a tensor of one number, or several results of which the loss is the first"
        )
    return result


def compile(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Optimizer | list[Optimizer] | None = None,
    *,
    placement: Placement | None = None,
    backend: Backend = "auto",
    memory: float | None = None,
    clip_grad_norm: float | None = None,
    micro_batches: int = 1,
    schedule: str | None = None,
    name: str | None = None,
) -> Graph:
    """A step of training a model: `step(*batch)` computes `loss_fn(model, *batch)`, its gradients, and steps.

    Without a loss function it is an inference: `step(*args)` is `model(*args)`.
    """
    if not isinstance(model, nn.Module):
        raise SbpError(
            f"compile of {type(model).__name__}\n  give it an nn.Module, as in flow.compile(model, loss_fn, optimizer)"
        )
    if optimizer is not None and loss_fn is None:
        raise SbpError("compile has an optimizer and no loss\n  give it loss_fn(model, *batch) -> loss")
    options = {
        "placement": placement,
        "backend": backend,
        "memory": memory,
        "clip_grad_norm": clip_grad_norm,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "name": name or type(model).__name__,
    }
    return _Compiled(model, loss_fn, optimizer, options)
