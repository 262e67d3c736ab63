"""A schedule before anything runs: the timeline of every device, its bubble, slots and memory, as text."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import floor, log10
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ...boxing.figures import duration
from ...placement.moved import MovedName
from ..protocol.feasibility import proved
from ..protocol.simulate import Ran, Simulation, simulate
from .chunk_ends import Folding
from .definition import Definition, Shape
from .pipeline import Costs, network_of, on_devices
from .text import Action

__all__ = ["Preview", "bubble", "first_few", "peak_bytes", "peak_slots", "preview", "ticks"]

_NAME = re.compile(r"([FBWU])(\d+)(?:\.(\d+))?")

COLUMNS = 160  # of the rows at most, in letters
DEVICES = 12  # whose figures stand in one line


class ChunkTask(NamedTuple):
    """The task of a firing in a pipeline's network: kind, and chunk of the model."""

    kind: str
    chunk: int


def tasks_of(ran: Ran) -> Sequence[ChunkTask]:
    """The tasks of a firing: one, several that run together, or none."""
    return _tasks_named(ran.case or ran.actor)


@lru_cache(maxsize=1 << 12)
def _tasks_named(name: str) -> tuple[ChunkTask, ...]:
    found = map(_NAME.fullmatch, name.split("&"))
    return tuple(ChunkTask(match[1], int(match[2])) for match in found if match)


def peak_slots(run: Simulation) -> dict[str, int]:
    """By device the most activations that it holds at once, of a chunk and a micro-batch each."""
    return _peaks(run, None)


def peak_bytes(run: Simulation, costs: Costs | Sequence[Costs]) -> dict[str, int]:
    """By device the most bytes of activations that it holds at once."""
    return _peaks(run, costs)


def _peaks(run: Simulation, costs: Costs | Sequence[Costs] | None) -> dict[str, int]:
    """The most that each device holds. A chunk is held from the start of F to the end of B, or of W where it is apart;
    then B frees what is its part."""
    ends = {at.chunk: "W" for ran in run.firings for at in tasks_of(ran) if at.kind == "W"}
    held: dict[str, int] = {}
    peak: dict[str, int] = {}
    in_order = sorted(run.firings, key=lambda ran: ran.start)  # a device does one thing at a time
    for ran, at in [(each, at) for each in in_order for at in tasks_of(each)]:
        size, sooner = 1, 0
        if costs is not None:
            cost = costs if isinstance(costs, Costs) else costs[at.chunk]
            size, sooner = cost.bytes, cost.freed if at.chunk in ends else 0
        now = held.setdefault(ran.queue, 0)
        if at.kind == "F":
            held[ran.queue] = now + size
        elif at.kind == ends.get(at.chunk, "B"):
            held[ran.queue] = now - size + sooner
        elif at.kind == "B":
            held[ran.queue] = now - sooner
        peak[ran.queue] = max(peak.get(ran.queue, 0), held[ran.queue])
    return peak


def bubble(run: Simulation) -> float:
    """The share of the devices' time that is idle; their time is the longest from a first start to a last end."""
    queues = list(dict.fromkeys(ran.queue for ran in run.firings if tasks_of(ran)))
    time = max((run.span(queue) for queue in queues), default=0.0)
    return 1 - sum(map(run.busy, queues)) / (time * len(queues)) if time else 0.0


class Bar(NamedTuple):
    """One thing of a timeline."""

    op: Action
    start: float
    end: float


