"""Compile: the graph of a model and its loss function, typed as these are, as a plan or notes say."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Concatenate, Self, Unpack, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from ...placement.errors import SbpError
from ..explanations.graph import Graph
from ..graph.compiled import Args, CompiledGraph, M, Result
from ..graph.graph import held_by_wrapper, refuse_wrapper
from ..graph.options import GivenOptions, OptionError, Options
from ..graph.step import Step
from ..model.flows import FlowError
from ..tensors.tensor import GlobalTensor
from .answer import answer
from .assignment import Assignment, assignment
from .expect import expected, findings
from .grids import grids_of
from .language.plan_text import PlanText
from .notes import noted, options_of
from .plan import StepPlan, as_plan

__all__ = ["compile"]


class CompileOptions(GivenOptions, total=False):
    """The options of a graph, and a plan: one that was read, its text, or the file that it is in."""

    plan: PlanText | str | Path | None


class _Compiled(Graph, CompiledGraph[M, Args, Result]):
    """The graph that `compile` makes, which knows the plan that it runs by."""

    given: Assignment | None = None
    beside: GivenOptions  # a plan: the options that the user gave

    def move(
        self, plan: PlanText | str | Path | None = None, *, lost: Iterable[int] = (), **options: Unpack[GivenOptions]
    ) -> Self:
        """Have the next call plan anew, and bring there what the model and its optimizers hold: see `Graph.move`. It
        plans as a plan says, or as is said of the modules by now. Options stay those that were given to `compile`, but
        for what is given here; a plan is in the place of the one before. Returns the step."""
        self._refuse_move()
        beside: GivenOptions = {**self.beside, **options}
        made, said = _planned(as_plan(plan), self.model, beside, self._optimizers())
        self._moved_to(Options.of(said, str(self._options.name)), lost)
        self.given, self.beside = made, beside
        return self

    def step_for(self, *args: Any, **kwargs: Any) -> Step:
        try:
            step = super().step_for(*args, **kwargs)
        except FlowError as error:
            raise (error if self.given is None else self.given.shown(error)) from None
        if step.runner is None and self.given is not None:
            expected(self.given.plan, findings(self.given.plan, step))
        return step

    @property
    def plan(self) -> StepPlan:
        """The plan that runs, with all said that was left open; before a first call, the given plan."""
        given, step = self.given, self._last

        def say() -> str:
            return answer(step, given) if step is not None else str(given.plan) if given is not None else ""

        return StepPlan.of_step(say)


_Optimizers = Optimizer | list[Optimizer] | None


@overload
def compile(
    model: M,
    loss_fn: Callable[Concatenate[M, Args], Tensor],
    optimizer: _Optimizers = None,
    **options: Unpack[CompileOptions],
) -> _Compiled[M, Args, GlobalTensor]: ...
@overload
def compile(
    model: M,
    loss_fn: Callable[Concatenate[M, Args], Result],
    optimizer: _Optimizers = None,
    **options: Unpack[CompileOptions],
) -> _Compiled[M, Args, Result]: ...
@overload
def compile(
    model: M,
    loss_fn: Callable[..., Tensor],  # as of `loss_fn(model, **batch)`, whose arguments have no types of their own
    optimizer: _Optimizers = None,
    **options: Unpack[CompileOptions],
) -> _Compiled[M, ..., GlobalTensor]: ...
@overload
def compile(
    model: M,
    loss_fn: Callable[..., Any],
    optimizer: _Optimizers = None,
    **options: Unpack[CompileOptions],
) -> _Compiled[M, ..., Any]: ...
@overload
def compile(
    model: M, loss_fn: None = None, optimizer: None = None, **options: Unpack[CompileOptions]
) -> _Compiled[M, ..., Any]: ...
def compile(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: _Optimizers = None,
    **options: Unpack[CompileOptions],
) -> _Compiled[Any, ..., Any]:
    """A step of training a model: `step(*batch)` computes `loss_fn(model, *batch)`, its gradients, and steps.

    Without a loss function it is an inference: `step(*args)` is `model(*args)`. There are the options placement=,
    backend=, memory=, clip_grad_norm=, micro_batches=, schedule=, slices=, inputs=, loss_scale=, skip_nonfinite=,
    leave_gradients=, overlap=, post_validation=, draws=, cuda_graph= and name=, as `Options` explains them; and plan=,
    a plan's text, file or `Plan`, which says all of that and how the model lies.
    """
    if not isinstance(model, nn.Module):
        raise SbpError(
            f"compile of {type(model).__name__}\n  give it an nn.Module, as in flow.compile(model, loss_fn, optimizer)"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise SbpError(
            f"compile with {type(loss_fn).__name__} for a loss function\n"
            "  give it loss_fn(model, *batch) -> loss, as in flow.compile(model, loss_fn, optimizer)"
        )
    if loss_fn is not None and _of_torch(loss_fn):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise SbpError(
            f"compile with torch's {name} for a loss function, which is called with the model first\n"
            f"  call the model in one, as in lambda model, x, y: {name}(model(x), y)"
        )
    listed = list(optimizer) if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    if options.get("leave_gradients"):
        listed = [held_by_wrapper(each) or each for each in listed]
        optimizer = listed if isinstance(optimizer, list | tuple) else next(iter(listed), None)
    for each in listed:
        refuse_wrapper(each, "compile")
        if not isinstance(each, Optimizer):
            raise SbpError(
                f"compile with {type(each).__name__} for an optimizer\n"
                "  give it one of torch.optim, as in torch.optim.AdamW(model.parameters())"
            )
    if optimizer is not None and loss_fn is None:
        raise SbpError("compile has an optimizer and no loss\n  give it loss_fn(model, *batch) -> loss")
    plan = as_plan(options.pop("plan", None))
    made, said = _planned(plan, model, options, listed)
    graph: _Compiled[Any, ..., Any] = _Compiled(model, loss_fn, optimizer, said)
    graph.given, graph.beside = made, options
    return graph


def _of_torch(loss: Callable[..., Any]) -> bool:
    """Whether a loss is one of torch's own, a function or a module, which takes results and targets."""
    of = type(loss) if isinstance(loss, nn.Module) else loss
    return (getattr(of, "__module__", None) or "").startswith(("torch.nn.modules", "torch.nn.functional"))


def _planned(
    plan: PlanText | None, model: nn.Module, options: GivenOptions, optimizers: Iterable[Optimizer]
) -> tuple[Assignment | None, GivenOptions]:
    """A plan noted on a model, and the options with what it says of these."""
    if plan is None:
        return None, {**options}
    made = assignment(plan, model, grids_of(plan, model=model), optimizers)
    said = options_of(made)
    for name in said.keys() & {name for name, value in options.items() if value is not None}:
        raise SbpError(f"{name}= is given beside a plan that says it too\n  leave out one of the two")
    try:
        Options.of({**options, **said}, type(model).__name__)  # what it refuses is so before anything is noted
    except OptionError as error:
        raise made.shown(error) from None
    noted(made, model)
    return made, {**options, **said}
