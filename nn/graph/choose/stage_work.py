"""The work of stages: the time of a micro-batch in each, wherever layers are cut, and of a schedule's step.

Devices of stages and the links between them may be unlike, so that a layer's time is that on the stage that has it. A
cut is judged by its course: the network of the schedule, simulated with the times of its chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import chain, combinations, pairwise, product
from math import comb, prod

from ....actors.protocol.simulate import simulate
from ....actors.schedules.definition import Shape
from ....actors.schedules.pipeline import Costs, network_of, on_devices
from ....actors.schedules.schedule import Schedule
from ....placement import Placement
from ....placement.errors import ScheduleError

__all__ = ["LayerCost", "StageWork", "shape_on"]

COUNTED = 2000  # cuts up to which all are looked at; of more, only those near a good one
SIMULATED = 24  # cuts of these, the best by a formula
NEAR = 0.005  # share of seconds for which runs are unlike in length, though no stage has less to do
SURE = 1e-9  # share of seconds by which sums in another order may differ
LONG = 20_000  # firings of a network beyond which the formula has to do


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of one layer on one stage, for a micro-batch; `hop` is what it hands on to the next stage, and `update`
    is spent once a step."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    hop: float = 0.0
    update: float = 0.0

    @property
    def busy(self) -> float:
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class StageWork:
    """The costs of each layer by the number of the chunk that might have it, and where chunks are.

    Of several lists of layers, such as an encoder's and a decoder's, `towers` has so many layers and chunks of each."""

    each: Sequence[Sequence[LayerCost]]
    placements: Sequence[Placement]
    schedule: Schedule
    micro_batches: int
    simulated: bool  # whether it is a step that the schedule knows, such as training
    towers: Sequence[tuple[int, int]] = ()
    known: dict[tuple[int, ...], float] = field(default_factory=dict, compare=False, repr=False)  # seconds by ends

    def busy(self, ends: Sequence[int]) -> list[float]:
        """The computing of each stage for a micro-batch, in the order of their first runs."""
        found = dict.fromkeys(self.placements, 0.0)
        for number, place, run in self._runs(ends):
            found[place] += sum(self.each[number][layer].busy for layer in run)
        return list(found.values())

    def quick(self, ends: Sequence[int]) -> float:
        """About the seconds of a step: the first micro-batch goes through all chunks, the others come behind it as
        fast as the busiest stage lets them."""
        busy = self.busy(ends)
        hops = sum(self.each[n][end - 1].hop for n, end in enumerate(ends[:-1]))
        return self.micro_batches * max(busy) + sum(busy) - max(busy) + 2 * hops + self._update(ends)

    def seconds(self, ends: Sequence[int]) -> float:
        """The seconds of the step, by a simulation of its course where there is one; of equal cuts there is one."""
        key = tuple(ends)
        if key not in self.known:
            self.known[key] = self._seconds(ends)
        return self.known[key]

    def _seconds(self, ends: Sequence[int]) -> float:
        shape = shape_on(self.schedule, self.placements, self.micro_batches) if self.simulated else None
        if shape is None or 2 * self.micro_batches * len(self.placements) > LONG:
            return self.quick(ends)
        network = network_of(self.schedule, shape, self._costs(ends))
        if self.schedule.linear:
            stages = list(dict.fromkeys(self.placements))
            network = on_devices(network, [stages.index(place) for place in self.placements])
        run = simulate(network, record=False)
        return run.end + self._update(ends) if run.finished else self.quick(ends)

    def best(self, near: Sequence[int], held: Sequence[int] = ()) -> list[int]:
        """The ends of the runs in the shortest step that was found; `near` is a good cut to begin with. It stays where
        others, whose busiest stage has as much to do, are hardly quicker: runs of unlike lengths hold more. Towers that
        are `held` stay cut as it is."""
        cuts, fixed = [list(near)], self._fixed(held)
        if prod(comb(layers - 1, n - 1) for at, (layers, n) in enumerate(self._towers) if at not in held) <= COUNTED:
            cuts += self._every(near, held)
        else:
            for n, (before, after) in enumerate(zip([0, *near], near[1:], strict=False)):
                others = () if n in fixed else range(before + 1, after)
                cuts += [[*near[:n], end, *near[n + 1 :]] for end in others]
        found = list(near)
        least, busiest = self.seconds(found), (1 - SURE) * max(self.busy(near))
        enough = (1 - NEAR) * least
        for ends in nsmallest(SIMULATED, cuts, key=self.quick):
            most = least if max(self.busy(ends)) < busiest else min(least, enough)
            if self.at_least(ends) < most and (seconds := self.seconds(ends)) < most:
                found, least = ends, seconds
        return found

    def at_least(self, ends: Sequence[int]) -> float:
        """Seconds below which a step is not, since its busiest stage has all micro-batches to do, and an update."""
        if self.schedule.way == "routes":  # on which a stage is another for every second micro-batch
            return 0.0
        return (1 - SURE) * self.micro_batches * max(self.busy(ends)) + self._update(ends)

    @property
    def _towers(self) -> Sequence[tuple[int, int]]:
        return self.towers or [(len(self.each[0]), len(self.placements))]

    def _fixed(self, held: Sequence[int]) -> set[int]:
        """The chunks whose ends stay: the last of each tower, and all of one that is held."""
        found, chunk = set[int](), 0
        for at, (_, many) in enumerate(self._towers):
            chunk += many
            found.update(range(chunk - many if at in held else chunk - 1, chunk))
        return found

    def _every(self, near: Sequence[int], held: Sequence[int]) -> Iterator[list[int]]:
        """All ways to cut the towers that are not held."""
        parts: list[list[tuple[int, ...]]] = []
        first = chunk = 0
        for at, (layers, many) in enumerate(self._towers):
            end = first + layers
            inner = combinations(range(first + 1, end), many - 1)
            parts.append([tuple(near[chunk : chunk + many])] if at in held else [(*each, end) for each in inner])
            first, chunk = end, chunk + many
        return (list(chain(*each)) for each in product(*parts))

    def _costs(self, ends: Sequence[int]) -> list[Costs]:
        found = []
        for number, _, run in self._runs(ends):
            mine = [self.each[number][layer] for layer in run]
            sums = (sum(getattr(cost, name) for cost in mine) for name in ("forward", "backward", "weight"))
            forward, backward, weight = sums
            found.append(Costs(forward, backward, weight, mine[-1].hop))
        return found

    def _update(self, ends: Sequence[int]) -> float:
        found = dict.fromkeys(self.placements, 0.0)
        for number, place, run in self._runs(ends):
            found[place] += sum(self.each[number][layer].update for layer in run)
        return max(found.values())

    def _runs(self, ends: Sequence[int]) -> list[tuple[int, Placement, range]]:
        runs = enumerate(zip(self.placements, pairwise([0, *ends]), strict=True))
        return [(number, place, range(first, end)) for number, (place, (first, end)) in runs]


def shape_on(schedule: Schedule, placements: Sequence[Placement], micro_batches: int) -> Shape | None:
    """The pipeline of such chunks, if the schedule has it."""
    if schedule.linear:
        return schedule.shape(len(placements), micro_batches)
    order = {place: number for number, place in enumerate(dict.fromkeys(placements))}
    stages, chunks = len(order), len(placements)
    least = 2 if schedule.way == "vee" else 1
    try:
        shape = schedule.shape(stages, micro_batches, v=max(least, chunks // stages))
        schedule.rows(shape)
    except ScheduleError:  # such as that of a table for other numbers; an error says so when it is run
        return None
    wanted = [schedule.device(shape, chunk) for chunk in range(chunks)]
    fits = schedule.way != "routes" and shape.p * shape.v == chunks
    return shape if fits and [order[place] for place in placements] == wanted else None