@dataclass(frozen=True)
class Preview:
    """Work of every device, with its times. Print it, or write it as SVG; notebooks draw it. Neither gets wider than a
    page, however much longer one stage takes than another."""

    schedule: Definition
    shape: Shape
    costs: Costs | tuple[Costs, ...]
    run: Simulation
    devices: tuple[int, ...] = ()  # of each chunk of a linear schedule, where some share one
    in_seconds: bool = False  # the costs are, as those of a model

    svg: ClassVar[Callable[["Preview"], str]]  # actors/timeline gives these two
    drawn: ClassVar[Callable[["Preview", Path | str], Path]]

    @property
    def end(self) -> float:
        return self.run.end

    @property
    def bubble(self) -> float:
        return bubble(self.run)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """By device the most activations at once."""
        return self._by_device(peak_slots(self.run))

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """By device the most bytes of activations at once."""
        return self._by_device(peak_bytes(self.run, self.costs))

    @cached_property
    def _bars(self) -> tuple[tuple[tuple[Bar, ...], tuple[Bar, ...]], ...]:
        """By device its tasks in order, as far as they compute, and what of them goes over its links."""
        found: list[tuple[list[Bar], list[Bar]]] = [([], []) for _ in range(self.device_count)]
        routes = self.schedule.routes(self.shape)
        for ran in self.run.firings:
            tasks = tasks_of(ran)
            if not tasks:
                continue
            device, _ = self._seat(tasks[0].chunk)
            if ran.end <= ran.start:
                continue
            computed, sent = found[device]
            at, times = ran.start, [self._alone(task) for task in tasks]
            for n, (kind, chunk) in enumerate(tasks):
                _, nth = self._seat(chunk)
                label = (ran.label, *ran.more)[n]
                number = label * routes + nth if routes > 1 else label
                op = Action(kind, nth, number, n + 1 < len(tasks))
                exchange = self._costs_of(chunk).exchange if kind in "FB" else 0.0
                if len(tasks) == 1:
                    end = begin = ran.end - exchange
                else:
                    end = at + (ran.end - ran.start) * (times[n] / sum(times) if sum(times) else 1 / len(tasks))
                    begin = max([ran.start, *(bar.end for bar in sent[-1:])])
                computed.append(Bar(op, at, end))
                if exchange:
                    sent.append(Bar(op._replace(joined=False), begin, begin + exchange))
                at = end
        return tuple((tuple(computed), tuple(sent)) for computed, sent in found)

    @property
    def device_count(self) -> int:
        """The devices, one a row."""
        return 1 + max(self.devices) if self.devices else self.shape.p

    @property
    def chunk_count(self) -> int:
        """The most chunks of a device."""
        return max(map(self.devices.count, self.devices)) if self.devices else self.shape.v

    def _seat(self, chunk: int) -> tuple[int, int]:
        """The device of a chunk, and its number among the chunks there."""
        if not self.devices:
            return self.schedule.device(self.shape, chunk), chunk // self.shape.p
        return self.devices[chunk], self.devices[:chunk].count(self.devices[chunk])

    def _alone(self, task: ChunkTask) -> float:
        """The time in which a task computes."""
        costs = self._costs_of(task.chunk)
        return {"F": costs.forward, "B": costs.backward, "W": costs.weight}.get(task.kind, 0.0)

    def _costs_of(self, chunk: int) -> Costs:
        return self.costs if isinstance(self.costs, Costs) else self.costs[chunk % len(self.costs)]

    @property
    def rows(self) -> tuple[tuple[Bar, ...], ...]:
        """The tasks of each device in order; chunks are counted on the device, micro-batches over both routes."""
        return tuple(computed for computed, _ in self._bars)

    @property
    def links(self) -> tuple[tuple[Bar, ...], ...]:
        """The exchanges of each device's tasks, as far as they take time."""
        return tuple(sent for _, sent in self._bars)

    @cached_property
    def hidden(self) -> float:
        """The share of all exchanges that goes on while their device computes."""
        whole = sum(bar.end - bar.start for row in self.links for bar in row)
        shown = 0.0
        for row, sent in zip(self.rows, self.links, strict=True):
            for bar in sent:
                shown += sum(max(0.0, min(bar.end, of.end) - max(bar.start, of.start)) for of in row)
        return shown / whole if whole else 0.0

    @property
    def title(self) -> str:
        took = duration(self.end) if self.in_seconds else f"{self.end:g} units"
        said = f"{self.run.network.name}: {took}, bubble {100 * self.bubble:.1f} %"
        return said + (f", of exchanges {100 * self.hidden:.1f} % hidden" if any(self.links) else "")

    @property
    def order(self) -> tuple[str, ...]:
        """A row of words for each device, which `Schedule(table=...)` takes."""
        return tuple(" ".join(str(cell.op) for cell in row if cell.op.kind != "U") for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.title
        yield f"  slots at most   {first_few(self.slots, '  ')}"
        if any(self.memory):
            yield f"  memory at most  {first_few([f'{size / 2**20:.4g} MiB' for size in self.memory], '  ')}"
        every = (*self.rows, *self.links)
        unit = min((cell.end - cell.start for row in every for cell in row if cell.end > cell.start), default=1.0)
        wide = max((len(str(cell.op)) for row in self.rows for cell in row), default=2)
        if self.end / unit * (wide + 1) > COLUMNS:
            yield from self._scaled()
            return
        for device, (row, sent) in enumerate(zip(self.rows, self.links, strict=True)):
            yield f"  device {device:<3} {_written(row, unit, wide)}".rstrip()
            if sent:
                yield f"    link {device:<3} {_written(sent, unit, wide)}".rstrip()

    def _scaled(self) -> Iterator[str]:
        """Rows in which a letter is so much time, and what is too short for one is not seen."""
        scale = COLUMNS / self.end
        for device, each in enumerate(zip(self.rows, self.links, strict=True)):
            for who, row in zip(("  device", "    link"), each, strict=True):
                line = ["."] * COLUMNS
                for cell in row:
                    at, end = (min(COLUMNS, round(time * scale)) for time in (cell.start, cell.end))
                    said = str(cell.op) if len(str(cell.op)) < end - at else cell.op.kind
                    line[at:end] = said.ljust(end - at, "-")[: end - at]
                if row or "device" in who:
                    yield f"{who} {device:<3} {''.join(line)}"
        axis = ""
        for tick in ticks(self.end):
            at = round(tick * scale)
            if at >= len(axis):
                axis = axis.ljust(at) + f"{tick:g} "
        yield f"  time       {axis}".rstrip()

    def _repr_svg_(self) -> str:
        return type(self).svg(self)

    write = MovedName("sbpflow.actors.Preview.write")

    def draw(self, path: Path | str) -> Path:
        """Write the picture, as svg or png. An svg is text: the same schedule makes the same file."""
        return type(self).drawn(self, path)

    def _by_device(self, found: dict[str, int]) -> tuple[int, ...]:
        return tuple(found.get(f"device {device}", 0) for device in range(self.device_count))

    def dict(self) -> dict[str, Any]:
        """All of it in lists, numbers and text, as json has them."""
        return {
            "schedule": self.run.network.name,
            "units": self.end,
            "bubble": self.bubble,
            "hidden": self.hidden,
            "slots": list(self.slots),
            "memory": list(self.memory),
            "order": list(self.order),
        }


def _written(row: Sequence[Bar], unit: float, wide: int) -> str:
    """Tasks behind each other, each as wide as it is long."""
    line, at = "", 0
    for cell in row:
        start = max(at, round(cell.start / unit))
        line += ".".ljust(wide + 1) * (start - at)
        at = max(start + 1, round(cell.end / unit))
        line += str(cell.op).ljust((at - start) * (wide + 1) - 1, "-" if at - start > 1 else " ") + " "
    return line


def first_few(values: Sequence[object], between: str) -> str:
    """Values of the devices in a row, of the first ones where there are many."""
    more = len(values) - DEVICES
    return between.join(map(str, values[:DEVICES])) + (f"{between}and {more} more" if more > 0 else "")


def ticks(end: float, most: int = 10) -> list[float]:
    """Round times from 0 to an end, for an axis.

    >>> ticks(33), ticks(0.0042)
    ([0, 5, 10, 15, 20, 25, 30], [0.0, 0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004])
    """
    if not end > 0:
        return [0]
    power = floor(log10(end / most))
    step, places = next((n * 10**power, power) for n in (1, 2, 5, 10) if end / (n * 10.0**power) <= most)
    return [round(n * step, max(0, -places)) for n in range(int(end / step * (1 + 1e-9)) + 1)]


def preview(
    schedule: Definition,
    shape: Shape,
    costs: Costs | Sequence[Costs] | None = None,
    overlap: Folding | None = None,
    *,
    validated: bool = False,
    devices: Sequence[int] = (),
) -> Preview:
    """The preview of a schedule; where it comes to a stop, an error says who waits for what. With `overlap` it has what
    is done once a step, too. `devices` has that of each chunk, where some chunks of a linear schedule share one."""
    each: Costs | tuple[Costs, ...] = Costs() if costs is None else costs if isinstance(costs, Costs) else tuple(costs)
    network = network_of(schedule, shape, each, overlap, validated=validated)
    if devices:
        network = on_devices(network, devices)
    run = simulate(network)
    if not run.finished:
        proved(network)
    return Preview(schedule, shape, each, run, tuple(devices))
