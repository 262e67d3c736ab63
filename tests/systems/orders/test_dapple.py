"""DAPPLE: early backward, and stages that several devices share, planned by the latency of the whole step."""

import random

import pytest
from torch import nn

import sbpflow as flow
from sbpflow.actors import Costs, published
from sbpflow.nn import LayerLoad, split_stages
from sbpflow.placement.errors import PlacementError
from tests.nn.graph.pipes import mlp, trains

from .planned import every_boxing, hosts, step


def drawn(seed: int, many: int) -> list[LayerLoad]:
    draw = random.Random(seed)
    return [
        LayerLoad(draw.uniform(1, 4), draw.uniform(2, 8), 0, draw.choice([1, 4, 16]), draw.choice([1, 20, 80]))
        for _ in range(many)
    ]


@pytest.mark.parametrize(("seed", "count", "devices"), [(0, 1, 4), (1, 2, 2), (2, 4, 1)])
def test_the_plan_is_the_best_of_all_plans(seed: int, count: int, devices: int) -> None:
    """Four devices in one, two and four hosts: what is found takes as long as the best of all plans there are."""
    layers = drawn(seed, 4)
    with flow.use_cluster(hosts(count, devices, inside=40.0, between=4.0)):
        found = split_stages(layers, flow.placement("cuda", range(4)), 3)
        wanted = min(step(layers, plan, 3) for plan in every_boxing(4, 4, range(1, 5)))
        ranks = tuple(tuple(place.flat) for place in found.placements)
        assert found.value == pytest.approx(wanted)
        assert found.value == pytest.approx(step(layers, (found.ends, ranks), 3))
    assert found.exact
    assert sorted(rank for each in ranks for rank in each) == [0, 1, 2, 3]


def test_slow_links_make_stages_and_fast_ones_replicas() -> None:
    """Gradients that weigh much over slow links: hosts are stages. Over fast links all devices share the samples."""
    layers = [LayerLoad(1.0, 2.0, 0, 1, 40)] * 8
    for between, stages in ((2.0, 2), (1000.0, 1)):
        with flow.use_cluster(hosts(2, 4, inside=1000.0, between=between)):
            found = split_stages(layers, flow.placement("cuda", range(8)), 8)
        assert len(found.placements) == stages
        assert {place.size for place in found.placements} == {8 // stages}


@pytest.mark.sweep
def test_more_devices_than_are_tried_one_by_one_have_a_plan_near_the_bound() -> None:
    """16 devices and 8 layers: a plan that says that it may not be the best, and no worse than simple ones."""
    layers = drawn(3, 8)
    with flow.use_cluster(hosts(4, 4, inside=400.0, between=20.0)):
        everywhere = flow.placement("cuda", range(16))
        found = split_stages(layers, everywhere, 8)
        equal = []
        for n in (1, 2, 4, 8):
            ends = tuple(8 // n * (s + 1) for s in range(n))
            equal.append((ends, tuple(tuple(range(2 * end - 16 // n, 2 * end)) for end in ends)))
        assert found.value <= min(step(layers, plan, 8) for plan in equal)
    assert sum(layer.forward + layer.backward for layer in layers) / 2 <= found.value < 40 * 8


@pytest.mark.parametrize("hop", [0.0, 0.5])
def test_early_backward_holds_few_activations_and_pb_hides_hops(hop: float) -> None:
    """PA begins p-s micro-batches, PB 2(p-s)-1: with hops of c PA takes 2c(p-1)/p longer for each, and PB does not."""
    p, costs = 4, Costs(hop=hop)
    ends = {}
    for name in ("dapple", "eager_1f1b"):
        many = {m: published(name).show(p, m, costs=costs) for m in (20, 60)}
        ends[name] = (many[60].end - many[20].end) / 40
        assert max(many[60].slots) == (p if name == "dapple" else 2 * p - 1)
    assert ends == {"dapple": pytest.approx(3 + 2 * hop * (p - 1) / p), "eager_1f1b": pytest.approx(3)}


def test_a_plan_trains_as_one_device() -> None:
    """Three layers on two devices, the fourth, with heavy gradients, on one: the stages of the plan run."""
    layers = [LayerLoad(1, 2, 0, 1, 1)] * 3 + [LayerLoad(1, 2, 0, 1, 1000)]
    with flow.use_cluster(hosts(1, 3, inside=10.0, between=1.0)):
        found = split_stages(layers, flow.placement("cuda", range(3)), 4)
        assert [place.size for place in found.placements] == [2, 1]
        found = split_stages(layers, flow.placement("cpu", range(3)), 4)
    model = mlp().double()
    found.place(list(model))
    trains(model, micro_batches=4)


def test_what_cannot_be_split_is_refused() -> None:
    place, layer = flow.placement("cpu", range(2)), LayerLoad(1, 1)
    with pytest.raises(PlacementError, match="interleaved has several chunks"):
        split_stages([layer] * 4, place, 4, schedule="interleaved")
    with pytest.raises(PlacementError, match="0 layers"):
        split_stages([], place)
    with pytest.raises(PlacementError, match="stages=3"):
        split_stages([layer] * 4, place, stages=3)
    with pytest.raises(PlacementError, match="by='bubble'"):
        split_stages([layer] * 4, place, by="bubble")  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match=r"LayerLoad\(forward=-1\)"):
        LayerLoad(-1, 1)
    with pytest.raises(PlacementError, match="2 layers for a plan of 4"):
        split_stages([layer] * 4, place).place([nn.Identity(), nn.Identity()])
