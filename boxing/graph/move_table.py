"""Every move of a graph with its bytes and price: those of values, of gradients, and of parameters after the update.

Moves that are equal in repeated blocks are one row with a count, and the gradients of a bucket are one move. Values
that are gathered again for the backward have a row more.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ...placement import Placement
from ...placement.moved import MovedName
from ...sbp import Layout, State
from ..boxing import Boxing, between
from ..bundle import refilling
from ..routes.moves import LOCAL
from .blocks import Blocks
from .buckets import exchange, exchanges, gathered
from .physical import Back, Physical, Source, in_narrower

__all__ = [
    "AccountKey",
    "Direction",
    "MoveAccount",
    "MoveRow",
    "MoveTotal",
    "CollectiveKind",
    "axes_of",
    "buckets",
    "buckets_home",
    "each_move",
    "merged",
    "moves_of",
    "priced_moves",
    "totals",
    "updates",
    "of_owner",
    "updates_of",
    "value_for_owner",
    "ways_of",
]

Direction: TypeAlias = Literal["forward", "again", "backward", "update"]


AccountKey: TypeAlias = tuple[str, str]  # a value, and the direction: forward, backward, update


@dataclass(frozen=True)
class MoveAccount:
    """The seconds of moves by which a step was chosen.

    A value has one sum for all its moves one way with each micro-batch, and one for those once a step. Moves `inside`
    of ops that are taken apart have one sum for all. Updates of parameters that are `stepped_whole` move by no choice:
    they take the seconds of their routes."""

    each: Mapping[AccountKey, float]
    late: Mapping[AccountKey, float]
    inside: float = 0.0
    known: Collection[str] = ()  # values that are not inside of such ops
    stepped_whole: frozenset[str] = frozenset()
    piped: bool = False
    hides: Mapping[AccountKey, float] = field(default_factory=dict)  # the part of `each` that computing hides

    def key(self, root: str, direction: str) -> AccountKey:
        return (root, direction) if root in self.known else ("", "")

    def seconds(self, key: AccountKey) -> float:
        """All of them."""
        return self.inside if key == ("", "") else self.each.get(key, 0.0) + self.late.get(key, 0.0)

    def once(self, key: AccountKey) -> bool:
        """Whether that is done once a step alone."""
        return bool(self.late.get(key)) and not self.each.get(key)


class CollectiveKind(NamedTuple):
    """A kind of collective and the names of the axes that it runs over."""

    kind: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} over {', '.join(self.axes)}" if self.axes else self.kind


@dataclass(frozen=True)
class MoveRow:
    """One move, or `count` equal ones of repeated blocks; figures are of one of them."""

    name: str  # the value's; a star stands for the number of a repeated block
    direction: Direction
    boxing: Boxing
    line: str = ""
    module: str = ""
    count: int = 1
    of: tuple[str, ...] = ()  # the values, parameters or gradients that go
    ends: tuple[str, ...] = ()  # for each, the copy that comes, or the value that the gradient is of
    bucket: int | None = None
    told: float | None = None  # seconds, where an account of the whole step has them
    once: bool = False  # whether a step in micro-batches makes it once
    hidden: float = 0.0  # seconds of it beside which something is computed
    members: tuple[tuple[Layout, Layout], ...] = ()  # of a bucket: how what is in it lies, before and after, each once

    if not TYPE_CHECKING:
        plan = MovedName("sbpflow.boxing.graph.move_table.MoveRow.plan")

    @property
    def bytes(self) -> int:
        """Bytes that the busiest rank receives."""
        return self.boxing.bytes

    @property
    def total(self) -> int:
        """Bytes that all ranks send."""
        return self.boxing.total

    @property
    def seconds(self) -> float:
        return self.boxing.price.time if self.told is None else self.told

    @property
    def waited(self) -> float:
        """Seconds of it during which nothing is computed."""
        return max(0.0, self.seconds - self.hidden)

    @property
    def ways(self) -> tuple[CollectiveKind, ...]:
        """Each kind of collective with its axes, once."""
        return tuple(dict.fromkeys(ways_of(self.boxing)))

    @property
    def route(self) -> str:
        """The collectives of a move, such as `reduce_scatter over data`."""
        return ", then ".join(map(str, self.ways)) or "nothing sent"

    @property
    def src(self) -> Layout:
        return self.boxing.src

    @property
    def dst(self) -> Layout:
        return self.boxing.dst

    @property
    def changes(self) -> tuple[tuple[Layout, Layout], ...]:
        """From which layouts to which: of what is in a bucket, because its own is that of a row of pieces."""
        return self.members or ((self.src, self.dst),)

    @property
    def free(self) -> bool:
        """Whether nothing is sent."""
        return not self.boxing.sends or not self.total

    @property
    def spent(self) -> float:
        """Seconds of all of them."""
        return self.seconds * self.count


def axes_of(place: Placement, axes: Iterable[int]) -> tuple[str, ...]:
    """The names of these axes, or their numbers where they have none."""
    return tuple(place.names[a] if place.names else str(a) for a in axes)


def ways_of(boxing: Boxing) -> tuple[CollectiveKind, ...]:
    """The moves of a boxing that send something."""
    return tuple(
        CollectiveKind(m.kind, _named(boxing, m.src.placement, m.axes)) for m in boxing.moves if m.kind not in LOCAL
    )


def _named(boxing: Boxing, place: Placement, axes: tuple[int, ...]) -> tuple[str, ...]:
    """The names of axes.

    Between two grids of the same ranks, whose common one has no names, they are those of either grid for the same
    groups: `data=expert`; and on a grid that is cut where an axis crosses hosts, that of the axis."""
    if place.names or not axes:
        return axes_of(place, axes)
    groups = set(map(frozenset, place.groups(axes)))
    named = [
        (name, set(map(frozenset, grid.groups((a,)))))
        for grid in (boxing.src.placement, boxing.dst.placement)
        for a, name in enumerate(grid.names or ())
    ]
    found = dict.fromkeys(name for name, whole in named if whole == groups)
    found = found or dict.fromkeys(name for name, whole in named if all(any(g <= h for h in whole) for g in groups))
    return ("=".join(found),) if found else axes_of(place, axes)


def moves_of(graph: Physical, again: Sequence[str] = (), account: MoveAccount | None = None) -> list[MoveRow]:
    """Every move in a graph, the one that takes longest first, with all its repeats; `again` is moved a second time.
    Seconds are those of its route, or its part of those of an account."""
    return merged(graph, priced_moves(graph, again, account))


def priced_moves(
    graph: Physical, again: Sequence[str] = (), account: MoveAccount | None = None
) -> list[tuple[str, MoveRow]]:
    """Every move by itself, and the block it is in."""
    with graph.priced():
        every = list(each_move(graph, Blocks(graph), again))
        return every if account is None else _accounted(graph, every, account)


def merged(graph: Physical, every: Iterable[tuple[str, MoveRow]]) -> list[MoveRow]:
    """Moves with those that are equal to them in repeated blocks, the one that takes longest first."""
    rows: dict[tuple[object, ...], MoveRow] = {}
    blocks = Blocks(graph)
    for block, row in every:
        name, module = blocks.generic(row.name, block), blocks.generic(row.module, block)
        key = (name, row.direction, row.boxing, row.line, row.once)
        known = rows.get(key)
        if known is not None:
            n = known.count + 1
            told = None if row.told is None or known.told is None else known.told + (row.told - known.told) / n
            hidden = known.hidden + (row.hidden - known.hidden) / n
            of, ends = known.of + row.of, known.ends + row.ends
            row = replace(row, name=name, module=module, count=n, told=told, hidden=hidden, of=of, ends=ends)
        rows[key] = row
    # Seconds that differ by how they were added up are equal, so that a gather and its sum stay in their order.
    return sorted(rows.values(), key=lambda row: (-float(f"{row.spent:.9g}"), -row.bytes * row.count))


def _accounted(
    graph: Physical, every: Sequence[tuple[str, MoveRow]], account: MoveAccount
) -> list[tuple[str, MoveRow]]:
    """The moves with the seconds of an account.

    A value's moves one way share the one sum that it has for them, in proportion to the seconds of their routes."""
    origin: dict[str, str] = {}
    for box in graph.boxes:
        origin[box.output.name] = origin.get(box.source, box.source)
    parts: list[list[tuple[AccountKey, float]]] = []
    sums: dict[AccountKey, float] = {}
    for _, row in every:
        roots = [origin.get(name, name) for name in row.of]
        sizes = [max(graph.layout(root).numel, 1) for root in roots]
        way = "forward" if row.direction == "again" else row.direction
        keys = [account.key(root, way) for root in roots]
        mine = [(key, row.seconds * size / sum(sizes)) for key, size in zip(keys, sizes, strict=True)]
        parts.append(mine)
        for key, seconds in mine:
            sums[key] = sums.get(key, 0.0) + seconds
    found = []
    for (block, row), mine in zip(every, parts, strict=True):
        if row.direction == "update" and not account.stepped_whole.isdisjoint(row.of):
            found.append((block, replace(row, told=row.seconds, once=account.piped)))
            continue
        told = sum(account.seconds(key) * seconds / sums[key] for key, seconds in mine if sums[key])
        hidden = sum(account.hides.get(key, 0.0) * seconds / sums[key] for key, seconds in mine if sums[key])
        once = not row.free and all(account.once(key) for key, _ in mine)
        found.append((block, replace(row, told=told, hidden=hidden, once=once)))
    return found


