"""Every move of a graph with its bytes and price: those of values, of gradients, and of parameters after the update.

Moves that are equal in repeated blocks are one row with a count, and the gradients of a bucket are one move. What is
gathered again for the backward is there again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from ...placement import Placement
from ...sbp import Layout
from ..picture.palette import SHORT
from ..plan import Plan, plan
from .blocks import Blocks
from .buckets import exchange
from .physical import Back, Physical, Source

__all__ = [
    "Direction",
    "MoveRow",
    "MoveTotal",
    "CollectiveKind",
    "axes_of",
    "buckets",
    "moves_of",
    "totals",
    "update_of",
    "ways_of",
]

Direction: TypeAlias = Literal["forward", "again", "backward", "update"]


class CollectiveKind(NamedTuple):
    """A kind of collective and the names of the axes that it runs over."""

    kind: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} over {', '.join(self.axes)}" if self.axes else self.kind


@dataclass(frozen=True)
class MoveRow:
    """One move, or `count` equal ones of repeated blocks; figures are of one of them."""

    name: str  # of the value; a star stands for the number of a repeated block
    direction: Direction
    plan: Plan
    line: str = ""
    module: str = ""
    count: int = 1

    @property
    def bytes(self) -> int:
        """Bytes that the busiest rank receives."""
        return self.plan.bytes

    @property
    def total(self) -> int:
        """Bytes that all ranks send."""
        return self.plan.total

    @property
    def seconds(self) -> float:
        return self.plan.price.time

    @property
    def ways(self) -> tuple[CollectiveKind, ...]:
        """Each kind of collective with its axes, once."""
        return tuple(dict.fromkeys(ways_of(self.plan)))

    @property
    def route(self) -> str:
        """The collectives of a move, such as `reduce_scatter over data`."""
        return ", then ".join(map(str, self.ways)) or "nothing sent"

    @property
    def src(self) -> Layout:
        return self.plan.src

    @property
    def dst(self) -> Layout:
        return self.plan.dst

    @property
    def free(self) -> bool:
        """Whether nothing is sent."""
        return not self.total

    @property
    def spent(self) -> float:
        """Seconds of all of them."""
        return self.seconds * self.count


def axes_of(place: Placement, axes: Iterable[int]) -> tuple[str, ...]:
    """The names of these axes, or their numbers where they have none."""
    return tuple(place.names[a] if place.names else str(a) for a in axes)


def ways_of(plan: Plan) -> tuple[CollectiveKind, ...]:
    """The moves of a plan that send something."""
    return tuple(CollectiveKind(m.kind, axes_of(m.src.placement, m.axes)) for m in plan.moves if m.kind in SHORT)


def moves_of(graph: Physical, again: Sequence[str] = ()) -> list[MoveRow]:
    """Every move in a graph, the one that takes longest first, with all its repeats; `again` is moved a second time."""
    rows: dict[tuple[object, ...], MoveRow] = {}
    blocks = Blocks(graph)
    for block, row in _rows(graph, blocks, again):
        name, module = blocks.generic(row.name, block), blocks.generic(row.module, block)
        key = (name, row.direction, row.plan, row.line)
        known = rows.get(key)
        rows[key] = row if known is None else replace(row, name=name, module=module, count=known.count + 1)
    return sorted(rows.values(), key=lambda row: (-row.spent, -row.bytes * row.count))


@dataclass(frozen=True)
class MoveTotal:
    """All moves of one direction that take the same collectives; a plan of two kinds counts under both names."""

    direction: Direction
    ways: tuple[CollectiveKind, ...]
    count: int
    bytes: int  # that busiest ranks receive, summed over the moves
    total: int  # that all ranks send
    seconds: float

    @property
    def route(self) -> str:
        return ", then ".join(map(str, self.ways))


def totals(rows: Iterable[MoveRow]) -> list[MoveTotal]:
    """Totals by direction and by kind of collective and axes, the heaviest first; free moves are left out."""
    found: dict[tuple[Direction, tuple[CollectiveKind, ...]], list[MoveRow]] = {}
    for row in rows:
        if not row.free:
            found.setdefault((row.direction, row.ways), []).append(row)
    return sorted(
        (
            MoveTotal(
                *key,
                sum(row.count for row in of),
                sum(row.bytes * row.count for row in of),
                sum(row.total * row.count for row in of),
                sum(row.spent for row in of),
            )
            for key, of in found.items()
        ),
        key=lambda total: -total.seconds,
    )


def _rows(graph: Physical, blocks: Blocks, again: Sequence[str]) -> Iterator[tuple[str, MoveRow]]:
    """Each move, and the block it is in."""
    makers = {y.name: step for step in graph.steps for y in step.outputs}
    users = {name: step for step in reversed(graph.steps) for name in step.inputs}

    def row(name: str, direction: Direction, way: Plan, of: str) -> tuple[str, MoveRow]:
        """A move of `name`, which the user's code knows by who makes or first uses the value `of`."""
        step = makers.get(of) or users.get(of)
        line, module = (step.origin.line, step.origin.module) if step else ("", "")
        return blocks.of(of), MoveRow(graph.called.get(name, name), direction, way, line, module)

    boxes = {box.output.name: box for box in graph.boxes}
    for box in graph.boxes:
        yield row(box.source, "forward", graph.plan(box), box.output.name)
    for name in again:
        yield row(boxes[name].source, "again", graph.plan(boxes[name]), name)
    for together in buckets(graph.backs):
        first = together[0]
        more = f" and {len(together) - 1} more" if len(together) > 1 else ""
        yield row(first.into + more, "backward", exchange(together), first.of)
    for source in graph.sources:
        way = update_of(source)
        if way is not None:
            yield row(source.value.name, "update", way, source.value.name)


def update_of(source: Source) -> Plan | None:
    """How a parameter gets from where its optimizer changed it to where it lies, if these differ."""
    there = source.value.layout.with_state(source.value.layout.state)
    return plan(source.home, there) if source.update is not None and source.home is not there else None


def buckets(backs: Iterable[Back]) -> list[list[Back]]:
    """Moves of gradients, those of one bucket together, in the order in which the first of each is reached."""
    found: dict[object, list[Back]] = {}
    for at, back in enumerate(backs):
        key = ("alone", at) if back.bucket is None else ("bucket", back.bucket)
        found.setdefault(key, []).append(back)
    return list(found.values())
