"""Cases: lower bounds of plans that say more, as restrictions of the one problem in which all was left open.

A plan that people write leaves its parameters no choice; all else is as open as before. So the problem is formulated
and folded once for all of them, and each looks at it with the candidates of parameters that it allows: first at the
share of what is hidden at which the open plan had its bound, then where its own is higher.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from ....placement import Placement
from ....sbp import B, S, Sbp, Split
from ....sbp.joint.formulate import Formulated
from ....sbp.joint.pins import allows
from ....sbp.joint.solver.best import Best, best_of
from ....sbp.joint.solver.eliminate import components
from ....sbp.joint.solver.fold import Folded, fold
from ....sbp.joint.solver.measured import Drawn, Measured, measured
from ....sbp.joint.solver.messages import above
from ....sbp.joint.solver.multipliers import At, Climb, climbed
from ....sbp.joint.solver.presolve import Model, presolve
from ....sbp.joint.solver.table import Table
from ....sbp.joint.source_options import Stored
from ....sbp.logical import Logical, Source
from ...graph.choose.choose import Decided
from ..assignment import Assignment
from ..language.statements import Kind, Offload, Recompute

__all__ = ["Cases"]

LOOKS = 3  # besides the first
BEYOND = 1e-3  # share by which a look aims higher than is enough, because rounding may leave it below
RESTS: tuple[Kind, ...] = ("grads", "states")


class _Posed(NamedTuple):
    """A problem, the variable of each node, and what all of its candidates come to."""

    posed: Formulated
    folded: Folded
    whole: Measured


class Cases:
    """The problem in which all was left open, for plans that are cases of it."""

    def __init__(self, opened: Decided) -> None:
        self.opened = opened
        self.posed: dict[frozenset[str], _Posed] = {}  # by modules that are run again
        self.known: dict[object, tuple[list[bool], list[bool]]] = {}
        self.bounds: dict[object, float] = {}

    def least(self, made: Assignment, enough: float = inf) -> float:
        """A lower bound of a step's seconds, or `enough` of them, under a plan that says more than the open one. Only
        choices of that one count in which weights, gradients and states rest as the plan has them.

        Gradients and states that could not rest so there cost nothing here. Weights that could not, as in cuts that
        leave remainders, are seen by ops in ways that were not possible either: then nothing is known.
        """
        again = {path for line, paths in made.marks if isinstance(line, Recompute) and not line.keep for path in paths}
        whole = any(isinstance(line, Recompute) and (line.keep or line.only) for line, _ in made.marks)
        posed = self.problem(frozenset() if whole else frozenset(again))
        left = self.restricted(posed, made)
        if left is None:
            return 0.0
        if not again and self.opened.floor >= enough:
            return self.opened.floor
        kind = frozenset(again), tuple(live.tobytes() for live in left.lives), enough
        if kind not in self.bounds:  # plans that differ in how results flow are one case
            self.bounds[kind] = _bound(left, self.opened.solution.share, enough)
        return self.bounds[kind]

    def holds(self, made: Assignment) -> float:
        """A lower bound of a plan's memory, as the chooser counts it without recomputation, in units of the open
        plan's. It is 0 where nothing is known."""
        posed = self.problem(frozenset())
        left = self.restricted(posed, made)
        if left is None or any(isinstance(line, Recompute | Offload) for line, _ in made.marks):
            return 0.0
        return sum(float(held.min()) for held in left.memory) / self.opened.solution.memory

    def problem(self, again: frozenset[str]) -> _Posed:
        """The open problem where the backward runs these modules again."""
        found = self.posed.get(again)
        if found is None:
            posed = (
                self.opened.formulated
                if not again
                else self.opened.asked.formulated(_run_again(self.opened.logical, again))
            )
            folded = fold(posed.problem.priced(0.0))
            found = self.posed[again] = _Posed(posed, folded, measured(posed.problem, folded))
        return found

    def restricted(self, of: _Posed, made: Assignment) -> Measured | None:
        """The part of it that a plan leaves; none where its weights rest as they cannot there."""
        allowed: dict[int, list[bool]] = {}
        free: set[int] = set()
        variables = of.folded.variable.tolist()
        for at, node in enumerate(of.posed.nodes):
            source = self.opened.logical.sources[node.index] if node.kind == "source" else None
            if source is None or source.kind != "parameter":
                continue
            same, rests = self.fitting(node.candidates, source, made)
            if not any(same):
                return None
            here, may = variables[at], rests if any(rests) else same
            allowed[here] = [a and b for a, b in zip(allowed.get(here, may), may, strict=True)]
            if not any(rests):
                free.add(here)
        keeps = {n: np.flatnonzero(np.array(may)) for n, may in allowed.items()}
        if not all(len(keep) for keep in keeps.values()):
            return None
        left = of.whole.kept(keeps)
        return _freed(left, free) if free else left

    def fitting(self, candidates: Sequence[object], source: Source, made: Assignment) -> tuple[list[bool], list[bool]]:
        """Whether a parameter's weights lie as a plan says, and whether gradients and states do too, for each
        candidate."""
        grid = made.grids.whole
        weights = dict.fromkeys(grid.names or (), B) | _entries(made, "weights", source)
        grads, states = (_entries(made, kind, source) for kind in RESTS)
        if not grads:  # they go where the states lie
            grads = {axis: entry for axis, entry in states.items() if weights.get(axis) == B and entry != B}
        said = [weights, weights | grads, weights | states]
        key = id(candidates), *(tuple(_lying(entries, grid)) for entries in said)
        if key not in self.known:
            lies = [
                [allows(tuple(_lying(entries, grid)), lie.state) for entries, lie in zip(said, each[:3], strict=True)]
                for each in candidates
                if isinstance(each, Stored)
            ]
            self.known[key] = [first for first, *_ in lies], [all(each) for each in lies]
        return self.known[key]


