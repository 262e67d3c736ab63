"""Blocks that the backward runs again so that a limit of memory is met: as few as it takes, where nothing fits without.

A block is one of the outermost repeated modules. Those come first that free most bytes for a second of running them
again; of equal ones those that would be kept longest, which are the first.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ....placement.errors import ShortageError
from ....sbp.joint.formulate import Formulated
from ....sbp.joint.solver.solve import Solution
from ....sbp.logical import Logical

__all__ = ["fewest", "run_again", "worthwhile"]

Found = TypeVar("Found")


def worthwhile(logical: Logical, posed: Formulated, solution: Solution) -> list[str]:
    """The blocks that keep something for the backward, the best to be run again first."""
    kept: dict[str, float] = {}
    spent: dict[str, float] = {}
    for node, memory, k in zip(posed.nodes, posed.problem.memory, solution.choice, strict=True):
        if node.kind == "op":
            origin = logical.ops[node.index].origin
            if origin.block and not origin.recompute:
                kept[origin.block] = kept.get(origin.block, 0.0) + float(memory[k])
                spent[origin.block] = spent.get(origin.block, 0.0) + float(node.cost[k])
    worth = {block: f"{kept[block] / max(spent[block], 1e-12):.2g}" for block in kept if kept[block]}
    return sorted(worth, key=lambda block: -float(worth[block]))  # which leaves equal ones in their order


def run_again(logical: Logical, blocks: Sequence[str]) -> Logical:
    """The graph with each of these as a region; what is one already stays one."""
    known = {*blocks}
    ops = tuple(
        replace(op, origin=replace(op.origin, recompute=f"{op.origin.block} for memory"))
        if op.origin.block in known and not op.origin.recompute
        else op
        for op in logical.ops
    )
    return replace(logical, ops=ops)


def fewest(blocks: Sequence[str], attempt: Callable[[Sequence[str]], Found]) -> Found:
    """The find with as few of the first blocks as it takes; `attempt` raises where there is none."""
    try:
        found = attempt(blocks)
    except ShortageError as error:
        raise ShortageError(f"{error}\n  in it all {len(blocks)} blocks of layers are run again already") from None
    low, high = 1, len(blocks)  # with so many it is found
    while low < high:
        middle = (low + high) // 2
        try:
            found, high = attempt(blocks[:middle]), middle
        except ShortageError:
            low = middle + 1
    return found
