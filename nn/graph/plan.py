"""The plan of a step: all that is decided before anything runs, as a value.

Planning looks at modules and changes nothing: only the first run makes parameters global, with values where they have
none. What was planned stands as long as nothing it depends on has changed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...boxing.graph.buckets import bucketed
from ...boxing.graph.physical import Physical
from ...boxing.graph.text.text import to_text
from ...placement.errors import SbpError, ScheduleError, ShortageError
from ...sbp import Layout
from ...sbp.logical import Logical
from ..model.cast import Types, types_of
from ..tensors.tensor import GlobalTensor
from .capture.arguments import input_flows, input_titles, tensors_by_path
from .captures import Captures
from .choose.choose import Decided
from .choose.offload_fix import with_fix
from .choose.parameters import named_values, said_of
from .choose.stage_balance import Balance, even_stages
from .microbatch.batch import Batch
from .optimizer.adopt import refuse_closures
from .optimizer.loss_scale import LossScale
from .optimizer.post_validation import refuse_mixing
from .optimizer.relocation import ModelMove
from .options import Options
from .passes import Passes
from .pieces import Pieces, kept_of
from .plan_pieces import plan_pieces
from .run.program import Program

__all__ = ["Planned", "plan_step"]


@dataclass(frozen=True, eq=False)
class Planned:
    """The plan of a step for arguments of one kind. In micro-batches `logical`, `decided` and `graph` are of the first
    of them, and `pieces` has all."""

    passes: Passes  # with what they were told, and what they have seen of modules
    logical: Logical
    decided: Decided
    graph: Physical  # that runs
    balance: Balance  # of the stages of pipelines
    said: tuple[Mapping[str, Any], ...]  # of the modules, by annotations
    tied: Mapping[str, str]  # the names of parameters and buffers, with the first that each has
    pieces: Pieces | None

    @property
    def options(self) -> Options:
        return self.passes.options

    @property
    def trains(self) -> bool:
        return bool(self.logical.losses)

    @cached_property
    def kept(self) -> dict[str, Layout]:
        """The layouts of parameters and buffers from the first run on."""
        return kept_of(self.graph)

    @cached_property
    def program(self) -> Program:
        """The program of a straight step; it is compiled when it is told to prepare."""
        return Program(self.graph, backend=self.options.backend)

    def stands(self) -> bool:
        """Whether the first run would do what was planned: what is said of modules, and of them global, is the same."""
        values, said = named_values(self.passes.modules), said_of(self.passes.modules)
        types = types_of(self.passes.modules)
        return (
            self.said == said
            and self.tied == _ties(values)
            and all(
                name in values and _fits(values[name], of, types.get(name), free=self.passes.free)
                for name, of in self.kept.items()
            )
        )


def plan_step(
    build: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
    optimizers: Sequence[Optimizer],
    options: Options,
    names: Sequence[str] = (),
    scale: LossScale | None = None,
    captures: Captures | None = None,
    move: ModelMove | None = None,
) -> Planned:
    """The plan of a step for arguments like these, which the user calls so: `PASSES` up to *physical*, one by one.
    `captures` are those that other plans of the same step have made; with a `move` the model is to lie otherwise."""
    many, name = options.micro_batches, str(options.name)
    batch = Batch.of(args, kwargs, many, name, options.slices) if options.piped else None
    inputs = tensors_by_path(args, kwargs)
    refuse_closures(optimizers)
    _refuse_gradients(inputs, options.piped)
    flows = input_flows(options.flows, inputs, names, name)
    passes = Passes(modules, optimizers, options, flows, inputs, scale, move)
    alone, captures = captures is None, captures or Captures()
    logical = captures.of(passes, build, args, kwargs)
    if optimizers and torch.is_grad_enabled() and not logical.losses:
        raise SbpError(
            f"{name} has an optimizer, and build(...) calls no backward(): nothing would be trained\n"
            "  call loss.backward() in it, or run the graph under torch.no_grad()"
        )
    if logical.losses and options.loss_scale is not None and not optimizers:
        raise SbpError(
            f"{name} has loss_scale={options.loss_scale} and no optimizer: gradients would be left with the scale\n"
            "  give it the optimizer, or leave loss_scale= out and scale the loss by a torch.amp.GradScaler"
        )
    if options.skip_nonfinite and not optimizers:
        raise SbpError(
            f"{name} has skip_nonfinite=True and no optimizer, so there is no step that could be left out\n"
            "  give it the optimizer, or leave skip_nonfinite= out and look at the gradients before yours steps"
        )
    if options.post_validation and logical.losses:
        if not optimizers:
            raise SbpError(
                f"{name} has post_validation=True and no optimizer\n  give it one, or leave post_validation= out"
            )
        refuse_mixing(optimizers, name)
    how: Any = {"sliced": options.slices not in (None, 1), "free": passes.free}
    balance = even_stages(logical, modules, options.policy, many, passes.states, **how)
    logical = passes.placed(logical, balance.moved)
    pieces = None
    if batch is None:
        try:
            decided = passes.decided(logical, inputs, options.memory, enough=captures.enough, known=captures.known)
        except ShortageError as error:
            if not alone or options.memory is None or passes.whole or options.post_validation:
                raise  # who plans many tries this itself; and optimizers that step whole tensors have other needs
            limit = options.memory
            raise with_fix(error, logical, limit, lambda other: passes.decided(other, inputs, limit)) from None
        graph = bucketed(decided.graph)
        passes.dump("physical", lambda: to_text(graph))
    else:
        pieces = plan_pieces(passes, build, args, kwargs, batch, logical, balance.moved)
        logical, decided, graph = pieces.first.micro.logical, pieces.first.decided, pieces.first.graph
        if pieces.streams and (passes.scale is not None or options.skip_nonfinite):
            half, fix = "trains them in fp16", "take bf16, or"
            asked, fix = (half, fix) if passes.scale is not None else ("is to leave steps out", "take")
            raise ScheduleError(
                f"schedule {options.policy.name} updates weights while a step goes on, and {asked}\n"
                f"  no stage can know whether another overflows: {fix} a schedule with a flush, such as '1f1b'"
            )
    passes.settle(build)
    graph = replace(graph, called=input_titles(inputs, names))
    return Planned(passes, logical, decided, graph, balance, said_of(modules), _ties(named_values(modules)), pieces)


def _ties(values: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name with the first name that its value has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in values.items()}


def _fits(value: Tensor, of: Layout, types: Types | None, *, free: bool) -> bool:
    """Whether a parameter or buffer is what was planned, or can be made so."""
    cast = types is not None and isinstance(value, nn.Parameter) and types.weights is of.dtype
    same = tuple(value.shape) == of.shape and (value.dtype is of.dtype or cast)
    if free or not isinstance(value, GlobalTensor):
        return same
    return same and value.placement is of.placement and value._layout.state == of.state


def _refuse_gradients(inputs: Mapping[str, Tensor], piped: bool) -> None:
    """Gradients would end at the graph, and what comes before it would not be trained; micro-batches give none."""
    for path, x in inputs.items():
        if not (x.requires_grad and torch.is_grad_enabled()):
            continue
        if piped:
            raise SbpError(
                f"the argument {path} requires grad, which a step in micro-batches does not give\n"
                "  leave micro_batches= and schedule= out, or pass it detached"
            )
        if not x.is_leaf:
            raise SbpError(
                f"the argument {path} {tuple(x.shape)} was computed from something that requires grad\n"
                "  no gradient would go back from the graph to there\n"
                "  compute it inside of the graph, or pass x.detach()"
            )
