"""Of a DataLoader dataset, batch size, order, collate_fn, workers are kept; what ranks cannot share is refused."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, WeightedRandomSampler

from sbpflow.nn.data.sources import batches_of, source_of
from sbpflow.placement.errors import SbpError

from .sets import Numbers, Stream


class Own(BatchSampler):
    """Batches of one's own."""


def of(given: Any, **more: Any) -> Any:
    said: dict[str, Any] = {"batch_size": None, "shuffle": None, "drop_last": None, "collate": None}
    return source_of(given, **{**said, **more})


def test_a_loader_says_how_its_dataset_is_read() -> None:
    made = of(DataLoader(Numbers(10), 4, shuffle=True, drop_last=True, collate_fn=list))
    assert (made.batch_size, made.shuffle, made.drop_last, made.sampler) == (4, True, True, None)
    assert made.collate is list
    assert not made.plain
    assert of(DataLoader(Numbers(10), 4)).plain


def test_a_sampler_of_ones_own_says_the_order_by_seed_and_epoch() -> None:
    weights = torch.tensor([0.0, 1.0, 1.0, 1.0])
    for generator in (None, torch.Generator().manual_seed(5)):
        sampler = WeightedRandomSampler(weights.tolist(), 20, generator=generator)
        made = of(DataLoader(Numbers(4), 2, sampler=sampler))
        before = torch.get_rng_state(), torch.empty(0) if generator is None else generator.get_state()
        orders = [made.order(seed, epoch)(0, 20).tolist() for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
        assert orders[0] == orders[1] != orders[2] != orders[3]
        assert set(orders[0]) == {1, 2, 3}
        assert made.size == 20
        assert torch.equal(before[0], torch.get_rng_state())
        assert generator is None or torch.equal(before[1], generator.get_state())


@pytest.mark.parametrize(
    ("given", "more", "said"),
    [
        (
            DataLoader(Numbers(8), 2, sampler=DistributedSampler(Numbers(8), 2, 0)),
            {},
            r"its share of a share\n  leave sampler= out",
        ),
        (DataLoader(Numbers(8), None), {}, "batch_size=None"),
        (
            DataLoader(Numbers(8), batch_sampler=Own(SequentialSampler(range(8)), 2, True)),
            {},
            "with Own: batches have to be cut",
        ),
        (DataLoader(Numbers(8), 2), {"batch_size": 4}, "beside a DataLoader, which says it too"),
        (Numbers(8), {}, r"batch_size=None\)\n  say how many"),
        (Stream(8), {"batch_size": 2, "shuffle": True}, "shuffle them where they are made"),
        (3, {"batch_size": 2}, "int, which is no dataset"),
    ],
)
def test_what_ranks_cannot_share_is_refused(given: Any, more: Any, said: str) -> None:
    with pytest.raises(SbpError, match=said):
        of(given, **more)


def test_the_last_batch_is_dropped_where_that_is_said() -> None:
    assert list(batches_of(10, 4, 0, True)) == [(0, 4), (4, 8)]
    assert list(batches_of(10, 4, 0, False)) == [(0, 4), (4, 8), (8, 10)]
    assert list(batches_of(10, 4, 10, False)) == []
