"""A step beside its simulation: how much stood still, where the two part first, and what to try."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from statistics import median, median_low
from typing import Literal, NamedTuple, TypeAlias

from ...boxing.figures import duration
from ..protocol.feasibility import waits
from ..protocol.network import Network
from ..protocol.simulate import Ran
from ..runtime.replay import Did, Replay

__all__ = ["Parting", "StepRecords", "advice", "is_wire", "parting", "scale", "summary"]

WIRES = ("link", "send", "receive", "copy", "wire", "communication")  # how the names of their queues begin
SLOW = 1.15  # of its simulated time: a queue that is worth a remark
MUCH = 0.1  # of a step
UNEVEN = 2.0  # times as long as the busiest rank, which ranks stand still in the mean: its stage is too large
MOST = 8  # lines that tell who waits for whom


def is_wire(queue: str) -> bool:
    """Whether a queue moves data and computes nothing, by its name."""
    return queue.lower().startswith(WIRES)


@dataclass(frozen=True)
class StepRecords:
    """The records of one step on one clock, by rank, in the order of their starts, and what follows from them."""

    network: Network
    records: tuple[tuple[int, Ran], ...]
    wire: Callable[[str], bool] = field(default=is_wire, compare=False)

    @cached_property
    def replay(self) -> Replay:
        return Replay(self.network, self.records)

    @cached_property
    def start(self) -> float:
        return min((ran.start for _, ran in self.records), default=0.0)

    @cached_property
    def end(self) -> float:
        return max((ran.end for _, ran in self.records), default=0.0)

    @cached_property
    def usual(self) -> float:
        """The median time of a firing of a compute queue."""
        return median([r.end - r.start for _, r in self.records if not self.wire(r.queue)] or [0.0])

    @cached_property
    def queues(self) -> dict[tuple[int, str], tuple[Did, ...]]:
        """The firings of each queue of each rank, in order; queues as in the network."""
        found: dict[tuple[int, str], list[Did]] = defaultdict(list)
        for did in self.replay.done:
            found[did.rank, did.ran.queue].append(did)
        order = {queue: at for at, queue in enumerate(self.network.queues)}
        return {key: tuple(found[key]) for key in sorted(found, key=lambda key: (key[0], order[key[1]]))}

    def busy(self, rank: int, queue: str) -> list[tuple[float, float]]:
        """The spans in which a queue worked. A receive that was posted early only begins when what it takes is being
        sent."""
        spans = []
        for did in self.queues[rank, queue]:
            others = [by for _, by in did.sources if self.replay.done[by].rank != rank and self.wire(queue)]
            sent = max((self.replay.done[by].ran.start for by in others), default=did.ran.start)
            spans.append((min(max(did.ran.start, sent), did.ran.end), did.ran.end))
        return spans

    def bubble(self, rank: int) -> float:
        """The share of the whole step in which the compute queues of a rank stand still."""
        mine = [queue for r, queue in self.queues if r == rank and not self.wire(queue)]
        total = len(mine) * (self.end - self.start)
        return 1 - sum(_length(self.busy(rank, queue)) for queue in mine) / total if total else 0.0

    def exposed(self, rank: int) -> float:
        """Seconds in which a compute queue of a rank stands still while a communication queue of it works."""
        mine = [queue for r, queue in self.queues if r == rank]
        moving = [span for queue in mine if self.wire(queue) for span in self.busy(rank, queue)]
        working = [self.busy(rank, queue) for queue in mine if not self.wire(queue)]
        return sum(_length([*spans, *moving]) - _length(spans) for spans in working)

    def hidden(self, rank: int) -> float:
        """Seconds in which a communication queue of a rank works beside a compute queue of it."""
        mine = [queue for r, queue in self.queues if r == rank]
        moving = [span for queue in mine if self.wire(queue) for span in self.busy(rank, queue)]
        working = [span for queue in mine if not self.wire(queue) for span in self.busy(rank, queue)]
        return _length(moving) + _length(working) - _length([*moving, *working])

    def busiest(self) -> tuple[int, str, float]:
        """The rank and queue that stand still least, and the share of the step in which it works."""
        shares = {key: _length(self.busy(*key)) / max(self.end - self.start, 1e-30) for key in self.queues}
        key = max(shares, key=lambda key: round(shares[key], 6))  # the first of equals
        return *key, shares[key]

    def why(self, did: Did, usual: "Usual | None" = None) -> tuple[str, str]:
        """The last wait of a firing, in a word (`busy`, `filled`, `freed`, `way`, `late` or `first`) and in several."""
        here = self.queues[did.rank, did.ran.queue]
        at = here.index(did)
        before = here[at - 1] if at else None
        free = before.ran.end if before else self.start
        ready = self.start if did.ready is None else did.ready
        idle = did.ran.start - max(free, ready)
        by = self.replay.done[did.cause.by] if did.cause and did.cause.kind != "done" else None
        if idle > 0.5 * self.usual:
            if did.cause is None or by is None or by.rank == did.rank or free > ready:
                return "late", "for nothing: all was there, and its queue did not begin it"
            return "way", f"for {did.cause.register}, {duration(idle)} on its way from {by} on rank {by.rank}"
        if before and free >= ready:
            return "busy", f"for {before} on the same queue{_slowly(before, usual)}"
        if did.cause is None or by is None:
            return "first", "for the step to begin"
        slot = "a filled slot" if did.cause.kind == "filled" else "a free slot"
        return did.cause.kind, f"for {slot} of {did.cause.register}, from {by} on rank {by.rank}{_slowly(by, usual)}"


Span: TypeAlias = tuple[float, float]
Usual: TypeAlias = dict[tuple[str, str, int], float]  # simulated seconds by actor, case and label


def _usual(simulated: StepRecords, unit: float = 1.0) -> Usual:
    return {(r.actor, r.case, r.label): (r.end - r.start) * unit for _, r in simulated.records}


def _slowly(did: Did, usual: Usual | None) -> str:
    ran = did.ran
    expected = usual.get((ran.actor, ran.case, ran.label), 0.0) if usual else 0.0
    took = (ran.end - ran.start) / expected if expected else 1.0
    return f", which took {took:.2f} of its simulated time" if took > SLOW else ""


def _length(spans: Iterable[Span]) -> float:
    """Of all spans together, what several cover once."""
    total, reached = 0.0, float("-inf")
    for lo, hi in sorted(spans):
        total += max(0.0, hi - max(lo, reached))
        reached = max(reached, hi)
    return total


class Parting(NamedTuple):
    """The first point where a step leaves its simulation: another firing (`order`), none (`missing`), or a late one
    (`late`)."""

    kind: Literal["order", "missing", "late"]
    rank: int
    queue: str
    expected: Did
    found: Did | None
    late: float  # seconds behind the simulated start
    why: str  # as of Step.why
    text: str


def scale(real: StepRecords, simulated: StepRecords) -> float:
    """Seconds for one unit of simulated time: the lower median over compute firings, which no slow stage moves."""
    usual = _usual(simulated)
    ratios = [
        (ran.end - ran.start) / long
        for _, ran in real.records
        if not real.wire(ran.queue) and (long := usual.get((ran.actor, ran.case, ran.label), 0.0)) > 0
    ]
    return median_low(ratios) if ratios and median_low(ratios) > 0 else 1.0


def parting(real: StepRecords, simulated: StepRecords, tolerance: float = 0.5) -> Parting | None:
    """The first firing that differs from the simulated one, or begins later by `tolerance` of a usual firing."""
    unit = scale(real, simulated)
    usual = _usual(simulated, unit)
    allowed = tolerance * real.usual
    known = {queue: dids for (_, queue), dids in simulated.queues.items()}
    found: list[tuple[float, Parting]] = []
    for (rank, queue), dids in real.queues.items():
        for mine, model in zip_longest(dids, known.get(queue, ())):
            if model is None:
                break
            if mine is None:
                text = f"{model} was not run, after {dids[-1]}"
                found.append((dids[-1].ran.end, Parting("missing", rank, queue, model, None, 0.0, "missing", text)))
                break
            late = mine.ran.start - real.start - (model.ran.start - simulated.start) * unit
            if str(mine) != str(model) or mine.ran.actor != model.ran.actor:
                there = [did for did in dids if str(did) == str(model) and did.ran.actor == model.ran.actor]
                why, words = real.why(there[0], usual) if there else ("missing", "")
                text = f"ran {mine} where {model} was to come" + (f", which waited {words}" if words else "")
                found.append((mine.ran.start, Parting("order", rank, queue, model, mine, late, why, text)))
                break
            if late > allowed:
                why, words = real.why(mine, usual)
                text = f"{mine} began {duration(late)} later than simulated, having waited {words}"
                found.append((mine.ran.start, Parting("late", rank, queue, model, mine, late, why, text)))
                break
    return min(found, key=lambda each: each[0])[1] if found else None


def slow(real: StepRecords, simulated: StepRecords) -> dict[tuple[int, str], float]:
    """The time that each compute queue took, as a multiple of the simulated time of what it ran."""
    usual = _usual(simulated, scale(real, simulated))
    found = {}
    for (rank, queue), dids in real.queues.items():
        expected = sum(usual.get((did.ran.actor, did.ran.case, did.ran.label), 0.0) for did in dids)
        if expected and not real.wire(queue):
            found[rank, queue] = sum(did.ran.end - did.ran.start for did in dids) / expected
    return found


def advice(real: StepRecords, simulated: StepRecords | None, parted: Parting | None) -> str:
    """One thing to try: what costs most, as far as the records show."""
    long = max(real.end - real.start, 1e-30)
    ranks = sorted({rank for rank, _ in real.records})
    if parted and parted.kind == "missing":
        return "the step did not end: what is ready above never ended, or never began, and the others wait for it"
    took = slow(real, simulated) if simulated else {}
    rank, queue = max(took, key=lambda key: took[key], default=(0, ""))
    bubbles = {rank: real.bubble(rank) for rank in ranks}
    idle = sum(bubbles.values()) / max(len(ranks), 1)
    if len(took) > 1 and took[rank, queue] > SLOW and bubbles[rank] <= idle:  # one that mostly waits holds up nobody
        share = f"{took[rank, queue]:.2f} of the time that was simulated"
        return f"{queue} on rank {rank} takes {share}: give it fewer layers, or measure its costs again"
    busiest = min(ranks, key=lambda rank: bubbles[rank], default=0)
    if idle > MUCH and bubbles[busiest] < idle / UNEVEN:
        works = (
            f"rank {busiest} works for {1 - bubbles[busiest]:.0%} of the step, a rank in the mean for {1 - idle:.0%}"
        )
        return f"{works}: another cut of the layers, as the slowest stage sets the pace of all"
    exposed = {rank: real.exposed(rank) / long for rank in ranks}
    worst = max(exposed, key=lambda rank: exposed[rank], default=0)
    if exposed and exposed[worst] > MUCH:
        return (
            f"rank {worst} waits {exposed[worst]:.0%} of the step for data on its way: more slots, to run further ahead"
        )
    if parted and parted.kind == "late" and parted.why == "way":
        return "data is long on its way between ranks: more slots, to run further ahead, or fewer and larger messages"
    if parted and parted.kind == "late" and parted.why == "late":
        return "queues begin late what is ready: the host does not keep up; larger micro-batches, or compiled stages"
    if parted and parted.late > 0 and parted.why == "freed" and parted.found and parted.found.cause:
        return f"{parted.found.cause.register} had no free slot: raise its mark by one"
    if idle > MUCH:
        return (
            f"compute stands still for {idle:.0%} of the step: more micro-batches, or a schedule with a smaller bubble"
        )
    return "nothing stands out"


def summary(real: StepRecords, simulated: StepRecords | None = None, tolerance: float = 0.5) -> str:
    """A step in a few lines of text."""
    return "\n".join(_lines(real, simulated, tolerance))


def _lines(real: StepRecords, simulated: StepRecords | None, tolerance: float) -> Iterator[str]:
    if not real.records:
        yield f"{real.network.name}: nothing was recorded"
        return
    unit = scale(real, simulated) if simulated else 1.0
    beside = f", simulated {duration((simulated.end - simulated.start) * unit)}" if simulated else ""
    yield f"{real.network.name}: step {duration(real.end - real.start)}{beside}"
    homes = {queue: rank for rank, queue in real.queues}
    model = (
        StepRecords(real.network, tuple((homes.get(r.queue, -1), r) for _, r in simulated.records))
        if simulated
        else None
    )
    for rank in sorted({rank for rank, _ in real.records}):
        beside = f" (simulated {model.bubble(rank):.1%})" if model else ""
        exposed = duration(real.exposed(rank))
        yield f"  rank {rank}: bubble {real.bubble(rank):.1%}{beside}, exposed communication {exposed}"
    rank, queue, share = real.busiest()
    yield f"  busiest queue: {queue} on rank {rank}, {share:.1%} of the step"
    early = max((did.early for did in real.replay.done if not real.wire(did.ran.queue)), default=0.0)
    if early > 0.5 * real.usual:
        yield f"  clocks: some firings began up to {duration(early)} before what they take was there; see the offsets"
    parted = parting(real, simulated, tolerance) if simulated else None
    if simulated:
        yield "  parts from the simulation: " + (
            f"rank {parted.rank}, {parted.queue}: {parted.text}" if parted else "nowhere"
        )
    if parted and parted.kind == "missing":
        yield from (f"    {line}" for line in str(waits(real.replay.desk)).splitlines()[:MOST])
    yield f"  try: {advice(real, simulated, parted)}"
