"""The axes of a plan: those of its grid on the ranks that there are, and signatures over them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from ....placement import Placement
from ....sbp import Sbp

__all__ = ["AxisEntries", "GridAxis", "Grids", "signature_text"]

AxisEntries: TypeAlias = tuple[tuple[str, Sbp | None], ...] | None  # an axis each, None: the planner's; None: all are


@dataclass(frozen=True)
class GridAxis:
    """An axis of the grid: so many ranks, `*` for what the launcher has left, `?` for the planner's. One that folds
    another is the same ranks, seen once more."""

    name: str
    size: int | Literal["*", "?"]
    folds: str | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.size}" + (f" folds {self.folds}" if self.folds else "")


@dataclass(frozen=True)
class Grids:
    """The placement, and the axes that fold others, by their names."""

    whole: Placement
    folds: dict[str, GridAxis]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes that lines of a plan may name."""
        return (*(self.whole.names or ()), *self.folds)

    def size(self, axis: str) -> int:
        """The ranks along an axis."""
        if axis in self.folds:
            return int(self.folds[axis].size)
        return self.whole.shape[self.whole.axis(axis)]


def signature_text(entries: AxisEntries) -> str:
    if entries is None:
        return "?"
    return ", ".join(f"{axis}={'?' if entry is None else repr(entry)}" for axis, entry in entries)
