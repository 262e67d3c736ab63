"""Prices of moves by value, so that the prices in a picture add up to those of its graph."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..boxing import Boxing
from .move_table import MoveAccount, priced_moves
from .physical import Back, Physical

__all__ = ["MovePart", "MovePrices"]


class MovePart(NamedTuple):
    """A move of one value, or its part of one that it shares; it stands for `times` such."""

    boxing: Boxing
    bytes: int  # that the busiest rank receives
    seconds: float
    times: int = 1


class MovePrices:
    """The price of every move in a graph: that of its route, or its part of an account's.

    `moving` is the sum for a step, or for one micro-batch, and `hidden` the part of it that is hidden; `once` is that
    of moves made once a step."""

    def __init__(
        self,
        graph: Physical,
        again: Sequence[str] = (),
        account: MoveAccount | None = None,
        *,
        moving: float | None = None,
        hidden: float | None = None,
        once: float = 0.0,
    ) -> None:
        self.moving, self.hidden, self.once = moving, hidden, once
        self.piped = account is not None and account.piped
        self.every = priced_moves(graph, again, account)
        self._parts: dict[tuple[str, ...], list[MovePart]] = {}
        for _, row in self.every:
            if row.bucket is None:
                sizes = [max(graph.layout(name).numel, 1) for name in row.of]
                for end, of, size in zip(row.ends, row.of, sizes, strict=True):
                    share = size / sum(sizes)
                    part = MovePart(row.boxing, round(row.bytes * share), row.seconds * share)
                    way = "forward" if row.direction == "again" else row.direction
                    self._parts.setdefault((way, end, of) if way == "backward" else (way, end), []).append(part)

    def copied(self, name: str, alike: Iterable[str] = ()) -> list[MovePart]:
        """The move that this copy comes by, and that by which it comes again."""
        return self._mean([("forward", each) for each in (name, *alike)])

    def back(self, of: Back, alike: Iterable[Back] = ()) -> list[MovePart]:
        """The moves of a gradient that goes in no bucket."""
        return self._mean([("backward", each.of, each.into) for each in (of, *alike)])

    def updated(self, name: str, alike: Iterable[str] = ()) -> list[MovePart]:
        """The moves of a parameter's update, those that it shares with others in part."""
        return self._mean([("update", each) for each in (name, *alike)])

    def _mean(self, keys: Sequence[tuple[str, ...]]) -> list[MovePart]:
        """The parts of the first of these, which stands for all."""
        first, *others = (self._parts.get(key, []) for key in keys)
        found = []
        for k, part in enumerate(first):
            same = [part.seconds, *(other[k].seconds for other in others if k < len(other))]
            found.append(part._replace(seconds=sum(same) / len(keys), times=len(keys)))
        return found
