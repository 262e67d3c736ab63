"""The same choice as an integer program, for graphs too wide for elimination: HiGHS, where scipy is installed.

One 0/1 variable for each candidate, and for each table of two nodes one for each pair of classes, whose sums along
either side *equal* the candidates' (with "at most" instead the relaxation is looser). Only the candidates need to be
integers: they fix all else.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

import numpy as np

from ..problem import Ints, Vector
from .presolve import Model

__all__ = ["installed", "programmed"]

COLUMNS = 60_000  # of the program; 25 thousand took 10 s at worst, 94 thousand more than 5 minutes
NODES = 200  # of the search tree; a limit of time would let ranks choose differently


def installed() -> bool:
    """Whether scipy can be imported."""
    return find_spec("scipy") is not None


def programmed(model: Model, part: Sequence[int]) -> tuple[dict[int, int] | None, float]:
    """The best choice found for these nodes, between which all tables are of two, and a lower bound of all choices.

    None, and no bound, where the program is too large; None and an infinite one where every choice is forbidden.

    HiGHS' tolerances are absolute, so it sees costs in units of about a millionth of what all costs together.
    """
    tables = model.among(part)
    if sum(table.values.size for table in tables) > COLUMNS:
        return None, -np.inf
    optimize, sparse = import_module("scipy.optimize"), import_module("scipy.sparse")
    start: dict[int, int] = {}
    costs: list[Vector] = []
    total = 0
    for node in part:
        start[node] = total
        costs.append(model.costs[node][model.lives[node]])
        total += len(costs[-1])
    columns: list[Ints] = []
    rows: list[Ints] = []
    signs: list[Vector] = []
    count = len(part)
    for at, node in enumerate(part):
        columns.append(start[node] + np.arange(len(costs[at])))
        rows.append(np.full(len(costs[at]), at))
        signs.append(np.ones(len(costs[at])))
    integers = total
    for table in tables:
        assert len(table.nodes) == 2, table.nodes
        values, own = table.values, []
        for axis, n in enumerate(table.nodes):
            used, inverse = np.unique(table.classes[axis][model.lives[n]], return_inverse=True)
            values = values.take(used, axis)
            own.append(inverse.reshape(-1))
        cells = np.nonzero(np.isfinite(values))
        for axis, n in enumerate(table.nodes):
            columns += [total + np.arange(len(cells[axis])), start[n] + np.arange(len(own[axis]))]
            rows += [count + cells[axis], count + own[axis]]
            signs += [np.ones(len(cells[axis])), -np.ones(len(own[axis]))]
            count += values.shape[axis]
        costs.append(values[cells])
        total += len(costs[-1])
    matrix = sparse.csr_array(
        (np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns))), shape=(count, total)
    )
    right = np.zeros(count)
    right[: len(part)] = 1
    scale = 1e6 / max(sum(float(np.abs(cost).mean()) for cost in costs if len(cost)), 1e-300)
    answer = optimize.milp(
        np.concatenate(costs) * scale,
        constraints=optimize.LinearConstraint(matrix, right, right),
        integrality=(np.arange(total) < integers).astype(int),
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 1e-9, "node_limit": NODES},
    )
    if answer.status == 2:
        return None, np.inf  # every choice is forbidden
    bound = -np.inf if answer.mip_dual_bound is None else float(answer.mip_dual_bound) / scale
    if answer.x is None:
        return None, bound
    choice = {}
    for node in part:
        live = model.lives[node]
        choice[node] = int(live[answer.x[start[node] : start[node] + len(live)].argmax()])
    return choice, bound
