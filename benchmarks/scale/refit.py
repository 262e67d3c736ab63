"""A fit without a table: one factor for each part of a step, by the rows of all other tables of its devices.

    seconds  =  products a  +  attention b  +  other ops c  +  moves d  +  optimizer e  +  waiting

The constants that devices have were fitted by others, so this asks what a fit would add that has not seen a table.
Parts are those of the answers (`step_parts`), which a factor scales as a share of a peak would. What is approximated:
waiting for other stages grows with their computing, as the share of a bubble does not change; what is hidden stays so.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Row", "fitted", "left_out", "scaled"]

PARTS = ("products", "attention", "other ops", "moves", "optimizer")
COMPUTING = PARTS[:3]
TIMID = 0.05  # what a factor of e costs beside an error of e in a whole table: rows that do not tell leave it at one
ROUNDS = 30  # of Gauss and Newton
SMALL = 1e-4

Row = tuple[Mapping[str, float], float]  # the parts of an answer, and the published seconds
Vector = npt.NDArray[np.float64]


def scaled(parts: Mapping[str, float], factors: Mapping[str, float]) -> float:
    """Seconds of a step whose parts take so many times as long.

    >>> scaled({"products": 6.0, "moves": 1.0, "other stages": 3.0}, {"products": 2.0, "moves": 1.0})
    19.0
    """
    found = sum(seconds * factors.get(part, 1.0) for part, seconds in parts.items() if part != "other stages")
    before = sum(parts.get(part, 0.0) for part in COMPUTING)
    after = sum(parts.get(part, 0.0) * factors.get(part, 1.0) for part in COMPUTING)
    return found + parts.get("other stages", 0.0) * (after / before if before else 1.0)


def fitted(tables: Sequence[Sequence[Row]]) -> dict[str, float]:
    """The factors with the least squares of logs of predicted over published, where each table weighs as much."""
    rows = [(row, len(table) ** -0.5) for table in tables for row in table]
    logs: Vector = np.zeros(len(PARTS))
    for _ in range(ROUNDS):
        errors = _errors(rows, logs)
        slopes = [(_errors(rows, logs + step) - errors) / SMALL for step in SMALL * np.eye(len(PARTS))]
        whole = np.vstack([np.stack(slopes, 1), TIMID * np.eye(len(PARTS))])
        change = np.linalg.lstsq(whole, -np.concatenate([errors, TIMID * logs]), rcond=None)[0]
        logs = logs + np.clip(change, -0.5, 0.5)
    return {part: float(np.exp(log)) for part, log in zip(PARTS, logs, strict=True)}


def _errors(rows: Sequence[tuple[Row, float]], logs: Vector) -> Vector:
    factors = {part: float(np.exp(log)) for part, log in zip(PARTS, logs, strict=True)}
    return np.array([weight * np.log(scaled(parts, factors) / seconds) for (parts, seconds), weight in rows])


def left_out(tables: Mapping[str, Sequence[Row]]) -> dict[str, list[float]]:
    """By table, the seconds of its rows by a fit to all others; nothing of a table that has no others."""
    found = {}
    for name, own in tables.items():
        others = [rows for other, rows in tables.items() if other != name]
        if others:
            factors = fitted(others)
            found[name] = [scaled(parts, factors) for parts, _ in own]
    return found
