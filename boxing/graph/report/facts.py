"""The facts of a graph: time, memory of each rank, every move, every op with the choice it was given.

Facts that nobody told (costs of ops, memory, how the choice was made) are said to be unknown, never guessed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import dtype

from ....sbp.logical import PART
from ...figures import duration, volume
from ..blocks import Blocks
from ..measures import Course, Held
from ..move_prices import MovePrices
from ..move_table import MoveAccount, MoveRow, MoveTotal, moves_of, totals
from ..physical import Op, Physical
from ..picture.scene import lie, op_name
from .roles import Role, roles_of
from .walked import Walked

__all__ = ["Cost", "GraphFacts", "MemoryReport", "OpRow", "SearchReport", "ops_of", "priced_ops"]


@dataclass(frozen=True)
class Cost:
    """One op as the chooser knows it: its seconds, and by how many more the next best signature would cost."""

    of: int | str  # its place among the steps of the graph, or the name of what it makes
    seconds: float
    runner_up: str = ""
    extra: float = 0.0
    backward: float = 0.0  # the part of the seconds that is spent in the backward


@dataclass(frozen=True)
class MemoryReport:
    """The memory of each rank, how much each has if that is known, and why the inside of some segments is estimated."""

    ranks: Mapping[int, Held]
    limit: int | None = None
    estimates: Sequence[str] = ()
    again: Sequence[str] = ()  # blocks that the backward runs again, because nothing else fitted

    @property
    def fullest(self) -> int:
        """Bytes of the rank that takes most."""
        return max((held.total for held in self.ranks.values()), default=0)

    @property
    def doubt(self) -> str:
        many = len(self.estimates)
        return f"memory of {many} segment{'s' * (many > 1)} is an estimate: {self.estimates[0]}" if many else ""


@dataclass(frozen=True)
class SearchReport:
    """The search for signatures: seconds of a step by the choice, by choosing op after op, and a lower bound. A
    pipeline's are those of its `stages` together, in the mean of these; a step takes as long as the slowest."""

    optimum: float
    greedy: float | None = None
    bound: float | None = None
    method: str = ""
    spent: float | None = None  # seconds that choosing took
    stages: int = 1

    @property
    def proved(self) -> bool:
        """Whether no choice can be better."""
        return self.bound is not None and self.optimum <= self.bound * (1 + 1e-9)

    def __str__(self) -> str:
        text = duration(self.optimum) + f", the mean of {self.stages} stages," * (self.stages > 1)
        text += f" by {self.method}" if self.method else ""
        text += f" in {duration(self.spent)}" if self.spent is not None else ""
        if self.greedy is not None:
            more = f" ({self.greedy / self.optimum - 1:+.0%})" if self.optimum else ""
            text += f"; op after op would give {duration(self.greedy)}{more}"
        if self.bound is not None:
            of = " of their sum" * (self.stages > 1)
            text += f"; proved best{of}" if self.proved else f"; none is below {duration(self.bound)}"
        return text


@dataclass(frozen=True)
class OpRow:
    """One op, or `count` equal ones of repeated blocks; seconds are of one of them."""

    op: str
    module: str
    inputs: tuple[str, ...]  # signatures
    outputs: tuple[str, ...]
    seconds: float | None = None
    runner_up: str = ""
    extra: float = 0.0
    line: str = ""
    count: int = 1

    @property
    def signature(self) -> str:
        return f"{', '.join(self.inputs)} -> {', '.join(dict.fromkeys(self.outputs))}"


