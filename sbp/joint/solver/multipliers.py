"""Multipliers: the share of what is hidden and the price of a byte at which plans have the highest lower bound.

Hidden seconds cost max(0, hidden - room), which is the most that any share of them comes to, and bytes may be paid for
instead of having to fit: at every share and price the cheapest plan, less the price of the limit, is a lower bound.
Each plan is a plane above all of these bounds. The next look is at the place where the lowest of the known planes is
highest, until no plan lies below: that is the lower convex hull of what is possible.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np

from ..problem import Vector
from .best import Best
from .measured import Drawn

__all__ = ["At", "Climb", "Look", "climbed", "higher"]

NEAR = 1e-4  # share of the cost below which another look is not worth its time
SHARES, PRICES = 0.1, 2.0  # the distances from the last look, as a difference of shares and a factor of prices


class At(NamedTuple):
    """A share of what is hidden, and a price of a byte."""

    share: float
    price: float


Look: TypeAlias = Callable[[At], tuple[Best, Drawn | None]]


class Climb(NamedTuple):
    """The highest bound that was met, where that was, and the plans whose planes are known."""

    bound: float
    at: At
    planes: tuple[Drawn, ...]


def climbed(
    look: Look,
    start: Climb,
    limit: float | None,
    turns: int,
    *,
    known: Callable[[], float],
    enough: Callable[[float], bool],
    near: bool = False,
) -> Climb:
    """Look until no plane is left above, or `enough` says so of the bound; never above what the `known` plan costs.

    With `near` only around where it starts, for where few planes are known."""
    bound, at, planes = start
    around = at if near else None
    for _ in range(turns):
        if enough(bound):
            break
        to = higher(Climb(bound, at, planes), limit, known(), around)
        if to is None:
            break
        found, plan = look(to)
        low = found.bound - to.price * (limit or 0.0)
        if low > bound:
            bound, at = low, to
        if plan is None or plan in planes:
            break
        planes = (*planes, plan)
    return Climb(bound, at, planes)


def higher(climb: Climb, limit: float | None, known: float, around: At | None = None) -> At | None:
    """The multipliers to try next for a bound above those that were met; None if no plane leaves room for one.

    `known` is the cost of the best plan so far, which is above all bounds too."""
    height, to = highest([*climb.planes, Drawn((), known, 0.0, limit or 0.0)], limit, around)
    return to if height - climb.bound > NEAR * abs(height) else None


def highest(planes: Sequence[Drawn], limit: float | None, around: At | None = None) -> tuple[float, At]:
    """The height and place where the lowest of these planes is highest, of shares from 0 to 1 and prices from 0.

    `around` one of them, not far from it.
    """
    scale = limit or 1.0
    over = [0.0 if limit is None else (plan.bytes - limit) / scale for plan in planes]
    rows = np.array([(plan.seconds, plan.beside, more) for plan, more in zip(planes, over, strict=True)])
    size = max(float(np.abs(rows[:, :2]).max()), 1e-300)
    rows[:, :2] /= size
    # height <= seconds + share * beside + price * over, 0 <= share <= 1, 0 <= price: corners are where three are equal.
    left = np.vstack([np.column_stack([np.ones(len(rows)), -rows[:, 1:]]), [[0, -1, 0], [0, 1, 0], [0, 0, -1]]])
    low, high, least = 0.0, 1.0, 0.0
    if around is not None:
        least = around.price * scale / size / PRICES
        low, high = max(0.0, around.share - SHARES), min(1.0, around.share + SHARES)
        left = np.vstack([left, [[0, 0, 1]]])
    right = np.concatenate([rows[:, 0], [-low, high, -least, least * PRICES**2]])[: len(left)]
    return _highest(left, right, size, scale)


def _highest(left: Vector, right: Vector, size: float, scale: float) -> tuple[float, At]:
    """The highest corner of all that is below these planes, in units of a cost and of a limit."""
    threes = np.array(list(combinations(range(len(right)), 3)))
    matrices = left[threes]
    threes = threes[np.abs(np.linalg.det(matrices)) > 1e-12]
    corners: Vector = np.linalg.solve(left[threes], right[threes][..., None])[..., 0]
    slack = right[None, :] - corners @ left.T
    fine = (slack >= -1e-9 * np.maximum(1.0, np.abs(corners).max(axis=1))[:, None]).all(axis=1)
    corners = corners[fine]
    best = np.lexsort((corners[:, 1], corners[:, 2], -corners[:, 0]))[0]
    height, share, price = corners[best].tolist()
    return height * size, At(min(1.0, max(0.0, share)), max(0.0, price) * size / scale)
