"""Mini-buckets: where a graph is too wide for elimination and scipy is not there, a good plan, and a bound for it.

Elimination goes on with tables that stay below the limit: where a node's tables together would pass it, they are
parted into groups, and the node may take another candidate in each group. That can only be cheaper, so the result is a
lower bound. Read back with all groups together it gives a plan, which is then improved: some nodes stay as they are,
so many that the others can be chosen exactly, until several such parts have gained nothing.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from ..problem import Vector
from .eliminate import components, order, read_back, sweep
from .presolve import Elimination, Model, presolve
from .table import Table, best_over, sizes

__all__ = ["estimated"]

LARGEST = 10**6  # cells; tables of thirty times that took six times as long and bound no better than by 2% more
PART = 10**5  # cells of a table that is quickly made, again and again
IDLE = 4  # parts of the graph that may gain nothing before the plan stands
TURNS = 24


def estimated(model: Model, part: Sequence[int], table: int) -> tuple[dict[int, int] | None, float]:
    """A choice for these nodes, or none if none was found that is allowed, and a lower bound of all choices."""
    table = min(table, LARGEST)
    soft = _softened(model, part)
    bound, starts = -np.inf, []
    for cells in (table // 1000, table // 100, table // 10, table):  # a larger table is mostly, not always, better
        relaxed = model.copy()
        relaxed.constant = 0.0
        left = set(part)
        while left and not relaxed.dead:
            node = min(left, key=lambda n: (prod(sizes(n, _tables(relaxed, n), relaxed.lives).values()), n))
            left.remove(node)
            if node in relaxed.left:
                _eliminate_parted(relaxed, node, cells)
        if relaxed.dead:
            return None, np.inf
        bound = max(bound, relaxed.constant)
        starts.append(read_back(relaxed.steps, {}))
    choice = _descended(soft, part, min(starts, key=soft.value), min(table, PART))
    allowed = all(among.value(choice) < np.inf for among in model.among(part))
    return choice if allowed else None, bound


def _eliminate_parted(model: Model, node: int, limit: int) -> None:
    groups: list[list[Table]] = []
    for table in sorted(_tables(model, node), key=lambda t: -t.values.size):
        for group in groups:
            if prod(sizes(node, [*group, table], model.lives).values()) <= limit:
                group.append(table)
                break
        else:
            groups.append([table])
    if len(groups) < 2:
        model.eliminate(node)
        return
    live, cost = model.lives[node], model.costs[node]
    model.steps.append(Elimination(node, live, cost, _tables(model, node), eliminated=True))
    model.remove(node)
    # Any shares of a candidate's cost will do for the groups. With equal least totals they agree most on a candidate.
    least = np.array([sum(_least(table, node, model) for table in group) for group in groups])
    even = (cost[live] + least.sum(axis=0)) / len(groups)
    finite = np.isfinite(even)
    for group, own in zip(groups, least, strict=True):
        share = np.full(len(cost), np.inf)
        share[live[finite]] = even[finite] - own[finite]
        model.add(best_over(node, share, group, model.lives))


def _least(table: Table, node: int, model: Model) -> Vector:
    view = table.view(node, model.lives)
    least: Vector = view.rows.min(axis=1)[view.mine]
    return least


def _descended(model: Model, part: Sequence[int], choice: dict[int, int], table: int) -> dict[int, int]:
    """A choice no dearer: parts of the graph are chosen exactly while the rest stays as it is."""
    value, idle, kept = model.value(choice), 0, dict.fromkeys(part, 0)
    for _ in range(TURNS):
        fixed: list[int] = []
        while True:
            trial = model.copy()
            for n in fixed:
                trial.lives[n] = np.array([choice[n]])
                trial.touch(n)
            presolve(trial)
            ways = [order(trial, some) for some in components(trial)]
            if all(peak <= table for _, peak in ways):
                break
            # Next those that were kept least often, and of these the ones with most neighbours.
            wide = [n for way, peak in ways if peak > table for n in way]
            wide.sort(key=lambda n: (kept[n], -len(trial.neighbours(n)), n))
            fixed += wide[: max(1, len(wide) // 8)]
        for way, _ in ways:
            sweep(trial, way)
        for n in fixed:
            kept[n] += 1
        found = {**choice, **read_back(trial.steps, {})}
        gained = model.value(found)
        idle = 0 if gained < value else idle + 1
        if gained < value:
            choice, value = found, gained
        if idle == IDLE or not fixed:
            break
    return choice


def _softened(model: Model, part: Sequence[int]) -> Model:
    """The same model with forbidden choices only very dear, so that a plan may be mended step by step."""
    among = model.among(part)
    peaks = [np.abs(model.costs[n][model.lives[n]]).max() for n in part]
    peaks += [np.abs(table.values[np.isfinite(table.values)]).max(initial=0.0) for table in among]
    penalty = 1.0 + 2.0 * sum(peaks)
    soft = Model(model.costs, ())
    soft.left = dict.fromkeys(part)
    soft.lives = list(model.lives)
    for table in among:
        soft.add(Table(table.nodes, np.where(np.isfinite(table.values), table.values, penalty), table.classes))
    return soft


def _tables(model: Model, node: int) -> tuple[Table, ...]:
    return tuple(model.around[node].values())
