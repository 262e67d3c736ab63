"""The limit of memory: the cheapest plan whose peak stays below it, by the same account that `explain` shows.

A choice's part of the peak depends on all other choices, so the chooser counts something simpler: parameters, gradients
and states as they lie; and for activations a share of the values that the backward keeps and of the weights gathered
when most was live. Share and moment are those of the plans found so far, until one fits and leaves little.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ....boxing.figures import volume
from ....boxing.graph.measures import Held
from ....placement.errors import ShortageError
from ....sbp.joint.move_cost import local_bytes
from ....sbp.joint.problem import Vector
from ....sbp.joint.solver.solve import Solution
from ....sbp.joint.uses import weights
from .posed_graph import Decided, PosedGraph
from .shortage import kept_most, shortage

__all__ = ["fitted"]

TURNS = 6
PATIENCE = 2  # turns in which the share alone may bring the peak down, which halves what is too much at each
NEAR = 0.02  # share of the limit that may be left
ENOUGH, FAR = 0.01, 0.03  # gaps: with which a plan may stand, and above which branches would take too long


class _PlanInMemory(NamedTuple):
    """A plan with the fullest rank, and what that one holds."""

    decided: Decided
    rank: int
    held: Held

    @classmethod
    def of(cls, posed: PosedGraph, solution: Solution) -> "_PlanInMemory":
        decided = posed.decided(solution)
        held = decided.held()
        rank = max(held, key=lambda rank: held[rank].total)
        return cls(decided, rank, held[rank])

    @property
    def peak(self) -> int:
        return self.held.total

    @property
    def cost(self) -> float:
        return self.decided.solution.cost


def fitted(posed: PosedGraph, limit: float) -> Decided:
    """The plan that costs least of those that fit."""
    counted, solver = _Counted(posed), posed.solver
    solution = solver.solve(counted.memory, None, branches=0)
    found = lean = _PlanInMemory.of(posed, solution)
    if found.peak <= limit:
        return found.decided
    counted.note(found)
    best: _PlanInMemory | None = None
    chosen = counted.memory, limit  # for which the best was found
    room, share, leanest = limit, counted.share(found), 0
    seen = {solution.choice}
    for turn in range(TURNS):
        memory = counted.shared(share)
        solution = solver.solve(memory, room, branches=0, near=solution.near)
        if not solution.choice:  # the account may say that it fits
            solution = solver.solve(memory, solution.least * (1 + 1e-9), branches=0)
        found = _PlanInMemory.of(posed, solution)
        lean = min(lean, found, key=lambda one: one.peak)
        leanest += solution.least > room
        if found.peak <= limit and (best is None or found.cost < best.cost):
            best, chosen = found, (memory, room)
        if limit * (1 - NEAR) <= found.peak <= limit or (leanest > 1 and best is None):
            break
        if solution.choice in seen and best is not None:
            break  # the next one is far off
        seen.add(solution.choice)
        counted.note(found)
        before, share = share, counted.share(found)
        if abs(share - before) <= 1e-3 * before or (best is None and turn >= PATIENCE):
            room -= found.peak - limit
    if best is None:
        all_there = all(lean.rank in there for there in posed.asked.where.ops)
        on = "" if all_there else f", and rank {lean.rank} is the fullest"
        kept = kept_most(lean.decided, lean.rank)
        raise ShortageError(shortage(f"no plan fits into {volume(limit)} a rank{on}", limit, lean.held, kept))
    answer = best.decided.solution
    if not ENOUGH < answer.gap <= FAR:
        return best.decided
    # Only the last of these problems is worth looking at branch by branch.
    memory, room = chosen
    room = max(room, answer.least * (1 + 1e-9))
    solution = solver.solve(memory, room, near=answer.near)
    if solution.choice and solution.cost < answer.cost:
        found = _PlanInMemory.of(posed, solution)
        if found.peak <= limit:
            return found.decided
    bound = min(answer.cost, max(answer.bound, solution.bound))
    return replace(best.decided, solution=replace(answer, bound=bound))


class _Counted:
    """A plan's memory as the chooser counts it: values that stay and a share of those saved, the mean of ranks."""

    def __init__(self, posed: PosedGraph) -> None:
        self.logical, self.nodes, where = posed.logical, posed.formulated.nodes, posed.asked.where
        self.stays = [node.kind == "source" for node in self.nodes]
        ranks = len({rank for there in (*where.sources, *where.ops) for rank in there.flat})
        homes = {"source": where.sources, "op": where.ops}
        self.homes = [homes[n.kind][n.index] if n.kind in homes else None for n in self.nodes]
        sizes = [ranks if there is None else there.size for there in self.homes]
        self.memory = posed.formulated.problem.memory
        if min(sizes, default=ranks) < ranks:  # a stage of a pipeline, which some of the ranks have
            self.memory = tuple(held * (size / ranks) for held, size in zip(self.memory, sizes, strict=True))
        self.makers: dict[str, int] = {}  # nodes by what the first plan calls what they make
        self.passes: dict[int, Vector] = {}  # by node, the gathered weights that are there while it runs

    def note(self, plan: _PlanInMemory) -> None:
        """Count the weights that are gathered for what runs when most is live."""
        if not self.makers:
            for n, node in enumerate(self.nodes):
                if node.kind == "op":  # one that is there to be pinned is called as what it is of
                    self.makers.setdefault(plan.decided.made_by(node.index), n)
        for n in {self.makers[name] for name in plan.held.moment if name in self.makers}:
            self.passes.setdefault(n, self.gathered(n))

    def gathered(self, n: int) -> Vector:
        """Bytes of the weights that an op reads, and of their gradients, by what it chooses."""
        node, there = self.nodes[n], self.homes[n]
        assert there is not None
        op, held = self.logical.ops[node.index], weights(self.logical)
        found = np.zeros(len(node.candidates))
        for slot, number in enumerate(op.inputs):
            if number in held:
                x = self.logical.fakes[number]
                lying = [option.inputs[slot].state for option in node.candidates]
                times = 2 if op.grad and number in self.logical.wants_grad else 1
                found += times * local_bytes(lying, tuple(x.shape), x.dtype.itemsize, there.shape)
        return found

    def comes(self, n: int) -> Vector:
        """Bytes of a node that come and go, by what it chooses."""
        return self.memory[n] + self.passes[n] if n in self.passes else self.memory[n]

    def shared(self, share: float) -> tuple[Vector, ...]:
        """Bytes of all nodes where of those that come and go this share counts."""
        scaled: dict[int, Vector] = {}
        for n, (vector, stays) in enumerate(zip(self.memory, self.stays, strict=True)):
            if not stays and n not in self.passes and id(vector) not in scaled:
                scaled[id(vector)] = vector * share
        return tuple(
            vector if stays else self.comes(n) * share if n in self.passes else scaled[id(vector)]
            for n, (vector, stays) in enumerate(zip(self.memory, self.stays, strict=True))
        )

    def share(self, plan: _PlanInMemory) -> float:
        """By how much the account of a plan exceeds what stays, for each byte that comes and goes."""
        held = list(enumerate(zip(plan.decided.solution.choice, self.stays, strict=True)))
        stays = sum(float(self.memory[n][k]) for n, (k, s) in held if s)
        comes = sum(float(self.comes(n)[k]) for n, (k, s) in held if not s)
        return max(0.0, plan.peak - stays) / comes if comes else 1.0
