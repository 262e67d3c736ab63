"""Room: the cheapest plan whose peak stays below a limit, by the same account that `explain` shows.

What a choice adds to the peak depends on all others, so the chooser counts something simpler: parameters, gradients and
states as they lie, and of activations a share of what the backward keeps. The share is measured on the plan that was
found last, until one fits and leaves little.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ...boxing.graph.report import Held
from ...boxing.look import volume
from ...placement.errors import SbpError
from ...sbp.joint.formulate import Formulated
from ...sbp.joint.homes import Homes
from ...sbp.joint.problem import Problem, Vector
from ...sbp.joint.solve import Solution, solve

__all__ = ["Fitted", "fitted"]

Made = TypeVar("Made")
TURNS = 6
NEAR = 0.02  # share of the limit that may be left
LARGEST = 3  # of what is kept, named where nothing fits


@dataclass(frozen=True)
class Fitted(Generic[Made]):
    """A solution, what was made of it, and the bytes that it takes on the fullest rank."""

    solution: Solution
    made: Made
    peak: float


def fitted(
    posed: Formulated,
    where: Homes,
    limit: float,
    make: Callable[[Solution], Made],
    account: Callable[[Made], Mapping[int, Held]],
    names: Callable[[Made, int], str],
) -> Fitted[Made]:
    """The plan that costs least of those that fit; `names` says which value the node with a number makes."""
    counted = _Counted(posed, where)

    def look(solution: Solution) -> tuple[Fitted[Made], Held]:
        made = make(solution)
        worst = max(account(made).values(), key=lambda held: held.total)
        return Fitted(solution, made, worst.total), worst

    solution = solve(counted.problem(1.0))
    if not solution.choice:
        return Fitted(solution, make(solution), 0.0)
    found, worst = look(solution)
    if found.peak <= limit:
        return found
    best: Fitted[Made] | None = None
    room, share, leanest = limit, counted.share(solution, worst), 0
    for _ in range(TURNS):
        problem = counted.problem(share)
        solution = solve(problem, limit=room)
        if not solution.choice:
            solution = solve(problem, limit=solution.least * (1 + 1e-9))  # the account may say that it fits
        found, worst = look(solution)
        leanest += solution.least > room
        if found.peak <= limit and (best is None or solution.cost < best.solution.cost):
            best = found
        if limit * (1 - NEAR) <= found.peak <= limit or (leanest > 1 and best is None):
            break
        before, share = share, counted.share(solution, worst)
        if abs(share - before) <= 1e-3 * before:
            room -= found.peak - limit
    if best is None:
        raise SbpError(_refusal(posed, limit, found, worst, names))
    return best


class _Counted:
    """Memory as the chooser counts it of a plan: what stays, and a share of what the backward keeps; a rank's mean."""

    def __init__(self, posed: Formulated, where: Homes) -> None:
        self.posed = posed
        self.stays = [node.kind == "source" for node in posed.nodes]
        ranks = len({rank for there in (*where.sources, *where.ops) for rank in there.flat})
        homes = {"source": where.sources, "op": where.ops}
        sizes = [homes[n.kind][n.index].size if n.kind in homes else ranks for n in posed.nodes]
        self.memory = posed.problem.memory
        if min(sizes, default=ranks) < ranks:  # a stage of a pipeline: of so many ranks, some have it
            self.memory = tuple(held * (size / ranks) for held, size in zip(self.memory, sizes, strict=True))

    def problem(self, share: float) -> Problem:
        scaled: dict[int, Vector] = {}
        for vector, stays in zip(self.memory, self.stays, strict=True):
            if not stays and id(vector) not in scaled:
                scaled[id(vector)] = vector * share
        memory = tuple(v if s else scaled[id(v)] for v, s in zip(self.memory, self.stays, strict=True))
        return replace(self.posed.problem, memory=memory)

    def share(self, solution: Solution, worst: Held) -> float:
        """By how much the account of this plan exceeds what stays, for each byte that its backward keeps."""
        pairs = list(zip(self.memory, solution.choice, self.stays, strict=True))
        stays = sum(float(held[k]) for held, k, s in pairs if s)
        kept = sum(float(held[k]) for held, k, s in pairs if not s)
        return max(0.0, worst.total - stays) / kept if kept else 1.0


def _refusal(
    posed: Formulated, limit: float, found: Fitted[Made], worst: Held, names: Callable[[Made, int], str]
) -> str:
    """Text of the error: what takes most of the plan that takes least, and what would help."""
    kinds = {kind: getattr(worst, kind) for kind in ("parameters", "gradients", "states", "activations")}
    said = ", ".join(f"{kind} {volume(size)}" for kind, size in sorted(kinds.items(), key=lambda kind: -kind[1]))
    held = zip(posed.nodes, posed.problem.memory, found.solution.choice, strict=True)
    large = sorted(
        ((float(memory[k]), at) for at, (node, memory, k) in enumerate(held) if node.kind == "op"), reverse=True
    )
    kept = ", ".join(f"{names(found.made, at)} {volume(size)}" for size, at in large[:LARGEST] if size)
    rest = worst.total - worst.activations
    parts = -(-worst.activations // max(1, int(limit - rest)))
    if rest >= limit:
        helps = (
            "parameters, gradients and states are in pieces already: use more ranks, or an optimizer that keeps less"
        )
    else:
        helps = (
            f"activations would fit as {max(2, parts)} micro-batches (micro_batches={max(2, parts)}), where layers are "
            "recomputed (torch.utils.checkpoint), or on more ranks"
        )
    return (
        f"no plan fits into {volume(limit)} a rank\n"
        f"  the one that needs least takes {volume(worst.total)}: {said}\n"
        + (f"  most of what its backward keeps: {kept}\n" if kept else "")
        + f"  {helps}; or a memory= of {volume(worst.total)}"
    )
