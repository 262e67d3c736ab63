"""PipeDream-2BW: gradients of several micro-batches make an update, and two versions of the weights are enough."""

import copy

import pytest
import torch

from sbpflow.actors import network_of, published, simulate

from .stages import cut, layers, numbers, squares, staged, whole


@pytest.mark.parametrize("p", [2, 4, 7])
def test_there_are_two_versions_and_weights_are_one_update_late(p: int) -> None:
    schedule, m = published("2bw"), 6 * (p - 1)
    run = simulate(network_of(schedule, schedule.shape(p, m)))
    assert [run.peak[f"w.{s}"] for s in range(p)] == [2] * p
    found, late = schedule.delays(p, m), {0: p - 1, 1: 5 * (p - 1)}  # of the first update nobody is late
    assert found.forward == found.backward == dict.fromkeys(range(p), late)


def test_an_update_is_of_the_gradient_at_the_weights_before_to_the_bit() -> None:
    """w(t+1) = w(t) - lr g(w(t-1)), for the whole model at once."""
    every, m, lr, model = 3, 12, 0.1, layers(4)
    before, now = copy.deepcopy(model), copy.deepcopy(model)
    pieces = cut(*numbers(2 * m), m)
    for at in range(0, m, every):
        before.zero_grad()
        for x, y in pieces[at : at + every]:
            (squares(before, x, y) / every).backward()  # type: ignore[no-untyped-call]
        after = copy.deepcopy(now)
        for w, old in zip(after.parameters(), before.parameters(), strict=True):
            assert old.grad is not None
            w.data.sub_(old.grad, alpha=lr)
        before, now = now, after
    staged(model, "2bw", m, lr)(*numbers(2 * m))
    assert all(map(torch.equal, whole(model), [*now.parameters()]))
