"""Fold3D: the data-parallel exchange of one half of the layers is folded under the work of the other half."""

import pytest

from sbpflow.actors import Costs, Folding, Simulation, network_of, published, simulate

P, M = 4, 8


def ran(schedule: str, costs: Costs, folding: Folding | None, v: int) -> Simulation:
    one = published(schedule)
    return simulate(network_of(one, one.shape(P, M, v=v), costs, folding))


def exposed(schedule: str, costs: Costs, folding: Folding, v: int) -> float:
    """The units by which a step is longer than one that exchanges nothing."""
    return ran(schedule, costs, folding, v).end - ran(schedule, Costs(), None, v).end


@pytest.mark.parametrize("schedule", ["bfpp", "interleaved"])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("reduce", [0.5, 1, 2, 4])
def test_all_but_one_of_the_chunks_is_folded(schedule: str, v: int, reduce: float) -> None:
    """Every chunk's exchange is exposed on the queue of its device; beside it, that of the chunk that ends last."""
    if schedule == "interleaved" and v == 1:
        schedule = "1f1b"
    costs = Costs(reduce=reduce)
    assert exposed(schedule, costs, Folding(beside=False), v) == v * reduce
    assert exposed(schedule, costs, Folding(), v) == reduce


def test_weights_that_are_gathered_are_folded_alike() -> None:
    costs = Costs(reduce=2, gather=2)
    assert exposed("bfpp", costs, Folding(beside=False), 2) == 8
    assert exposed("bfpp", costs, Folding(), 2) == 4  # the first chunk's gather, and its way home


def test_in_parts_others_go_between() -> None:
    """The upper chunk's exchange is long, and the lower one's optimizer waits for its own: its parts need not wait for
    the whole of the other."""
    long = [Costs(reduce=60 if chunk >= P else 1, update=1) for chunk in range(2 * P)]
    ends = {}
    for parts in (1, 60):
        one = published("bfpp")
        run = simulate(network_of(one, one.shape(P, M, v=2), long, Folding(parts=parts)))
        ends[parts] = next(each.end for each in run.firings if each.actor == "U0")
    assert ends[60] < ends[1]


def test_queues_of_links_run_beside_those_of_devices() -> None:
    run = ran("bfpp", Costs(reduce=2), Folding(), 2)
    (upper,) = [each for each in run.of("link 0") if each.actor == f"R{P}"]
    beside = [each for each in run.of("device 0") if each.start < upper.end and each.end > upper.start]
    assert {each.actor for each in beside} == {"B0"}
