"""The limit of memory: the cheapest plan whose peak stays below it, by the same account that `explain` shows.

What a choice adds to the peak depends on all others, so the chooser counts something simpler: parameters, gradients and
states as they lie, and of activations a share of what the backward keeps and of the weights that are gathered for what
ran when most was live. Share and moment are those of the plans that were found, until one fits and leaves little.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ....boxing.figures import volume
from ....boxing.graph.measures import Held
from ....placement.errors import ShortageError
from ....sbp.joint.formulate import Formulated
from ....sbp.joint.placements import Homes
from ....sbp.joint.problem import Vector
from ....sbp.joint.solver.solve import Solution, Solver
from .shortage import kept_most, shortage

__all__ = ["Fitted", "fitted"]

Made = TypeVar("Made")
TURNS = 6
PATIENCE = 2  # turns in which the share alone may bring the peak down, which halves what is too much at each
NEAR = 0.02  # share of the limit that may be left
ENOUGH, FAR = 0.01, 0.03  # gaps: with which a plan may stand, and above which branches would take too long


@dataclass(frozen=True)
class Fitted(Generic[Made]):
    """A solution, what was made of it, and the bytes that it takes on the fullest rank."""

    solution: Solution
    made: Made
    peak: float
    rank: int = 0  # the fullest


def fitted(
    posed: Formulated,
    where: Homes,
    limit: float,
    solver: Solver,
    make: Callable[[Solution], Made],
    account: Callable[[Made], Mapping[int, Held]],
    names: Callable[[Made, int], str],
    gathered: Callable[[int], Vector],
) -> Fitted[Made]:
    """The plan that costs least of those that fit; `names` says which value the node with a number makes, and
    `gathered` what its weights take as it reads them."""
    counted = _Counted(posed, where)

    def look(solution: Solution) -> tuple[Fitted[Made], Held]:
        made = make(solution)
        held = account(made)
        rank = max(held, key=lambda rank: held[rank].total)
        return Fitted(solution, made, held[rank].total, rank), held[rank]

    solution = solver.solve(counted.memory, None, branches=0)
    if not solution.choice:
        return Fitted(solution, make(solution), 0.0)
    found, worst = look(solution)
    if found.peak <= limit:
        return found
    at: dict[str, int] = {}
    for n, node in enumerate(posed.nodes):
        if node.kind == "op":
            at.setdefault(names(found.made, n), n)  # one that is there to be pinned is called as what it is of

    def note(worst: Held) -> None:
        for n in {at[name] for name in worst.moment if name in at}:
            counted.passes.setdefault(n, gathered(n))

    note(worst)
    best: Fitted[Made] | None = None
    lean = found, worst
    chosen = counted.memory, limit  # for which the best was found
    room, share, leanest = limit, counted.share(solution, worst), 0
    seen = {solution.choice}
    for turn in range(TURNS):
        memory = counted.shared(share)
        solution = solver.solve(memory, room, branches=0, near=solution.near)
        if not solution.choice:  # the account may say that it fits
            solution = solver.solve(memory, solution.least * (1 + 1e-9), branches=0)
        found, worst = look(solution)
        lean = min(lean, (found, worst), key=lambda one: one[0].peak)
        leanest += solution.least > room
        if found.peak <= limit and (best is None or solution.cost < best.solution.cost):
            best, chosen = found, (memory, room)
        if limit * (1 - NEAR) <= found.peak <= limit or (leanest > 1 and best is None):
            break
        if solution.choice in seen and best is not None:
            break  # the next one is far off
        seen.add(solution.choice)
        note(worst)
        before, share = share, counted.share(solution, worst)
        if abs(share - before) <= 1e-3 * before or (best is None and turn >= PATIENCE):
            room -= found.peak - limit
    if best is None:
        found, worst = lean
        here = [found.rank in there for there in where.ops]
        kept = kept_most(posed, found.solution.choice, lambda n: names(found.made, n), here.__getitem__)
        on = f", and rank {found.rank} is the fullest" if not all(here) else ""
        raise ShortageError(shortage(f"no plan fits into {volume(limit)} a rank{on}", limit, worst, kept))
    if not ENOUGH < best.solution.gap <= FAR:
        return best
    # Only the last of these problems is worth looking at branch by branch.
    memory, room = chosen
    room = max(room, best.solution.least * (1 + 1e-9))
    solution = solver.solve(memory, room, near=best.solution.near)
    if solution.choice and solution.cost < best.solution.cost:
        found, _ = look(solution)
        if found.peak <= limit:
            return found
    bound = min(best.solution.cost, max(best.solution.bound, solution.bound))
    return replace(best, solution=replace(best.solution, bound=bound))


class _Counted:
    """Memory as the chooser counts it of a plan: what stays, and a share of what the backward keeps; a rank's mean."""

    def __init__(self, posed: Formulated, where: Homes) -> None:
        self.stays = [node.kind == "source" for node in posed.nodes]
        ranks = len({rank for there in (*where.sources, *where.ops) for rank in there.flat})
        homes = {"source": where.sources, "op": where.ops}
        sizes = [homes[n.kind][n.index].size if n.kind in homes else ranks for n in posed.nodes]
        self.memory = posed.problem.memory
        if min(sizes, default=ranks) < ranks:  # a stage of a pipeline: of so many ranks, some have it
            self.memory = tuple(held * (size / ranks) for held, size in zip(self.memory, sizes, strict=True))
        self.passes: dict[int, Vector] = {}  # of nodes, what is there besides while they run

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

    def share(self, solution: Solution, worst: Held) -> float:
        """By how much the account of this plan exceeds what stays, for each byte that comes and goes."""
        held = list(enumerate(zip(solution.choice, self.stays, strict=True)))
        stays = sum(float(self.memory[n][k]) for n, (k, s) in held if s)
        comes = sum(float(self.comes(n)[k]) for n, (k, s) in held if not s)
        return max(0.0, worst.total - stays) / comes if comes else 1.0
