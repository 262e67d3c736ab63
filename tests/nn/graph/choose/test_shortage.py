"""A pipelined step keeps to its limit of memory with all that its schedule has under way, or the stage is named."""

from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.boxing.graph.measures import Held
from sbpflow.nn.graph.choose.shortage import shortage
from sbpflow.nn.graph.run.footprint import less
from sbpflow.placement.errors import SbpError
from tests.nn.graph.choose.test_memory_limit import most
from tests.ranks import Ranks

from ..memory.test_liveness import Live
from ..pipes import ALONE4, mlp, numbers, square_loss, staged


def pipe(limit: float | None, schedule: str = "1f1b") -> Any:
    """Two stages of two ranks each."""
    torch.manual_seed(0)
    model: nn.Module = mlp(4, 64).double()
    grid = flow.placement("cpu", [[0, 1], [2, 3]], names=("pipe", "data"))
    for stage, layers in enumerate((model[:2], model[2:])):  # type: ignore[index]
        flow.nn.place(layers, grid.at(pipe=stage))
    adam = torch.optim.Adam(model.parameters())
    return flow.compile(model, square_loss, adam, schedule=schedule, micro_batches=8, memory=limit)


def batch() -> Any:
    return numbers(0, rows=512, width=64)


def test_a_pipelined_step_whose_micro_batches_outgrow_the_limit_is_chosen_again() -> None:
    free = most(pipe(None).plan_for(*batch()))
    step = pipe(0.95 * free).plan_for(*batch())
    assert step.planned.plan.pieces.room < 0.95 * free
    assert most(step) <= 0.95 * free


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_where_a_stage_does_not_fit_it_is_named_with_its_rank_and_what_takes_most(schedule: str) -> None:
    torch.manual_seed(0)
    model = staged(mlp(4, 64).double(), ALONE4, schedule)

    def make(limit: float | None) -> Any:
        sgd = torch.optim.SGD(model.parameters())
        return flow.compile(model, square_loss, sgd, schedule=schedule, micro_batches=8, memory=limit)

    need = most(make(None).plan_for(*batch()))
    with pytest.raises(SbpError, match=r"stage \d of 4 of Sequential, on cpu:.*, does not fit into") as refused:
        make(0.9 * need).plan_for(*batch())
    said = str(refused.value)
    assert f"micro-batches under way at once under {schedule}" in said
    assert "most of what its backward keeps: " in said
    assert ("schedule='1f1b'" in said) == (schedule == "gpipe")
    assert most(make(need).plan_for(*batch())) == need  # the memory= that the error ends in


def test_on_one_group_of_ranks_no_stage_is_named() -> None:
    model = mlp(4, 64).double()
    adam = torch.optim.Adam(model.parameters())
    step = flow.compile(
        model,
        square_loss,
        adam,
        placement=flow.placement("cpu", range(2)),
        micro_batches=8,
        schedule="gpipe",
        memory=6e5,
    )
    with pytest.raises(SbpError, match=r"^Sequential does not fit into 586 KiB a rank"):
        step.plan_for(*batch())


def seen(share: float) -> tuple[int, float]:
    """Bytes that this rank was seen to take, and the limit that the step was given."""
    limit = share * most(pipe(None).plan_for(*batch()))
    step = pipe(limit)
    for _ in range(2):
        step(*batch())
    (optimizer,) = step.planned.optimizers
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, flow.GlobalTensor)]
    stays = [x.untyped_storage() for of in (*states, *step.planned.model.held.values()) for x in of._shards]
    given, live = batch(), Live()
    live.known.update(x._cdata for x in (*stays, *(x.untyped_storage() for x in given)))
    with live:
        step(*given)
    return live.peak + sum({x._cdata: x.nbytes() for x in stays}.values()), limit


@pytest.mark.sweep
def test_a_limit_is_kept_by_the_ranks_of_a_pipeline(ranks4: Ranks) -> None:
    for taken, limit in ranks4(seen, 0.95):
        assert taken <= 1.1 * limit  # which rank is quicker decides what is alive at once


def test_the_room_of_one_micro_batch_leaves_as_much_for_each() -> None:
    held = Held(parameters=10, gradients=10, states=20, activations=400, total=440)  # eight that keep 50 each
    assert less(held, Held(10, 10, 20, 50, 90), 240) == 65
    assert less(held, Held(10, 10, 20, 50, 90), 30) == 38.75  # not even what stays


def test_more_micro_batches_are_advised_only_where_they_help() -> None:
    held = Held(parameters=10, gradients=10, states=20, activations=400, total=440)
    assert "micro_batches=8)" in shortage("no", 240, held, "", 4)
    assert "micro_batches" not in shortage("no", 240, held, "", 0)
    assert "in pieces already" in shortage("no", 30, held, "")
