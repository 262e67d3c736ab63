"""Every move of a graph with its bytes and price: those of values, of gradients, and of parameters after the update.

Moves that are equal in repeated blocks are one row with a count. The gradients of one bucket go together, so that each
kind of collective starts once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from ...placement import Placement
from ...sbp import Layout
from ..look import SHORT
from ..plan import Plan, plan
from ..price import Network
from .blocks import Blocks
from .physical import Back, Graph, Source

__all__ = ["Direction", "MoveRow", "Total", "Way", "axes_of", "buckets", "moves_of", "totals", "update_of", "ways_of"]

Direction: TypeAlias = Literal["forward", "backward", "update"]


class Way(NamedTuple):
    """A kind of collective and the names of the axes that it runs over."""

    kind: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} over {', '.join(self.axes)}" if self.axes else self.kind


@dataclass(frozen=True)
class MoveRow:
    """One move, or `count` equal ones of repeated blocks; figures are of one of them.

    `bytes` are those that the busiest rank receives, `total` what all ranks send.
    """

    name: str  # of the value; a star stands for the number of a repeated block
    direction: Direction
    plans: tuple[Plan, ...]  # several in a bucket
    bytes: int
    total: int
    seconds: float
    line: str = ""
    module: str = ""
    count: int = 1

    @property
    def ways(self) -> tuple[Way, ...]:
        """Each kind of collective with its axes, once."""
        return tuple(dict.fromkeys(way for one in self.plans for way in ways_of(one)))

    @property
    def route(self) -> str:
        """What is sent, as `reduce_scatter over data`."""
        return ", then ".join(map(str, self.ways)) or "nothing sent"

    @property
    def src(self) -> Layout:
        return self.plans[0].src

    @property
    def dst(self) -> Layout:
        return self.plans[0].dst

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


def ways_of(plan: Plan) -> tuple[Way, ...]:
    """The moves of a plan that send something."""
    return tuple(Way(m.kind, axes_of(m.src.placement, m.axes)) for m in plan.moves if m.kind in SHORT)


def _bytes(plans: Sequence[Plan]) -> int:
    """Bytes that the busiest rank receives when these go together."""
    if len(plans) == 1:
        return plans[0].bytes
    ranks = dict.fromkeys(rank for one in plans for rank in one.ranks)
    return max((sum(one.received(rank) for one in plans) for rank in ranks), default=0)


def _seconds(plans: Sequence[Plan]) -> float:
    """The price of these together: what starts a collective is paid once for all that run over the same axes."""
    seconds, started = 0.0, set[tuple[Placement, str, tuple[int, ...]]]()
    for one in plans:
        for move in one.moves:
            seconds += move.price.time
            key = (move.src.placement, move.kind, move.axes)
            if key in started and move.axes:
                seconds -= Network.of(move.src.placement, one.cluster).moved(move.kind, move.axes, 0.0).time
            started.add(key)
    return seconds


def moves_of(graph: Graph) -> list[MoveRow]:
    """Every move in a graph, the one that takes longest first, with all its repeats."""
    rows: dict[tuple[object, ...], MoveRow] = {}
    blocks = Blocks(graph)
    for block, row in _rows(graph, blocks):
        name, module = blocks.generic(row.name, block), blocks.generic(row.module, block)
        key = (name, row.direction, row.plans, row.line)
        known = rows.get(key)
        rows[key] = row if known is None else replace(row, name=name, module=module, count=known.count + 1)
    return sorted(rows.values(), key=lambda row: (-row.spent, -row.bytes * row.count))


@dataclass(frozen=True)
class Total:
    """All moves of one direction that take the same collectives; a plan of two kinds counts under both names."""

    direction: Direction
    ways: tuple[Way, ...]
    count: int
    bytes: int  # that busiest ranks receive, summed over the moves
    total: int  # that all ranks send
    seconds: float

    @property
    def route(self) -> str:
        return ", then ".join(map(str, self.ways))


def totals(rows: Iterable[MoveRow]) -> list[Total]:
    """What is spent by direction and by kind of collective and axes, the heaviest first; free moves are left out."""
    found: dict[tuple[Direction, tuple[Way, ...]], list[MoveRow]] = {}
    for row in rows:
        if not row.free:
            found.setdefault((row.direction, row.ways), []).append(row)
    return sorted(
        (
            Total(
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


def _rows(graph: Graph, blocks: Blocks) -> Iterator[tuple[str, MoveRow]]:
    """Each move, and the block it is in."""
    makers = {y.name: step for step in graph.steps for y in step.outputs}
    users = {name: step for step in reversed(graph.steps) for name in step.inputs}

    def row(name: str, direction: Direction, plans: Sequence[Plan], of: str) -> tuple[str, MoveRow]:
        """A move of `name`, which the user's code knows by who makes or first uses the value `of`."""
        step = makers.get(of) or users.get(of)
        line, module = (step.origin.line, step.origin.module) if step else ("", "")
        cost = _bytes(plans), sum(one.total for one in plans), _seconds(plans)
        return blocks.of(of), MoveRow(name, direction, tuple(plans), *cost, line, module)

    for box in graph.boxes:
        yield row(box.source, "forward", [graph.plan(box)], box.output.name)
    for together in buckets(graph.backs):
        first = together[0]
        more = f" and {len(together) - 1} more" if len(together) > 1 else ""
        yield row(first.into + more, "backward", [back.plan for back in together], first.of)
    for source in graph.sources:
        way = update_of(source)
        if way is not None:
            yield row(source.value.name, "update", [way], source.value.name)


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
