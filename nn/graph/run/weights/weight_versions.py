"""Versions of weights: for schedules without a flush, in which every stage updates its weights as its gradients come.

A register holds the weights of each chunk in several versions. The forward and backward of a micro-batch read the same
one, and a slot is free when both are done: PipeDream keeps as many as there are micro-batches under way, 2BW keeps two
and updates every few micro-batches. Between two steps everything is finished, so that a step of the graph begins with
the newest weights on all stages.

Where a schedule reads weights unpinned, as PipeMare's does, no register has them: there is one version, which a forward
reads at its time and its backward at its own. Where they are corrected, the backward reads them less `gap * velocity`:
as many updates back as there were since the forward, at the pace of the mean of late ones.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import ref

import torch

from .....actors.protocol.network import Actor, Network, Register
from .....actors.protocol.state import Firing
from .....actors.schedules.schedule import Schedule
from .....placement.errors import ScheduleError
from ...compiler.codegen import Bundles, Running
from ...compiler.generated_calls import Shards
from ...lower.instructions import Instruction, LocalRegister, Transfer
from ...microbatch.batch import PieceKind
from ..tasks import Name
from ..variant import Variant
from .same_weights import Fire, Sums, Update
from .unpinned_weights import Velocity, check_only_read

__all__ = ["WeightVersions"]


class Version:
    """The weights of a chunk at one time. The newest are the parameters themselves; when these are about to change,
    whoever still needs the version gets a copy."""

    def __init__(self, shards: dict[str, Shards]) -> None:
        self.shards = shards


class WeightVersions:
    """How a schedule without a flush keeps weights: every chunk has its versions, and an optimizer, an actor U, that
    makes the next. A step is told how: its `update` makes one step of the optimizers on some parameters."""

    def __init__(
        self,
        variants: Mapping[tuple[int, PieceKind], Variant],
        kinds: Sequence[PieceKind],
        schedule: Schedule,
        name: str,
    ) -> None:
        self.update: Update = _forgotten
        self.key = 0, kinds[0]
        self.variant = variants[self.key]
        self.sums: dict[tuple[int, PieceKind], Sums] = {}
        self.held: Mapping[str, Shards] = {}
        self.newest: dict[int, Version] = {}
        many = sorted({kind.sizes[0] for kind in kinds})
        if len(many) > 1:
            raise ScheduleError(
                f"{name}: micro-batches of {' and '.join(map(str, many))} samples\n"
                f"  {schedule.name} has all of one size; pass a batch whose samples micro_batches= divides"
            )
        if len(set(kinds)) > 1:
            raise ScheduleError(
                f"{name}: {len(set(kinds))} kinds of micro-batches, as updates have more or fewer of them, or some "
                f"samples are taken by their place\n"
                f"  {schedule.name} has one step for all; or take a schedule with a flush, such as '1f1b'"
            )
        if self.variant.backend == "autograd":
            raise ScheduleError(
                f"{name}: backend='autograd' keeps the weights of a forward by reference\n"
                f"  {schedule.name} changes them before its backward; leave backend= out"
            )
        if schedule.unpinned:
            check_only_read(self.variant, schedule.name, name)
        tasks = self.variant.tasks
        far = next((do for do in tasks.before if _leaves(tasks.transfers[do.number])), None)
        if far is not None:
            raise ScheduleError(
                f"{name}: a weight is used on two groups of ranks, {far.reads[0]}\n"
                f"  {schedule.name} has versions of a weight on one stage; place what shares it together, "
                "or take a schedule with a flush, such as '1f1b'"
            )
        homes = {task.name.chunk: set(task.sums) for task in tasks.tasks.values() if task.sums}
        self.slots_of: dict[int, tuple[LocalRegister, ...]] = {}
        for chunk, registers in homes.items():
            self.slots_of[chunk] = tuple(dict.fromkeys(slot for r, slot in tasks.sums.items() if r in registers))
        self.chunk_of: dict[str, int] = {}  # of each gradient on its way home
        for chunk, slots in self.slots_of.items():
            for slot in slots:
                if self.chunk_of.setdefault(slot, chunk) != chunk:
                    raise ScheduleError(
                        f"{name}: the gradient of {slot.of} comes from two chunks\n"
                        f"  {schedule.name} updates each chunk by itself; take a schedule with a flush, such as '1f1b'"
                    )
        self.after: dict[int, list[Instruction]] = defaultdict(list)
        for do in tasks.after:
            chunk = next(self.chunk_of[x] for x in do.reads if x in self.chunk_of)
            self.chunk_of.update(dict.fromkeys(do.writes, chunk))
            self.after[chunk].append(do)
        self.homes: dict[int, dict[str, LocalRegister]] = defaultdict(dict)
        for weight, register in tasks.grads.items():
            self.homes[self.chunk_of[register]][weight] = register
        self.seeing: dict[int, Running] = {}
        self.unpinned = schedule.unpinned
        self.velocity: dict[int, Velocity] = {}  # where weights are corrected
        self.updates: dict[int, int] = {}  # of each chunk in this step
        self.read: dict[tuple[int, int], int] = {}  # of these, by chunk and micro-batch, those that its forward saw

    def corrects(self, delays: Mapping[int, int]) -> None:
        """Have chunks that read weights so many updates late corrected, if the schedule does that."""
        if self.unpinned == "corrected":
            self.velocity = {chunk: Velocity(late) for chunk, late in delays.items() if late}

    @property
    def corrected(self) -> frozenset[str]:
        """The weights that have a mean of late updates."""
        return frozenset(name for chunk in self.velocity for name in self.homes.get(chunk, ()))

    def goes_on(self, means: Mapping[str, Shards]) -> None:
        """Have the next step go on with these means."""
        for chunk, velocity in self.velocity.items():
            velocity.mean = {name: means[name] for name in self.homes.get(chunk, ())}

    def prepare(self) -> None:
        """Compile what is done once a step, before all micro-batches: that of frozen weights."""
        _ = self.frozen

    @cached_property
    def frozen(self) -> Running:
        """The moves of weights that no update changes, to who needs them."""
        known = {name for names in self.homes.values() for name in names}
        todo: list[Instruction] = []
        for do in self.variant.tasks.before:
            if do.reads[0] in known:
                known.update(do.writes)
            else:
                todo.append(do)
        made: dict[str, LocalRegister] = {y: y for do in todo for y in do.writes}
        return self.variant.running("before", todo, Bundles((), (made,)))

    def begin(
        self,
        held: Mapping[str, Shards],
        update: Update,
        made: Sequence[Mapping[str, Shards]],
        validation: object,
    ) -> dict[tuple[int, PieceKind], Mapping[str, Shards]]:
        """The weights that a step starts with."""
        self.held, self.update, self.sums = held, update, {self.key: {}}
        self.updates, self.read = {}, {}
        with torch.no_grad():
            (still,) = self.frozen.run(held)
        return {self.key: {**held, **still}}

    def grads(self) -> dict[str, Shards]:
        """No gradients are left: the optimizers have had them."""
        return {}

    def undo(self) -> Sequence[int]:
        """The chunks that were updated in a step that an error has ended: they stay so."""
        return sorted(self.updates)

    def end(self) -> None:
        self.held, self.update, self.newest, self.sums = {}, _forgotten, {}, {}

    def initial(self, network: Network) -> dict[str, Callable[[], Sequence[Any]]]:
        """The versions that lie in registers from the start."""
        of = ref(self)

        def versions(register: Register) -> Sequence[Any]:
            weights = of()
            assert weights is not None
            return [weights.first(int(register.name.partition(".")[2]))] * register.initial

        return {r.name: partial(versions, r) for r in network.registers if r.name.startswith("w.")}

    def first(self, chunk: int) -> Version:
        """The weights of a chunk as they are now, also where they are seen in another way."""
        version = self.newest[chunk] = self.version(chunk, {name: self.held[name] for name in self.homes[chunk]})
        return version

    def version(self, chunk: int, weights: Mapping[str, Shards]) -> Version:
        """These weights of a chunk with what others need of them."""
        names = self.homes[chunk]
        if chunk not in self.seeing:
            known, todo = set(names), []
            for do in self.variant.tasks.before:
                if do.reads[0] in known:
                    known.update(do.writes)
                    todo.append(do)
            made: dict[str, LocalRegister] = {y: y for do in todo for y in do.writes}
            self.seeing[chunk] = self.variant.running(f"before{chunk}", todo, Bundles((), (made,)))
        with torch.no_grad():
            (seen,) = self.seeing[chunk].run({**self.held, **weights})
        return Version({**weights, **seen})

    def work(self, actor: Actor, task: Callable[[Actor], Fire]) -> Fire:
        """The work of an actor: an update, or a task, which may hand an update the gradients that were added up."""
        if actor.name.startswith("U"):
            return self.updating(int(actor.name[1:]), len(actor.gives))
        run = task(actor)
        chunk = Name.of(actor.cases[0] or actor.name).chunk
        ports = [give.register for give in actor.gives]
        last = next((at for at, register in enumerate(ports) if register.startswith("g.")), None)
        if last is None:
            return run
        every, slots, of = actor.gives[last].every, self.slots_of.get(chunk, ()), ref(self)

        def fire(firing: Firing) -> Sequence[Any]:
            out = list(run(firing))
            weights = of()
            if weights is not None and (firing.turn + 1) % every == 0:
                sums = weights.sums[weights.key]
                out[last] = tuple(tuple(sums.pop(slot, ())) for slot in slots)
            return out

        return fire

    def updating(self, chunk: int, width: int) -> Fire:
        """The work of a chunk's optimizer, which gives the next version where a register has these."""
        of, takes = ref(self), tuple((slot,) for slot in self.slots_of.get(chunk, ()))
        home = self.variant.running(f"after{chunk}", self.after[chunk], Bundles(takes, (self.homes[chunk],)))

        def fire(firing: Firing) -> Sequence[Any]:
            (slot,) = firing.held[0]
            weights = of()
            assert weights is not None
            with torch.no_grad():
                (grads,) = home.run(weights.held, *slot.value)
            weights.retire(chunk)
            return weights.updated(chunk, grads)[:width]

        return fire

    def updated(self, chunk: int, grads: Mapping[str, Shards]) -> tuple[Version]:
        """A chunk's weights behind an update of them."""
        velocity, own = self.velocity.get(chunk), {name: self.held[name] for name in self.homes[chunk]}
        if velocity is not None:
            velocity.before(own)
        if own:  # else all of the chunk is frozen
            self.update(grads)
        if velocity is not None:
            velocity.after(own)
        self.updates[chunk] = self.updates.get(chunk, 0) + 1
        return (self.first(chunk),)

    def retire(self, chunk: int) -> None:
        """The newest version is about to change: a copy for those who hold it, if there are any."""
        old = self.newest.pop(chunk)
        watch, shards = ref(old), old.shards
        del old
        held = watch()
        if held is not None:
            held.shards = {name: tuple(x.clone() for x in each) for name, each in shards.items()}

    def seen(
        self, shards: Mapping[str, Shards], firing: Firing, key: tuple[int, PieceKind], task: Name
    ) -> Mapping[str, Shards]:
        """The sources of a micro-batch with the version that a task is to see."""
        if self.unpinned:
            return {**shards, **self.unheld(task, firing.label).shards}
        version = next(slots[0].value for slots in firing.held if slots and isinstance(slots[0].value, Version))
        return {**shards, **version.shards}

    def unheld(self, task: Name, number: int) -> Version:
        """The weights that a task reads at its time, which is that of its chunk's queue."""
        chunk = task.chunk
        if chunk not in self.homes:
            return Version({})  # nothing of it is trained
        newest = self.newest.get(chunk) or self.first(chunk)
        if chunk not in self.velocity:
            return newest
        if task.kind == "F":
            self.read[chunk, number] = self.updates.get(chunk, 0)
            return newest
        late = self.updates.get(chunk, 0) - self.read[chunk, number]
        own = {name: self.held[name] for name in self.homes[chunk]}
        return self.version(chunk, self.velocity[chunk].back(own, late))


def _forgotten(grads: Mapping[str, Shards]) -> None:
    raise AssertionError("an update after the end of a step")


def _leaves(transfer: Transfer) -> bool:
    """Whether a move goes to other ranks."""
    return any(set(src.placement.flat).isdisjoint(dst.placement.flat) for src, dst in transfer.pairs)
