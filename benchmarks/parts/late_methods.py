"""Ways to train in which weights are read while they change, over the same link: a parameter server, and pipelines.

    parameter server   four workers, and one more host that has the weights: its link carries those of all workers,
                       a copy to and a gradient from each, one behind the other
    pipelines          four stages; a step is an update of as many samples, and what goes from stage to stage is carried
                       by the link of who sends it, one thing behind the other

Time is that of a simulation of the method's own network, in which links are queues: `Network.through` leads what is
sent through them. Both ways of a link are apart, as elsewhere. A call does some steps; behind it nothing is under way.

Hogwild is not here: its threads share one memory, so there is no link, and dense gradients meet in every weight.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from benchmarks.parts.systems_methods import (
    ALONE,
    BANDWIDTH,
    LAST,
    LATENCY,
    RANKS,
    Method,
    Way,
    adam,
    batch,
    loss_fn,
    model,
)
from sbpflow import B
from sbpflow.actors import Actor, Costs, Give, Register, Schedule, Take, network_of, published, simulate
from sbpflow.nn.asynchronous.bounded_delay import BoundedDelay, bounded_delay

__all__ = ["LATE"]

SERVER = flow.placement("cpu", [RANKS])
USUAL = 5e-3  # seconds that a worker computes, about; the order hardly depends on it, and `ends` looks whether it does


def served(delay: int) -> Callable[[], Way]:
    """Workers that pull and push all weights in each of their rounds, and one server."""

    def make() -> Way:
        trained = flow.nn.to_global(model(), SERVER, B)
        whole = sum(x.numel() * x.element_size() for x in trained.parameters())
        planned = course(delay, USUAL, whole)
        server = flow.nn.ParameterServer(
            trained, loss_fn, adam(trained), workers=ALONE, delay=delay, seconds=seconds(planned)
        )

        def steps(at: int) -> list[float]:
            rows = [list(zip(*(x.chunk(RANKS) for x in batch(at + k)), strict=True)) for k in range(LAST)]
            return [sum(_whole(loss).item() for loss in row) / RANKS for row in server.run(rows)]

        def ends(compute: float, nbytes: float) -> list[float]:
            found = course(delay, compute, nbytes / 2 / RANKS)
            if not found.versions == planned.versions == server.course_of(LAST).versions:
                raise ValueError(f"workers that compute {compute} s have other versions than those that were trained")
            return [ran.end for ran in found.run.firings if ran.actor == "update"]

        return Way(steps, 0.5, ends)

    return make


def course(delay: int, compute: float, nbytes: float) -> BoundedDelay:
    """The rounds of a call, if the server's link takes `nbytes` to a worker and `nbytes` back in each.

    A worker pulls again when its gradient has come to the server.
    """
    carry = LATENCY + nbytes / BANDWIDTH
    network = bounded_delay(RANKS, LAST, delay, lambda worker, at: compute, "parameter server").run.network
    for i in range(RANKS):
        network = network.adding(registers=[Register(f"back.{i}", 1, 1)])
        network = network.reading(f"pull {i}", Take(f"back.{i}"))
        network = network.through(f"have.{i}", Actor(f"send {i}", "to workers", time=carry))
        arrives = Actor(f"receive {i}", "from workers", gives=(Give(f"back.{i}"),), time=carry)
        network = network.through(f"push.{i}", arrives)
    took = {"gradient": compute, "send": carry, "receive": carry}
    return BoundedDelay(simulate(network, time=lambda actor, *_: took.get(actor.partition(" ")[0], 0.0)), RANKS)


def seconds(of: BoundedDelay) -> Callable[[int, int], float]:
    """How long each round takes each worker, from its pull until its gradient has come."""
    begun = {(ran.actor, ran.label): ran.start for ran in of.run.firings if ran.actor.startswith("pull")}
    come = {(ran.actor, ran.label): ran.end for ran in of.run.firings if ran.actor.startswith("receive")}
    return lambda worker, at: come[f"receive {worker}", at] - begun[f"pull {worker}", at]


def staged(schedule: str | Schedule, parts: int = 1, calls: int = LAST) -> Callable[[], Way]:
    """Four stages, a step of so many micro-batches, and a call of so many steps."""
    of = published(schedule) if isinstance(schedule, str) else schedule

    def make() -> Way:
        trained = model()
        stages: Sequence[Sequence[nn.Module]] = (
            (trained.words, trained.places),
            (trained.blocks[0],),
            (trained.blocks[1],),
            (trained.norm, trained.head),
        )
        for place, modules in zip(ALONE, stages, strict=True):
            for module in modules:
                flow.nn.place(module, place)
        step = flow.compile(trained, mean_and_each, adam(trained), micro_batches=calls * parts, schedule=of)

        def steps(at: int) -> list[float]:
            samples = [torch.cat(each) for each in zip(*(batch(at + k) for k in range(calls)), strict=True)]
            _, each = step(*samples)
            return [float(x) for x in _whole(each).view(calls, -1).mean(1)]

        def ends(compute: float, nbytes: float) -> list[float]:
            hops = 2 * (RANKS - 1) * parts
            return piped(of, calls, parts, usual_times(step), compute * RANKS, nbytes / hops / BANDWIDTH)

        return Way(steps, 1 / (RANKS - 1), ends)

    return make


def mean_and_each(model: nn.Module, text: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and that of each byte, so that steps of one call are told apart."""
    each = F.cross_entropy(model(text).flatten(0, 1), following.flatten(), reduction="none")
    return each.mean(), each.detach()


def usual_times(step: Any) -> dict[str, float]:
    """The median of each stage's F, B and U in the timeline of the last call: what they are to each other."""
    took: dict[str, list[float]] = defaultdict(list)
    for records in step.timeline().ranks.values():
        for ran in records:
            took[ran.actor].append(ran.end - ran.start)
    return {name: median(times) for name, times in took.items()}


def piped(of: Any, calls: int, parts: int, usual: dict[str, float], compute: float, line: float) -> list[float]:
    """When each step's updates have ended, if all stages together compute so long for a step, and a hop takes its
    sender's link for `line`."""
    scale = compute / sum(time if name.startswith("U") else time * parts for name, time in usual.items())
    costs = [
        Costs(
            forward=scale * usual[f"F{s}"],
            backward=scale * usual[f"B{s}"],
            weight=0.0,
            hop=LATENCY / 2,  # of each of the two legs
            update=scale * usual.get(f"U{s}", 0.0),
        )
        for s in range(RANKS)
    ]
    network = network_of(of, of.shape(RANKS, calls * parts), costs)
    for a, b in pairwise(range(RANKS)):
        network = network.through(f"x.{b}", Actor(f"on {b}", f"link {a}", time=line))
        network = network.through(f"dy.{a}", Actor(f"back {a}", f"link {b}", time=line))
    run = simulate(network)
    updates: dict[int, float] = defaultdict(float)
    for ran in run.firings:
        if ran.actor.startswith("U"):
            updates[ran.label] = max(updates[ran.label], ran.end)
    return [updates[at] for at in sorted(updates)] or [run.end]


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, flow.GlobalTensor) else x


# An update of four micro-batches of four samples: as many as a step of the others.
TWICE = replace(published("2bw"), update="p")

LATE = [
    Method("parameter server, delay 0", served(0)),
    Method("parameter server, delay 2", served(2)),
    Method("1F1B, with a flush", staged("1f1b", RANKS, 1)),
    Method("PipeDream", staged("pipedream")),
    Method("PipeDream-2BW", staged(TWICE, RANKS)),
    Method("PipeMare", staged("pipemare")),
    Method("PipeMare, corrected", staged("pipemare_corrected")),
]
