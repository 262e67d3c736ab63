"""The timeline of a step: what ran when, on every rank and queue, beside what the simulator said.

    timeline.save("step.json")      opens in Perfetto (ui.perfetto.dev) and in chrome://tracing
    timeline.draw("step.svg")       a picture, with the simulation below it; notebooks show it
    print(timeline.text())          rows of letters
    print(timeline.summary())       times, bubbles, where it left the simulation, and what to try

In the file a rank is a process and a queue a thread. Arrows lead from the firing that filled a slot to the one that
took it, where these are on different queues; a counter for each register with bytes shows its filled slots.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from ...boxing.picture.draw import written
from ...placement.errors import ScheduleError
from ...placement.moved import MovedName
from ..protocol.network import Network
from ..protocol.simulate import Ran, Simulation
from ..runtime.replay import Did
from .advice import StepRecords, is_wire, scale, summary
from .chart import chart

__all__ = ["Timeline", "Trace"]

Trace: TypeAlias = dict[str, object]  # one event of a trace file

KINDS = {"F": "forward", "B": "backward", "W": "weight"}


@dataclass(frozen=True)
class Timeline:
    """Records of one step by rank, each on the clock of its rank.

    `offsets` says how much more the clock of a rank shows than that of rank 0. `wire` tells queues that move data from
    those that compute, by their names.
    """

    network: Network
    ranks: Mapping[int, tuple[Ran, ...]]
    offsets: Mapping[int, float] = field(default_factory=dict)
    simulated: Simulation | None = None
    wire: Callable[[str], bool] = is_wire

    def __post_init__(self) -> None:
        known = {actor.name: actor.cases for actor in self.network.actors}
        for rank, records in self.ranks.items():
            for ran in records:
                if ran.case not in known.get(ran.actor, ()):
                    raise ScheduleError(
                        f"a timeline of {self.network.name}: rank {rank} ran {ran.case or ran.actor}\n"
                        f"  the network has no actor {ran.actor!r} with a case {ran.case!r}\n"
                        f"  give the network that the records were made with"
                    )

    @cached_property
    def step(self) -> StepRecords:
        """All records, on the clock of rank 0."""
        shifted = (
            (rank, replace(ran, start=ran.start - off, end=ran.end - off))
            for rank, records in sorted(self.ranks.items())
            for off in (self.offsets.get(rank, 0.0),)
            for ran in records
        )
        return StepRecords(self.network, tuple(shifted), self.wire)

    @cached_property
    def model(self) -> StepRecords | None:
        """The simulated records, each for the rank whose queue it is; -1 where no rank ran anything on it."""
        if self.simulated is None:
            return None
        homes = {ran.queue: rank for rank, records in self.ranks.items() for ran in records}
        records = tuple((homes.get(ran.queue, -1), ran) for ran in self.simulated.firings)
        return StepRecords(self.network, records, self.wire)

    @property
    def unit(self) -> float:
        """Seconds for one unit of simulated time."""
        return scale(self.step, self.model) if self.model else 1.0

    def summary(self, *, tolerance: float = 0.5) -> str:
        """Step time, what stood still, the busiest queue, where it left the simulation, and what to try.

        A firing is late if it begins later than simulated by `tolerance` of a usual firing.
        """
        return summary(self.step, self.model, tolerance)

    def text(self, width: int = 100) -> str:
        """A row for each queue: a letter for what began, its micro-batch, then dashes until it ended; dots are idle."""
        if not isinstance(width, int):
            raise ScheduleError(
                f"text(width) gives rows of so many letters, and not of {str(width)!r}\n"
                "  .draw(path) writes the picture, .save(path) what Perfetto opens"
            )
        steps = [(self.step, 1.0, "")] + ([(self.model, self.unit, "simulated ")] if self.model else [])
        long = max((step.end - step.start) * unit for step, unit, _ in steps) or 1.0
        rows = [
            (f"{before}{queue}" if before else f"rank {rank} {queue}", _row(dids, step.start, long / unit, width))
            for step, unit, before in steps
            for (rank, queue), dids in step.queues.items()
        ]
        wide = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:{wide}} |{row}|" for name, row in rows)

    write = MovedName("sbpflow.actors.timeline.timeline.Timeline.write")

    def draw(self, path: Path | str) -> Path:
        """Write the picture, as svg or png by the path's suffix."""
        return written(self._repr_svg_(), path)

    def save(self, path: Path | str) -> Path:
        """Write the file that Perfetto opens."""
        path = Path(path)
        if path.suffix != ".json":
            raise ScheduleError(
                f"a timeline is saved as json, not as {path.name!r}\n  a picture is drawn: timeline.draw(path)"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        trace = {"displayTimeUnit": "ms", "otherData": {"network": self.network.name}, "traceEvents": [*self.events()]}
        path.write_text(json.dumps(trace), encoding="utf-8")
        return path

    def _repr_svg_(self) -> str:
        return chart(self.step, self.model, self.unit)

    def events(self) -> Iterator[Trace]:
        """The events of the file; times are microseconds from the first start."""
        for rank in sorted(self.ranks):
            yield from _process(rank, f"rank {rank}")
        yield from _events(self.step, 1.0, {rank: rank for rank in self.ranks}, "real")
        if self.model:
            number = max(self.ranks, default=-1) + 1
            yield from _process(number, "simulated")
            everybody = dict.fromkeys((rank for rank, _ in self.model.records), number)
            yield from _events(self.model, self.unit, everybody, "simulated")


def _process(number: int, name: str) -> Iterator[Trace]:
    yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}


