"""Pairs that really run together: what a task moves is under way while the other computes, and nothing else changes."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.actors import Actor, Added, Give, Register, Schedule, Take, published
from sbpflow.boxing.box import Pending, box_async
from sbpflow.nn.graph.run.pairs import by_turns
from sbpflow.sbp.trial import one_thread
from tests.nn.composites.test_dropless import Layers, squares
from tests.nn.graph.pipes import (
    PAIRS,
    hinted,
    mlp,
    numbers,
    of,
    often,
    sgd,
    square_loss,
    staged,
    text,
    trains,
    whole,
    words_loss,
)
from tests.ranks import Ranks

Event = tuple[str, str]  # turn; start, on (of a move of several exchanges) or wait; and of which task
M = 4


class Watched:
    """A move under way that tells when it is waited for."""

    def __init__(self, pending: Pending, task: str, seen: list[Event]) -> None:
        self.pending, self.task, self.seen = pending, task, seen

    def go_on(self) -> None:
        self.seen.append(("on", self.task))
        self.pending.go_on()

    def wait(self) -> tuple[torch.Tensor, ...]:
        self.seen.append(("wait", self.task))
        return self.pending.wait()


@contextmanager
def watched() -> Iterator[list[list[Event]]]:
    """The moves of each pair that runs, in order."""
    pairs: list[list[Event]] = []

    def start(*given: Any, **how: Any) -> Watched:
        task, events = sys._getframe(1).f_code.co_name, mine[get_ident()]
        events.append(("start", task))
        return Watched(box_async(*given, **how), task, events)

    def told(task: Any, events: list[Event]) -> Any:
        while True:
            events.append(("turn", task.gi_code.co_name))
            try:
                next(task)
            except StopIteration as end:
                return end.value
            yield

    def turns(tasks: list[Any]) -> list[Any]:
        events = mine[get_ident()] = list[Event]()  # devices of one process are threads
        pairs.append(events)
        return by_turns([told(task, events) for task in tasks])

    mine: dict[int, list[Event]] = {}
    with (
        patch("sbpflow.nn.graph.instructions.moves.box_async", start),
        patch("sbpflow.nn.graph.run.bound_tasks.by_turns", turns),
    ):
        yield pairs


def hidden(events: list[Event]) -> int:
    """How many exchanges of a pair were under way while the other task went on: some of it is before they are over."""
    found, begun = 0, dict[str, int]()
    for at, (what, task) in enumerate(events):
        if what in ("on", "wait"):
            found += any(other != task for _, other in events[begun[task] : at])
        if what in ("start", "on"):
            begun[task] = at
    return found


def exchanged(events: list[Event]) -> int:
    return sum(what in ("start", "on") for what, _ in events)


def apart(schedule: str, p: int, m: int) -> Schedule:
    """The same order, one task of a pair behind the other."""
    rows = tuple(row.replace("+", "") for row in published(schedule).show(p, m).order)
    return Schedule("apart", way=published(schedule).way, table=rows)


def split(schedule: str = "dualpipe_v", width: int = 6) -> nn.Sequential:
    """Chunks with two layers whose features lie on both ranks of a stage, so that F and B of all move something."""
    torch.manual_seed(3)
    model = staged(mlp(8, width).double(), PAIRS, schedule)
    flow.nn.shard(model, {"*.0.weight": S(0), "*.bias": B})
    assert isinstance(model, nn.Sequential)
    return model


def learnt(schedule: str | Schedule, stages: str) -> list[torch.Tensor]:
    model = split(stages)
    step = flow.compile(model, square_loss, sgd(model), micro_batches=M, schedule=schedule)
    return [*(whole(step(*numbers(at))) for at in range(2)), *map(whole, model.parameters())]


@one_thread()
def pairs_on_ranks(schedule: str) -> list[list[Event]]:
    """Bit for bit what the same order gives one by one; the moves of this process's pairs."""
    with flow.use_cluster("flat"):
        with watched() as seen:
            together = learnt(schedule, schedule)
        with watched() as none:
            alone = learnt(apart(schedule, 2, M), schedule)
    assert not none
    assert all(map(torch.equal, together, alone))
    return seen


def check(seen: list[list[Event]]) -> None:
    for events in seen:
        (start, first), (again, second), (wait, landed), *_ = (each for each in events if each[0] != "turn")
        assert (start, again, wait, landed) == ("start", "start", "wait", first)
        assert {first[0], second[0]} == {"F", "B"}


