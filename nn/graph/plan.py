"""The plan of a step: all that is decided before anything runs, as a value.

Planning looks at modules and changes nothing: only the first run makes parameters global, with values where they have
none. What was planned stands as long as nothing it depends on has changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...boxing.graph.buckets import bucketed
from ...boxing.graph.physical import Physical
from ...boxing.graph.text.text import to_text
from ...placement.errors import ShortageError
from ...sbp import Layout
from ...sbp.logical import Logical
from ..model.cast import Types, types_of
from ..tensors.tensor import GlobalTensor
from .capture.arguments import StepCall, input_titles
from .capture.surroundings.garbage import uncollected
from .captures import Captures
from .choose.choose import Decided
from .choose.offload_fix import with_fix
from .choose.parameters import named_values, said_of
from .choose.stage_balance import Balance, even_stages
from .memory.liveness import RankMemory
from .microbatch.batch import Batch
from .optimizer.adopt import refuse_closures
from .optimizer.loss_scale import LossScale
from .optimizer.relocation import ModelMove
from .options import Options
from .passes import Passes
from .pieces import Pieces, kept_of
from .plan_pieces import plan_pieces
from .refusals import refuse, refuse_gradients, refuse_left, refuse_recording
from .run.pipeline import Pipelined
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

    @property
    def program(self) -> Program | Pipelined:
        """The program that runs; it is compiled when it is told to prepare."""
        return self.whole if self.pieces is None else self.pieces.program

    @cached_property
    def whole(self) -> Program:
        """That of a step without micro-batches."""
        return Program(self.graph, backend=self.options.backend)

    def memory(self) -> dict[int, RankMemory]:
        """The bytes that a step takes at its peak on every rank."""
        return self.whole.memory() if self.pieces is None else self.pieces.memory()

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


@uncollected()
def plan_step(
    call: StepCall,
    modules: Mapping[str, nn.Module],
    optimizers: Sequence[Optimizer],
    options: Options,
    scale: LossScale | None = None,
    captures: Captures | None = None,
    move: ModelMove | None = None,
) -> Planned:
    """The plan of a step for arguments like these: `PASSES` up to *physical*, one by one. `captures` are those that
    other plans of the same step have made; with a `move` the model is to lie otherwise."""
    name, many = str(options.name), options.micro_batches
    batch = Batch.of(call.args, call.kwargs, many, name, options.slices) if options.piped else None
    refuse_closures(optimizers)
    refuse_gradients(call.inputs, options.piped)
    passes = Passes(modules, optimizers, options, call, scale, move)
    shared = captures or Captures()
    logical = shared.of(passes, call)
    refuse(passes, trains=bool(logical.losses))
    sliced = options.slices not in (None, 1)
    kept = passes.states, passes.update
    balance = even_stages(logical, modules, options.policy, many, *kept, sliced=sliced, free=passes.free)
    logical = passes.placed(logical, balance.moved)
    pieces = None
    if batch is not None:
        pieces = plan_pieces(passes, call, batch, logical, balance.moved, shared.known)
        logical, decided, graph = pieces.first.micro.logical, pieces.first.decided, pieces.first.graph
    else:
        decided = _straight(passes, call, logical, shared, alone=captures is None)
        graph = bucketed(decided.graph)
        passes.dump("physical", lambda: to_text(graph))
    if options.cuda_graph:
        refuse_recording(graph, logical, name)
    if options.leave_gradients and logical.losses:
        refuse_left(graph, name)
    passes.settle(call.build)
    graph = replace(graph, called=input_titles(call.inputs, call.names))
    return Planned(passes, logical, decided, graph, balance, said_of(modules), _ties(named_values(modules)), pieces)


def _straight(passes: Passes, call: StepCall, logical: Logical, shared: Captures, *, alone: bool) -> Decided:
    """The signatures of a step without micro-batches. Who plans many tries what helps where none fits; one that is
    planned `alone` says it, but where optimizers have other needs, as they step whole tensors."""
    limit = passes.options.memory
    try:
        return passes.decided(logical, call.inputs, limit, enough=shared.enough, known=shared.known)
    except ShortageError as error:
        if not alone or limit is None or passes.whole or passes.options.post_validation:
            raise
        raise with_fix(error, logical, limit, lambda other: passes.decided(other, call.inputs, limit)) from None


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
