"""Hops hold what is under way: what was sent until it was taken, and what came until who read it has ended."""

import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.actors import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import simulate
from sbpflow.actors.runtime.channel import Send
from sbpflow.actors.runtime.partition import labels_of
from sbpflow.nn.graph.run import transfers
from tests.ranks import Ranks

from ..pipes import ALONE4, mlp, numbers, see_bundles, sgd, square_loss, staged

ROWS, WIDTH = 32, 256  # of a micro-batch, 64 KiB: of these four receives are posted ahead
AHEAD = 4


class Alive(NamedTuple):
    """At once, in a step: sends of one register that nobody has waited for, and buffers of what came or may come."""

    sent: int
    come: int
    left: int  # of either, behind the step


def test_registers_of_two_things_at_once_are_filled_by_the_part_that_fills_them() -> None:
    """One of the whole case, or of every case, goes by the first part, as in the protocol."""
    gives = Give("every"), Give("both", case="A&B"), Give("second", case="B")
    maker = Actor("a", "q", gives=gives, firings=3, sequence=("A", "A&B", "B"))
    readers = [Actor(give.register, "p", (Take(give.register),)) for give in gives]
    run = simulate(Network((maker, *readers), tuple(Register(give.register, 3) for give in gives)))
    labels = {"every": (0, 1, 1), "both": (1,), "second": (0, 1)}
    assert labels_of(run) == labels
    assert {name: tuple(ran.label for ran in run.firings if ran.actor == name) for name in labels} == labels


def piped(schedule: str, pieces: int) -> Any:
    torch.manual_seed(0)
    chunks = 8 if schedule in ("interleaved", "zb_v") else 4
    model: nn.Module = staged(mlp(chunks, WIDTH).double(), ALONE4, schedule)
    return flow.compile(model, square_loss, sgd(model), schedule=schedule, micro_batches=pieces)


def on_a_rank(schedule: str, pieces: int) -> tuple[Alive, dict[str, int]]:
    """The buffers that were alive here, and what is told of what may be under way."""
    step = piped(schedule, pieces)
    batch = numbers(0, rows=ROWS * pieces, width=WIDTH)
    step(*batch)
    sent = come = 0
    sends: set[Send] = set()
    buffers: list[weakref.ref[Any]] = []
    post, empty = Send.post, transfers.PeerMessage.empty

    def posted(self: Send, label: int, value: Any) -> None:
        nonlocal sent
        post(self, label, value)
        sends.add(self)
        sent = max(sent, len(self.posted))

    def emptied(self: transfers.PeerMessage) -> Tensor:
        nonlocal come
        made = empty(self)
        buffers.append(weakref.ref(made.untyped_storage()))
        come = max(come, sum(of() is not None for of in buffers))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Send, "post", posted)
        patch.setattr(transfers.PeerMessage, "empty", emptied)
        step(*batch)
    left = sum(of() is not None for of in buffers) + sum(len(of.posted) for of in sends)
    return Alive(sent, come, left), step.planned.program.proved.answers.under_way()


def bounded(few: Alive, many: Alive, told: int) -> bool:
    """Whether with more micro-batches no more is alive; a last group of one may have its turn a firing sooner."""
    return many.left == few.left == 0 and many.sent <= told and many.come <= few.come + 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_buffers_of_hops_do_not_wait_for_the_end_of_a_step(ranks4: Ranks, schedule: str) -> None:
    few, many = ranks4(on_a_rank, schedule, 8), ranks4(on_a_rank, schedule, 16)
    for (alive, told), (later, same) in zip(few, many, strict=True):
        assert told == same
        assert max(told.values()) == 4  # as many as there are ranks
        assert bounded(alive, later, 4)


def test_all_that_a_schedule_keeps_is_let_go_with_the_step(ranks4: Ranks) -> None:
    """GPipe keeps what came for every micro-batch, since its backward reads it, and 1F1B for those under way."""
    all_, early = ranks4(on_a_rank, "gpipe_lifo", 16), ranks4(on_a_rank, "1f1b", 16)
    assert [alive.left for alive, _ in (*all_, *early)] == [0] * 8
    for rank, ((kept, _), (alive, _)) in enumerate(zip(all_, early, strict=True)):
        assert alive.come <= 4 - rank + 2 * (AHEAD + 1)
        if rank:
            assert kept.come >= 16 > alive.come


def in_one_process(schedule: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By register of hops how many values were alive at once; behind the step there are none."""
    most: dict[str, int] = {}
    alive: dict[str, list[weakref.ref[Tensor]]] = {}

    def see(name: str, bundle: Any) -> None:
        if name.startswith(("x.", "dy.")):
            known = alive.setdefault(name, [])
            known += [weakref.ref(x) for x in bundle]
            most[name] = max(most.get(name, 0), sum(x() is not None for x in known))

    with monkeypatch.context() as patch:
        see_bundles(patch, see)
        step = piped(schedule, pieces)
        step(*numbers(0, rows=pieces, width=WIDTH))
    assert all(x() is None for known in alive.values() for x in known)
    return most


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe_lifo"])
def test_in_one_process_a_hop_is_let_go_when_it_was_read(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation is the last that its own layer keeps for the backward, and so lives as long as that does."""
    many = in_one_process(schedule, 16, monkeypatch)
    assert len(many) == 6
    for name, count in many.items():
        kind, chunk = name.split(".")
        if schedule != "gpipe_lifo":
            assert count <= 5 - int(chunk) + (kind == "x"), name  # those under way between two chunks, and the newest
        elif kind == "x":
            assert count == 16