def test_moves_of_both_tasks_of_a_pair_are_under_way_at_once() -> None:
    """In a process that owns all ranks; with two steps of 4 micro-batches on each of 2 devices."""
    seen = pairs_on_ranks("dualpipe_v")
    check(seen)
    rows = published("dualpipe_v").show(2, M).order
    assert len(seen) == 2 * sum(row.count("+") for row in rows)
    assert sum(map(hidden, seen)) > 0.7 * sum(map(exchanged, seen))


@pytest.mark.parametrize("schedule", often(["dualpipe_v"], ["dualpipe"]))
def test_ranks_of_a_stage_start_the_moves_of_pairs_in_one_order(ranks4: Ranks, schedule: str) -> None:
    seen = ranks4(pairs_on_ranks, schedule)
    assert seen[0] == seen[1] != []
    assert seen[2] == seen[3] != []
    for each in seen:
        check(each)


SENT = """
grid (pipe=2, expert=2)
input x <- expert=S(0)
**.{up,down}: expert=S(0)
inside layers.* use dropless over expert
pipe layers over pipe by SCHEDULE, 4 micro-batches
"""


@one_thread()
def experts_on_ranks() -> tuple[int, int, list[list[Event]]]:
    """Layers whose tokens go to the ranks of their experts: marks first, and then so many rows as are marked."""

    def learnt(schedule: str) -> list[torch.Tensor]:
        model, x = Layers(4), torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        step = flow.compile(model, squares, sgd(model), plan=SENT.replace("SCHEDULE", schedule))
        return [*(whole(step(x)) for _ in range(2)), *map(whole, model.parameters())]

    with flow.use_cluster("flat"):
        with watched() as seen:
            together = learnt("dualpipe_v")
        assert all(map(torch.equal, together, learnt("zb_v")))
    return sum(map(hidden, seen)), sum(map(exchanged, seen)), seen


def test_tokens_go_to_their_experts_while_the_other_task_computes() -> None:
    under, exchanges, seen = experts_on_ranks()
    assert any(what == "on" for events in seen for what, _ in events)
    assert under > 0.85 * exchanges


@pytest.mark.sweep
def test_ranks_send_tokens_while_the_other_task_computes(ranks4: Ranks) -> None:
    found = ranks4(experts_on_ranks)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert all(under > 0.85 * exchanges > 0 for under, exchanges, _ in found)


def test_the_predicted_course_has_what_pairs_hide() -> None:
    """With all pairs together it is that of `show`; and a stage that hides its exchanges is done sooner."""
    ends = {}
    for schedule in (published("dualpipe_v"), apart("dualpipe_v", 2, M)):
        model = split(width=(width := 256))  # else weights are gathered instead, with which a backward moves nothing
        step = flow.compile(model, square_loss, sgd(model), micro_batches=M, schedule=schedule)
        step.plan_for(*numbers(0, width=width))
        course, costs = step.explain().course, step.costs()
        assert course is not None
        assert all(cost.exchange > 0 for cost in costs)
        drawn = schedule.show(2, M, costs=costs)
        assert course.bubble == pytest.approx(drawn.bubble)
        assert (drawn.hidden > 0.01) == (schedule.name == "dualpipe_v")
        ends[schedule.name] = drawn.end
    assert ends["dualpipe_v"] < ends["apart"]


def test_what_moves_nothing_has_its_turn_under_the_move_of_the_other() -> None:
    """Of the last chunk of a data parallel GPT only the forward moves something: its loss. On quicker cores each rank
    computes so few samples whole."""
    known = flow.cluster("cpu")
    rates = {name: rate / 4 for name, rate in known.device.flops.items()}
    device = replace(known.device, flops=rates, memory_bandwidth=known.device.memory_bandwidth / 4)
    with flow.use_cluster(replace(known, device=device)), watched() as seen:
        model = hinted(staged(of("gpt"), PAIRS, "dualpipe_v"), "data")
        trains(model, words_loss, text, micro_batches=M, schedule="dualpipe_v", steps=1)
    both = [("turn", "B0"), ("turn", "F3"), ("start", "F3"), ("turn", "B0"), ("turn", "F3"), ("wait", "F3")]
    assert seen
    assert all(events == both for events in seen)


def test_a_task_that_moves_nothing_lets_the_other_start_first() -> None:
    """Its one pause is at its begin, so that all of it goes on under the other's first move."""
    order: list[str] = []

    def task(name: str, pauses: list[str]) -> Any:
        for what in pauses:
            order.append(f"{name} {what}")
            yield
        order.append(f"{name} ends")
        return name

    assert by_turns([task("F", ["gives way"]), task("B", ["starts", "starts"])]) == ["F", "B"]
    assert order == ["F gives way", "B starts", "F ends", "B starts", "B ends"]