@dataclass(frozen=True)
class GraphFacts:
    """A graph with what is known of it.

    `exposed` are seconds of moves during which nothing is computed, `hidden` those of moves beside the computing, and
    `update` those of the optimizer: with the ops they are what the choice was made by. `again` names values that are
    moved a second time, such as parameters gathered for the backward. Each move's own seconds are its part of these, by
    the `account` of the choice; those of its route, where there is none.
    """

    graph: Physical
    costs: Sequence[Cost] = ()
    memory: MemoryReport | None = None
    solution: SearchReport | None = None
    exposed: float | None = None
    hidden: float | None = None
    update: float = 0.0
    again: Sequence[str] = ()
    course: Course | None = None  # that of a pipeline, whose ops and moves are told of one micro-batch
    cut: str = ""  # how its layers were cut into stages, where nobody said it
    copying: float = 0.0  # seconds of what is offloaded on its way to the host, and as many back
    waiting: float = 0.0  # those of both during which nothing is computed
    launching: float = 0.0  # those of a micro-batch in which the host launches kernels and nothing else goes on
    idle: Sequence[str] = ()  # a line on each axis over which nothing is split
    once: float = 0.0  # seconds of moves that a step in micro-batches makes before or behind them
    account: MoveAccount | None = None  # the seconds of moves by which the choice was made
    recorded: str = ""  # what a graph of the card has of the step
    late: Sequence[str] = ()  # a line on what a step in micro-batches does once for the whole batch
    devices: str = ""  # how the seconds of the devices are known: fitted and where, or by a datasheet
    links: str = ""  # how the links are known by which it was chosen: measured and when, a preset, or a guess
    work: Mapping[dtype, float] = field(default_factory=dict)  # FLOPs of a step of all ranks, by what computes them
    whole: float = 0.0  # those of updates of whole tensors, in `exposed` or `once`: no choice is made by them
    walk: Callable[[], Walked] = Walked  # gives what only the page shows

    @cached_property
    def moves(self) -> list[MoveRow]:
        return moves_of(self.graph, self.again, self.account)

    @property
    def eager(self) -> list[str]:
        """A line on each part that runs eagerly, whose price nobody knows beforehand, as Python says what it does while
        it runs; and one on what is done once for the whole batch."""
        parts = [step for step in self.graph.steps if isinstance(step, Op) and step.op.namespace == PART]
        names = [step.origin.module or op_name(step.op) for step in parts]
        unknown = "its seconds and moves are in none of these figures, as Python says what they are while it runs"
        return [*(f"{name} runs eagerly: {unknown}" for name in names), *self.late]

    @cached_property
    def prices(self) -> MovePrices:
        """Those by which pictures tell the same seconds."""
        moving, hidden, once = self.moving, self.hidden, self.once
        return MovePrices(self.graph, self.again, self.account, moving=moving, hidden=hidden, once=once)

    @cached_property
    def totals(self) -> list[MoveTotal]:
        return totals(self.moves)

    @cached_property
    def ops(self) -> list[OpRow]:
        return ops_of(self.graph, self.costs)

    @property
    def recomputed(self) -> tuple[int, int]:
        """The number of ops that the backward runs again, and of their regions: those that a gradient goes through."""
        ops = [step for step in self.graph.steps if isinstance(step, Op) and step.origin.recompute]
        through = {op.origin.recompute for op in ops if any(value.grad for value in op.outputs)}
        return sum(op.origin.recompute in through for op in ops), len(through)

    @property
    def compute(self) -> float | None:
        """Seconds of all ops, if any are known."""
        return sum(cost.seconds for cost in self.costs) if self.costs else None

    @property
    def flops(self) -> float:
        """Floating point operations of a step, forward and backward, of all ranks; what runs again is left out."""
        return sum(self.work.values())

    @property
    def moving(self) -> float:
        """Seconds of all moves, one after the other."""
        if self.exposed is not None and self.hidden is not None:
            return self.exposed + self.hidden
        return sum(total.seconds for total in self.totals)

    @property
    def predicted(self) -> float | None:
        """Seconds of a step; where nobody told what is exposed, as if nothing overlapped."""
        if self.course is not None:
            return self.course.seconds + self.whole
        exposed = self.moving if self.exposed is None else self.exposed
        return None if self.compute is None else self.compute + self.update + exposed + self.waiting + self.launching

    @property
    def placements(self) -> list[str]:
        """Those of the graph's values; one with the same ranks as another, turned, is that one."""
        found = list(dict.fromkeys(value.layout.placement for value in self.graph.values.values()))
        return [str(place) for at, place in enumerate(found) if not any(other.turn_to(place) for other in found[:at])]

    @cached_property
    def frozen(self) -> str:
        """The parameters that get no gradients, in a line, where others get some."""
        held = [source.value for source in self.graph.sources if source.kind == "parameter"]
        still = [value for value in held if not value.grad]
        if not 0 < len(still) < len(held):
            return ""
        size = volume(sum(value.layout.nbytes for value in still))
        return f"{len(still)} of {len(held)} parameters, {size}: no gradients, no states"

    @cached_property
    def roles(self) -> list[Role]:
        return roles_of(self.graph)

    def dict(self) -> dict[str, Any]:
        """All of it in lists, dicts, numbers and text, as json has them."""
        chosen = self.solution and {**asdict(self.solution), "proved": self.solution.proved}
        return {
            "name": self.graph.name,
            "placements": self.placements,
            "time": {
                "predicted": self.predicted,
                "compute": self.compute,
                "update": self.update,
                "hidden": self.hidden,
                "moves": self.moving,
                "exposed": self.exposed,
                "once": self.once,
                "copying": self.copying,
                "waiting": self.waiting,
                "launching": self.launching,
                "course": self.course and asdict(self.course),
            },
            "flops": {str(kind).removeprefix("torch."): many for kind, many in self.work.items()},
            "devices": self.devices,
            "links": self.links,
            "cut": self.cut,
            "idle": list(self.idle),
            "eager": self.eager,
            "choice": chosen,
            "recomputed": {"ops": self.recomputed[0], "regions": self.recomputed[1]},
            "memory": self.memory
            and {
                "limit": self.memory.limit,
                "estimates": list(self.memory.estimates),
                "again": list(self.memory.again),
                "ranks": {
                    str(rank): asdict(held) | {"moment": list(held.moment)} for rank, held in self.memory.ranks.items()
                },
            },
            "modules": [
                {
                    "module": role.module,
                    "axes": dict(zip(role.axes, role.words, strict=True)),
                    "sbp": list(map(str, role.sbp)),
                    "numel": role.numel,
                    "count": role.count,
                }
                for role in self.roles
            ],
            "moves": [_move(row) for row in self.moves],
            "totals": [_total(total) for total in self.totals],
            "ops": [{**asdict(row), "inputs": list(row.inputs), "outputs": list(row.outputs)} for row in self.ops],
        }


