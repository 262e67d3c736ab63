"""Legend of a picture: every move of a graph that sends something, those that are alike as one, and what all cost."""

from collections.abc import Sequence
from typing import NamedTuple

from ...boxing import Boxing
from ...figures import duration, volume
from ..move_prices import MovePrices
from ..move_table import CollectiveKind, MoveRow, merged, ways_of
from ..physical import Physical
from .scene import numbered, some

__all__ = ["LegendChip", "all_told", "legend_chips"]

SINGLE = 4  # buckets that have a chip each


class LegendChip(NamedTuple):
    """A move in the legend, or several: what they cost, and of what they are."""

    seconds: float
    bytes: int  # a rank
    times: int
    name: str
    boxing: Boxing
    direction: str

    @property
    def lines(self) -> tuple[str, ...]:
        many = f" in {self.times} moves" if self.times > 1 else ""
        ways = list(map(str, dict.fromkeys(ways_of(self.boxing))))
        return (
            f"{duration(self.seconds)}, {volume(self.bytes)} a rank{many}",
            self.name,
            *(f"{way}, then" for way in ways[:-1]),
            *ways[-1:],
        )


def legend_chips(graph: Physical, prices: MovePrices) -> list[LegendChip]:
    """Every move that sends something, the heaviest first; buckets of one kind are one where there are many."""
    alike: dict[object, list[MoveRow]] = {}  # hops from stage to stage
    for row in merged(graph, [(block, row) for block, row in prices.every if row.bucket is None]):
        hop = row.src.placement is not row.dst.placement
        same = (row.direction, ways_of(row.boxing), row.boxing.price.time, row.bytes) if hop else id(row)
        alike.setdefault(same, []).extend([row] if not row.free else [])
    chips = [_chip(of) for of in alike.values() if of]
    together: dict[int, list[MoveRow]] = {}
    for _, row in prices.every:
        if row.bucket is not None:
            together.setdefault(row.bucket, []).append(row)
    found: dict[object, list[int]] = {}
    for number, rows in sorted(together.items()):
        key: tuple[CollectiveKind, ...] | int = ways_of(_most(rows)) if len(together) > SINGLE else number
        found.setdefault(key, []).append(number)
    for numbers in found.values():
        rows = [row for number in numbers for row in together[number]]
        many = sum(len(together[number][0].of) for number in numbers)
        name = f"{numbered('bucket', numbers)}: {some(many, 'gradient')}"
        spent, size = sum(row.seconds for row in rows), sum(row.bytes for row in rows)
        chips.append(LegendChip(spent, size, len(rows), name, _most(together[numbers[0]]), "bucket"))
    return sorted(chips, key=lambda chip: -chip.seconds)


def _most(rows: Sequence[MoveRow]) -> Boxing:
    return max((row.boxing for row in rows), key=lambda boxing: boxing.bytes)


def _chip(rows: Sequence[MoveRow]) -> LegendChip:
    row = rows[0]
    many, times = f" and {len(rows) - 1} like it" * (len(rows) > 1), sum(each.count for each in rows)
    name = f"{'gradient of ' * (row.direction == 'backward')}{row.name}{', again' * (row.direction == 'again')}{many}"
    return LegendChip(sum(each.spent for each in rows), row.bytes * times, times, name, row.boxing, row.direction)


def all_told(prices: MovePrices) -> str:
    """The sum of all moves, in the words of an explanation."""
    moves = f"{duration(prices.moving or 0.0)}, of which hidden {duration(prices.hidden or 0.0)}"
    return f"{moves}; once a step {duration(prices.once)}" if prices.once else moves
