"""PipeDream: no flush; stage s keeps p-s versions of its weights, and each backward has that of its forward."""

import copy

import pytest
import torch
from torch import nn

from sbpflow.actors import network_of, published, simulate

from .stages import cut, layers, numbers, squares, staged, whole


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_versions_and_delays_are_those_of_the_paper(p: int) -> None:
    m, schedule = 5 * p, published("pipedream")
    run = simulate(network_of(schedule, schedule.shape(p, m)))
    assert [run.peak[f"w.{s}"] for s in range(p)] == [p - s for s in range(p)]
    found = schedule.delays(p, m)
    assert found.chunks == {s: p - 1 - s for s in range(p)}
    assert found.forward == found.backward  # one version for both


def test_a_backward_has_the_weights_of_its_forward_to_the_bit() -> None:
    p, m, model = 4, 12, layers(4)
    history = [[copy.deepcopy(layer)] for layer in model]
    for k, (x, y) in enumerate(cut(*numbers(2 * m), m)):
        seen = nn.Sequential(*(history[s][max(0, k - (p - 1 - s))] for s in range(p)))
        grads = iter(torch.autograd.grad(squares(seen, x, y), [*seen.parameters()]))
        for each in history:
            each.append(copy.deepcopy(each[-1]))
            for w in each[-1].parameters():
                w.data.sub_(next(grads), alpha=0.1)
    staged(model, "pipedream", m)(*numbers(2 * m))
    expected = [w for each in history for w in each[-1].parameters()]
    assert all(map(torch.equal, whole(model), expected))
