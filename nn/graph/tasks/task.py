"""The task of a chunk at one micro-batch, what it hands to others, and all tasks of a graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ....sbp import Layout
from ..instructions.instruction import Instruction
from ..lower.registers import LocalRegister, Transfer

__all__ = ["Hop", "Name", "Task", "TaskKind", "Tasks"]

TaskKind: TypeAlias = Literal["F", "B", "W"]


class Name(NamedTuple):
    """A task by what it is and for which chunk."""

    kind: TaskKind
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}"

    @classmethod
    def of(cls, text: str) -> "Name":
        """By its name, or by that of a case of it for one slice of each sequence."""
        return cls(text[0], int(text[1:].partition(".")[0]))  # type: ignore[arg-type]

    def shifted(self, by: int) -> "Name":
        """The same task of a later chunk."""
        return Name(self.kind, self.chunk + by)


class Hop(NamedTuple):
    """A register of one task that arrives as a register of another, on other ranks."""

    source: Name
    target: Name
    sent: LocalRegister
    come: LocalRegister
    pair: tuple[Layout, Layout]


@dataclass(frozen=True)
class Task:
    """The task of an actor at a firing. `values` are results of the step that it makes, `sums` gradients of weights."""

    name: Name
    todo: tuple[Instruction, ...]
    values: tuple[LocalRegister, ...]
    sums: tuple[LocalRegister, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.name}:", *(f"  {do}" for do in self.todo)])


@dataclass(frozen=True)
class Tasks:
    """All tasks of a graph. `edges` are by who makes and who reads."""

    tasks: Mapping[Name, Task]
    edges: Mapping[tuple[Name, Name], tuple[LocalRegister, ...]]
    hops: tuple[Hop, ...]
    before: tuple[Instruction, ...]
    after: tuple[Instruction, ...]
    sums: Mapping[LocalRegister, LocalRegister]  # parts of gradients -> the register where they are added up
    grads: Mapping[str, LocalRegister]  # of sources: the register of the gradient at home
    transfers: tuple[Transfer, ...]
    layouts: Mapping[str, Layout]
