"""Tables: what several nodes cost together, with one row for all candidates that differ in nothing it says.

An op has hundreds of ways on a grid of three axes, but one of its tensors has only a few dozen states, and an edge sees
no more than that. A table therefore has one entry for each *class* of candidates, which makes every step below smaller
by the third power of their share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from ..problem import Ints, Vector

__all__ = ["Table", "TableView", "added", "best_over", "compressed", "dense", "pair", "refined", "sizes"]

CELLS = 1 << 16  # cells of a temporary, which then stays in the cache
NONE = np.zeros(1, dtype=np.intp)  # where a table does not look at a node
FEW = 1 << 12  # numbers
MERGED = 1 << 17  # cells up to which two tables are always added
LARGE = 1 << 20  # cells above which looking for equal rows takes longer than it saves


@dataclass(frozen=True, eq=False)
class TableView:
    """A table as one of its nodes sees it among live candidates.

    Each class of its own has a row, with all that the others may choose; each candidate has the number of its row."""

    lives: tuple[Ints, ...]  # of the table's nodes
    rows: Vector
    mine: Ints

    @cached_property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """Whether the others may choose anything, by row."""
        found: npt.NDArray[np.bool_] = self.rows.min(axis=1) < np.inf
        return found

    @cached_property
    def apart(self) -> Vector:
        """[row r, row t]: how much more t may cost, at least, taken where r is best and where t is worst."""
        rows, every = self.rows, np.arange(len(self.rows))
        low, high = rows.argmin(axis=1), rows.argmax(axis=1)
        with np.errstate(invalid="ignore"):  # inf - inf: forbidden for both
            here = rows[:, low].T - rows[every, low][:, None]
            there = rows[every, high][None, :] - rows[:, high]
        found: Vector = np.fmax(here, there)
        return found


@dataclass(frozen=True, eq=False)
class Table:
    """values[class of node 0, class of node 1, ...]; the classes of candidates that were dropped mean nothing."""

    nodes: tuple[int, ...]  # ascending
    values: Vector
    classes: tuple[Ints, ...]  # for each node, candidate -> class
    views: dict[int, TableView] = field(default_factory=dict, init=False)  # the last that each node asked for

    def of(self, node: int) -> Ints:
        """The class of each candidate of a node."""
        return self.classes[self.nodes.index(node)]

    def value(self, choice: Mapping[int, int] | Sequence[int]) -> float:
        """Seconds of one choice."""
        index = tuple(classes[choice[n]] for n, classes in zip(self.nodes, self.classes, strict=True))
        return float(self.values[index])

    def at(self, node: int, candidates: Ints, choice: Mapping[int, int] | Sequence[int]) -> Vector:
        """Seconds of each of these candidates of a node, the others' choice being known."""
        index = tuple(
            slice(None) if n == node else classes[choice[n]]
            for n, classes in zip(self.nodes, self.classes, strict=True)
        )
        picked: Vector = self.values[index][self.of(node)[candidates]]
        return picked

    def view(self, node: int, lives: Sequence[Ints]) -> TableView:
        """The table as a node sees it; kept until candidates of its nodes are dropped."""
        now = tuple(lives[n] for n in self.nodes)
        known = self.views.get(node)
        if known is None or any(a is not b for a, b in zip(known.lives, now, strict=True)):
            known = self.views[node] = self._viewed(node, now)
        return known

    def _viewed(self, node: int, lives: tuple[Ints, ...]) -> TableView:
        values, mine, at = self.values, NONE, 0
        for axis, (n, live, classes) in enumerate(zip(self.nodes, lives, self.classes, strict=True)):
            used, inverse = dense(classes[live])
            if len(used) < values.shape[axis]:
                values = values.take(used, axis)
            if n == node:
                mine, at = inverse, axis
        rows = (values if at == 0 else np.moveaxis(values, at, 0)).reshape(values.shape[at], -1)
        return TableView(lives, rows, mine)


def pair(i: int, j: int, matrix: Vector) -> Table:
    """The table of two nodes, i < j."""
    return compressed(Table((i, j), matrix + 0.0, (np.arange(matrix.shape[0]), np.arange(matrix.shape[1]))))


def compressed(table: Table) -> Table:
    """The same with equal rows, columns and so on taken together."""
    values, classes = table.values, list(table.classes)
    if values.size > LARGE:
        return table
    for axis in range(values.ndim):
        rows = np.ascontiguousarray(np.moveaxis(values, axis, 0)).reshape(values.shape[axis], -1)
        seen: dict[bytes, int] = {}
        group = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows], dtype=np.intp)
        if len(seen) < len(group):
            _, first = np.unique(group, return_index=True)
            values = values.take(first, axis)
            classes[axis] = group[classes[axis]]
    return Table(table.nodes, values, tuple(classes))


def dense(numbers: Ints) -> tuple[Ints, Ints]:
    """Those of these numbers, from 0, that there are, and the place of each among them: `np.unique` without sorting
    while there are few, where what a call costs counts."""
    top = int(numbers.max(initial=-1)) + 1
    if top > FEW:
        used, places = np.unique(numbers, return_inverse=True)
        return used, places.reshape(-1)
    seen = np.zeros(top, dtype=np.intp)
    seen[numbers] = 1
    return seen.nonzero()[0], (seen.cumsum() - 1)[numbers]


