"""Batches: how arguments are cut, what a piece counts for, and the micro-batches of one update as a batch."""

import pytest
import torch

from sbpflow.nn.graph.microbatch.batch import Batch, weight_of
from sbpflow.placement.errors import SbpError
from sbpflow.sbp.state import State


@pytest.mark.parametrize(("samples", "sizes"), [(8, (2, 2, 2, 2)), (9, (3, 2, 2, 2)), (4, (1, 1, 1, 1))])
def test_early_micro_batches_take_the_remainder(samples: int, sizes: tuple[int, ...]) -> None:
    batch = Batch.of([torch.arange(samples)], {"mask": torch.ones(6, samples), "x": torch.ones(samples, 2)}, 4, "step")
    assert tuple(piece.sizes[0] for piece in batch.pieces) == sizes
    assert batch.inputs == {"0": ((0,),), "mask": ((), ()), "x": ((0,), ())}
    pieces = batch.cut({"0": torch.arange(samples), "mask": torch.ones(6, samples)})
    assert torch.equal(torch.cat([piece["0"] for piece in pieces]), torch.arange(samples))
    assert all(piece["mask"].shape == (6, samples) for piece in pieces)


def test_a_loss_counts_as_much_as_it_has_samples() -> None:
    assert [weight_of(state, (3 / 8,), "loss") for state in (State((), (0,)), State(()))] == [1, 3 / 8]
    assert weight_of(State((), (1,)), (3 / 8, 1 / 4), "loss") == 3 / 8


@pytest.mark.parametrize(("state", "word"), [(State((), (0,), "max"), r'P\("max"\)'), (State(((0,),)), r"S\(0\)")])
def test_a_maximum_is_no_loss(state: State, word: str) -> None:
    with pytest.raises(SbpError, match=f"no sum or mean over samples: along time it is {word}\n"):
        weight_of(state, (0.5,), "loss")


def test_the_micro_batches_of_an_update_are_a_batch() -> None:
    batch = Batch.of([torch.arange(9)], {}, 4, "step")
    one, two = batch.update([0, 1]), batch.update([2, 3])
    assert (one.sizes, one.runs.lengths, batch.rows([0, 1]).starts) == ((5,), ((3, 2),), (0,))
    assert (two.sizes, [piece.starts for piece in two.pieces], batch.rows([2, 3]).starts) == ((4,), [(0,), (2,)], (5,))
    assert [batch.update([0, 1]).shares(piece) for piece in one.pieces] == [(0.6,), (0.4,)]
    assert batch.update(range(4)) is batch
