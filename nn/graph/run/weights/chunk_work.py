"""The work that is done once a step for each chunk, by itself: weights that are gathered, gradients brought home.

    before   ->  gathers   of chunk c: moves of weights that its tasks read
                 rest      what goes to other groups of ranks, and what is only seen in another way
    after    ->  homes     of chunk c: moves of gradients that its tasks make, in parts
                 rest      gradients that come from several groups

What hangs together, as the moves of one bucket, is of one chunk: the first of those that it is for.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .....boxing.graph.buckets import exchange
from ...compiler.generated_calls import Shards
from ...instructions.codegen import Bundles, Running
from ...instructions.instruction import Instruction
from ...instructions.moves import MoveNow
from ...lower.registers import LocalRegister
from ..variant import Variant
from .same_weights import Once
from .step_state import Sums

__all__ = ["ChunkWork", "Home", "Together"]


@dataclass(frozen=True)
class Together:
    """Things to do that hang together: they read `slots`, or what was there before, and are for these chunks."""

    todo: tuple[Instruction, ...]
    registers: frozenset[LocalRegister]
    chunks: tuple[int, ...]


class Home:
    """The way home of a chunk's gradients, in parts."""

    def __init__(self, variant: Variant, chunk: int, parts: Sequence[Sequence[Together]]) -> None:
        self.parts = parts
        every = [each for part in parts for each in part]
        self.makers = tuple(sorted({c for each in every for c in each.chunks} - {chunk}))
        tasks = variant.tasks
        self.slots: list[tuple[LocalRegister, ...]] = []
        self.runs: list[Running] = []
        self.names: list[str] = []
        for number, part in enumerate(parts):
            here = {register for each in part for register in each.registers}
            slots = tuple(slot for slot in dict.fromkeys(tasks.sums.values()) if slot in here)
            homes = {name: register for name, register in tasks.grads.items() if register in here}
            mine = {id(do) for each in part for do in each.todo}
            todo = [do for do in tasks.after if id(do) in mine]
            bundles = Bundles(tuple((slot,) for slot in slots), (homes,))
            self.runs.append(variant.running(f"home{chunk}_{number}", todo, bundles))
            self.slots.append(slots)
            self.names += homes

    def run(self, part: int, held: Mapping[str, Shards], sums: Sums) -> dict[str, Shards]:
        """A part of the gradients at home; what is added up is let go."""
        made: dict[str, Shards]
        (made,) = self.runs[part].run(held, *(tuple(sums.pop(slot, ())) for slot in self.slots[part]))
        return made


