"""Variants: the graph of micro-batches of one size on one route, compiled task by task; and its tasks made to run."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from torch import Tensor

from ....actors.protocol.network import Actor, Give, Take
from ....boxing.graph.buckets import bucketed
from ....boxing.graph.physical import Physical
from ....placement.world import owned, world
from ..compiler.backends import Backend, Compiled
from ..compiler.codegen import Bundles, Running, task
from ..compiler.generated_calls import Shards, no_shards
from ..lower.localise import Localiser
from ..lower.order import Order as Listed
from ..lower.overlap import Do, freed, overlapped
from ..lower.segments import Segment, Stage, segments
from .chunks import Chunks, chunks
from .network import Lowered
from .program import compiled_once
from .tasks import Name, Tasks, derived
from .tasks import tasks as tasks_of
from .transfers import carrier

__all__ = ["BoundTask", "Once", "Variant"]


class Variant:
    """A graph of micro-batches of one size, compiled task by task; that is done when its tasks are first asked for."""

    def __init__(
        self,
        graph: Physical,
        said: Mapping[str, int],
        *,
        split: bool,
        streamed: bool = False,
        backend: Backend,
        placed: Collection[str] = (),
    ) -> None:
        self.split, self.backend = split, backend
        self.stages: tuple[Stage, ...] = segments(graph, said)
        self.where: Chunks = chunks(graph, self.stages, said, placed)
        home = self.where.homeward(self.stages)
        # Only what is brought home once a step goes in buckets; where every chunk updates by itself, in its own.
        alike = {name: chunk if streamed else 0 for name, chunk in home.items()}
        self.graph = bucketed(graph, together=lambda move: alike.get(move.of))
        self.compiled: dict[tuple[int, int], Compiled] = {}
        self.again: dict[int, tuple[str, ...]] = {}
        self.halves: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}

    @cached_property
    def tasks(self) -> Tasks:
        """The tasks of one micro-batch, by chunk."""
        localiser = Localiser(self.graph)
        weights = derived(self.stages, self.where)
        for number, stage in enumerate(self.stages):
            if not isinstance(stage, Segment):
                continue
            flags = tuple(name in weights for name in stage.wants)
            apart = flags if self.split and any(flags) and not all(flags) else None
            for rank in owned(stage.placement):
                local = localiser.segment(stage, rank)
                self.compiled[number, rank] = compiled_once(local, self.backend, apart)
            mine = [self.compiled[number, rank] for rank in owned(stage.placement)]
            self.again[number] = _names(stage, [one.again for one in mine])
            if apart is not None:
                halves = [[one.apart.again[half] for one in mine if one.apart] for half in (0, 1)]
                self.halves[number] = _names(stage, halves[0]), _names(stage, halves[1])
        return tasks_of(
            self.graph,
            self.stages,
            self.where,
            self.again,
            apart=self.halves if self.split else None,
            regather=self.backend != "autograd",
        )

    def running(self, name: str, todo: Sequence[Do], bundles: Bundles) -> Running:
        """Things to do as a function."""
        stay = {register for bundle in (*bundles.takes, *bundles.gives) for register in bundle}
        beside = overlapped(todo, self.tasks.transfers)
        plan = Listed(tuple(freed(beside, stay)), self.tasks.transfers, self.tasks.layouts, (), {})
        return task(self.graph, self.stages, plan, self.compiled, self.again, self.halves, bundles, name)


def _names(stage: Segment, taken: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The inputs that some rank here takes."""
    return tuple(stage.inputs[at] for at in sorted({at for numbers in taken for at in numbers}))


class BoundTask:
    """One task of one variant, made to run: where its bundles lie among the takes and gives of an actor's case."""

    def __init__(self, variant: Variant, low: Lowered, name: Name, shift: int, actor: Actor, case: str) -> None:
        own, called = variant.tasks.tasks[name], name.shifted(shift)
        ports: tuple[Take | Give, ...] = (*actor.takes, *actor.gives)
        mine = {port.register for port in ports if port.case in ("", case)}
        takes = [register for register in low.takes.get(called, ()) if register in mine]
        gives = tuple(register for register in low.gives.get(called, ()) if register in mine)
        bundles = Bundles(
            tuple(low.bundles[register].come for register in takes),
            (*(low.bundles[register].sent for register in gives), own.values, own.sums),
        )
        self.made = variant.running(str(name), own.todo, bundles)
        self.run = self.made.run
        alone = world().rank is None  # else what comes in was brought by a link
        carriers = [carrier(low.bundles[register]) if alone else None for register in takes]
        places = [take.register for take in actor.takes]
        self.takes = list(zip(map(places.index, takes), carriers, strict=True))
        places = [give.register for give in actor.gives]
        self.gives = [places.index(register) for register in gives]
        self.names, self.new = gives, True
        here = {r: len(owned(variant.tasks.layouts[r].placement)) for r in (*own.values, *own.sums)}
        self.values = [(register, here[register]) for register in own.values]
        self.sums = [(variant.tasks.sums[register], here[register]) for register in own.sums]
        self.owns = self.made.owns[-1]


class Once:
    """What is done once a step for the micro-batches of a variant, before and behind them all."""

    def __init__(self, variant: Variant) -> None:
        tasks = self.tasks = variant.tasks
        self.made = tuple(dict.fromkeys(y for do in tasks.before for y in do.writes))
        self.slots = tuple(dict.fromkeys(tasks.sums.values()))
        homes, takes = tuple((register,) for register in tasks.grads.values()), tuple((slot,) for slot in self.slots)
        self._before = variant.running("before", tasks.before, Bundles((), tuple((y,) for y in self.made)))
        self._after = variant.running("after", tasks.after, Bundles(takes, homes))

    def before(self, held: Mapping[str, Shards]) -> dict[str, Shards]:
        """The weights with those that other groups need of them."""
        return {**held, **dict(zip(self.made, self._before.run(held), strict=True))}

    def after(self, held: Mapping[str, Shards], sums: Mapping[str, list[Tensor]]) -> dict[str, Shards]:
        """Gradients at home, of what is added up here; a token of what others have."""
        made = self._after.run(held, *(tuple(sums.get(slot, ())) for slot in self.slots))
        found = zip(self.tasks.grads.items(), made, strict=True)
        return {name: mine or no_shards(self.tasks.layouts[register]) for (name, register), mine in found}
