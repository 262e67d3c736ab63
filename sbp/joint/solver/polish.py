"""Polish: one variable of a folded problem at a time takes another candidate, until all fits and while it pays."""

import numpy as np

from ..problem import Vector
from .measured import Drawn, Measured
from .table import Table

__all__ = ["polished"]

MOVES = 200


class _Nearby:
    """The changes that each candidate of each variable would make while all others stay."""

    def __init__(self, left: Measured, places: list[int]) -> None:
        self.left, self.places = left, places
        self.around: list[list[tuple[Table, bool]]] = [[] for _ in left.lives]
        for hidden, tables in ((False, left.tables), (True, left.hidden)):
            for table in tables:
                for n in table.nodes:
                    self.around[n].append((table, hidden))
        self.every = [np.arange(len(live)) for live in left.lives]
        self.size = np.array([len(live) for live in left.lives])
        self.start = np.concatenate([[0], self.size.cumsum()])
        self.changes = np.zeros((3, int(self.start[-1])))  # seconds, beside and bytes of all candidates
        for n in range(len(left.lives)):
            self.refresh(n)

    def refresh(self, n: int) -> None:
        seconds, beside = self.left.costs[n], self.left.beside[n]
        for table, hidden in self.around[n]:
            more = table.at(n, self.every[n], self.places)
            if hidden:
                beside = beside + more
            else:
                seconds = seconds + more
        own = self.places[n]
        rows: tuple[Vector, ...] = (seconds, beside, self.left.memory[n])
        for at, row in enumerate(rows):
            self.changes[at, self.start[n] : self.start[n + 1]] = row - row[own]

    def take(self, at: int) -> None:
        n = int(np.searchsorted(self.start, at, side="right")) - 1
        self.places[n] = at - int(self.start[n])
        for other in dict.fromkeys([n, *(m for table, _ in self.around[n] for m in table.nodes)]):
            self.refresh(other)


def polished(left: Measured, plan: Drawn, limit: float) -> Drawn | None:
    """A plan near this one that fits, or none where none was met."""
    places = left.places(plan.choice)
    if places is None:
        return None
    near = _Nearby(left, places)
    beside, held = plan.beside, plan.bytes
    for _ in range(MOVES):
        seconds, more, bytes = near.changes
        dearer = seconds + np.maximum(0.0, beside + more) - max(0.0, beside)
        if held > limit:
            gained = np.minimum(-bytes, held - limit)
            with np.errstate(divide="ignore", invalid="ignore"):
                each = np.where(gained > 0, np.maximum(dearer, 0.0) / gained, np.inf)
            at = int(each.argmin())
            if not np.isfinite(each[at]):
                return None
        else:
            dearer = np.where(held + bytes <= limit, dearer, np.inf)
            at = int(dearer.argmin())
            if not dearer[at] < -1e-12 * plan.seconds:
                break
        beside, held = beside + float(more[at]), held + float(bytes[at])
        near.take(at)
    found = left.drawn(near.places)
    return found if found.bytes <= limit and found.cost < np.inf else None
