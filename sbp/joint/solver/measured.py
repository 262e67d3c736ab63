"""Measures of a folded problem: seconds, hidden seconds and bytes, each apart, for the candidates that are left.

At one share of what is hidden and one price of a byte they are a problem of seconds alone. A candidate that is dropped
stays dropped at all shares and prices, so that each further look is at less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..problem import Edge, Ints, Problem, Vector
from .fold import Folded, fold
from .presolve import Model, presolve
from .table import Table, compressed

__all__ = ["Drawn", "Measured", "drawn", "measured"]


class Drawn(NamedTuple):
    """A choice for each variable, in the folded problem's numbers of candidates, with its seconds and bytes."""

    choice: tuple[int, ...]
    seconds: float  # of what is never hidden
    beside: float  # by how much what may be hidden is more than there is room for; less if negative
    bytes: float

    @property
    def cost(self) -> float:
        """Seconds with those that nothing hides."""
        return self.seconds + max(0.0, self.beside)

    def at(self, share: float, price: float) -> float:
        """Seconds at one share of what is hidden and one price of a byte."""
        return self.seconds + share * self.beside + price * self.bytes


@dataclass(frozen=True, eq=False)
class Measured:
    """The rest of a folded problem; `lives` says which candidates, and all else is about these alone."""

    lives: tuple[Ints, ...]
    costs: tuple[Vector, ...]
    beside: tuple[Vector, ...]
    memory: tuple[Vector, ...]
    tables: tuple[Table, ...]
    hidden: tuple[Table, ...]

    @property
    def size(self) -> int:
        """The number of candidates that are left."""
        return sum(map(len, self.lives))

    def model(self, share: float, price: float) -> Model:
        """The problem of seconds alone."""
        parts = zip(self.costs, self.beside, self.memory, strict=True)
        costs = [cost + share * beside + price * held for cost, beside, held in parts]
        hidden = [replace(table, values=share * table.values) for table in self.hidden if share]
        return Model(costs, [*self.tables, *hidden])

    @cached_property
    def reduced(self) -> Model | None:
        """The problem with what is right at every price of a byte done once, if nothing is hidden."""
        if self.hidden or any(map(np.any, self.beside)):
            return None
        model = Model(self.costs, self.tables, self.memory)
        presolve(model)
        return model

    def problem(self, share: float, price: float) -> Model:
        """The problem of seconds alone, of which as much is known already as is right at every price."""
        return self.model(share, price) if self.reduced is None else self.reduced.priced(price)

    def holding(self, memory: Sequence[Vector]) -> "Measured":
        """The same with these bytes, if any."""
        return replace(self, memory=tuple(memory)) if memory else self

    def kept(self, keeps: Mapping[int, Ints]) -> "Measured":
        """The same with only these of the candidates of some variables, by their places among those that are left."""

        def cut(vectors: Sequence[Vector]) -> tuple[Vector, ...]:
            return tuple(v[keeps[n]] if n in keeps else v for n, v in enumerate(vectors))

        return Measured(
            tuple(live[keeps[n]] if n in keeps else live for n, live in enumerate(self.lives)),
            cut(self.costs),
            cut(self.beside),
            cut(self.memory),
            tuple(_kept(table, keeps) for table in self.tables),
            tuple(_kept(table, keeps) for table in self.hidden),
        )

    def drawn(self, places: Sequence[int]) -> Drawn:
        """The sums of a choice by places among those that are left."""
        seconds = _sum(self.costs, places) + sum(table.value(places) for table in self.tables)
        beside = _sum(self.beside, places) + sum(table.value(places) for table in self.hidden)
        choice = tuple(int(live[k]) for live, k in zip(self.lives, places, strict=True))
        return Drawn(choice, seconds, beside, _sum(self.memory, places))

    def places(self, choice: Sequence[int]) -> list[int] | None:
        """The places of a choice among the candidates that are left; None where one is gone."""
        found = []
        for live, k in zip(self.lives, choice, strict=True):
            at = int(np.searchsorted(live, k))
            if at == len(live) or live[at] != k:
                return None
            found.append(at)
        return found


def measured(problem: Problem, folded: Folded) -> Measured:
    """All of a problem, of which `folded` is what is never hidden."""
    zeros = {id(cost): np.zeros_like(cost) for cost in problem.costs}
    none = tuple(zeros[id(cost)] for cost in problem.costs)
    edges = tuple(Edge(e.i, e.j, e.hidden) for e in problem.edges if e.hidden is not None)
    room = fold(replace(problem, costs=problem.room or none, edges=(), memory=()))
    hidden = fold(replace(problem, costs=none, edges=edges, memory=()))
    return Measured(
        tuple(np.arange(len(cost)) for cost in folded.costs),
        folded.costs,
        tuple(a - b for a, b in zip(hidden.costs, room.costs, strict=True)),
        folded.memory or tuple(np.zeros(len(cost)) for cost in folded.costs),
        folded.tables,
        hidden.tables,
    )


def drawn(problem: Problem, choice: Sequence[int]) -> Drawn:
    """The sums of a choice for every node."""
    beside = problem.beside(choice)
    return Drawn(tuple(choice), problem.cost(choice) - max(0.0, beside), beside, problem.bytes(choice))


def _kept(table: Table, keeps: Mapping[int, Ints]) -> Table:
    if keeps.keys().isdisjoint(table.nodes):
        return table
    values, classes = table.values, []
    for axis, (n, of) in enumerate(zip(table.nodes, table.classes, strict=True)):
        used, inverse = np.unique(of[keeps[n]] if n in keeps else of, return_inverse=True)
        values = values.take(used, axis)
        classes.append(inverse.reshape(-1))
    return compressed(Table(table.nodes, values, tuple(classes)))


def _sum(vectors: Sequence[Vector], places: Sequence[int]) -> float:
    return sum(float(vector[k]) for vector, k in zip(vectors, places, strict=True))