def test_a_task_that_fails_closes_the_other() -> None:
    closed = []

    def waits() -> Any:
        try:
            yield
        finally:
            closed.append(True)

    def fails() -> Any:
        raise ValueError("no")
        yield

    with pytest.raises(ValueError, match="no"):
        by_turns([waits(), fails()])
    assert closed == [True]


def test_tasks_that_move_nothing_run_one_behind_the_other() -> None:
    """Nothing would be hidden, and the forward handed on later."""
    with watched() as seen:
        step = trains(staged(mlp().double(), [flow.placement("cpu", [n]) for n in (0, 1)], "dualpipe_v"),
                      micro_batches=M, schedule="dualpipe_v", steps=1)  # fmt: skip
    assert not seen
    assert "&" not in str(step.network)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (10, {}),
        (8, {"backend": "autograd"}),
        (8, {"overlap": True}),
        (8, {"post_validation": True, "clip_grad_norm": 0.1}),
    ],
)
def test_pairs_train_as_one_device_whatever_else_is_done(rows: int, options: dict[str, Any]) -> None:
    """Micro-batches of two sizes, torch's autograd, ends of chunks beside, and optimizers that may be taken back."""
    with watched() as seen:
        trains(
            split(), batches=lambda at: numbers(at, rows), micro_batches=M, schedule="dualpipe_v", steps=2, **options
        )
    assert sum(map(hidden, seen)) > 0.8 * sum(map(exchanged, seen))


@pytest.mark.parametrize("what", ["offload", "recompute"])
def test_pairs_whose_activations_go_away_train_as_one_device(what: str) -> None:
    model = split()
    if what == "offload":
        flow.nn.offload(model, "*", "saved")
    else:
        for layer in model:
            flow.nn.recompute(layer)
    with watched() as seen:
        trains(model, micro_batches=M, schedule="dualpipe_v", steps=2)
    assert sum(map(hidden, seen)) > 0.7 * sum(map(exchanged, seen))


def test_added_actors_bring_arguments_to_tasks_of_pairs() -> None:
    """Each task finds that of its own micro-batch, of two that run together too."""

    def losses(loaded: bool) -> list[float]:
        model, now = split(), list(numbers(0))
        step = flow.compile(model, square_loss, sgd(model), micro_batches=M, schedule="dualpipe_v")
        step.plan_for(*now)
        for at, (task, batch) in enumerate((("F0", "x"), ("F3", "y"))) if loaded else ():
            reader = next(actor for actor in step.network.actors if task in actor.parts)
            loader = Actor(f"load {batch}", f"host {batch}", gives=(Give(f"batch {batch}"),), firings=M)
            more = step.network.adding([loader], [Register(f"batch {batch}", M)])
            more = more.reading(reader.name, Take(f"batch {batch}", case=task))
            work = {loader.name: lambda firing, at=at: [now[at].chunk(M)[firing.label]]}
            step.add(Added(more, work, {loader.queue: reader.queue}, feeds={f"batch {batch}": batch}))
        found = []
        for number in range(2):
            now[:] = numbers(number)
            found.append(whole(step(*([torch.empty_like(x, device="meta") for x in now] if loaded else now))).item())
        return found

    with watched() as seen:
        assert losses(True) == losses(False)
    assert seen


def test_an_error_in_a_pair_names_both() -> None:
    def fails(tasks: list[Any]) -> Any:
        raise ValueError("no")

    model = split()
    step = flow.compile(model, square_loss, sgd(model), micro_batches=M, schedule="dualpipe_v")
    with patch("sbpflow.nn.graph.run.bound_tasks.by_turns", fails), pytest.raises(ValueError, match="no") as error:
        step(*numbers(0))
    notes = "".join(error.value.__notes__)
    assert re.search(r"\(F\d&B\d\), micro-batches \d and \d", notes), notes  # of whichever device is sooner


def test_a_timeline_says_what_ran_together() -> None:
    step = trains(split(), micro_batches=M, schedule="dualpipe_v", steps=2)
    found = step.timeline()
    assert found is not None
    both = [did for did in found.step.replay.done if did.ran.more]
    rows = published("dualpipe_v").show(2, M).order
    assert len(both) == sum(row.count("+") for row in rows)
    assert all(did.placed for did in found.step.replay.done)
    assert {str(did) for did in both} >= {"F0 micro-batch 3 & B3 micro-batch 1"}
