"""Pipe-Torch: a pipeline over a network whose links are unlike is cut and placed by what it costs."""

import random

import pytest

import sbpflow as flow
from sbpflow.nn import LayerLoad, split_stages
from sbpflow.placement.hardware import RankLink

from .planned import every_boxing, hosts, step


@pytest.mark.parametrize(("seed", "schedule"), [(0, "gpipe"), (1, "1f1b"), (2, "zb_h1")])
def test_six_layers_over_three_unequal_links_are_placed_as_the_best_of_all_plans(seed: int, schedule: str) -> None:
    """Every cut of six layers into three stages, on the three devices in every order."""
    draw = random.Random(seed)
    layers = [LayerLoad(draw.uniform(1, 4), draw.uniform(2, 8), 0, draw.choice([2, 8, 32])) for _ in range(6)]
    links = [RankLink((a, b), 0.1 * a, draw.choice([1.0, 4.0, 16.0])) for a, b in ((0, 1), (1, 2), (0, 2))]
    with flow.use_cluster(hosts(1, 3, inside=4.0, between=4.0, links=links)):
        found = split_stages(layers, flow.placement("cuda", range(3)), 4, schedule=schedule, stages=3)
        plans = list(every_boxing(6, 3, [3]))
        assert len(plans) == 60
        best = min(plans, key=lambda plan: step(layers, plan, 4, schedule))
        assert found.value == pytest.approx(step(layers, best, 4, schedule))
        ranks = tuple(tuple(place.flat) for place in found.placements)
        assert step(layers, (found.ends, ranks), 4, schedule) == pytest.approx(found.value)
    assert found.exact


def test_the_slow_link_is_left_out() -> None:
    """Three equal stages and one slow link: the pipeline goes over the two others."""
    layers = [LayerLoad(1.0, 2.0, 0, 8)] * 6
    links = [RankLink((0, 1), 0.0, 0.5), RankLink((1, 2), 0.0, 8.0), RankLink((0, 2), 0.0, 8.0)]
    with flow.use_cluster(hosts(1, 3, inside=8.0, between=8.0, links=links)):
        found = split_stages(layers, flow.placement("cuda", range(3)), 6, stages=3)
    assert found.ends == (2, 4, 6)
    assert found.placements[1].flat == (2,)
