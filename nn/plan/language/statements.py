"""The statements of a plan, one a line, as values that print as they are written.

    grid (data=2, tensor=4)               Grid
    states **: data=S(0)                  Rest
    model.norm -> tensor=S(1)             Flow
    input tokens <- data=S(0)             Input
    take tp_plan over tensor              TakePlan
    place model.vision at pipe=0          Place
    pipe model.layers over pipe by 1f1b, 8 micro-batches          Pipe
    recompute model.layers.* keep mm      Recompute
    offload states ** to cpu ahead 2      Offload
    cast {grads,states} ** to fp32        Cast
    inside model.layers.* use ring over context                   Inside
    compress model.layers.** by sign(rows=True) over data         Compress
    limit memory 70 GiB                   Limit
    seek pipe, schedule                   Seek
    expect 2 all_gather over tensor a layer forward               ExpectMoves, ExpectGathered, ExpectAtMost

A path is a pattern of names: `*` is any part of one name, `**` any number of names, {a,b} one of several, [2:8] a range
of numbers.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ....sbp import Sbp

__all__ = [
    "Cast",
    "AxisEntries",
    "Compress",
    "ExpectAtMost",
    "ExpectGathered",
    "ExpectMoves",
    "Flow",
    "Grid",
    "GridAxis",
    "Input",
    "Inside",
    "Kind",
    "Limit",
    "Offload",
    "Pipe",
    "Place",
    "Recompute",
    "Rest",
    "Seek",
    "Statement",
    "TakePlan",
]

Kind: TypeAlias = Literal["weights", "grads", "states"]
Kinds: TypeAlias = tuple[Kind, ...]
AxisEntries: TypeAlias = tuple[tuple[str, Sbp | None], ...] | None  # an axis each, None: the planner's; None: all are


@dataclass(frozen=True)
class GridAxis:
    """An axis of the grid: so many ranks, `*` for what the launcher has left, `?` for the planner's. One that folds
    another is the same ranks, seen once more."""

    name: str
    size: int | Literal["*", "?"]
    folds: str | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.size}" + (f" folds {self.folds}" if self.folds else "")


@dataclass(frozen=True)
class Grid:
    """The placement: a type of device, or what the run has, and axes; or a placement's own text."""

    axes: tuple[GridAxis, ...] = ()
    type: str | None = None
    placement: str | None = None

    def __str__(self) -> str:
        if self.placement is not None:
            return f"grid {self.placement}"
        return " ".join(filter(None, ("grid", self.type, f"({', '.join(map(str, self.axes))})")))


@dataclass(frozen=True)
class Rest:
    """How weights, gradients or optimizer states lie between steps."""

    path: str
    entries: AxisEntries
    kinds: Kinds = ("weights",)

    def __str__(self) -> str:
        return f"{_kinds(self.kinds)}{self.path}: {_signature(self.entries)}"


@dataclass(frozen=True)
class Flow:
    """How the result of a module flows, or its input."""

    path: str
    entries: AxisEntries
    of: Literal["result", "input"] = "result"

    def __str__(self) -> str:
        return f"{self.path} {'->' if self.of == 'result' else '<-'} {_signature(self.entries)}"


@dataclass(frozen=True)
class Input:
    """How an argument of the step lies, by its name or path."""

    name: str
    entries: AxisEntries

    def __str__(self) -> str:
        return f"input {self.name} <- {_signature(self.entries)}"


@dataclass(frozen=True)
class TakePlan:
    """The plan that the model's own config has, `tp_plan`, `ep_plan` or `pp_plan`, over an axis."""

    what: str
    over: str

    def __str__(self) -> str:
        return f"take {self.what} over {self.over}"


@dataclass(frozen=True)
class Place:
    """Modules at one place of an axis."""

    path: str
    axis: str
    at: int

    def __str__(self) -> str:
        return f"place {self.path} at {self.axis}={self.at}"


@dataclass(frozen=True)
class Pipe:
    """Layers as stages over an axis, by a schedule with marks such as v=3."""

    path: str
    over: str
    schedule: str = "1f1b"
    marks: tuple[tuple[str, int], ...] = ()
    micro_batches: int | None = None
    slices: int | None = None

    def __str__(self) -> str:
        by = " ".join([f"pipe {self.path} over {self.over} by {self.schedule}", *(f"{n}={k}" for n, k in self.marks)])
        many = f", {self.micro_batches} micro-batches" if self.micro_batches is not None else ""
        return by + many + (f", {self.slices} slices" if self.slices is not None else "")


