"""A rank that works longer than the others has a name, though all of them end a step together."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.graph.optimizer.adopted_model import AdoptedModel
from sbpflow.nn.graph.run.rank_times import RankTimes
from tests.ranks import Fresh, Ranks


def test_slow_is_more_than_half_as_long_again_as_the_median() -> None:
    times = RankTimes({0: 1.0, 1: 1.4, 2: 1.6, 3: 0.9})
    assert (times.median, times.slowest, times.slow) == (1.0, 2, (2,))
    assert RankTimes({0: 1.0, 1: 1.6}).slow == (1,)
    assert str(RankTimes({0: 0.01, 1: 0.012})) == "no rank is slow: 10.0 to 12.0 ms of work a step"
    assert str(RankTimes({0: 1.0, 1: 1.0, 2: 2.0, 3: 3.0})).startswith("ranks 2, 3 are slow, rank 3 most: 3000.0 ms")


def test_a_host_of_which_all_ranks_are_slow_is_named() -> None:
    hosts, told = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}, "3000.0 ms of work a step, 3.0 times the median"
    found = RankTimes({0: 1.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 1.0}, hosts)
    assert str(found) == f"ranks 2, 3 are slow, rank 3 most, all of host b: {told}"
    assert RankTimes({0: 1.0, 1: 1.1, 2: 1.0, 3: 3.0, 4: 1.0}, hosts).slow_hosts == ()
    assert str(RankTimes({0: 1.0, 1: 1.0, 4: 3.0}, hosts)) == f"rank 4 is slow, all of host c: {told}"


def test_one_process_has_nobody_to_compare_with() -> None:
    net = nn.Linear(4, 4)
    step = flow.compile(net, lambda net, x: net(x).sum(), placement=flow.placement("cpu", [0, 1]))
    step(torch.ones(4, 4))
    assert step.rank_times() is None


def slowed(stages: bool) -> Any:
    """The slow rank as each rank is told, where rank 1 holds its steps up."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options: dict[str, Any] = {"placement": flow.placement("cpu", [0, 1])}
    if stages:
        flow.nn.place(net[0], flow.placement("cpu", [0]))
        flow.nn.place(net[1], flow.placement("cpu", [1]))
        options = {"micro_batches": 2}

    def loss_fn(net: nn.Module, x: Tensor) -> Any:
        return net(x).square().mean()

    step = flow.compile(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), **options)
    shards = AdoptedModel.shards

    def held_up(self: AdoptedModel) -> Any:
        if flow.init().rank == 1:
            threading.Event().wait(0.3)
        return shards(self)

    AdoptedModel.shards = held_up  # type: ignore[method-assign]
    try:
        for _ in range(3):
            step(torch.ones(4, 4))
    finally:
        AdoptedModel.shards = shards  # type: ignore[method-assign]
    found = step.rank_times()
    return found and (found.slow, found.slow_hosts)


@pytest.mark.parametrize("stages", [False, True])
def test_a_slow_rank_is_named_on_all(stages: bool, ranks4: Ranks) -> None:
    slow = (1,), ()
    assert ranks4(slowed, stages) == [slow, slow, None, None]


def test_a_slow_host_is_named_by_its_name(fresh: Fresh) -> None:
    ended = fresh(2, slowed, False, environment=lambda rank: {"SBPFLOW_HOST": "xy"[rank]})
    assert [end.answer and end.answer.value for end in ended] == [((1,), ("y",))] * 2
