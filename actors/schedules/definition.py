"""Definitions of schedules: where chunks are placed, how many slots their registers have, and who goes first.

    act     slots from F to B: how many micro-batches a chunk may have begun and not taken back
    stash   slots from F to W, where W is apart from B
    dy      slots from B to W
    low_b   B takes slot k when F has filled slot k + low_b: a delay line that keeps the order whatever time things take
    low_w   W takes slot k when B has filled slot k + low_w

Of what is ready a device does what comes first in `first`; slots alone hold the forward back. Where marks do not say
enough, an order says for each device what it does, thing by thing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias, get_args

from ...placement.errors import ScheduleError, caret
from ..protocol.network import skips
from .dual_orders import DUAL_ORDERS
from .formula import fault, formula, known_names
from .text import Action, Value, ops, read, write
from .v_orders import ORDERS as V_ORDERS

__all__ = ["Definition", "Marks", "Shape", "ChunkWay", "Unpinned"]

# How chunks lie on p devices: round and round; down and up again; or two routes through all, from either end.
ChunkWay: TypeAlias = Literal["loop", "vee", "routes"]

ORDERS = {**V_ORDERS, **DUAL_ORDERS}  # of families, for every p and m
# Whether B and W read the weights of their F, which are held for them, or the newest; or these, corrected by how far
# weights have come since their F.
Unpinned: TypeAlias = Literal["", "newest", "corrected"]

WAYS = ("loop", "vee", "routes")
FORMULAS = ("act", "stash", "dy", "low_b", "low_w", "group", "pool", "unit", "versions", "update")


@dataclass(frozen=True)
class Shape:
    """A pipeline: p devices, m micro-batches, v chunks on each device, each micro-batch in n slices."""

    p: int
    m: int
    v: int = 1
    n: int = 1

    def __post_init__(self) -> None:
        for name, value in (("p", self.p), ("m", self.m), ("v", self.v), ("n", self.n)):
            if value < 1:
                raise ScheduleError(f"a pipeline of {name}={value}\n  give a number of 1 or more")


@dataclass(frozen=True)
class Marks:
    """The marks of one chunk."""

    act: int
    stash: int
    dy: int
    low_b: int = 0
    low_w: int = 0


@dataclass(frozen=True)
class Definition:
    """A schedule as data. Marks are formulas of p, s, m, v, c, n; `table` is an order for each device instead."""

    name: str
    way: ChunkWay = "loop"
    v: int = 1  # chunks on each device where the user says nothing
    split: bool = False  # W apart from B
    act: str = "m*n"
    stash: str = "m*n"
    dy: str = "m*n"
    low_b: str = "0"
    low_w: str = "0"
    first: str = "FBW"  # of what is ready
    deep: bool = False  # of the forwards that are ready too, the chunk nearest to the loss
    group: str = "m"  # micro-batches that go through a chunk before the next chunk's turn
    unit: str = ""  # micro-batches that go before all later ones
    pool: str = ""  # one actor for the forwards of a device and one for its backwards, this far apart
    lifo: bool = False  # backward from the newest micro-batch, all forwards being done
    slices: bool = False  # of one sequence, backward from the last to the first
    turns: bool = False  # a route begins its next micro-batch when the other has its loss
    versions: str = ""  # of the weights, for a schedule without a flush
    update: str = "1"  # micro-batches an update, for such a schedule
    unpinned: Unpinned = ""  # nobody holds a version: there is one, which changes between F and B
    order: str = ""  # of a family that has an order for every p and m
    table: tuple[str, ...] = ()  # a row for each device, in words: F0 F1 B0 f0 b0

    def __post_init__(self) -> None:
        def wrong(field: str, what: str, fix: str) -> ScheduleError:
            return ScheduleError(f"{self.name}: {field} {getattr(self, field)!r} {what}\n  {fix}")

        if len(self.name.split()) != 1 or "#" in self.name:
            raise wrong("name", "is no name", "give one word without #")
        if self.way not in WAYS:
            raise wrong("way", "is no way of placing chunks", f"there are {', '.join(WAYS)}")
        if sorted(self.first) != sorted("FBW"):
            raise wrong("first", "does not order F, B and W", "write FBW, or BFW for backwards first")
        if self.order and self.order not in ORDERS:
            raise wrong("order", "is not known", f"there are {', '.join(ORDERS)}; others are given as a table")
        for field in FORMULAS:
            text = getattr(self, field)
            found = fault(text) if text or field not in ("pool", "unit", "versions") else None
            if found is not None:
                raise ScheduleError(
                    caret(text, found[0], f"{self.name}: {field}: {found[1]}") + f"\n  the names are {known_names()}"
                )
        if self.unpinned not in get_args(Unpinned):
            raise wrong("unpinned", "is no way of reading weights", "write newest, or corrected; or leave it out")
        if self.unpinned and self.versions != "1":
            raise wrong("versions", "are held by those who read them", "unpinned weights are there once: versions 1")
        if self.versions and (self.lifo or self.slices):
            raise wrong("versions", "are read in order", "leave out lifo and slices")
        if self.table:
            inside = [op for row in self._table for op in row]
            object.__setattr__(self, "v", max((op.chunk for op in inside), default=0) + 1)
            object.__setattr__(self, "split", any(op.kind == "W" for op in inside))
        if self.way != "loop" and self.v == 1:
            object.__setattr__(self, "v", 2)
        if self.v > 2 and (self.way == "routes" or self.order):
            raise wrong("v", "is too much", "two routes, and a family's order, have 2 chunks on each device")
        if self.table:
            self._check_table()

    @classmethod
    def read(cls, text: str) -> Self:
        """The schedule that a text says; `str` writes what this reads.

        >>> print(Definition.read("schedule mine\\nact p-s   # as 1F1B\\n"))
        schedule mine
        act p-s
        """
        given: dict[str, Any] = dict(read(text, _usual()))
        return cls(**given)

    def __str__(self) -> str:
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.table:
            said.update(v=1, split=False)  # the table says it
        elif self.way != "loop" and self.v == 2:
            said.update(v=1)
        return write(said, _usual())

    @cached_property
    def synchronous(self) -> bool:
        """Whether all micro-batches of a step see the same weights."""
        return not self.versions

    @property
    def waits(self) -> bool:
        """Whether the last chunk can hold what all micro-batches leave there, before one of them goes back."""
        marks = self.act in ("m", "m*n") and not (self.pool or self.split or self.slices or self.table or self.order)
        return marks and self.synchronous and self.way == "loop"

    @cached_property
    def linear(self) -> bool:
        """Whether it runs any chunks in a row, each as a stage of its own, also where several are on one device."""
        return self.way == "loop" and self.v == 1 and not self.table

    @cached_property
    def in_turn(self) -> bool:
        """Whether each part of each chunk of a table does its micro-batches as they come."""
        last: dict[tuple[int, str, int], int] = {}
        for device, row in enumerate(self._table):
            for kind, chunk, number, _ in row:
                if number < last.get((device, kind, chunk), -1):
                    return False
                last[device, kind, chunk] = number
        return True

    def shape(self, p: int = 0, m: int = 0, *, v: int = 0, n: int = 1) -> Shape:
        """A pipeline for this schedule; a table says p and m itself."""
        if self.table:
            rows = self._table
            p, m = p or len(rows), m or 1 + max((op.number for row in rows for op in row), default=0)
        return Shape(p, m, v or self.v, n)

    def routes(self, shape: Shape) -> int:
        """Routes that micro-batches take by turns; one micro-batch takes one."""
        return min(2, shape.m) if self.way == "routes" else 1

    def device(self, shape: Shape, chunk: int) -> int:
        """The device that a chunk lies on. Of two routes the first has chunks 0 to p-1, the second p to 2p-1."""
        turn, place = divmod(chunk, shape.p)
        return shape.p - 1 - place if self.way != "loop" and turn % 2 else place

    def value(self, text: str, shape: Shape, chunk: int) -> int:
        names = {"p": shape.p, "m": shape.m, "v": shape.v, "n": shape.n, "c": chunk, "s": self.device(shape, chunk)}
        if self.way == "routes":
            names["s"] = chunk % shape.p  # along the route
        return formula(text, names)

    def rows(self, shape: Shape) -> tuple[tuple[Action, ...], ...]:
        """The order of each device, in chunks of the model; empty where marks say it."""
        if self.order and (shape.v, shape.n) == (2, 1):
            return ORDERS[self.order](shape.p, shape.m)
        if self.order:
            raise ScheduleError(f"{self.name} is not for {shape}\n  it is for v=2 n=1")
        if not self.table:
            return ()
        mine = self.shape()
        if shape != mine:
            raise ScheduleError(
                f"{self.name} is a table for p={mine.p} m={mine.m} v={mine.v}, not for {shape}\n"
                "  ask for these, or use marks"
            )
        return tuple(
            tuple(op._replace(chunk=self._chunk(shape, device, op.chunk)) for op in row)
            for device, row in enumerate(self._table)
        )

    def marks(self, shape: Shape, chunk: int) -> Marks:
        """The marks of a chunk; more slots than micro-batches are of no use. Of an order, what it needs."""
        rows = self.rows(shape)
        if rows:
            return _needed(rows[self.device(shape, chunk)], chunk)
        most = shape.m * shape.n

        def quota(text: str) -> int:
            return max(1, min(most, self.value(text, shape, chunk)))

        def low(text: str) -> int:
            return max(0, self.value(text, shape, chunk))

        return Marks(quota(self.act), quota(self.stash), quota(self.dy), low(self.low_b), low(self.low_w))

    def skips(self, shape: Shape, maker: str, reader: str) -> tuple[int, ...]:
        """The slots that each firing of `reader`, such as B0, leaves lying when it takes from `maker`. That may be F0,
        or D0, the data of a chunk. Empty where both come in the same order."""
        if self.in_turn:
            return ()
        return skips(self._numbers(shape, maker), self._numbers(shape, reader))

    def _numbers(self, shape: Shape, task: str) -> Iterator[int]:
        """The micro-batches of a task of a table in the order of its firings, counted on its route."""
        kind, chunk, routes = task[0], int(task[1:]), self.routes(shape)
        if kind == "D":
            return iter(range(len(range(chunk // shape.p if self.way == "routes" else 0, shape.m, routes))))
        row = self.rows(shape)[self.device(shape, chunk)]
        return (op.number // routes for op in row if op[:2] == (kind, chunk))

    def _chunk(self, shape: Shape, device: int, nth: int) -> int:
        """The number in the model of a device's chunk."""
        back = self.way != "loop" and nth % 2
        return nth * shape.p + (shape.p - 1 - device if back else device)

    @cached_property
    def _table(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(ops(self.name, device, row) for device, row in enumerate(self.table))

    def _check_table(self) -> None:
        """Every chunk does everything once, and where there are versions in the order of micro-batches."""
        shape = self.shape()
        routes = self.routes(shape)
        for device, row in enumerate(self._table):
            for nth in range(self.v):
                if self.way == "routes" and nth >= routes:
                    continue
                numbers = list(range(nth if self.way == "routes" else 0, shape.m, routes))
                for kind in "FBW" if self.split else "FB":
                    has = [op.number for op in row if op.kind == kind and op.chunk == nth]
                    missing = [Action(kind, nth, k) for k in numbers if k not in has]
                    if missing:
                        raise ScheduleError(
                            f"{self.name}: device {device} never does {missing[0]}\n  {self.table[device]}\n"
                            f"  each device does {'F, B and W' if self.split else 'F and B'} of each of its "
                            f"{self.v} chunk{'s' * (self.v > 1)} for micro-batches 0 to {shape.m - 1}"
                        )
                    if has != numbers and (self.versions or sorted(has) != numbers):
                        at = next(i for i, (k, want) in enumerate(zip(has, [*numbers, -1], strict=False)) if k != want)
                        word = next(str(op) for op in row if op[:3] == (kind, nth, has[at]))
                        raise ScheduleError(
                            caret(self.table[device], f" {self.table[device]} ".find(f" {word} "),
                                  f"{self.name}: device {device} does {word} out of turn")
                            + f"\n  {'versions are read in order' if self.versions else 'each route has its own'}: "
                            "number micro-batches as they come"
                        )  # fmt: skip


def _usual() -> dict[str, Value]:
    return {field.name: "" if field.name == "name" else field.default for field in fields(Definition)}  # type: ignore[misc]


def _needed(row: Sequence[Action], chunk: int) -> Marks:
    """The slots that an order uses."""

    def most(begins: str, ends: str) -> int:
        used = high = 0
        for op in row:
            if op.chunk == chunk:
                used += (op.kind == begins) - (op.kind == ends)
                high = max(high, used)
        return max(1, high)

    return Marks(most("F", "B"), most("F", "W"), most("B", "W"))