def refined(groupings: Sequence[Ints]) -> tuple[Ints, Ints]:
    """The first member of each group, and the group of each member, where groups are alike in all these groupings."""
    groups, group = dense(groupings[0])
    for other in groupings[1:]:
        groups, group = dense(group * (int(other.max(initial=0)) + 1) + other)
    first = np.empty(len(groups), dtype=np.intp)
    first[group[::-1]] = np.arange(len(group) - 1, -1, -1)  # the last that is written is the first there is
    return first, group


def added(one: Table, other: Table, lives: Sequence[Ints]) -> Table | None:
    """Two tables of the same nodes as one, if that is not much larger: their classes multiply."""
    groups = [
        refined([a[lives[n]], b[lives[n]]]) for n, a, b in zip(one.nodes, one.classes, other.classes, strict=True)
    ]
    if prod(len(first) for first, _ in groups) > max(MERGED, one.values.size + other.values.size):
        return None
    total = np.zeros(())
    for table in (one, other):
        picks = [
            classes[lives[n][first]] for n, classes, (first, _) in zip(table.nodes, table.classes, groups, strict=True)
        ]
        total = total + table.values[np.ix_(*picks)]
    classes = [
        _spread(len(a), lives[n], group) for n, a, (_, group) in zip(one.nodes, one.classes, groups, strict=True)
    ]
    return compressed(Table(one.nodes, total, tuple(classes)))


def sizes(node: int, tables: Sequence[Table], lives: Sequence[Ints]) -> dict[int, int]:
    """The nodes that eliminating this one leaves in one table, and how many classes each has there at most."""
    found: dict[int, int] = {}
    for table in tables:
        for n, size in zip(table.nodes, table.values.shape, strict=True):
            if n != node:
                found[n] = min(found.get(n, 1) * size, len(lives[n]))
    return found


def best_over(node: int, cost: Vector, tables: Sequence[Table], lives: Sequence[Ints]) -> Table:
    """The rest of these tables when the node always takes what is best; `cost` has all its candidates."""
    live = lives[node]
    _, group = refined([table.of(node)[live] for table in tables])
    order = np.lexsort((cost[live], group))  # stable: the first of equal candidates
    mine = live[order[np.unique(group[order], return_index=True)[1]]]  # the cheapest of each group

    others = sorted({n for table in tables for n in table.nodes} - {node})
    picks: dict[int, Ints] = {}
    classes = []
    for n in others:
        first, inverse = refined([table.of(n)[lives[n]] for table in tables if n in table.nodes])
        picks[n] = lives[n][first]
        total = next(len(table.of(n)) for table in tables if n in table.nodes)
        classes.append(_spread(total, lives[n], inverse))
    shape = tuple(len(picks[n]) for n in others)
    parts = []
    for table in tables:
        own = table.of(node)[mine]
        values = np.moveaxis(table.values, table.nodes.index(node), 0)
        values = values.reshape(
            len(values), *(table.values.shape[table.nodes.index(n)] if n in table.nodes else 1 for n in others)
        )
        parts.append((values, own, [table.of(n)[picks[n]] if n in table.nodes else NONE for n in others]))
    # Small ones first, whose sums are small too.
    parts.sort(key=lambda part: prod(len(pick) for pick in part[2]))
    return compressed(Table(tuple(others), _least(cost[mine], parts, shape), tuple(classes)))


def _least(cost: Vector, parts: Sequence[tuple[Vector, Ints, list[Ints]]], shape: tuple[int, ...]) -> Vector:
    """The least over candidates of their cost and of what these tables say, for all that the others may choose.

    A part has values[class of the candidate, classes of others ...], the class of each candidate, and the classes of
    each other to look at. Only a slab of a part is ever spread out: as a whole it may be larger than the result.
    """
    first, *rest = shape
    slab = max(1, CELLS // prod(rest))
    best = np.full(shape, np.inf)
    for lo in range(0, first, slab):
        here = []
        for values, own, picks in parts:
            head = picks[0][lo : lo + slab] if values.shape[1] > 1 or len(picks[0]) > 1 else picks[0]
            here.append((values[np.ix_(np.arange(len(values)), head, *picks[1:])], own))
        out = best[lo : lo + slab]
        step = max(1, CELLS // out.size)
        for k in range(0, len(cost), step):
            if step == 1:  # views, not copies
                total = cost[k] + here[0][0][here[0][1][k]]
                for values, own in here[1:]:
                    total = total + values[own[k]]
                np.minimum(out, total, out=out)
            else:
                total = cost[k : k + step].reshape(-1, *(1 for _ in shape))
                for values, own in here:
                    total = total + values[own[k : k + step]]
                np.minimum(out, total.min(axis=0), out=out)
    return best


def _spread(length: int, live: Ints, classes: Ints) -> Ints:
    """The classes of live candidates, by candidate."""
    spread = np.full(length, -1, dtype=np.intp)
    spread[live] = classes
    return spread
