"""Bound tasks: those of a proved pipeline, made to run as the work of its actors."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from ....actors.protocol.network import Actor, Give, Take
from ....actors.protocol.state import Firing
from ....placement.world import owned, world
from ....sbp.call import tensors_in
from ..compiler.generated_calls import Shards, trimmed
from ..instructions.codegen import Bundles
from ..instructions.overlap import goes_on
from ..microbatch.batch import PieceKind
from ..tasks.task import Name
from .network import Lowered
from .pairs import by_turns
from .proved_pipeline import ProvedPipeline
from .transfers import carrier
from .variant import Variant
from .weights.weights import Fire

__all__ = ["BoundTask", "BoundTasks"]


class BoundTask:
    """One task of one variant, made to run: where its bundles lie among the takes and gives of an actor's case.

    One that `pauses` takes turns with another: what runs is a generator.
    """

    def __init__(
        self,
        variant: Variant,
        low: Lowered,
        name: Name,
        shift: int,
        actor: Actor,
        case: str,
        *,
        early: bool,
        pauses: bool = False,
    ) -> None:
        self.name, own, called = name, variant.tasks.tasks[name], name.shifted(shift)
        ports: tuple[Take | Give, ...] = (*actor.takes, *actor.gives)
        mine = {port.register for port in ports if port.case in ("", case)}
        takes = [register for register in low.takes.get(called, ()) if register in mine]
        gives = tuple(register for register in low.gives.get(called, ()) if register in mine)
        bundles = Bundles(
            tuple(low.bundles[register].come for register in takes),
            (*(low.bundles[register].sent for register in gives), own.values),
        )
        self.made = variant.running(str(name), own.todo, bundles, pauses=pauses)
        self.moves = any(goes_on(do, variant.tasks.transfers) for do in own.todo)
        alone = world().rank is None  # else what comes in was brought by a link
        carriers = [carrier(low.bundles[register]) if alone else None for register in takes]
        self.ports = frozenset(at for at, take in enumerate(actor.takes) if take.case in ("", case))
        places = [take.register for take in actor.takes]
        self.takes = list(zip(map(places.index, takes), carriers, strict=True))
        places = [give.register for give in actor.gives]
        self.gives = [places.index(register) for register in gives]
        self.names, self.new = gives, True
        here = {r: len(owned(variant.tasks.layouts[r].placement)) for r in own.values}
        self.values = [(register, here[register]) for register in own.values]
        # What buffers become may be views of weights, which change before the step ends where optimizers step early.
        self.copied = frozenset(variant.graph.writes.values()) if early else frozenset[str]()

    def own(self, firing: Firing, label: int) -> Firing:
        """The part of a firing that is this task's, where that is of two at once."""
        if not firing.more:
            return firing
        held = [slots if at in self.ports else () for at, slots in enumerate(firing.held)]
        return firing._replace(label=label, held=tuple(held), more=())

    def weigh(self, bundles: Sequence[Any], sizes: dict[str, int]) -> None:
        """Note how large what lies in the slots is, once."""
        self.new = False
        for register, bundle in zip(self.names, bundles, strict=False):
            sizes[register] = sum(x.nbytes for x in tensors_in(bundle))

    def keep(self, tensors: tuple[Tensor, ...], values: dict[str, Shards]) -> None:
        """The results of a micro-batch."""
        at = 0
        for register, many in self.values:
            mine = trimmed(tensors[at : at + many])
            values[register] = tuple([x.clone() for x in mine]) if register in self.copied else mine
            at += many


Bound: TypeAlias = tuple[int, Mapping[PieceKind, BoundTask]]  # the route of a task, and that for each kind


class BoundTasks:
    """The tasks of a pipeline, for each actor, case and kind of micro-batch. What a step under way holds, they find
    where its weights have it. Threads have this as their work: it knows nothing of the program that they run, so that
    they keep none alive that nobody else has."""

    def __init__(self, proved: ProvedPipeline) -> None:
        self.variants, self.lowered, self.weights = proved.variants, proved.lowered, proved.weights
        self.keys, self.count, self.routes = proved.keys, proved.count, len(proved.firsts)
        self.early = proved.weights.steps or not proved.schedule.synchronous
        self.bytes: dict[str, int] = {}  # of the registers, as far as this process has filled them

    def task(self, actor: Actor) -> Fire:
        """The work of an actor that is a task of each micro-batch, or two at once."""
        cases = [[self.bound(actor, part, "&" in case) for part in case.split("&")] for case in actor.cases]
        return partial(self.fire, cases, len(actor.gives))

    def bound(self, actor: Actor, case: str, pauses: bool) -> Bound:
        """A task of an actor as it runs for each kind of micro-batch, and its route."""
        name = Name.of(case or actor.name)
        route, chunk = divmod(name.chunk, self.count)
        own, shift = Name(name.kind, chunk), route * self.count
        return route, {
            kind: BoundTask(self.variants[route, kind], low, own, shift, actor, case, early=self.early, pauses=pauses)
            for kind, low in self.lowered.items()
            if own in self.variants[route, kind].tasks.tasks
        }

    def fire(self, cases: Sequence[Sequence[Bound]], width: int, firing: Firing) -> Sequence[Any]:
        """One task for one micro-batch, or two by turns; without gradients, as whoever runs a step asks for none."""
        out: list[Any] = [None] * width
        found = []
        for (route, entries), label in zip(cases[firing.case], (firing.label, *firing.more), strict=True):
            k = label * self.routes + route
            if (entry := entries.get(self.keys[k][1])) is not None:
                found.append((entry, k, self.begun(entry, k, entry.own(firing, label))))
        if firing.more:  # who moves nothing gives way first, and has its turn under the moves of the other
            found.sort(key=lambda each: each[0].moves)
        begun = [each for *_, each in found]
        made = by_turns(begun) if firing.more else begun
        for (entry, k, _), values in zip(found, made, strict=True):
            self.done(entry, k, values, out)
        return out

    def begun(self, entry: BoundTask, k: int, firing: Firing) -> Any:
        """A task of a micro-batch: what it makes, or of one that pauses the generator that makes it."""
        held = firing.held
        bundles = [held[at][0].value if carry is None else carry(held[at][0].value) for at, carry in entry.takes]
        shards = self.weights.step.shards[k]
        return entry.made.run(self.weights.seen(shards, firing, self.keys[k], entry.name), *bundles)

    def done(self, entry: BoundTask, k: int, made: Sequence[Any], out: list[Any]) -> None:
        """Hand on what a task has made."""
        step = self.weights.step
        for at, bundle in zip(entry.gives, made, strict=False):
            out[at] = bundle
        if entry.new:
            entry.weigh(made, self.bytes)
        if entry.values:
            entry.keep(made[-1], step.values[k])
            if step.late is not None:
                step.late.come(step.values, step.shards)
