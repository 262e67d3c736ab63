"""Details of a step that only its page shows: candidates of ops, memory over the step, and schedules.

They take time to work out, so that a report has a function that gives them, and asks it once its page is wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Candidates", "CandidateSeconds", "MemoryCourse", "MemoryMark", "ScheduledTask", "TaskSchedule", "Walked"]


class CandidateSeconds(NamedTuple):
    """A signature that an op could have had: its own seconds, and how many more moves around it would take than with
    the one it got, if nothing else changed."""

    signature: str
    own: float
    around: float


@dataclass(frozen=True)
class Candidates:
    """The candidates of an op, of which it got the one numbered `chosen`."""

    rows: tuple[CandidateSeconds, ...]
    chosen: int

    def more(self, k: int) -> float:
        """The seconds by which a step takes longer with another candidate, if nothing else changes."""
        return self.rows[k].own + self.rows[k].around - self.rows[self.chosen].own

    @property
    def order(self) -> list[int]:
        """The numbers of the candidates, the cheapest first; the chosen one before those that cost as much."""
        return sorted(range(len(self.rows)), key=lambda k: (self.more(k), k != self.chosen))


class MemoryMark(NamedTuple):
    """A moment of a step on a rank: what runs, the values that it makes, and bytes by kind."""

    task: str
    values: tuple[str, ...]
    gradients: int
    activations: int


@dataclass(frozen=True)
class MemoryCourse:
    """The memory of a rank over a step. Parameters and states are there all the time."""

    rank: int
    parameters: int
    states: int
    marks: Sequence[MemoryMark]

    @property
    def most(self) -> int:
        """Bytes at the fullest moment."""
        return self.parameters + self.states + max((m.gradients + m.activations for m in self.marks), default=0)


class ScheduledTask(NamedTuple):
    """A task on a queue, from when to when in seconds; `chunks` are those whose ops it runs."""

    queue: str
    name: str
    kind: str  # F, B, W, U, or move
    start: float
    end: float
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True)
class TaskSchedule:
    """A schedule of a step: of a simulation or of a run."""

    name: str
    tasks: Sequence[ScheduledTask]
    note: str = ""  # on what it does not show, and how one gets that


@dataclass(frozen=True)
class Walked:
    """All of that of one step. `candidates` gives those of an op by the name of what it makes first, where they are
    known; `chunks` has the values that each chunk makes."""

    candidates: Callable[[str], Candidates | None] = lambda name: None
    memory: MemoryCourse | None = None
    schedules: Sequence[TaskSchedule] = ()
    chunks: Sequence[Sequence[str]] = ()
