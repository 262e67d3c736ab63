"""Where each of many jobs runs: at the site that ends it first, by the plan that it would have there. Nothing runs.

    python examples/clusters/sites.py             # a trace of twelve jobs
    python examples/clusters/sites.py --check     # also every other way to place the first six

Three sites have cards of their own, and thin links between them. A job comes with its model, its batch, and data that
lie at one of the sites. At each site, and on two sites together, the planner finds the best plan that fits the cards;
where none does, the job cannot go. A site runs one job after the other.
"""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf
from typing import TypeAlias

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.placement.hardware import Level

SITES = {"east": "a100x8*1", "west": "h100x8*1", "north": "a100x8*2"}
TOGETHER = ("east", "north")  # which have cards of one kind
THIN = 1.25e9  # bytes a second between sites, 10 Gb/s
FAR = 20e-3  # seconds for a hop between sites
CARD = 2e9  # bytes of a card that are left for such jobs
MODELS = {"small": (2048, 2, 4096), "wide": (16384, 2, 1024), "deep": (4096, 4, 16384)}  # width, layers, samples
Free: TypeAlias = Mapping[str, float]  # when each site is done with its jobs


class Net(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@dataclass(frozen=True)
class Job:
    """A job as it comes: at which second, what it trains for how many steps, and where its bytes of data lie."""

    number: int
    came: float
    model: str
    steps: int
    home: str
    data: float


@dataclass(frozen=True)
class Run:
    """A job at a site, or at two together: when it begins and ends."""

    job: Job
    at: tuple[str, ...]
    begins: float
    ends: float


def trace(jobs: int, seed: int) -> list[Job]:
    """Jobs as they come, the same ones for a seed."""
    draw, now, made = random.Random(seed), 0.0, []
    for number in range(jobs):
        now += draw.expovariate(1 / 400)
        model, steps, home = draw.choice([*MODELS]), draw.randrange(20_000, 200_000), draw.choice([*SITES])
        made.append(Job(number, now, model, steps, home, draw.choice([1e9, 1e11, 1e12])))
    return made


def places() -> list[tuple[str, ...]]:
    return [*((site,) for site in SITES), TOGETHER]


def cluster_of(at: tuple[str, ...]) -> flow.Cluster:
    """The cards of a site; two are joined by one more level, over which all cards of a site share the thin link."""
    one = flow.cluster(SITES[at[-1]])
    device = replace(one.device, memory=CARD)
    if len(at) == 1:
        return replace(one, device=device)
    first, second = (flow.cluster(SITES[site]).capacity[-1] for site in at)
    groups = (tuple(range(first)), tuple(range(first, first + second)))
    nodes = tuple(tuple(range(k, k + 8)) for k in range(0, first + second, 8))
    node, network = (replace(level, groups=of) for level, of in zip(one.levels, (nodes, groups), strict=True))
    return replace(one, device=device, levels=(node, network, Level("sites", 2, FAR, THIN / max(first, second))))


@cache
def seconds_of_step(at: tuple[str, ...], model: str) -> float:
    """The seconds of a step by the best plan at a site; infinitely many where none fits."""
    width, layers, samples = MODELS[model]
    with torch.device("meta"):
        net, x = Net(width, layers), torch.empty(samples, width)
    grid = f"grid cuda (data={sum(flow.cluster(SITES[site]).capacity[-1] for site in at)})"
    try:
        return flow.find_plan(net, x, plan=grid, cluster=cluster_of(at)).checked.seconds
    except flow.SbpError:
        return inf


def runs_of(job: Job, free: Free) -> Iterator[Run]:
    """The job at each place, after what runs there, and after its data have come."""
    for at in places():
        needed = sum(site != job.home for site in at) / len(at)
        begins = max(job.came + needed * job.data / THIN, *(free[site] for site in at))
        yield Run(job, at, begins, begins + job.steps * seconds_of_step(at, job.model))


def placed(jobs: Sequence[Job]) -> list[Run]:
    """Each job, as it comes, where it ends first."""
    free, made = dict.fromkeys(SITES, 0.0), []
    for job in jobs:
        best = min(runs_of(job, free), key=lambda run: run.ends)
        if best.ends == inf:
            raise SystemExit(f"job {job.number} fits no site: {job.model}")
        made.append(best)
        free |= dict.fromkeys(best.at, best.ends)
    return made


def least(jobs: Sequence[Job]) -> float:
    """The least mean wait of all ways to place the jobs, in the order in which they come."""
    found = inf
    for ways in product(range(len(places())), repeat=len(jobs)):
        free, waited = dict.fromkeys(SITES, 0.0), 0.0
        for job, way in zip(jobs, ways, strict=True):
            run = [*runs_of(job, free)][way]
            free |= dict.fromkeys(run.at, run.ends)
            waited += run.ends - job.came
            if waited >= found:
                break
        found = min(found, waited)
    return found / len(jobs)


def mean_wait(runs: Sequence[Run]) -> float:
    return sum(run.ends - run.job.came for run in runs) / len(runs)


def main() -> None:
    jobs = trace(12, seed=1)
    runs = placed(jobs)
    for run in runs:
        job, hours = run.job, (run.ends - run.begins) / 3600
        print(f"job {job.number:2} {job.model:5} of {job.home:5}  at {'+'.join(run.at):10}  {hours:5.2f} h")
    at_home = sum(run.at == (run.job.home,) for run in runs)
    print(f"{at_home} of {len(jobs)} where their data are; a job is done {mean_wait(runs) / 3600:.2f} h after it came")
    if "--check" in sys.argv:
        few = jobs[:6]
        print(f"six jobs: {mean_wait(placed(few)) / least(few):.3f} of the best of all {len(places()) ** 6} ways")


if __name__ == "__main__":
    main()
