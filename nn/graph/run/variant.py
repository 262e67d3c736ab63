"""Variants: the graph of micro-batches of one size on one route, compiled task by task."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from ....actors.schedules.chunk_ends import Folding
from ....boxing.graph.buckets import bucketed
from ....boxing.graph.physical import Physical
from ....sbp import Layout
from ..compiler.backends import Backend
from ..compiler.compiled_segments import CompiledSegments
from ..instructions.codegen import Bundles, Running, function
from ..instructions.instruction import Instruction
from ..instructions.order import Order
from ..instructions.overlap import freed, overlapped, pausing
from ..lower.localise import Localiser
from ..lower.segments import Stage, segments
from ..tasks.chunks import Chunks, chunks
from ..tasks.gradient_homes import brought_each_time
from ..tasks.task import Tasks
from ..tasks.tasks import derived
from ..tasks.tasks import tasks as tasks_of

__all__ = ["Variant"]


class Variant:
    """A graph of micro-batches of one size, compiled task by task; that is done when its tasks are first asked for."""

    def __init__(
        self,
        graph: Physical,
        said: Mapping[str, int],
        *,
        split: bool,
        apart: bool = False,
        folding: Folding | None = None,
        backend: Backend,
        placed: Collection[str] = (),
    ) -> None:
        self.split, self.backend = split, backend
        self.stages: tuple[Stage, ...] = segments(graph, said)
        gathers = folding.parts if folding is not None and folding.once else 0
        self.where: Chunks = chunks(graph, self.stages, said, placed, gathers=gathers)
        home = self.where.homeward(self.stages)
        self.part = parted(graph, home, folding.parts if folding is not None else 1)
        # What is brought home once a step goes in buckets, where every chunk does so by itself in its own, or in those
        # of its parts; and what one chunk brings home with every micro-batch in buckets of that chunk.
        many = 2 * len(self.where.group)
        alike: dict[str, int | None] = {
            name: 2 * chunk + many * self.part[name] if apart else 0 for name, chunk in home.items()
        }
        for name, readers in brought_each_time(graph, self.stages, self.where).items():
            alike[name] = 2 * readers[0] + 1 if len(readers) == 1 else None
        self.graph = bucketed(graph, together=lambda move: alike.get(move.of))

    @cached_property
    def localiser(self) -> Localiser:
        return Localiser(self.graph)

    @cached_property
    def segments(self) -> CompiledSegments:
        weights = derived(self.stages, self.where) if self.split else ()
        return CompiledSegments(self.localiser, self.stages, self.backend, weights)

    @cached_property
    def tasks(self) -> Tasks:
        """The tasks of one micro-batch, by chunk."""
        return tasks_of(
            self.graph,
            self.stages,
            self.where,
            self.segments.again,
            apart=self.segments.halves if self.split else None,
            regather=self.backend != "autograd",
        )

    def running(self, name: str, todo: Sequence[Instruction], bundles: Bundles, *, pauses: bool = False) -> Running:
        """Things to do as a function; with `pauses` as a generator, which gives way wherever it waits for a move."""
        stay = {*bundles.taken, *bundles.given}
        beside = overlapped(todo, self.tasks.transfers)
        if pauses:
            beside = pausing(beside, self.tasks.transfers)
        plan = Order(tuple(freed(beside, stay)), self.tasks.transfers, self.tasks.layouts)
        return function(self.segments, plan, bundles, name, handed=True)

    @property
    def sums(self) -> list[Layout]:
        """The layouts of gradients of weights as they are added up."""
        return list({slot: self.tasks.layouts[part] for part, slot in self.tasks.sums.items()}.values())


def parted(graph: Physical, home: Mapping[str, int], parts: int) -> dict[str, int]:
    """The part, of `parts` with about as many bytes each, in which a gradient goes home: that in which its middle
    lies."""
    moved = [move.of for move in graph.backs if move.of in home]
    sizes = {name: graph.layout(name).numel * graph.layout(name).dtype.itemsize for name in moved}
    total: Counter[int] = Counter()
    for name, size in sizes.items():
        total[home[name]] += size
    so_far: Counter[int] = Counter()
    found = dict.fromkeys(home, 0)
    for name, size in sizes.items():
        chunk = home[name]
        found[name] = min(parts - 1, parts * (2 * so_far[chunk] + size) // max(1, 2 * total[chunk]))
        so_far[chunk] += size
    return found
