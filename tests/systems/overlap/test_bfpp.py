"""Breadth-first pipelines: one reduce and, of weights in pieces, one gather a chunk a step, beside the other chunks."""

from collections import Counter
from itertools import product
from threading import Event
from typing import Any

import pytest
import torch

from sbpflow import S
from sbpflow.actors import Costs, Folding, network_of, published, simulate
from sbpflow.actors.protocol.feasibility import proved
from sbpflow.actors.protocol.state import Firing
from sbpflow.nn.graph.run.bound_tasks import BoundTask
from sbpflow.nn.graph.tasks.task import Name

from .stages import Trained, plan_of, same, trained

BFPP = published("bfpp")
SCHEDULES = ["bfpp", "interleaved", "1f1b", "zb_h1", "zb_v", "chimera", "gems", "gpipe"]
PIECES: dict[str, Any] = {"ranks": 2, "rest": S(0), "inputs": {"x": S(0), "y": S(0)}, "rows": 1 << 17, "width": 4}


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 1), (4, 4, 2), (4, 8, 2), (4, 8, 4), (8, 8, 2)])
def test_the_bubble_is_one_over_the_chunks(p: int, m: int, v: int) -> None:
    """(p - 1) T / v, with T what a micro-batch takes on a device: 3 v here."""
    run = simulate(network_of(BFPP, BFPP.shape(p, m, v=v), Costs(reduce=1, gather=1), Folding()))
    ran = [each for each in run.of("device 0") if each.actor[0] in "FB"]
    busy = sum(each.end - each.start for each in ran)
    assert ran[-1].end - ran[0].start - busy == (p - 1) * 3 * v / v


@pytest.mark.parametrize("schedule", ["bfpp", "interleaved", "zb_v"])
def test_a_chunk_goes_home_when_its_last_part_ends(schedule: str) -> None:
    one = published(schedule)
    run = proved(network_of(one, one.shape(4, 8), Costs(reduce=0.5, gather=0.5), Folding()))
    found = Counter(each.actor for each in run.firings)
    for chunk in range(4 * one.v):
        mine = [each for each in run.firings if each.actor[1:] == str(chunk) or each.case[1:] == str(chunk)]
        home = next(each for each in mine if each.actor == f"R{chunk}")
        last = max(each.end for each in mine if each.queue != home.queue)
        busy = [each for each in run.of(home.queue) if each.start < home.start and each.end > last]
        assert home.start == last or busy  # the link may be at another chunk's
        assert home.start >= last
        assert found[f"R{chunk}"] == found[f"G{chunk}"] == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_the_same_to_the_bit(schedule: str, ranks: int) -> None:
    how: dict[str, Any] = {"ranks": ranks, "clip_grad_norm": 0.4}
    same(trained(schedule, **how), trained(schedule, **how, overlap=True))


def counted(made: Trained) -> Counter[str]:
    """Moves of the last step that are no part of a micro-batch's own, by route."""
    return Counter(
        move.route for move in made.moves if move.op == "bucket" or ".weight" in move.op or ".bias" in move.op
    )


def test_weights_in_pieces_are_gathered_once_and_their_gradients_go_home_once() -> None:
    """Four chunks of a weight and a bias, four micro-batches: a gather for each forward and backward, and a way home
    for each backward, of each weight; and in a step that is folded one of each a chunk."""
    usual, folded = (trained("bfpp", **PIECES, overlap=how) for how in (False, Folding(once=True)))
    weights, gathers = 8, counted(usual)["all_gather"]
    assert 4 * weights <= gathers <= 2 * 4 * weights
    assert counted(usual)["reduce_scatter"] == 4 * weights
    assert counted(folded) == {"all_gather": 4, "reduce_scatter": 4}
    for name, x in usual.weights.items():
        assert torch.allclose(x, folded.weights[name], rtol=0, atol=1e-6)  # addends are added in another order
    firings = Counter(ran.actor for ran in plan_of(folded).proved.proof.firings)
    assert [firings[f"{kind}{chunk}"] for kind, chunk in product("GR", range(4))] == [1] * 8


def test_parts_go_one_by_one() -> None:
    one, two = (trained("bfpp", **PIECES, overlap=Folding(once=True, parts=n)) for n in (1, 2))
    same(one, two)
    assert counted(two) == {"all_gather": 8, "reduce_scatter": 8}
    assert Counter(ran.actor for ran in plan_of(two).proved.proof.firings)["R1"] == 2


def test_gradients_of_the_second_half_are_home_while_the_first_half_computes() -> None:
    """The last backward of the first chunk waits here until those of the last two are home."""
    made = trained("bfpp", ranks=2, overlap=True, steps=1)
    program, home = plan_of(made), {chunk: Event() for chunk in range(4)}
    begun, weights = program.bound.begun, program.proved.weights
    run = weights.work_of[weights.keys[0]].homes  # type: ignore[attr-defined]

    def gone(chunk: int, before: Any) -> Any:
        def going(*given: Any) -> Any:
            found = before(*given)
            home[chunk].set()
            return found

        return going

    for chunk, each in run.items():
        each.run = gone(chunk, each.run)

    def begins(entry: BoundTask, k: int, firing: Firing) -> Any:
        if (entry.name, k) == (Name("B", 0), len(program.proved.kinds) - 1):
            assert home[2].wait(20)
            assert home[3].wait(20)
            assert not home[0].is_set()
        return begun(entry, k, firing)

    program.bound.begun = begins  # type: ignore[method-assign]
    made.step(torch.zeros(16, 8), torch.ones(16, 8))
    assert home[0].is_set()


def test_what_several_stages_share_goes_home_behind_all() -> None:
    usual, folded = (trained("1f1b", tied=True, overlap=how) for how in (False, True))
    same(usual, folded)
    assert "R1" in {actor.name for actor in plan_of(folded).proved.network.actors}


def test_micro_batches_of_two_sizes() -> None:
    how: dict[str, Any] = {"rows": 14, "ranks": 2, "micro_batches": 4}
    plain, folded = trained("1f1b", **how), trained("1f1b", **how, overlap=Folding(parts=2))
    # Chunks bring the gradients of each size home by themselves, and a plain step those of both sizes together.
    assert plain.losses == pytest.approx(folded.losses, rel=1e-5)
    for mine, other in ((plain.weights, folded.weights), (plain.states, folded.states)):
        assert mine.keys() == other.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=1e-4, atol=1e-6)
