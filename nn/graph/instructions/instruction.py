"""The base of all instructions, which every rank runs in one order; and a rank's memory as they take and free it.

Memory is counted by storages, so that a view costs nothing and a value in two registers counts once.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from ....boxing.graph.physical import Physical
from ....sbp import Layout
from ....sbp.logical import OffloadPlace
from ..compiler.inside import Estimate, Insides, SegmentBytes
from ..compiler.source_text import SourceText
from ..lower.registers import LocalRegister, Transfer
from ..lower.segments import Stage

__all__ = ["Instruction", "Storages", "bytes_on"]


def bytes_on(of: Layout, rank: int) -> int:
    """The bytes of a rank's shard of what lies so."""
    size = of.dtype.itemsize if rank in of.placement else 0
    for n in of.local_shape(rank) if size else ():
        size *= n
    return size


class Storages:
    """The storages of a rank. `traced` has the bytes inside of the segments that run there."""

    def __init__(
        self,
        graph: Physical,
        stages: Sequence[Stage],
        layouts: Mapping[str, Layout],
        transfers: Sequence[Transfer],
        traced: Mapping[int, Insides | Estimate],
        rank: int,
    ) -> None:
        self.stages, self.layouts, self.transfers, self.traced, self.rank = stages, layouts, transfers, traced, rank
        self.parameters = self.constants = 0  # bytes, which are there; those of constants, for a step alone
        self.fresh = count()
        self.bytes: dict[int, int] = {}
        self.held: dict[str, tuple[int, ...]] = {}
        self.first: dict[str, tuple[int, ...]] = {}  # where each register first lay
        self.uses: Counter[int] = Counter()
        # Bytes by where they are, now and at most; on the device: None.
        self.live, self.most = Counter[OffloadPlace | None](), Counter[OffloadPlace | None]()
        self.host: dict[int, OffloadPlace] = {}  # storages that are no memory of the device
        self.copies: dict[int, int] = {}  # storages: their copies on the host
        self.stowed: Counter[OffloadPlace] = Counter()
        for source in graph.sources:
            if rank not in source.value.layout.placement:
                continue
            size = self.size(source.value.layout)
            if source.kind == "constant":
                self.constants += size
            elif source.kind != "input":
                self.parameters += size
            self.hold(source.value.name, [self.new(size if source.kind == "input" else 0)])

    def size(self, layout: Layout) -> int:
        """Bytes that the rank holds of a tensor."""
        return bytes_on(layout, self.rank)

    def new(self, nbytes: int) -> int:
        storage = next(self.fresh)
        self.bytes[storage] = nbytes
        return storage

    def take(self, register: str) -> None:
        """Have a register hold memory of its own."""
        layout = self.layouts.get(register)  # none where a generator stood
        self.hold(register, [self.new(self.size(layout) if layout else 0)])

    def hold(self, register: str, storages: Iterable[int]) -> None:
        held = tuple(storages)
        for storage in held:
            self.uses[storage] += 1
            if self.uses[storage] == 1:
                self.live[self.host.get(storage)] += self.bytes[storage]
        self.drop(register)
        self.held[register] = held
        self.first.setdefault(register, held)
        for place, size in self.live.items():
            self.most[place] = max(self.most[place], size, 0)

    def drop(self, register: str) -> None:
        for storage in self.held.pop(register, ()):
            self.uses[storage] -= 1
            if not self.uses[storage]:
                self.live[self.host.get(storage)] -= self.bytes[storage]

    def passing(self, nbytes: int) -> None:
        """Bytes that are live for a moment."""
        self.most[None] = max(self.most[None], self.live[None] + nbytes)

    def run(self, inside: SegmentBytes, registers: Iterable[str]) -> list[int]:
        """The storages of the results of a traced graph."""
        given = [storage for register in registers for storage in self.held[register]]
        self.passing(inside.peak)
        made: dict[int, int] = {}
        found = []
        for view_of, name, nbytes in inside.results:
            if view_of is not None:
                found.append(given[view_of])
                continue
            if name not in made:
                made[name] = self.new(nbytes)
            found.append(made[name])
        return found

    def stow(self, register: str, to: OffloadPlace) -> list[int]:
        """Copies of a register on the host; one that is there already serves again."""
        found = []
        for storage in self.held.get(register, ()):
            there = self.copies.get(storage)
            if there is None or not self.uses[there]:
                there = self.copies[storage] = self.new(self.bytes[storage])
                self.host[there] = to
                self.stowed[to] += self.bytes[storage]
            found.append(there)
        return found


@dataclass(frozen=True)
class Instruction(ABC):
    """One thing to do, called by its `word` in texts.

    `number` is that of its stage, transfer or loss; an add has the number of the part that it adds."""

    word: ClassVar[str]
    number: int
    reads: tuple[LocalRegister, ...] = ()
    writes: tuple[LocalRegister, ...] = ()

    def __init_subclass__(cls, word: str = "") -> None:
        cls.word = word

    def __str__(self) -> str:
        return f"{self.word} {self.number}: {', '.join(self.reads)} -> {', '.join(self.writes)}"

    @property
    def registers(self) -> tuple[LocalRegister, ...]:
        return *self.reads, *self.writes

    @property
    def again(self) -> bool:
        """Whether it makes, once more for the backward, what the forward had."""
        return bool(self.writes) and self.writes[0].kind == "again"

    @abstractmethod
    def source(self, text: SourceText) -> None:
        """Write the lines of Python that do it on the ranks owned here."""

    def title(self, text: SourceText) -> str:
        """The name of its work in a profiler's trace; none where it has next to nothing to do."""
        return ""

    def effect(self, memory: Storages) -> None:
        """Take and free the memory that it does on a rank: each register that it writes takes its own."""
        for register in self.writes:
            memory.take(register)
