"""Elimination: nodes leave one by one, the smallest table first; read backwards, each step gives its node's choice.

Exact. The tables on the way grow with the width of the graph, so the sizes are counted before anything is built. The
tables that are read back also hold the second-best plan: it differs from the best first at some step, and after that
step everything is best again.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from math import prod
from random import Random

import numpy as np

from .presolve import Elimination, Model

__all__ = ["components", "order", "read_back", "second_best", "sweep"]

MUCH = 10**7  # cells to be looked at above which another order is worth looking for
TRIES = 24


def components(model: Model) -> list[list[int]]:
    """The nodes that are left, in parts that have nothing to do with each other."""
    seen: set[int] = set()
    parts = []
    for start in model.left:
        if start in seen:
            continue
        seen.add(start)
        part = [start]
        for node in part:
            fresh = [n for n in model.neighbours(node) if n not in seen]
            seen.update(fresh)
            part.extend(fresh)
        parts.append(sorted(part))
    return parts


def order(model: Model, part: Sequence[int], tries: int = TRIES) -> tuple[list[int], int]:
    """In which order to eliminate these nodes, and the cells of the largest table on the way, at most.

    Two rules are tried on paper, the smallest new table first, and the one that adds least to what lies there; where
    that is much, then again with a pinch of chance (the same in every process).
    """
    random = Random(0)
    ways = [_ordered(model, part, random, added=added, chance=0.0) for added in (False, True)]
    if min(ways)[0] > MUCH:
        ways += [_ordered(model, part, random, added=k % 2 > 0, chance=0.1 * (k // 4 + 1)) for k in range(tries)]
    _, peak, found = min(ways)
    return found, peak


def _ordered(
    model: Model, part: Sequence[int], random: Random, *, added: bool, chance: float
) -> tuple[int, int, list[int]]:
    """The cells that are looked at, those of the largest table, and the order."""
    number = count()
    around: dict[int, dict[int, dict[int, int]]] = {n: {} for n in part}  # node: table: node: its classes

    def put(table: dict[int, int]) -> None:
        serial = next(number)
        for n in table:
            around[n][serial] = table

    for old in model.among(part):
        put(dict(zip(old.nodes, old.values.shape, strict=True)))

    def result(node: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for table in around[node].values():
            for n, size in table.items():
                if n != node:
                    found[n] = min(found.get(n, 1) * size, len(model.lives[n]))
        return found

    grown: dict[int, int] = {}  # cells by which a node grows tables, known until its surroundings change

    def key(node: int) -> float:
        if node not in grown:
            cells = prod(result(node).values())
            grown[node] = cells - sum(prod(table.values()) for table in around[node].values()) if added else cells
        return grown[node] * (1 + chance * random.random()) if chance else grown[node]

    keys = {n: key(n) for n in part}
    queue = [(value, n) for n, value in keys.items()]
    heapq.heapify(queue)
    found, work, peak = [], 0, 0
    while queue:
        value, node = heapq.heappop(queue)
        if keys.get(node) != value:
            continue  # a later entry says what is true now
        del keys[node]
        reached = result(node)
        cells = prod(reached.values())
        peak, work = max(peak, cells), work + cells * len(model.lives[node]) * len(around[node])
        for serial, gone in around.pop(node).items():
            for n in gone:
                if n != node:
                    del around[n][serial]
        if len(reached) > 1:
            put(reached)
        for n in reached:
            del grown[n]
        for n in dict.fromkeys([*reached, *(m for r in reached for table in around[r].values() for m in table)]):
            keys[n] = key(n)
            heapq.heappush(queue, (keys[n], n))
        found.append(node)
    return work, peak, found


def sweep(model: Model, nodes: Iterable[int]) -> None:
    """Eliminate nodes in this order, comparing candidates between."""
    for node in nodes:
        model.compare()
        if model.dead:
            return
        if node in model.left:
            model.eliminate(node)


def read_back(steps: Sequence[Elimination], known: Mapping[int, int]) -> dict[int, int]:
    """The best choice of every node that these steps eliminated; `known` has those that were left."""
    choice = dict(known)
    for step in reversed(steps):
        if step.eliminated and step.node not in choice:
            choice[step.node] = int(step.candidates[step.seconds(choice).argmin()])
    return choice


def second_best(steps: Sequence[Elimination], choice: Mapping[int, int]) -> tuple[float, dict[int, int]]:
    """By how much the cheapest other plan is dearer, and that plan; the nodes that no step eliminated stay as they are.

    Exact: let some other plan differ from the best last at step s, so that all later steps agree. If s eliminated a
    node, the plan takes another of its candidates, and the earlier ones can do no better than read back. If s dropped
    candidates, the plan takes one of them; taking what beat it instead gives a plan no dearer, which only counts for
    nothing if it is the best one.
    """
    least, where, forced = np.inf, -1, -1
    for s, step in enumerate(steps):
        seconds = step.seconds(choice)
        own = choice[step.node]
        if step.eliminated:
            base = seconds[np.flatnonzero(step.candidates == own)[0]]
            seconds[step.candidates == own] = np.inf
        else:
            base = Elimination(step.node, np.array([own]), step.cost, step.tables, False).seconds(choice)[0]
        at = int(seconds.argmin())
        if seconds[at] - base < least:
            least, where, forced = float(seconds[at] - base), s, int(step.candidates[at])
    if where < 0:
        return np.inf, {}
    done = {step.node for step in steps[: where + 1] if step.eliminated}
    known = {n: k for n, k in choice.items() if n not in done}
    known[steps[where].node] = forced
    return least, read_back(steps[:where], known)