def _run_again(logical: Logical, modules: frozenset[str]) -> Logical:
    """The graph with the ops of these modules in regions."""

    def region(module: str) -> str:
        parts = module.split(".")
        return next((path for k in range(len(parts) + 1) if (path := ".".join(parts[:k])) in modules), "")

    ops = tuple(
        replace(op, origin=replace(op.origin, recompute=op.origin.recompute or region(op.origin.module)))
        for op in logical.ops
    )
    return replace(logical, ops=ops)


def _freed(left: Measured, free: set[int]) -> Measured:
    """The same where these variables cost nothing."""

    def zeros(vectors: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        return tuple(np.zeros_like(v) if n in free else v for n, v in enumerate(vectors))

    def others(tables: Sequence[Table]) -> tuple[Table, ...]:
        return tuple(table for table in tables if free.isdisjoint(table.nodes))

    return replace(
        left,
        costs=zeros(left.costs),
        beside=zeros(left.beside),
        tables=others(left.tables),
        hidden=others(left.hidden),
    )


def _bound(left: Measured, share: float, enough: float) -> float:
    """The highest bound that a few looks find, or one that is enough."""

    def look(at: At) -> tuple[Best, Drawn | None]:
        model = left.problem(*at)
        if enough < inf and (low := _quickly(model)) >= enough:
            return Best((), inf, low, "bounded", ()), None
        found = best_of(model)
        return found, left.drawn(found.choice) if found.choice else None

    start = At(share, 0.0)
    found, plan = look(start)
    if plan is None or found.bound >= enough:
        return found.bound
    climb = Climb(found.bound, start, (plan,))
    known = min(enough * (1 + BEYOND), plan.cost)
    return climbed(look, climb, None, LOOKS, known=lambda: known, enough=lambda bound: bound >= enough).bound


def _quickly(model: Model) -> float:
    """A bound that takes a fifth of the time of the best choice, and is a few hundredths below it."""
    presolve(model)
    return model.constant if model.dead else model.constant + sum(above(model, each)[0] for each in components(model))


def _entries(made: Assignment, kind: Kind, source: Source) -> dict[str, Sbp | None]:
    """The entries that a plan says of a parameter, by axes; dims are counted from the front."""
    ndim = source.fake.ndim
    said = {axis: pinned.entry for axis, pinned in made.rests[kind].get(source.name, {}).items()}
    return {axis: S(entry.dim % ndim) if isinstance(entry, Split) and ndim else entry for axis, entry in said.items()}


def _lying(said: Mapping[str, Sbp | None], grid: Placement) -> list[Sbp | None]:
    """The entries by axes of the grid; along an axis of one rank any will do."""
    entries = (said[name] for name in grid.names or ())
    return [None if n == 1 else entry for entry, n in zip(entries, grid.shape, strict=True)]