@dataclass(frozen=True)
class MoveTotal:
    """All moves of one direction that take the same collectives; a boxing of two kinds counts under both names."""

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


def each_move(graph: Physical, blocks: Blocks, again: Sequence[str]) -> Iterator[tuple[str, MoveRow]]:
    """Each move, and the block it is in."""
    makers = {y.name: step for step in graph.steps for y in step.outputs}
    users = {name: step for step in reversed(graph.steps) for name in step.inputs}

    def row(
        name: str, direction: Direction, way: Boxing, ends: Sequence[str], of: Sequence[str], at: int | None = None
    ) -> tuple[str, MoveRow]:
        """A move of `name`, at the user's line of the step that makes, or first uses, the first of its ends."""
        end = ends[0]
        step = makers.get(end) or users.get(end)
        line, module = (step.origin.line, step.origin.module) if step else ("", "")
        called = graph.called.get(name, name)
        return blocks.of(end), MoveRow(called, direction, way, line, module, of=(*of,), ends=(*ends,), bucket=at)

    boxes = {box.output.name: box for box in graph.boxes}
    for box in graph.boxes:
        if box.output.name in graph.copied:
            continue
        yield row(box.source, "forward", graph.boxing(box), [box.output.name], [box.source])
    for name in again:
        yield row(boxes[name].source, "again", graph.boxing(boxes[name]), [name], [boxes[name].source])
    for together in buckets(graph.backs):
        first = together[0]
        more = f" and {len(together) - 1} more" if len(together) > 1 else ""
        for way in exchanges(together):
            ends, into = [back.of for back in together], [back.into for back in together]
            block, made = row(first.into + more, "backward", way, ends, into, first.bucket)
            packed = dict.fromkeys((back.src, back.dst) for back in together) if len(together) > 1 else ()
            yield block, replace(made, members=(*packed,))
    for names, way in updates(graph.sources):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield row(names[0] + more, "update", way, names, names)


