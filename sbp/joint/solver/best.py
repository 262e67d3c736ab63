"""The best plan of a folded problem: presolve, messages where tables would be large, then elimination. HiGHS or bounds
take a graph that is still too wide."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ..problem import Vector
from .eliminate import components, order, read_back, second_best, sweep
from .ilp import installed, programmed
from .messages import FEW, narrowed
from .mini_buckets import estimated
from .presolve import Elimination, Model, presolve
from .table import Table

__all__ = ["Best", "Method", "best", "best_of"]

LARGE = 10**4  # cells
MANY = 10**6  # cells of all tables above which messages take less time than comparing candidates
ROUNDS = 3
LITTLE = 0.9  # share of the candidates that a round may leave without ending it
Method: TypeAlias = Literal["elimination", "ilp", "bounded"]


@dataclass(frozen=True, slots=True)
class Best:
    """A choice for each variable; () if none is allowed, or none was found."""

    choice: tuple[int, ...]
    value: float
    bound: float  # no choice has less
    method: Method
    second: tuple[
        int, ...
    ]  # the next best: of all plans if presolve and elimination found it, else of those near at hand


def best(
    costs: Sequence[Vector], tables: Sequence[Table], *, table: int = 3 * 10**7, wide: Method | None = None
) -> Best:
    """Exact while no table passes `table` cells; parts of the graph that are wider go to `wide`.

    That is HiGHS where it is installed; "elimination" eliminates whatever the size.
    """
    return best_of(Model(costs, tables), table=table, wide=wide)


def best_of(model: Model, *, table: int = 3 * 10**7, wide: Method | None = None) -> Best:
    """The best plan of a model of which some is known already."""
    wide = wide or ("ilp" if installed() else "bounded")
    if sum(table.values.size for table in model.among(model.left)) > MANY:
        for part in [] if model.dead else components(model):
            narrowed(model, part, FEW)
    presolve(model)
    _narrow(model)
    method: Method = "elimination"
    hard: list[list[int]] = []
    for part in [] if model.dead else components(model):
        way, peak = order(model, part)
        if peak <= table or wide == "elimination":
            sweep(model, way)
        else:
            hard.append(part)
    known: dict[int, int] = {}
    found, bound = not model.dead, model.constant
    for part in hard if found else []:
        choice, low, how = _wide(model, part, wide, table)
        method = "bounded" if "bounded" in (how, method) else how
        bound += low
        known.update(choice or {})
        found = found and choice is not None
    if not found:
        return Best((), np.inf, bound, method, ())
    value = model.value(known)
    choice = read_back(model.steps, known)
    second = second_best([*model.steps, *_looks(model, known)], choice)[1]
    every = range(len(model.costs))
    return Best(
        tuple(choice[n] for n in every),
        value,
        min(bound, value),
        method,
        tuple(second[n] for n in every) if second else (),
    )


def _narrow(model: Model) -> None:
    """Drop candidates that are in no plan as good as a known one, where elimination would meet large tables."""
    for _ in range(ROUNDS):
        parts = [part for part in ([] if model.dead else components(model)) if _largest(model, part) > LARGE]
        before = sum(len(model.lives[n]) for part in parts for n in part)
        for part in parts:
            narrowed(model, part)
        presolve(model)
        if sum(len(model.lives[n]) for part in parts for n in part if n in model.left) > LITTLE * before:
            return


def _largest(model: Model, part: Sequence[int]) -> int:
    """The cells of the largest table that a plain order of elimination would meet."""
    return order(model, part, tries=0)[1]


def _wide(model: Model, part: list[int], wide: Method, table: int) -> tuple[dict[int, int] | None, float, Method]:
    """A choice for a part that is too wide, its bound, and how they were found."""
    low = -np.inf
    if wide == "ilp":
        choice, low = programmed(model, part)
        if choice is not None or low == np.inf:
            return choice, low, "ilp"
    choice, bound = estimated(model, part, table)
    return choice, max(low, bound), "bounded"


def _looks(model: Model, known: dict[int, int]) -> list[Elimination]:
    """The other candidates of nodes that no step eliminated, one at a time."""
    steps = []
    for n, own in known.items():
        others = model.lives[n][model.lives[n] != own]
        if len(others):
            steps.append(Elimination(n, others, model.costs[n], tuple(model.around[n].values()), eliminated=False))
    return steps
