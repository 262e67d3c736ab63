"""The order of an epoch has every sample once, differs from epoch to epoch, and is as good as any."""

import numpy as np
import pytest

from sbpflow.nn.data.order import mixed, shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 255, 1000])
def test_every_sample_comes_once(size: int) -> None:
    for epoch in range(5):
        assert sorted(shuffled(np.arange(size), size, 3, epoch).tolist()) == list(range(size))


def test_a_place_is_told_without_the_others_also_of_very_large_datasets() -> None:
    whole = shuffled(np.arange(1000), 1000, 1, 2)
    assert shuffled(np.array([7, 993]), 1000, 1, 2).tolist() == whole[[7, 993]].tolist()
    far = shuffled(np.arange(1000), 10**15, 0, 0)
    assert len(set(far.tolist())) == 1000
    assert 0 <= far.min() < far.max() < 10**15


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {tuple(shuffled(np.arange(20), 20, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert mixed(-1, 2) != mixed(1, 2)


def test_each_sample_comes_at_each_place_equally_often() -> None:
    found = np.zeros((7, 7))
    for seed in range(800):
        found[np.arange(7), shuffled(np.arange(7), 7, seed, 0)] += 1
    expected = 800 / 7
    assert (((found - expected) ** 2) / expected).sum() < 70  # chi-squared with 36 degrees of freedom, 99.95 %


def test_the_order_is_the_same_in_every_version() -> None:
    assert shuffled(np.arange(10), 10, 0, 0).tolist() == [3, 7, 2, 5, 0, 1, 9, 4, 8, 6]
