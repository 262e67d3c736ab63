"""Figures of a training: speed, share of the peak, memory and moves, as seen, beside what the plan had predicted.

Seen figures are those of the steps since the line before. All ranks of a step ask for them together, as they compare
their clocks and memory; what was predicted is the plan's report.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from weakref import WeakKeyDictionary

from ...actors.timeline.timeline import Timeline
from ...boxing.exchange.execute import waited
from ...boxing.graph.report.report import Report
from ...boxing.graph.report.step_parts import step_parts
from ...boxing.graph.report.walked import Walked
from ...placement import Placement, default_cluster
from ...placement.cluster import preset_here
from ...placement.device import family
from ...placement.hardware import Device
from ...placement.world import device, owned, world
from ..explanations.model_work import peak_seconds
from ..explanations.step_report import explained
from ..explanations.step_timeline import timeline
from ..graph.run.pipeline import Pipelined
from ..graph.step import Step
from ..tensors.agreement import told

__all__ = ["Stretch", "Value", "caught_up", "predicted", "seen", "speed"]

Value = float | int | str
_reports: "WeakKeyDictionary[Step, Report]" = WeakKeyDictionary()


@dataclass
class Stretch:
    """The steps since a line: how often each plan ran, for how many tokens or samples, and when it began."""

    steps: dict[Step, int] = field(default_factory=dict)
    tokens: int = 0
    start: float = field(default_factory=perf_counter)
    waits: float = field(default_factory=lambda: waited.seconds)

    def add(self, step: Step, tokens: int) -> None:
        self.steps[step] = self.steps.get(step, 0) + 1
        self.tokens += tokens

    @property
    def many(self) -> int:
        return sum(self.steps.values())


def caught_up(step: Step) -> None:
    """Wait for the cards of a step, so that times are of what was computed and not of what was asked for."""
    kind = family(step.graph.ranks.type)
    if kind.card:
        kind.module.synchronize()


def report_of(step: Step) -> Report:
    """The report of a plan, made once."""
    if step not in _reports:
        _reports[step] = replace(explained(step, idle=False), walk=Walked)  # the report's own would keep the step
    return _reports[step]


def speed(stretch: Stretch, seconds: float, unit: str, peak: float | None) -> dict[str, Value]:
    """Seconds of a step, tokens and FLOPs a second, and the share of the peak, where one is known or given: FLOP/s of
    one device."""
    flops = sum(report_of(step).flops * many for step, many in stretch.steps.items())
    found: dict[str, Value] = {"seconds": seconds / stretch.many, f"{unit}_per_second": stretch.tokens / seconds}
    if flops:
        found["flops_per_second"] = flops / seconds
    least = [_least(step, peak) for step in stretch.steps]
    if flops and None not in least:
        many = stretch.steps.values()
        found["mfu"] = sum(each * times for each, times in zip(least, many, strict=True) if each is not None) / seconds
    return found


def _least(step: Step, peak: float | None) -> float | None:
    """The seconds of a step whose devices all reach their peak; None where that is not known."""
    ranks, report = step.graph.ranks, report_of(step)
    alone = world().rank is None  # ranks that one process plays may share devices
    many = len({device(ranks, rank) for rank in owned(ranks)}) if alone else ranks.size
    if peak is not None:
        return report.flops / peak / many
    known = known_device(ranks)
    return None if known is None else peak_seconds(report.work, known) / many


def known_device(ranks: Placement) -> Device | None:
    """The device of ranks, if its peak is known: a card by its name, or what somebody has said. A preset that stands in
    for a device which nobody has described is none."""
    found, kind = default_cluster(ranks).device_of(ranks), family(ranks.type)
    if found is not preset_here(ranks.type).device:
        return found
    return found if kind.card and kind.here and found.name in kind.module.get_device_name() else None


def predicted(step: Step) -> dict[str, Value]:
    """The figures of a plan: seconds of a step, of its moves behind and beside computing, GiB of the fullest rank. In
    micro-batches nobody predicts what is hidden."""
    report = report_of(step)
    found: dict[str, Value] = {}
    if report.predicted is not None:
        found |= {"predicted_seconds": report.predicted, "predicted_exposed": step_parts(report).get("moves", 0.0)}
    if report.hidden is not None and report.course is None:
        found["predicted_hidden"] = report.hidden
    if report.memory is not None:
        found["predicted_gib"] = report.memory.fullest / 2**30
    return found


def seen(step: Step, stretch: Stretch, seconds: float) -> dict[str, Value]:
    """Memory of the fullest rank, and what ranks wait for: all ask, and all are told but for the first's timeline."""
    ranks, many = step.graph.ranks, stretch.many
    waits = (waited.seconds - stretch.waits) / many
    rows = told([_peak_bytes(ranks), round(waits * 1e9)], ranks, "watched steps") or [[_peak_bytes(ranks), 0]]
    found: dict[str, Value] = {"gib": max(row[0] for row in rows) / 2**30}
    if len(rows) > 1:
        found["exposed"] = min(row[1] for row in rows) / 1e9  # others wait also for who works longest
    if isinstance(step.program, Pipelined):
        found |= _of_timeline(timeline(step.program, beside=False))
    times = step.rank_times()
    if times is not None:
        found |= {"waits": max(0.0, 1 - times.median / (seconds / many)), "slowest": times.slowest}
    return found


def _of_timeline(made: Timeline | None) -> Mapping[str, Value]:
    if made is None:
        return {}
    of, ranks = made.step, made.ranks
    exposed, hidden = (max(map(each, ranks), default=0.0) for each in (of.exposed, of.hidden))
    return {"exposed": exposed, "hidden": hidden, "bubble": max(map(of.bubble, ranks), default=0.0)}


def _peak_bytes(ranks: Placement) -> int:
    """The most memory that a device of this process had taken, or the process itself where it computes."""
    kind = family(ranks.type)
    if not kind.card:
        import resource  # which not every system has

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10
    return max((int(kind.module.max_memory_allocated(device(ranks, rank))) for rank in owned(ranks)), default=0)