@dataclass(frozen=True)
class Recompute:
    """Modules that the backward runs again: all of them, all but the ops that are kept, or some ops alone."""

    path: str
    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"recompute {self.path}"
            + (f" keep {', '.join(self.keep)}" if self.keep else "")
            + (f" only {', '.join(self.only)}" if self.only else "")
        )


@dataclass(frozen=True)
class Offload:
    """Values that lie on the host or the disk until they are needed, which are brought so many layers ahead."""

    path: str
    what: Kind | Literal["saved"] = "states"
    to: Literal["cpu", "disk"] = "cpu"
    ahead: int | None = None

    def __str__(self) -> str:
        return f"offload {self.what} {self.path} to {self.to}" + (
            f" ahead {self.ahead}" if self.ahead is not None else ""
        )


@dataclass(frozen=True)
class Cast:
    """The type in which weights, gradients or optimizer states are."""

    path: str
    type: str
    kinds: Kinds = ("weights",)

    def __str__(self) -> str:
        return f"cast {_kinds(self.kinds)}{self.path} to {self.type}"


@dataclass(frozen=True)
class Inside:
    """A named way to compute what modules do."""

    path: str
    use: str
    over: tuple[str, ...]

    def __str__(self) -> str:
        return f"inside {self.path} use {self.use} over {', '.join(self.over)}"


@dataclass(frozen=True)
class Compress:
    """The encoder by which gradients are added up, or what hops to modules from other ranks is sent."""

    path: str
    by: str
    over: str | None = None
    what: Literal["grads", "hops"] = "grads"

    def __str__(self) -> str:
        hops = "hops " if self.what == "hops" else ""
        return f"compress {hops}{self.path} by {self.by}" + (f" over {self.over}" if self.over else "")


@dataclass(frozen=True)
class Limit:
    """Bytes of a rank within which the step has to stay."""

    memory: int

    def __str__(self) -> str:
        return f"limit memory {_bytes(self.memory)}"


@dataclass(frozen=True)
class Seek:
    """Degrees and marks that the planner is to look for."""

    what: tuple[str, ...]

    def __str__(self) -> str:
        return f"seek {', '.join(self.what)}"


@dataclass(frozen=True)
class ExpectMoves:
    """So many moves of each kind, at that count or at most, over an axis or all, in a layer or the whole step, in one
    direction or both."""

    moves: tuple[tuple[int, str], ...]
    over: str | None = None
    a_layer: bool = False
    direction: Literal["forward", "backward", "update"] | None = None
    at_most: bool = False

    def __str__(self) -> str:
        listed = " and ".join(f"{n or 'no'} {kind}" for n, kind in self.moves)
        return (
            f"expect {'at most ' if self.at_most else ''}{listed}"
            + (f" over {self.over}" if self.over else "")
            + (" a layer" if self.a_layer else "")
            + (f" {self.direction}" if self.direction else "")
        )


@dataclass(frozen=True)
class ExpectGathered:
    """At most the gathered weights of so many layers are there at once."""

    layers: int

    def __str__(self) -> str:
        return f"expect gathered at once <= {self.layers} layers"


@dataclass(frozen=True)
class ExpectAtMost:
    """Memory of the fullest rank, in bytes, or time of a step: in seconds, or as a multiple of another plan's."""

    what: Literal["memory", "time"]
    limit: float
    of: str | None = None  # the file of the other plan

    def __str__(self) -> str:
        if self.what == "memory":
            return f"expect memory <= {_bytes(int(self.limit))}"
        return f"expect time <= {repr(self.limit).removesuffix('.0')}" + (f" of {self.of}" if self.of else " s")


Statement: TypeAlias = (
    Grid
    | Rest
    | Flow
    | Input
    | TakePlan
    | Place
    | Pipe
    | Recompute
    | Offload
    | Cast
    | Inside
    | Compress
    | Limit
    | Seek
    | ExpectMoves
    | ExpectGathered
    | ExpectAtMost
)


def _signature(entries: AxisEntries) -> str:
    if entries is None:
        return "?"
    return ", ".join(f"{axis}={'?' if entry is None else repr(entry)}" for axis, entry in entries)


def _kinds(kinds: Kinds) -> str:
    if kinds == ("weights",):
        return ""
    return f"{kinds[0]} " if len(kinds) == 1 else f"{{{','.join(kinds)}}} "


def _bytes(number: int) -> str:
    """As few letters as say it exactly: 70 GiB, 1500 MB, 12345 B."""
    for unit, size in UNITS.items():
        if number and number % size == 0:
            return f"{number // size} {unit}"
    return f"{number} B"


UNITS = {
    "TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3, "B": 1,
}  # fmt: skip
