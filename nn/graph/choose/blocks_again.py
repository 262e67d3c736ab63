"""Blocks that the backward runs again so that a limit of memory is met, where that is cheaper than to cut more.

A block is one of the outermost repeated modules, or of those with a number in their path. The blocks that free most
bytes for a second of running them again come first; equal ones in their order, because the first are kept longest.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from ....placement.errors import ShortageError
from ....sbp.joint.formulate import Formulated
from ....sbp.joint.solver.solve import Solution
from ....sbp.logical import Logical

__all__ = ["Worth", "blocks_of_ops", "cheapest", "fewest", "run_again", "worthwhile"]

Found = TypeVar("Found")


TRIES = 4  # of plans with more blocks


@dataclass(frozen=True)
class Worth:
    """A block, and about how many seconds it takes to run it again."""

    block: str
    seconds: float


def blocks_of_ops(logical: Logical) -> list[str]:
    """The block of each op, none where it is in no list of layers.

    Layers that are unlike are no repeated modules, so they are known by the numbers in their paths."""
    known = {op.origin.block for op in logical.ops if op.origin.block}
    return [op.origin.block or _numbered(op.origin.module, known) for op in logical.ops]


def _numbered(module: str, known: Set[str]) -> str:
    """The outermost numbered module around, but for those around repeated ones."""
    parts = module.split(".")
    for at, part in enumerate(parts, 1):
        path = ".".join(parts[:at])
        if part.isdigit() and not any(f"{block}.".startswith(f"{path}.") for block in known):
            return path
    return ""


def worthwhile(logical: Logical, posed: Formulated, solution: Solution) -> list[Worth]:
    """The blocks that keep something for the backward, the best to be run again first."""
    blocks = blocks_of_ops(logical)
    many = Counter(blocks)
    kept: dict[str, float] = {}
    spent: dict[str, float] = {}
    for node, memory, k in zip(posed.nodes, posed.problem.memory, solution.choice, strict=True):
        if node.kind == "op":
            block = blocks[node.index]
            if many[block] > 1 and block and not logical.ops[node.index].origin.recompute:
                kept[block] = kept.get(block, 0.0) + float(memory[k])
                spent[block] = spent.get(block, 0.0) + posed.rounds.times * (posed.own(node, k) - posed.back(node, k))
    worth = {block: f"{kept[block] / max(spent[block], 1e-12):.2g}" for block in kept if kept[block]}
    ranked = sorted(worth, key=lambda block: -float(worth[block]))  # which leaves equal ones in their order
    return [Worth(block, spent[block]) for block in ranked]


def run_again(logical: Logical, blocks: Sequence[str]) -> Logical:
    """The graph with each of these as a region; ops that are in a region already stay in it."""
    known = {*blocks}
    ops = tuple(
        replace(op, origin=replace(op.origin, recompute=f"{block} for memory"))
        if block in known and not op.origin.recompute
        else op
        for op, block in zip(logical.ops, blocks_of_ops(logical), strict=True)
    )
    return replace(logical, ops=ops)


def cheapest(
    plain: Found | None,
    floor: float,
    blocks: Sequence[Worth],
    attempt: Callable[[Sequence[str]], Found],
    cost: Callable[[Found], float],
) -> Found:
    """The cheapest find with some of the first blocks run again, or without (`plain`, where there is one).

    Without a limit nothing is below `floor` seconds, so that only so many blocks are tried as leave a chance.
    """
    names = [worth.block for worth in blocks]
    found = fewest(names, attempt) if plain is None else (0, plain)
    first, best = found
    spent = list(accumulate((worth.seconds for worth in blocks), initial=floor))
    more = [many for many in range(first + 1, len(blocks) + 1) if spent[many] < cost(best)]
    for many in more[:: -(-len(more) // TRIES) or 1]:
        if spent[many] < cost(best):
            try:
                best = min(best, attempt(names[:many]), key=cost)
            except ShortageError:
                continue  # what the account says of it goes up and down
    return best


def fewest(blocks: Sequence[str], attempt: Callable[[Sequence[str]], Found]) -> tuple[int, Found]:
    """As few of the first blocks as it takes, and what is found with them; `attempt` raises where there is none."""
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
    return high, found