def priced_ops(graph: Physical, costs: Iterable[Cost]) -> Iterator[tuple[Op, Cost | None]]:
    """The ops in the order of the graph, each with its cost, if that is known."""
    known = {cost.of: cost for cost in costs}
    for at, step in enumerate(graph.steps):
        if isinstance(step, Op):
            names = (y.name for y in step.outputs)
            yield step, known.get(at) or next((known[name] for name in names if name in known), None)


def ops_of(graph: Physical, costs: Iterable[Cost] = ()) -> list[OpRow]:
    """Every op in the order of the graph; equal ones of repeated blocks are one row with a count."""
    blocks = Blocks(graph)
    rows: dict[OpRow, OpRow] = {}
    for step, cost in priced_ops(graph, costs):
        module = blocks.generic(step.origin.module, step.origin.block)
        inputs = tuple(lie(graph.layout(name)) for name in step.inputs)
        outputs = tuple(lie(y.layout) for y in step.outputs)
        row = OpRow(op_name(step.op), module, inputs, outputs, line=step.origin.line)
        if cost:
            row = replace(row, seconds=cost.seconds, runner_up=cost.runner_up, extra=cost.extra)
        before = rows.get(row)
        rows[row] = replace(row, count=before.count + 1) if before else replace(row, module=step.origin.module)
    return list(rows.values())


def _move(row: MoveRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "direction": row.direction,
        "from": str(row.src),
        "to": str(row.dst),
        "route": [{"kind": way.kind, "axes": list(way.axes)} for way in row.ways],
        "bytes": row.bytes,
        "total": row.total,
        "seconds": row.seconds,
        "hidden": row.hidden,
        "once": row.once,
        "count": row.count,
        "module": row.module,
        "line": row.line,
    }


def _total(of: MoveTotal) -> dict[str, Any]:
    return {**asdict(of), "ways": [{"kind": way.kind, "axes": list(way.axes)} for way in of.ways], "route": of.route}
