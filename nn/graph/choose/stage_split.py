"""Stages of a pipeline on several devices each: where layers are cut, how many devices a stage has, and which.

A stage of r devices shares the samples of a micro-batch among them, computes r times as fast, and adds up its gradients
once a step. Plans are judged by the step that their schedule makes, simulated, each stage adding up when it has ended;
or, for pipelines that are never flushed, by the stage or link that takes longest for a micro-batch.

    bound   before the first micro-batch comes to a stage, it went through those before it; all of them are computed
            there; the last one goes back. No course is shorter, so plans are simulated from the least bound on, and
            when that reaches the best course, the rest needs no look
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, NamedTuple, get_args

import torch
from torch import nn

from ....actors.protocol.simulate import simulate
from ....actors.schedules.definition import Shape
from ....actors.schedules.pipeline import Costs, network_of
from ....actors.schedules.published import published
from ....actors.schedules.schedule import Schedule
from ....boxing.boxing import between
from ....placement import Cluster, Placement, default_cluster
from ....placement.errors import PlacementError
from ....sbp import B, P, S, layout
from ....sbp.joint.op_cost import rate
from ...model.annotate import place
from .device_groups import DeviceGroups, Used

__all__ = ["LayerLoad", "StageSplit", "split_stages"]

PLANS = 20_000  # that are all looked at
KEPT, STATES = 3, 120  # plans of a state, and states, that are followed further where there are more
SIMULATED = 400
NEAR = 1e-9  # of sums of floats

By = Literal["step", "slowest"]


@dataclass(frozen=True)
class LayerLoad:
    """One layer: the seconds of a micro-batch on one device of the cluster, the bytes that it hands on to the next
    layer, and the bytes of its gradients."""

    forward: float
    backward: float
    weight: float = 0.0
    sent: int = 0
    gradients: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= (given := getattr(self, field.name)) < inf:
                raise PlacementError(f"LayerLoad({field.name}={given})\n  give a number of 0 or more that has an end")


@dataclass(frozen=True)
class StageSplit:
    """Runs of layers and where they are. `value` is what was asked to be short, in seconds; `exact` says that no other
    plan is shorter, not only none that was looked at."""

    ends: tuple[int, ...]
    placements: tuple[Placement, ...]
    costs: tuple[Costs, ...]
    value: float
    exact: bool

    def place(self, layers: Sequence[nn.Module]) -> None:
        """Place layers so, one for each that was planned."""
        if len(layers) != self.ends[-1]:
            raise PlacementError(f"{len(layers)} layers for a plan of {self.ends[-1]}\n  give those that were planned")
        for where, (first, end) in zip(self.placements, pairwise([0, *self.ends]), strict=True):
            place(list(layers[first:end]), where)

    def __str__(self) -> str:
        cut = zip(self.placements, pairwise([0, *self.ends]), strict=True)
        runs = " | ".join(f"{end - first} on {where}" for where, (first, end) in cut)
        return f"{runs}: {self.value:g} s" + ("" if self.exact else ", and there may be shorter ones")


def split_stages(
    layers: Sequence[LayerLoad],
    devices: Placement,
    micro_batches: int = 1,
    *,
    schedule: str | Schedule = "1f1b",
    by: By = "step",
    stages: int = 0,
) -> StageSplit:
    """The stages of a pipeline over some devices: cuts, how many devices each stage has, and which.

    All devices are used, by `stages` stages if it is said. `by="step"` makes the step of the schedule short; "slowest"
    the time in which a pipeline without a flush takes a micro-batch, with its gradients added up for each.
    """
    policy = schedule if isinstance(schedule, Schedule) else published(schedule)
    if by not in get_args(By):
        raise PlacementError(f"split_stages: by={by!r}\n  by is {' or '.join(map(repr, get_args(By)))}")
    if not policy.linear or policy.slices:
        raise PlacementError(
            f"split_stages: {policy.name} has several chunks on a device, or an order for one number of devices\n"
            "  split for '1f1b', or cut for given stages by flow.nn.pipeline"
        )
    if not layers or micro_batches < 1 or not 0 <= stages <= min(len(layers), devices.size):
        raise PlacementError(
            f"split_stages: {len(layers)} layers, micro_batches={micro_batches}, stages={stages} on {devices}\n"
            "  give a layer, a micro-batch and a device for each stage, or more"
        )
    return _Splitter(list(layers), devices, micro_batches, policy, by, stages).found()


class _Stage(NamedTuple):
    """A run of layers on a group of devices."""

    end: int
    used: Used  # before it
    group: Used


class _Plan(NamedTuple):
    """Stages from the first on, with what is known of their course."""

    bound: float
    there: float  # until a micro-batch comes behind the last of them
    back: float
    stages: tuple[_Stage, ...]


def _plus(used: Used, group: Used) -> Used:
    return tuple(a + b for a, b in zip(used, group, strict=True))


class _Splitter:
    def __init__(
        self, layers: list[LayerLoad], devices: Placement, many: int, schedule: Schedule, by: By, stages: int
    ) -> None:
        self.layers, self.many, self.schedule, self.by, self.asked = layers, many, schedule, by, stages
        self.cluster: Cluster = default_cluster(devices)
        self.groups = DeviceGroups(devices, self.cluster)
        self.sums = {
            name: [0.0, *accumulate(float(getattr(layer, name)) for layer in layers)]
            for name in ("forward", "backward", "weight", "gradients")
        }
        self.prices: dict[tuple[object, ...], float] = {}
        self.figures: dict[tuple[int, _Stage], tuple[float, float, float, float]] = {}
        here = self.cluster.device
        rates = [rate(each.device, torch.float32) for each in self.cluster.devices]
        self.fastest = min(1.0, *(rate(here, torch.float32) / each for each in rates)) if rates else 1.0
        self.most = min(len(layers), devices.size)

    def found(self) -> StageSplit:
        best = min(self.simple(), key=self.value)
        least = self.value(best)
        plans, exact = self.plans(least)
        for n, each in enumerate(sorted(plans, key=lambda plan: (plan.bound, plan.stages))):
            if each.bound >= least * (1 - NEAR):
                break
            if n == SIMULATED:
                exact = False
                break
            value = self.value(each)
            if value < least:
                best, least = each, value
        places = tuple(self.groups.placed(stage.used, stage.group) for stage in best.stages)
        ends = tuple(stage.end for stage in best.stages)
        return StageSplit(ends, places, tuple(self.costs(best)), least, exact)

    def simple(self) -> Iterator[_Plan]:
        """Plans to begin with: about as many layers and devices for each stage, host by host."""
        layers, devices = len(self.layers), self.groups.many
        for count in [self.asked] if self.asked else range(1, self.most + 1):
            made, used = _Plan(0.0, 0.0, 0.0, ()), self.groups.none
            for n in range(count):
                first, end = layers * n // count, layers * (n + 1) // count
                group = self.groups.next_of(used, devices * (n + 1) // count - devices * n // count)
                made = self.longer(made, first, _Stage(end, used, group))
                used = _plus(used, group)
            yield made

    def plans(self, least: float) -> tuple[list[_Plan], bool]:
        """All plans that may be shorter, or the best ones of each state where they are too many."""
        here: dict[tuple[int, Used], list[_Plan]] = {(0, self.groups.none): [_Plan(0.0, 0.0, 0.0, ())]}
        done: list[_Plan] = []
        exact, count, whole = self.groups.all_tried, 0, (len(self.layers), self.groups.full)
        for number in range(1, (self.asked or self.most) + 1):
            after: dict[tuple[int, Used], list[_Plan]] = {}
            for (first, used), listed in here.items():
                for end, group in self.nexts(first, used, number):
                    stage, behind = _Stage(end, used, group), _plus(used, group)
                    longer = (self.longer(plan, first, stage) for plan in listed)
                    hopeful = [plan for plan in longer if self.hope(plan, behind) < least * (1 - NEAR)]
                    count += len(hopeful)
                    if hopeful:
                        after.setdefault((end, behind), []).extend(hopeful)
            last = after.pop(whole, [])
            done += last if not self.asked or number == self.asked else []
            if count > PLANS:
                exact = False
                ranked = sorted(after, key=lambda state: min(self.hope(plan, state[1]) for plan in after[state]))
                after = {state: sorted(after[state])[:KEPT] for state in ranked[:STATES]}
            here = after
        return done, exact

    def hope(self, plan: _Plan, used: Used) -> float:
        """No plan that goes on so is shorter: some stage behind has its share of what is left to compute."""
        left, end = self.groups.many - sum(used), plan.stages[-1].end
        if not left:
            return plan.bound
        rest = sum(self.sums[name][-1] - self.sums[name][end] for name in ("forward", "backward", "weight")) / left
        rest *= self.fastest
        return max(plan.bound, plan.there + self.many * rest if self.by == "step" else rest)

    def nexts(self, first: int, used: Used, number: int) -> Iterator[tuple[int, Used]]:
        """The ends that the stage of this number may have, each with its devices; the last takes all that is left."""
        layers, left = len(self.layers), self.groups.many - sum(used)
        behind = self.asked - number if self.asked else 0  # stages at least
        for group in self.groups.groups(used, 1, left - behind):
            if sum(group) == left:
                yield layers, group
            else:
                for end in range(first + 1, layers - max(behind, 1) + 1):
                    yield end, group

    def longer(self, plan: _Plan, first: int, stage: _Stage) -> _Plan:
        """The plan with one more stage."""
        key = first, stage
        if key not in self.figures:
            self.figures[key] = (*self.computed(first, stage), self.shared(first, stage))
        forward, backward, weight, shared = self.figures[key]
        hop = self.hop(first, plan.stages[-1], stage) if plan.stages else 0.0
        busy = forward + backward + weight
        if self.by == "slowest":
            return _Plan(max(plan.bound, busy, shared, 2 * hop), 0.0, 0.0, (*plan.stages, stage))
        there, back = plan.there + hop, plan.back + hop
        bound = max(plan.bound, there + self.many * busy + max(back, shared))
        return _Plan(bound, there + forward, back + backward, (*plan.stages, stage))

    def computed(self, first: int, stage: _Stage) -> tuple[float, float, float]:
        """Seconds of forward, backward and weights of a micro-batch on a group."""
        device = self.cluster.device_of(self.groups.placed(stage.used, stage.group))
        slower = rate(self.cluster.device, torch.float32) / rate(device, torch.float32) / sum(stage.group)
        parts = (self.sums[name][stage.end] - self.sums[name][first] for name in ("forward", "backward", "weight"))
        forward, backward, weight = (part * slower for part in parts)
        return forward, backward, weight

    def shared(self, first: int, stage: _Stage) -> float:
        """Seconds in which a group adds up its gradients."""
        size = int(self.sums["gradients"][stage.end] - self.sums["gradients"][first])
        where = self.groups.placed(stage.used, stage.group)
        if where.size == 1 or not size:
            return 0.0
        if (where, size) not in self.prices:
            src = layout(where, P, (size,), torch.uint8)
            self.prices[where, size] = between(src, layout(where, B, (size,), torch.uint8)).price.time
        return self.prices[where, size]

    def hop(self, first: int, before: _Stage, stage: _Stage) -> float:
        """Seconds in which samples come from one stage to the next."""
        size = self.layers[first - 1].sent
        here = self.groups.placed(before.used, before.group)
        there = self.groups.placed(stage.used, stage.group)
        if not size:
            return 0.0
        if (here, there, size) not in self.prices:
            src = layout(here, S(0), (size,), torch.uint8)
            self.prices[here, there, size] = between(src, layout(there, S(0), (size,), torch.uint8)).price.time
        return self.prices[here, there, size]

    def costs(self, plan: _Plan) -> list[Costs]:
        found, first = [], 0
        for stage, behind in zip(plan.stages, (*plan.stages[1:], None), strict=True):
            hop = self.hop(stage.end, stage, behind) if behind else 0.0
            found.append(Costs(*self.computed(first, stage), hop))
            first = stage.end
        return found

    def value(self, plan: _Plan) -> float:
        """Seconds of the step, each stage adding up its gradients when it has done its last task."""
        if self.by == "slowest":
            return plan.bound
        count = len(plan.stages)
        run = simulate(network_of(self.schedule, Shape(count, self.many), self.costs(plan)))
        assert run.finished, "published schedules end for every number of stages"
        ends, first = [0.0] * count, 0
        for ran in run.firings:
            ends[int(ran.queue.rpartition(" ")[2])] = max(ends[int(ran.queue.rpartition(" ")[2])], ran.end)
        for n, stage in enumerate(plan.stages):
            ends[n] += self.shared(first, stage)
            first = stage.end
        return max(ends)
