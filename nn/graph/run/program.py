"""Programs: a physical graph made to run, forward, backward and every move, on the ranks that this process owns."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ....actors.runtime.runtime import RunRecord
from ....boxing.graph.physical import Physical, Source
from ....placement.errors import ShapeError
from ....placement.world import owned
from ..compiler.backends import Backend, Compiled
from ..compiler.compiled_segments import CompiledSegments
from ..compiler.generated_calls import Shards, plain
from ..instructions.codegen import Bundles, Running, function
from ..instructions.order import Order, moved_again
from ..lower.localise import Localiser
from ..lower.segments import segments, stage_text
from ..memory.liveness import RankMemory, memory
from ..tasks.straight import schedule

__all__ = ["Outcome", "Program"]

_shape_of = operator.attrgetter("shape")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step. `values` are its results, losses and what buffers are to hold; `grads` lie where sources
    have their homes. Shards are those owned here, one empty token where none is."""

    values: dict[str, Shards]
    grads: dict[str, Shards]


class Program:
    """A graph made to run on this process. Calling it runs one step, outside autograd; the first call compiles it.

    `overlap` has moves go on beside segments: None, where it pays; True or False, everywhere or nowhere.
    Equal segments are compiled once, whatever layer or rank they are of. `reasons` says where a backend had to pass a
    segment on to another.
    """

    def __init__(self, graph: Physical, *, backend: Backend = "auto", overlap: bool | None = None) -> None:
        self.graph, self.backend, self.overlap = graph, backend, overlap
        self.stages = segments(graph)
        self._localiser = Localiser(graph)
        self._inputs = [source for source in graph.sources if source.kind == "input"]
        self._unchecked: Sequence[Source] = graph.sources
        self.outcome: RunRecord | None = None  # as no actors run it

    @cached_property
    def segments(self) -> CompiledSegments:
        return CompiledSegments(self._localiser, self.stages, self.backend)

    @cached_property
    def _made(self) -> tuple[Order, Running]:
        """The schedule, and the function that runs it."""
        plan = self._scheduled(self.segments.again)
        return plan, function(self.segments, plan, Bundles((), (plan.values, plan.grads)), "step")

    def _scheduled(self, again: Mapping[int, tuple[str, ...]]) -> Order:
        return schedule(self.graph, self.stages, again, regather=self.backend != "autograd", overlap=self.overlap)

    @property
    def schedule(self) -> Order:
        """The work of a step, in order."""
        return self._made[0]

    @property
    def planned(self) -> Order:
        """The same before anything is compiled, by the graph alone."""
        return self._scheduled({})

    @property
    def text(self) -> str:
        """The function that runs it."""
        return self._made[1].text

    def passes(self) -> dict[str, str]:
        """The results of the passes that made it, by their names."""
        return {"segments": "\n".join(map(stage_text, self.stages)), "order": str(self.schedule), "source": self.text}

    def prepare(self) -> None:
        """Compile it, which else the first call does."""
        _ = self._made

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        """The distinct segments."""
        return self.segments.distinct

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why segments were not compiled by the backend that was asked for."""
        return tuple(dict.fromkeys(made.reason for made in self.compiled if made.reason))

    def __call__(self, shards: Mapping[str, Shards]) -> Outcome:
        """One step. `shards` has for each source those that this process owns, in the order of its placement."""
        step = self._made[1].run
        self._check(shards)
        with torch.no_grad(), plain():
            return Outcome(*step(shards))

    def _check(self, shards: Mapping[str, Shards]) -> None:
        """Inputs at each step, what does not change at the first."""
        for source in self._unchecked:
            name, expected = source.value.name, self._expected[source.value.name]
            found = [*map(_shape_of, shards.get(name, ()))] if expected else []
            if found != expected:
                raise ShapeError(
                    f"step of {self.graph.name}: {source.kind} {name} has shards of {[*map(tuple, found)]}\n"
                    f"  {source.value.layout} gives the ranks owned here {expected}\n"
                    "  pass one tensor for each of them; a graph of other shapes has to be made anew"
                )
        self._unchecked = self._inputs

    @cached_property
    def _expected(self) -> dict[str, list[tuple[int, ...]]]:
        """The shapes of the shards of each source that are owned here."""
        return {
            s.value.name: [s.value.layout.local_shape(rank) for rank in owned(s.value.layout.placement)]
            for s in self.graph.sources
        }

    @cached_property
    def again(self) -> tuple[str, ...]:
        """The values that are moved a second time for the backward, once for each time; the graph alone says it."""
        return moved_again(self._scheduled({}).todo)

    def memory(self) -> dict[int, RankMemory]:
        """The bytes that a step takes at its peak on every rank of the graph, owned here or not."""
        regather = self.backend != "autograd"
        return memory(self.graph, self.stages, self._localiser, regather=regather, overlap=self.overlap)
