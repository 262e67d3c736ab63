"""The end of a step that is done once, behind all forwards and before any backward: what micro-batches hand over is put
together, a graph runs on it, and its gradients are what backwards start from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

from ....boxing import box
from ....boxing.exchange.execute import token
from ....boxing.graph.move_table import moves_of
from ....boxing.graph.physical import Physical, vars_in
from ....placement.world import owned
from ....sbp.state import State
from ...tensors.tensor import GlobalTensor, wrap
from ..capture.arguments import cutter
from ..compiler.backends import Backend
from ..compiler.generated_calls import Shards, trimmed
from ..memory.resident import Resident
from ..microbatch.batch import Batch, joined
from ..microbatch.whole_batch import WholeBatch
from .program import Outcome, Program

__all__ = ["LateGraph", "LateRun"]


@dataclass(frozen=True, eq=False)
class LateGraph:
    """The ops that need the whole batch, and the graph of them."""

    whole: WholeBatch
    graph: Physical

    @property
    def said(self) -> str:
        """A line on what it does, and what of it is in none of a report's figures."""
        ops = self.whole.logical.ops
        sent = sum(row.total * row.count for row in moves_of(self.graph))
        lines = list(dict.fromkeys(op.origin.line for op in ops if op.origin.line))
        return (
            f"{len(ops)} ops from {lines[0] if lines else 'no line'} on run once, on the whole batch, behind all "
            f"forwards: the {sent} bytes that they move, and what brings micro-batches together for them, are in none "
            "of these figures"
        )

    @property
    def resident(self) -> Resident:
        """The memory of all its values, as if none of them were let go."""
        return Resident.of("activations", [value.layout for value in self.graph.values.values()])


@dataclass(eq=False)
class LateRun:
    """A late graph at work. `graphs` are those of the micro-batches, and `states` say how their results lie along time.
    It runs once a step, in the process and thread that makes the last of what is handed over."""

    late: LateGraph
    graphs: Sequence[Physical]
    states: Sequence[State]
    batch: Batch
    backend: Backend
    outcome: Outcome | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        many = self.late.whole.handed
        self.handed = [vars_in(graph.result)[-many:] for graph in self.graphs]
        self.lies = self.states[-many:]
        self.program = Program(self.late.graph, backend=self.backend)
        self.sources = [source.value for source in self.late.graph.sources][:many]
        lies = {s.value.name: s.value.layout for s in self.late.graph.sources}
        self.cut = {name: cutter(lies[name]) for name in self.late.whole.known}
        self.known: dict[str, Shards] = {}

    def begin(self, known: Mapping[str, Tensor]) -> None:
        """A step begins, which knows of all its samples what is made of arguments."""
        self.outcome = None
        self.known = {name: self.cut[name](x) for name, x in known.items()}

    def come(self, values: Sequence[Mapping[str, Shards]], shards: Sequence[dict[str, Shards]]) -> None:
        """Run it if all that is handed over has come, and put the gradients of micro-batches where they seek them."""
        if self.outcome is not None:
            return
        there = [{**mine, **held} for mine, held in zip(shards, values, strict=True)]  # a weight is made by nobody
        if not all(set(names) <= held.keys() for names, held in zip(self.handed, there, strict=True)):
            return
        given = self.known | {of.name: self._whole(at, there) for at, of in enumerate(self.sources)}
        self.outcome = self.program(given)
        first = self.late.whole.losses
        homes = {s.value.name: s.home for s in self.late.graph.sources}
        for loss, at in enumerate(self.late.whole.wants, first):
            name = self.sources[at].name
            gradient = wrap(self.outcome.grads[name], homes[name])
            for k, mine in enumerate(shards):
                mine[f"seed {loss}"] = self._piece(gradient, at, k, loss)

    def _whole(self, at: int, values: Sequence[Mapping[str, Shards]]) -> Shards:
        """A value of the whole batch, as the graph has it."""
        names = [names[at] for names in self.handed]
        layouts = [graph.layout(name) for graph, name in zip(self.graphs, names, strict=True)]
        parts = [held[name] for name, held in zip(names, values, strict=True)]
        whole = joined(parts, layouts, self.lies[at], self.batch, [1.0] * len(parts))
        return tuple(box(tuple(whole._shards), whole._layout, self.sources[at].layout, op="whole batch"))

    def _piece(self, gradient: GlobalTensor, at: int, k: int, loss: int) -> Shards:
        """The part of a gradient that is a micro-batch's: that of its samples, all of an addend's, a share of others'.
        It lies as that of a loss of the micro-batch."""
        state, piece, graph = self.lies[at], self.batch.pieces[k], self.graphs[k]
        mine: Any = gradient
        if state.split:
            mine = self.batch.piece(gradient, state.dims, piece)
        elif not state.partial:
            mine = gradient * prod(self.batch.shares(piece))
        there = graph.layout(graph.losses[loss][0]).dual
        return tuple([x.clone() for x in box(tuple(mine._shards), mine._layout, there, op="whole batch")])

    def results(self) -> dict[int, GlobalTensor]:
        """The results of the step that it made, by number."""
        found = {}
        for n, name in zip(self.late.whole.late, vars_in(self.late.graph.result), strict=True):
            of = self.late.graph.layout(name)
            shards: Shards = (token(of),)
            if owned(of.placement):
                assert self.outcome is not None, "a micro-batch has not handed over all that it should have"
                shards = self.outcome.values[name]
            found[n] = wrap(shards if of.shape else trimmed(shards), of)
        return found