def _events(step: StepRecords, unit: float, processes: Mapping[int, int], which: str) -> Iterator[Trace]:
    """Everything of one step; `which` tells its arrows from those of the other."""
    where = {key: {"pid": processes[key[0]], "tid": n} for n, key in enumerate(step.queues)}
    for n, (key, place) in enumerate(where.items()):
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": key[1]}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": n}}

    def at(time: float) -> float:
        return round((time - step.start) * unit * 1e6, 3)

    done, arrows = step.replay.done, 0
    for did in done:
        ran, here = did.ran, where[did.rank, did.ran.queue]
        kind = "move" if step.wire(ran.queue) else KINDS.get(_letter(ran), "other")
        yield {
            "ph": "X", "name": str(did), "cat": kind, **here,
            "ts": at(ran.start), "dur": at(ran.end) - at(ran.start), "args": _args(step, did),
        }  # fmt: skip
        for register, by in did.sources:
            source = done[by]
            if (source.rank, source.ran.queue) == (did.rank, ran.queue):
                continue
            arrow = {"name": register, "cat": "register", "id": f"{which} {arrows}"}
            arrows += 1
            # Within the firing that it leaves, since at its very end no firing is there to hold it.
            leaves = source.ran.start + 0.9 * (source.ran.end - source.ran.start)
            yield {"ph": "s", **arrow, **where[source.rank, source.ran.queue], "ts": at(leaves)}
            yield {"ph": "f", "bp": "e", **arrow, **here, "ts": at(max(ran.start, leaves))}
    homes = {did.ran.actor: did.rank for did in done}
    for time, register, slots in sorted(step.replay.levels, key=lambda level: level[0]):
        owner = homes.get(step.network.producers.get(register, ""))
        if step.network.register(register).bytes and owner is not None:
            name = f"{register} filled"
            yield {"ph": "C", "name": name, "pid": processes[owner], "tid": 0, "ts": at(time), "args": {"slots": slots}}


def _args(step: StepRecords, did: Did) -> dict[str, object]:
    def of(uses: tuple[tuple[str, int], ...]) -> dict[str, str]:
        return {name: f"{used} of {step.network.register(name).high} slots in use" for name, used in uses}

    args: dict[str, object] = {
        "micro_batch": did.ran.label,
        **_more(did.ran),
        "takes": of(did.takes),
        "gives": of(did.gives),
    }
    args["bytes"] = did.bytes
    if not did.placed:
        args["note"] = "by the records before it, it could not have begun"
    return args


def _more(ran: Ran) -> dict[str, object]:
    return {"micro_batches": [label for _, label in ran.parts]} if ran.more else {}


def _letter(ran: Ran) -> str:
    return (ran.case or ran.actor)[:1]


def _row(dids: tuple[Did, ...], start: float, long: float, width: int) -> str:
    """Firings that are too short for a column are not seen."""
    row = ["."] * width
    for did in dids:
        lo, hi = (round((time - start) / long * width) for time in (did.ran.start, did.ran.end))
        words = "&".join(f"{name[:1]}{label}" for name, label in did.ran.parts)
        said = words if hi - lo >= len(words) else _letter(did.ran)
        row[lo:hi] = said.ljust(hi - lo, "-")[: hi - lo]
    return "".join(row)[:width]
