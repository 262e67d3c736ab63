"""Streamed programs: schedules without a flush, in which every stage updates its weights as its gradients come.

A register holds the weights of each chunk in several versions. The forward and backward of a micro-batch read the same
one, and a slot is free when both are done: PipeDream keeps as many as there are micro-batches under way, 2BW keeps two
and updates every few micro-batches. Between two steps everything is finished, so that a step of the graph begins with
the newest weights on all stages.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import ref

import torch

from ....actors.protocol.network import Actor, Network, Register
from ....actors.protocol.state import Firing
from ....actors.schedules.schedule import Schedule
from ....placement.errors import ScheduleError
from ..compiler.codegen import Bundles, Running
from ..compiler.generated_calls import Shards, no_shards, plain
from ..lower.overlap import Do, Transfer
from ..lower.registers import LocalRegister
from ..microbatch.parts import Size
from .pipeline import Made, Pipelined
from .tasks import Name
from .variant import Variant

__all__ = ["Streamed", "Update"]

Update = Callable[[Mapping[str, Shards]], None]  # an optimizer's step with these gradients, in place


class Version:
    """The weights of a chunk at one time. The newest are the parameters themselves; when these are about to change,
    whoever still needs the version gets a copy."""

    def __init__(self, shards: dict[str, Shards]) -> None:
        self.shards = shards


class Streamed(Pipelined):
    """A pipeline that updates as it goes; `update` makes one step of the optimizers on some parameters."""

    def __init__(
        self,
        variants: Mapping[tuple[int, Size], Variant],
        sizes: Sequence[Size],
        schedule: Schedule,
        name: str,
        update: Update,
    ) -> None:
        self.update = update
        self.held: Mapping[str, Shards] = {}
        self.newest: dict[int, Version] = {}
        if len(set(sizes)) > 1:
            raise ScheduleError(
                f"{name}: micro-batches of {' and '.join(str(size) for size, *_ in sorted(set(sizes)))} samples\n"
                f"  {schedule.name} has all of one size; pass a batch whose samples micro_batches= divides"
            )
        tasks = variants[0, sizes[0]].tasks
        far = next((do for do in tasks.before if _leaves(tasks.transfers[do.number])), None)
        if far is not None:
            raise ScheduleError(
                f"{name}: a weight is used on two groups of ranks, {far.reads[0]}\n"
                f"  {schedule.name} has versions of a weight on one stage; place what shares it together, "
                "or take a schedule with a flush, as '1f1b'"
            )
        homes = {task.name.chunk: set(task.sums) for task in tasks.tasks.values() if task.sums}
        self.slots_of: dict[int, tuple[LocalRegister, ...]] = {}
        for chunk, registers in homes.items():
            self.slots_of[chunk] = tuple(dict.fromkeys(slot for r, slot in tasks.sums.items() if r in registers))
        seen: dict[str, int] = {}
        for chunk, slots in self.slots_of.items():
            for slot in slots:
                if seen.setdefault(slot, chunk) != chunk:
                    raise ScheduleError(
                        f"{name}: the gradient of {slot.of} comes from two chunks\n"
                        f"  {schedule.name} updates each chunk by itself; take a schedule with a flush, as '1f1b'"
                    )
        self.seeing: dict[int, tuple[tuple[str, ...], Running]] = {}
        super().__init__(variants, sizes, schedule, name)

    def initial(self, network: Network) -> dict[str, Callable[[], Sequence[Any]]]:
        of = ref(self)

        def versions(register: Register) -> Sequence[Any]:
            program = of()
            assert program is not None
            return [program.first(int(register.name.partition(".")[2]))] * register.initial

        return {r.name: partial(versions, r) for r in network.registers if r.name.startswith("w.")}

    def first(self, chunk: int) -> Version:
        """The weights of a chunk as they are now, also where they are seen in another way."""
        variant = self.firsts[0]
        names = [name for name, register in variant.tasks.grads.items() if self.owns(chunk, register)]
        if chunk not in self.seeing:
            known, todo = set(names), []
            for do in variant.tasks.before:
                if do.reads[0] in known:
                    known.update(do.writes)
                    todo.append(do)
            ours = tuple(do.writes[0] for do in todo)
            gives = Bundles((), tuple((y,) for y in ours))
            self.seeing[chunk] = ours, variant.running(f"before{chunk}", todo, gives)
        made, see = self.seeing[chunk]
        with torch.no_grad():
            seen = dict(zip(made, see.run(self.held), strict=True))
        version = self.newest[chunk] = Version({**{name: self.held[name] for name in names}, **seen})
        return version

    def owns(self, chunk: int, register: str) -> bool:
        """Whether a gradient at home is made of what this chunk adds up."""
        return self.chunk_of[register] == chunk

    @cached_property
    def chunk_of(self) -> dict[str, int]:
        """The chunk of each gradient at home."""
        tasks = self.firsts[0].tasks
        made = {slot: chunk for chunk, slots in self.slots_of.items() for slot in slots}
        for do in tasks.after:
            for y in do.writes:
                made[y] = next(made[x] for x in do.reads if x in made)
        return {register: made[register] for register in tasks.grads.values()}

    def work(self, actor: Actor) -> Callable[[Firing], Sequence[Any]]:
        if actor.name.startswith("U"):
            return self.updating(int(actor.name[1:]))
        run = super().work(actor)
        chunk = Name.of(actor.cases[0] or actor.name).chunk
        ports = [give.register for give in actor.gives]
        last = next((at for at, register in enumerate(ports) if register.startswith("g.")), None)
        if last is None:
            return run
        every, slots, of = actor.gives[last].every, self.slots_of[chunk], ref(self)
        key = self.keys[0]

        def fire(firing: Firing) -> Sequence[Any]:
            out = list(run(firing))
            program = of()
            if program is not None and (firing.turn + 1) % every == 0:
                out[last] = tuple(tuple(program.sums[key].pop(slot, ())) for slot in slots)
            return out

        return fire

    def updating(self, chunk: int) -> Callable[[Firing], Sequence[Any]]:
        """The work of a chunk's optimizer."""
        variant = self.firsts[0]
        slots = self.slots_of.get(chunk, ())
        homes = {name: register for name, register in variant.tasks.grads.items() if self.owns(chunk, register)}
        todo = [do for do in variant.tasks.after if self.chunk_of_do(do) == chunk]
        takes, gives = tuple((slot,) for slot in slots), tuple((register,) for register in homes.values())
        of, layouts = ref(self), variant.tasks.layouts
        home: Running = variant.running(f"after{chunk}", todo, Bundles(takes, gives))

        def fire(firing: Firing) -> Sequence[Any]:
            (slot,) = firing.held[0]
            program = of()
            assert program is not None
            with torch.no_grad():
                made = home.run(program.held, *slot.value)
            grads = {
                name: mine or no_shards(layouts[register])
                for (name, register), mine in zip(homes.items(), made, strict=True)
            }
            program.retire(chunk)
            program.update(grads)
            return (program.first(chunk),)

        return fire

    def chunk_of_do(self, do: Do) -> int:
        made = {slot: chunk for chunk, slots in self.slots_of.items() for slot in slots}
        return next(made[x] for x in do.reads if x in made)

    def retire(self, chunk: int) -> None:
        """The newest version is about to change: a copy for those who hold it, if there are any."""
        old = self.newest.pop(chunk)
        watch, shards = ref(old), old.shards
        del old
        held = watch()
        if held is not None:
            held.shards = {name: tuple(x.clone() for x in each) for name, each in shards.items()}

    def seen(self, k: int, firing: Firing) -> Mapping[str, Shards]:
        version = next(slots[0].value for slots in firing.held if slots and isinstance(slots[0].value, Version))
        return {**self.shards[k], **version.shards}

    def __call__(
        self, held: Mapping[str, Shards], inputs: Sequence[Mapping[str, Shards]], seeds: Sequence[Mapping[str, Shards]]
    ) -> Made:
        self.held = held
        try:
            with torch.no_grad(), plain():
                self.stream([held] * len(inputs), inputs, seeds)
        finally:
            self.held, self.newest = {}, {}
        values, self.values = self.values, []
        return Made(values, {})


def _leaves(transfer: Transfer) -> bool:
    """Whether a move goes to other ranks."""
    return any(set(src.placement.flat).isdisjoint(dst.placement.flat) for src, dst in transfer.pairs)