def updates(sources: Iterable[Source]) -> Iterator[tuple[Sequence[str], Boxing]]:
    """Every move of an update, with the parameters that it is of: what optimizers changed goes home in buckets."""
    homeward: list[tuple[str, Boxing]] = []
    for source in sources:
        name, home = source.value.name, _way_home(source)
        homeward += [] if home is None else [(name, home)]
        yield from (([name], way) for way in updates_of(source) if way is not home)
    for numbers in gathered([(way.src, way.dst) for _, way in homeward]):
        members = [homeward[number] for number in numbers]
        yield [name for name, _ in members], exchange([way for _, way in members])


def buckets_home(sources: Iterable[Source]) -> list[list[tuple[Layout, Layout]]]:
    """The ends of the moves by which what optimizers changed goes home, those of one bucket together."""
    ends = [(way.src, way.dst) for way in map(_way_home, sources) if way and way.moves]
    return [[ends[number] for number in numbers] for numbers in gathered(ends)]


def _way_home(source: Source) -> Boxing | None:
    """The move of what an optimizer changed in pieces to where the parameter lies."""
    back = in_narrower(source.master, source.value.layout)
    ways = updates_of(source) if source.whole is None else ()
    return next((way for way in ways if (way.src, way.dst) == back), None)


def updates_of(source: Source) -> tuple[Boxing, ...]:
    """The boxings that bring a gradient to the optimizer and its change to the parameter; none where these lie there
    already."""
    if source.kind != "parameter" or not source.value.grad:
        return ()
    lies = source.value.layout.with_state(source.value.layout.state)
    ends = [in_narrower(source.home, source.master), in_narrower(source.master, lies)]
    if source.whole is not None:
        exact = lies.dtype is source.master.dtype and source.offload is None
        x = lies if exact else source.master  # where there are all digits of it
        needed = x, source.home, *[source.master] * source.whole
        ends = [(of, of.with_state(State(((),) * len(of.shape)))) for of in needed]
    return (*(between(src, dst) for src, dst in ends if src is not dst), *_to_owner_and_back(source))


def _to_owner_and_back(source: Source) -> tuple[Boxing, ...]:
    """The moves of the value and the gradient that an owner steps, from where they rest, and of the value back."""
    if source.owner is None:
        return ()
    rest, whole = source.master.with_state(source.master.state), of_owner(source)
    ways = refilling(value_for_owner(source), whole), refilling(rest, whole), refilling(whole, rest)
    return tuple(way for way in ways if way.total)


def value_for_owner(source: Source) -> Layout:
    """The layout of what an owner takes a parameter's value from: the parameter, if it has all of it and all digits."""
    lies = source.value.layout.with_state(source.value.layout.state)
    whole = refilling(lies, of_owner(source).with_dtype(lies.dtype)).total == 0
    return lies if whole and lies.dtype is source.master.dtype else source.master.with_state(source.master.state)


def of_owner(source: Source) -> Layout:
    """The layout of a parameter, and of its state, on the rank that steps it."""
    of = source.master
    assert source.owner is not None
    where = Placement(of.placement.type, (source.owner,), (1,), None)
    return Layout(where, State(((),) * len(of.shape)), of.shape, of.dtype)


def buckets(backs: Iterable[Back]) -> list[list[Back]]:
    """Moves of gradients, those of one bucket together, in the order in which the first of each is reached."""
    found: dict[object, list[Back]] = {}
    for at, back in enumerate(backs):
        key = ("alone", at) if back.bucket is None else ("bucket", back.bucket)
        found.setdefault(key, []).append(back)
    return list(found.values())