class ChunkWork:
    """The work that a variant has done once a step, by chunk, in so many parts."""

    def __init__(self, variant: Variant, parts: int) -> None:
        self.variant, self.many = variant, parts
        tasks, where = variant.tasks, variant.where
        makers: dict[LocalRegister, set[int]] = {}
        for task in tasks.tasks.values():
            for register in task.sums:
                makers.setdefault(tasks.sums[register], set()).add(task.name.chunk)
        after = list(_together(tasks.after, makers))
        self.home = {
            chunk: listed for chunk in range(len(where.group)) if (listed := self.of(chunk, after, known=makers))
        }
        readers: dict[LocalRegister, set[int]] = {}
        for task in tasks.tasks.values():
            for do in task.todo:
                for register in do.reads:
                    readers.setdefault(register, set()).add(task.name.chunk)
        used = {x: readers[x] for do in tasks.before for x in do.registers if x in readers}
        before = [each for each in _together(tasks.before, used) if self.sends(each)]
        sources = {s.value.name for s in variant.graph.sources}
        self.gathered = {
            chunk: listed for chunk in range(len(where.group)) if (listed := self.of(chunk, before, known=sources))
        }

    def of(self, chunk: int, listed: Iterable[Together], known: Collection[str]) -> list[Together]:
        """Those that a chunk's ranks do alone, and that are first for this chunk."""
        return [each for each in listed if min(each.chunks, default=-1) == chunk and self.near(each, known)]

    def near(self, each: Together, known: Collection[str]) -> bool:
        where, tasks = self.variant.where, self.variant.tasks
        groups = {where.group[chunk] for chunk in each.chunks}
        written = {register for do in each.todo for register in do.writes}
        if len(groups) > 1 or any(x not in known and x not in written for do in each.todo for x in do.reads):
            return False
        ranks = {rank for group in groups for rank in where.ranks(group)}
        ways = [tasks.transfers[do.number].pairs for do in each.todo if isinstance(do, MoveNow)]
        return all(ranks.issuperset(of.placement.flat) for pairs in ways for pair in pairs for of in pair)

    def sends(self, each: Together) -> bool:
        return any(self.variant.tasks.transfers[do.number].sends for do in each.todo if isinstance(do, MoveNow))

    def seconds(self, listed: Iterable[Together]) -> float:
        """The price of their moves."""
        boxes = (do for each in listed for do in each.todo if isinstance(do, MoveNow))
        return sum(exchange(self.variant.tasks.transfers[do.number].plans).price.time for do in boxes)

    def brought(self, chunk: int) -> list[LocalRegister]:
        """The weights that are gathered for a chunk, as its tasks read them."""
        return [y for each in self.gathered.get(chunk, ()) for do in each.todo for y in do.writes]

    @property
    def alone(self) -> dict[str, int]:
        """The weights whose gradients a chunk brings home by itself, and the chunk."""
        of = {x: chunk for chunk, listed in self.home.items() for each in listed for x in each.registers}
        return {name: of[register] for name, register in self.variant.tasks.grads.items() if register in of}

    @cached_property
    def homes(self) -> dict[int, Home]:
        """By chunk the way home of its gradients."""
        found = {}
        for chunk, listed in self.home.items():
            parts: list[list[Together]] = [[] for _ in range(self.many)]
            for each in listed:
                parts[self.part(each)].append(each)
            found[chunk] = Home(self.variant, chunk, parts)
        return found

    def part(self, each: Together) -> int:
        known = self.variant.part
        return max((known.get(register.of, 0) for register in each.registers), default=0)

    @cached_property
    def gathers(self) -> dict[int, tuple[list[Running], tuple[int, ...]]]:
        """By chunk the parts of its gathers, and the other chunks that read what they bring."""
        found = {}
        for chunk, listed in self.gathered.items():
            runs = []
            for number in range(self.many):
                todo = [do for each in listed[number :: self.many] for do in each.todo]
                made: dict[str, LocalRegister] = {y: y for do in todo for y in do.writes}
                runs.append(self.variant.running(f"gather{chunk}_{number}", todo, Bundles((), (made,))))
            readers = sorted({c for each in listed for c in each.chunks} - {chunk})
            found[chunk] = runs, tuple(readers)
        return found

    @cached_property
    def rest(self) -> Once:
        """The rest that is done before and behind all micro-batches."""
        tasks = self.variant.tasks
        gone = {do for listed in self.gathered.values() for each in listed for do in each.todo}
        before = [do for do in tasks.before if do not in gone]
        away = {x for listed in self.home.values() for each in listed for x in each.registers}
        after = [do for do in tasks.after if away.isdisjoint(do.writes)]
        slots = [slot for slot in dict.fromkeys(tasks.sums.values()) if slot not in away]
        homes = {name: register for name, register in tasks.grads.items() if register not in away}
        return Once(self.variant, before, after, slots, homes)


def _together(todo: Sequence[Instruction], of: Mapping[LocalRegister, set[int]]) -> list[Together]:
    """Things to do that share registers, and single registers of which nothing is to be done; with their chunks."""
    groups: dict[int, set[LocalRegister]] = {}
    number: dict[LocalRegister, int] = {}
    for at, registers in enumerate([*(do.registers for do in todo), *((register,) for register in of)]):
        joined = set(registers)
        for other in {number[x] for x in registers if x in number}:
            joined |= groups.pop(other)
        groups[at] = joined
        number.update(dict.fromkeys(joined, at))
    listed: dict[int, list[Instruction]] = {at: [] for at in groups}
    for do in todo:
        listed[number[do.writes[0]]].append(do)
    return [
        Together(tuple(listed[at]), frozenset(held), tuple(sorted({c for x in held for c in of.get(x, ())})))
        for at, held in groups.items()
    ]
