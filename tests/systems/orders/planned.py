"""Plans of stages, all of them, with their seconds worked out one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

import torch

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.actors import Costs, Shape, network_of, published, simulate
from sbpflow.nn import LayerLoad
from sbpflow.placement import Cluster, Placement
from sbpflow.placement.hardware import Level, RankLink

# A plan: where runs of layers end, and the ranks of each.
Plan = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def hosts(count: int, devices: int, *, inside: float, between: float, links: Sequence[RankLink] = ()) -> Cluster:
    levels = Level("node", devices, 0.0, inside), Level("network", count, 0.0, between)
    return replace(flow.cluster("a100x8"), name="planned", levels=levels, links=tuple(links))


def every_boxing(layers: int, devices: int, stages: Sequence[int]) -> Iterator[Plan]:
    """All cuts into so many stages, and all ways to give each device to one of them, so that none has nothing."""
    for count in stages:
        for of in product(range(count), repeat=devices):
            ranks = tuple(tuple(rank for rank in range(devices) if of[rank] == s) for s in range(count))
            if all(ranks):
                for inner in combinations(range(1, layers), count - 1):
                    yield (*inner, layers), ranks


def times(layers: Sequence[LayerLoad], plan: Plan) -> tuple[list[Costs], list[float]]:
    """The costs of a micro-batch in each stage, and the seconds in which its gradients are added up."""
    costs, sums = [], []
    places = [flow.placement("cuda", list(ranks)) for ranks in plan[1]]
    for n, (first, end) in enumerate(pairwise([0, *plan[0]])):
        run, here = layers[first:end], places[n]
        parts = [sum(getattr(one, name) for one in run) / here.size for name in ("forward", "backward", "weight")]
        hop = moved(here, S(0), places[n + 1], S(0), run[-1].sent) if n + 1 < len(places) else 0.0
        costs.append(Costs(parts[0], parts[1], parts[2], hop))
        gradients = sum(one.gradients for one in run)
        sums.append(moved(here, P, here, B, gradients) if here.size > 1 else 0.0)
    return costs, sums


def moved(here: Placement, src: object, there: Placement, dst: object, size: int) -> float:
    before, after = (flow.layout(p, sbp, (size,), torch.uint8) for p, sbp in ((here, src), (there, dst)))  # type: ignore[arg-type]
    return flow.boxing.between(before, after).price.time if size else 0.0


def step(layers: Sequence[LayerLoad], plan: Plan, many: int, schedule: str = "1f1b") -> float:
    """The seconds of a step: the schedule, and the gradients of each stage behind its last task."""
    costs, sums = times(layers, plan)
    run = simulate(network_of(published(schedule), Shape(len(costs), many), costs))
    return max(max(ran.end for ran in run.of(f"device {s}")) + extra for s, extra in enumerate(sums))


def slowest(layers: Sequence[LayerLoad], plan: Plan) -> float:
    """The stage or the link that takes longest for a micro-batch, there and back."""
    costs, sums = times(layers, plan)
    busy = [cost.forward + cost.backward + cost.weight for cost in costs]
    return max(*busy, *sums, *(2 * cost.hop for cost in costs))
