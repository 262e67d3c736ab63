"""Versions of weights: for schedules without a flush, in which every stage updates its weights as its gradients come.

A register holds the weights of each chunk in several versions. The forward and backward of a micro-batch read the same
one, and a slot is free when both are done: PipeDream keeps as many as there are micro-batches under way, 2BW keeps two
and updates every few micro-batches. Between two steps everything is finished, so that a step of the graph begins with
the newest weights on all stages.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import ref

import torch

from .....actors.protocol.network import Actor, Network, Register
from .....actors.protocol.state import Firing
from .....actors.schedules.schedule import Schedule
from .....placement.errors import ScheduleError
from ...compiler.generated_calls import Shards
from ...instructions.codegen import Bundles, Running
from ...instructions.instruction import Instruction
from ...lower.registers import LocalRegister, Transfer
from ...memory.resident import Resident
from ...microbatch.batch import PieceKind
from ...tasks.task import Name
from ..variant import Variant
from .step_state import StepState, VariantKey
from .weights import Fire, MeanDtype, Weights

__all__ = ["Version", "WeightVersions"]


class Version:
    """The weights of a chunk at one time. The newest are the parameters themselves; when these are about to change,
    whoever still needs the version gets a copy."""

    def __init__(self, shards: dict[str, Shards]) -> None:
        self.shards = shards


class WeightVersions(Weights):
    """How a schedule without a flush keeps weights: every chunk has its versions, and an optimizer, an actor U, that
    makes the next. A step is told how: its `update` makes one step of the optimizers on some parameters."""

    def __init__(
        self,
        variants: Mapping[VariantKey, Variant],
        kinds: Sequence[PieceKind],
        schedule: Schedule,
        name: str,
    ) -> None:
        self.key = 0, kinds[0]
        self.variant = variants[self.key]
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
        self.late = self.homes = defaultdict[int, dict[str, LocalRegister]](dict)
        for weight, register in tasks.grads.items():
            self.homes[self.chunk_of[register]][weight] = register
        self.seeing: dict[int, Running] = {}
        self.updates: dict[int, int] = {}  # of each chunk in this step

    def prepare(self) -> None:
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

    def resident(self, slots: Mapping[str, int], states: int, mean: MeanDtype) -> Iterator[Resident]:
        """Further versions of each chunk's weights: copies also of what is else a view of them."""
        layouts = self.variant.tasks.layouts
        for chunk, names in self.homes.items():
            seen = (y for do in self.seen_by(names) for y in do.writes)
            further = max(0, slots.get(f"w.{chunk}", 1) - 1)
            yield Resident.of("activations", [layouts[x] for x in (*names, *seen)], further)

    def begin(self, step: StepState) -> dict[VariantKey, Mapping[str, Shards]]:
        self.step, self.updates = step, {}
        with torch.no_grad():
            (still,) = self.frozen.run(step.held)
        return {self.key: {**step.held, **still}}

    def grads(self) -> dict[str, Shards]:
        return {}

    def undo(self) -> Sequence[int]:
        return sorted(self.updates)

    def end(self) -> None:
        super().end()
        self.newest = {}

    def initial(self, network: Network) -> dict[str, Callable[[], Sequence[Any]]]:
        """The first version, as often as a register has it."""

        def versions(register: Register) -> Sequence[Any]:
            return [self.first(int(register.name.partition(".")[2]))] * register.initial

        return {r.name: partial(versions, r) for r in network.registers if r.name.startswith("w.")}

    def first(self, chunk: int) -> Version:
        """The weights of a chunk as they are now, also where they are seen in another way."""
        version = self.newest[chunk] = self.version(chunk, {name: self.step.held[name] for name in self.homes[chunk]})
        return version

    def seen_by(self, names: Iterable[str]) -> list[Instruction]:
        """The moves of these weights to who needs them."""
        known, todo = set(names), []
        for do in self.variant.tasks.before:
            if do.reads[0] in known:
                known.update(do.writes)
                todo.append(do)
        return todo

    def version(self, chunk: int, weights: Mapping[str, Shards]) -> Version:
        """These weights of a chunk with what others need of them."""
        names = self.homes[chunk]
        if chunk not in self.seeing:
            todo = self.seen_by(names)
            made: dict[str, LocalRegister] = {y: y for do in todo for y in do.writes}
            self.seeing[chunk] = self.variant.running(f"before{chunk}", todo, Bundles((), (made,)))
        with torch.no_grad():
            (seen,) = self.seeing[chunk].run({**self.step.held, **weights})
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
        every, slots = actor.gives[last].every, self.slots_of.get(chunk, ())

        def fire(firing: Firing) -> Sequence[Any]:
            out = list(run(firing))
            if (firing.turn + 1) % every == 0:
                sums = self.step.sums[self.key]
                out[last] = tuple(tuple(sums.pop(slot, ())) for slot in slots)
            return out

        return fire

    def updating(self, chunk: int, width: int) -> Fire:
        """The work of a chunk's optimizer, which gives the next version where a register has these."""
        takes = tuple((slot,) for slot in self.slots_of.get(chunk, ()))
        home = self.variant.running(f"after{chunk}", self.after[chunk], Bundles(takes, (self.homes[chunk],)))

        def fire(firing: Firing) -> Sequence[Any]:
            (slot,) = firing.held[0]
            with torch.no_grad():
                (grads,) = home.run(self.step.held, *slot.value)
            self.retire(chunk)
            return self.updated(chunk, grads)[:width]

        return fire

    def updated(self, chunk: int, grads: Mapping[str, Shards]) -> tuple[Version]:
        """A chunk's weights behind an update of them."""
        if self.homes[chunk]:  # else all of the chunk is frozen
            self.step.update(grads)
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

    def seen(self, shards: Mapping[str, Shards], firing: Firing, key: VariantKey, task: Name) -> Mapping[str, Shards]:
        version = next(slots[0].value for slots in firing.held if slots and isinstance(slots[0].value, Version))
        return {**shards, **version.shards}


def _leaves(transfer: Transfer) -> bool:
    """Whether a move goes to other ranks."""
    return any(set(src.placement.flat).isdisjoint(dst.placement.flat) for src, dst in transfer.pairs)
