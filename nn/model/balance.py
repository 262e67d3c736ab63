"""The balance of a pipeline: layers in runs that take as long as each other, as far as they can.

Before shapes are known layers are cut by their weights, as a guess; whoever captures a step cuts them anew by what they
take (`open_cuts`), unless it was said where.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from torch import nn
from torch.nn.parameter import is_lazy

from ...actors.schedules.published import published
from ...actors.schedules.schedule import Schedule
from ...placement import Placement
from ...placement.errors import PlacementError
from .annotate import CHUNK, CUT, PART, PLACE, LayerMoves, note, place_alone, placed_by_slice

__all__ = ["LayerCut", "LayerWork", "balanced", "ends_of", "open_cuts", "pipeline", "runs", "settle"]

WORTH = 1.1


@dataclass(frozen=True, eq=False)
class LayerCut:
    """So many layers in runs that nobody said the ends of, with the placement of each run; layers note it.

    A step that is planned leaves them as they are where it does not take longer than the best one by more than `worth`.
    `first` is the number of the first run among the chunks of a schedule, where other layers run before.
    """

    placements: tuple[Placement, ...]
    layers: int
    worth: float = WORTH
    first: int = 0


def pipeline(
    layers: Iterable[nn.Module],
    placements: Sequence[Placement],
    schedule: str | Schedule = "1f1b",
    *,
    chunks: int = 0,
    costs: Sequence[float] | None = None,
    worth: float = WORTH,
    behind: Iterable[nn.Module] = (),
) -> None:
    """Place layers that run one after the other as the stages of a schedule, in runs as even as can be.

    `placements` has one for each stage. A schedule like "interleaved" or "zb_v" has several chunks on each, `chunks` if
    it is not the usual 2; they are placed round and round, or there and back again.

    A step that is planned cuts the layers by what they take in it, with what is before, between and behind them; until
    then they are cut by their weights, and they stay so where the best cut is not `worth` it: the step takes at most so
    many times as long. `costs` cuts by numbers of one's own, one for each layer, and that remains.

    A model of two towers has two such lists: the layers of the one that runs later, such as a decoder, come `behind`
    those of the other, which were placed before; the schedule is of all chunks together.
    """
    plan = schedule if isinstance(schedule, Schedule) else published(schedule)
    shape = plan.shape(len(placements), 1, v=chunks)
    count = len(placements) if plan.way == "routes" else shape.p * shape.v
    listed, before = list(layers), _chunks_before(behind, placements, plan)
    if len(listed) < count:
        raise PlacementError(
            f"{len(listed)} layer{'s' * (len(listed) != 1)} cannot be {count} chunks of {plan.name} "
            f"on {len(placements)} placements\n"
            "  give fewer placements or chunks, or more layers; a layer that runs several times with the same weights, "
            "as Albert's does, is one, and all its runs are on one placement"
        )
    if costs is not None and not (len(costs) == len(listed) and all(0 <= cost < inf for cost in costs)):
        raise PlacementError(
            f"pipeline: costs={list(costs)!r} of {len(listed)} layers\n  give a number of 0 or more for each layer"
        )
    given = _weights(listed) if costs is None else costs
    work = LayerWork(given if any(given) else [1.0] * len(listed), [0.0] * (len(listed) - 1))
    turned = before if plan.way == "vee" else 0
    where = tuple(placements[plan.device(shape, turned + number)] for number in range(count))
    cut = LayerCut(where, len(listed), worth, before)
    settle(runs(cut, listed, work.ends(cut.placements)))
    for at, layer in enumerate(listed):
        note(layer, CUT, (cut, at) if costs is None else None)


def _chunks_before(behind: Iterable[nn.Module], placements: Sequence[Placement], plan: Schedule) -> int:
    """The number of chunks in which layers were placed, behind which others come."""
    listed = list(behind)
    apart = next((n for n, layer in enumerate(listed) if layer.__dict__.get(CHUNK) is None), None)
    if apart is not None:
        raise PlacementError(
            f"pipeline: layer {apart} of the {len(listed)} that these come behind is in no chunk of a pipeline\n"
            "  place those first, as in flow.nn.pipeline(model.encoder.layers, placements), and pass the same list"
        )
    if not listed:
        return 0
    last = max(listed, key=lambda layer: int(layer.__dict__[CHUNK])).__dict__
    if plan.way == "loop" and last[PLACE] == placements[0]:
        return int(last[CHUNK])  # one chunk, as nothing is sent between the two
    before = int(last[CHUNK]) + 1
    if plan.way == "vee" and before % len(placements):
        raise PlacementError(
            f"pipeline: {plan.name} goes down all stages and up again, which {before} chunks before, on "
            f"{len(placements)} placements, do not\n"
            "  place the layers before on the same placements, or take '1f1b', which runs on any"
        )
    return before


def settle(moved: LayerMoves) -> None:
    """Note in modules that each is on such a placement, in such a chunk."""
    for layer, (placement, chunk) in moved.items():
        place_alone(layer, placement, chunk)
        if isinstance(layer, nn.ModuleList | nn.Sequential):
            for child in layer.children():
                note(child, PART, None)  # what an earlier `place` said of it with the layer


def runs(cut: LayerCut, layers: Sequence[nn.Module], ends: Sequence[int]) -> LayerMoves:
    """The placement and the chunk of each layer, where runs end there."""
    each = enumerate(pairwise([0, *ends]))
    return {layer: (cut.placements[n], cut.first + n) for n, (first, end) in each for layer in layers[first:end]}


def open_cuts(roots: Iterable[nn.Module]) -> list[tuple[LayerCut, list[nn.Module]]]:
    """The pipelines in some modules of which nobody said where stages end, each with its layers."""
    found: dict[LayerCut, dict[int, nn.Module]] = {}
    for root in roots:
        around = {child: module for module in root.modules() for child in module.children()}
        for module in root.modules():
            if CUT in module.__dict__ and placed_by_slice(module, around.get(module)) is None:
                cut, at = module.__dict__[CUT]
                found.setdefault(cut, {})[at] = module
    return [(cut, [held[at] for at in range(cut.layers)]) for cut, held in found.items() if len(held) == cut.layers]


def ends_of(layers: Sequence[nn.Module]) -> list[int]:
    """The ends of the runs in which layers were placed."""
    chunk = [layer.__dict__[CHUNK] for layer in layers]
    return [at for at in range(1, len(chunk) + 1) if at == len(chunk) or chunk[at] != chunk[at - 1]]


def _weights(layers: Sequence[nn.Module]) -> list[float]:
    """A guess of what layers take: what is multiplied in each, and a little for one that multiplies nothing."""
    held = [
        [value for part in layer.modules() if not isinstance(part, _LOOKS_UP) for value in part._parameters.values()]
        for layer in layers
    ]
    if any(value is not None and is_lazy(value) for each in held for value in each):
        return [1.0] * len(layers)
    found = [float(sum(v.numel() for v in each if v is not None and v.ndim > 1)) for each in held]
    return [one + LITTLE * sum(found) / len(found) for one in found]


_LOOKS_UP = (nn.Embedding, nn.EmbeddingBag)
LITTLE = 0.01  # of the mean


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """The end of each run of layers. The longest run is as short as can be; of such cuts the most even one, and of
    equal ones that with more layers in the early runs.

    >>> balanced([8, 1, 1, 1, 1, 1, 1, 1], 2), balanced([1, 1, 1, 1, 1], 2)
    ([1, 8], [3, 5])
    """
    sums, n = [0.0, *accumulate(costs)], len(costs)
    slack = 1 + 1e-9  # costs are sums of floats
    most = _least([[sums[end] - sums[at] for end in range(n + 1)] for at in range(n + 1)], parts) * slack
    best: list[list[tuple[float, int]]] = [[(inf, n)] * (n + 1) for _ in range(parts + 1)]  # squares, and the end
    best[0][n] = 0.0, n
    for left in range(1, parts + 1):
        for at in range(n - left, -1, -1):
            for end in range(at + 1, n - left + 2):
                long = sums[end] - sums[at]
                if long > most:
                    break
                squares = long * long + best[left - 1][end][0]
                if squares <= best[left][at][0] * slack:
                    best[left][at] = squares, end
    ends, at = [], 0
    for left in range(parts, 0, -1):
        at = best[left][at][1]
        ends.append(at)
    return ends


@dataclass(frozen=True)
class LayerWork:
    """The work of a step, in seconds: layers, what they hand on to the next, and in how many micro-batches."""

    layers: Sequence[float]
    hops: Sequence[float]  # behind each layer but the last
    micro_batches: int = 1000

    def seconds(self, ends: Sequence[int], stages: Sequence[Hashable]) -> float:
        """The seconds of a step with such runs of layers on such stages. The first micro-batch goes through all of
        them, the others come behind it as fast as the busiest stage or the slowest hop lets them."""
        each = [self.hops[end - 1] for end in ends[:-1]]
        slowest = max(by_stage(self.layers, ends, stages) + each)
        return slowest + (sum(self.layers) + sum(each) - slowest) / self.micro_batches

    def ends(self, stages: Sequence[Hashable]) -> list[int]:
        """The ends of runs that make a short step, as far as moving single ends of even runs gets.

        >>> heavy = LayerWork([8, 1, 1, 1, 1, 1, 1, 1], [0] * 7)
        >>> heavy.ends("ab"), heavy.ends("abab")
        ([1, 8], [1, 5, 6, 8])
        """
        ends = balanced(self.layers, len(stages))
        whole = sum(self.layers) or 1.0

        def long(ends: Sequence[int]) -> tuple[float, float]:
            runs = [sum(self.layers[first:end]) for first, end in pairwise([0, *ends])]
            return round(self.seconds(ends, stages) / whole, 9), round(max(runs) / whole, 9)

        while True:
            tried = [
                [*ends[:n], end, *ends[n + 1 :]]
                for n, (before, after) in enumerate(zip([0, *ends], ends[1:], strict=False))
                for end in range(before + 1, after)
            ]
            best = min(tried, key=long, default=ends)
            if long(best) >= long(ends):
                return ends
            ends = best


def by_stage(costs: Sequence[float], ends: Sequence[int], stages: Sequence[Hashable]) -> list[float]:
    """The sum of the runs of each stage, in the order of their first runs."""
    found = dict.fromkeys(stages, 0.0)
    for stage, (first, end) in zip(stages, pairwise([0, *ends]), strict=True):
        found[stage] += sum(costs[first:end])
    return list(found.values())


def _least(long: Sequence[Sequence[float]], parts: int) -> float:
    """The least that the longest run of any cut takes; `long` is by first layer and end."""
    n = len(long) - 1
    row = [0.0 if at == n else inf for at in range(n + 1)]
    for left in range(1, parts + 1):
        row = [
            min((max(long[at][end], row[end]) for end in range(at + 1, n - left + 2)), default=inf)
            for at in range(n + 1)
        ]
    return row[0]
