"""1-bit SGD: signs of gradients with error feedback, by rows with two levels each, summed in shares."""

from math import ceil

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from tests.ranks import Ranks
from tests.systems.compression.runs import (
    DATA,
    batch,
    encoded_sums,
    exact_sum,
    net,
    sent_bytes,
    step_of,
    trained,
    weights,
)

SIGNS = [
    flow.encoders.sign(),
    flow.encoders.sign(rows=True),
    flow.encoders.sign(twice=True),
    flow.encoders.sign(rows=True, twice=True),
]


@pytest.mark.parametrize("encoder", SIGNS, ids=str)
def test_sums_that_were_sent_and_errors_are_the_sums_of_gradients(encoder: flow.encoders.Encoder) -> None:
    rounds = [[torch.randn(33, 8) for _ in DATA] for _ in range(6)]
    sent, kept = encoded_sums(rounds, encoder)
    assert (sent + kept.sum(0) - exact_sum(rounds)).abs().max() < 1e-4  # of sums rounded to float32


def test_a_gradient_takes_a_thirty_second_of_its_bytes() -> None:
    """In shares, whatever the number of ranks; a level of four bytes for each tensor and share is all there is more."""
    shapes, ranks = [p.numel() for p in net(128).parameters()], DATA.size
    plain = 2 * (ranks - 1) * 4 * sum(shapes)  # the bytes of an all_reduce in float32
    step = step_of(net(128), {"*": flow.encoders.sign(twice=True)})
    step(*batch(0))
    with flow.record() as moves:
        counted = sent_bytes(step)
    coded = sum(move.boxing.total for move in moves if move.op == "encoded")
    others = sum(move.boxing.total for move in moves if move.op != "encoded")
    assert counted == coded + others
    assert coded == 2 * ranks * (ranks - 1) * sum(ceil(ceil(n / ranks) / 8) + 4 for n in shapes)
    assert plain / coded > 32 / 1.12
    assert [move.route for move in moves if move.op == "encoded"] == ["all_to_all", "all_gather"]
    told = [row for row in step.explain().moves if row.direction == "backward"]
    assert sum(row.total * row.count for row in told) == coded


def test_all_ranks_end_with_the_same_weights() -> None:
    model = net()
    trained(step_of(model, {"*": flow.encoders.sign()}), 5)
    for weight in weights(model).values():
        first, *others = weight.to_local()
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.sweep
def test_it_converges_as_float32_does() -> None:
    plain, coded = (
        trained(step_of(net(), None if encoder is None else {"*": encoder}), 120)
        for encoder in (None, flow.encoders.sign(rows=True, twice=True))
    )
    assert plain[0] == pytest.approx(coded[0])
    assert sum(plain[-20:]) < 0.5 * sum(plain[:20])
    assert abs(sum(coded[-20:]) / sum(plain[-20:]) - 1) < 0.05  # 0.01 as measured


def test_the_same_run_gives_the_same_bits() -> None:
    once, again = (trained(step_of(net(), {"*": flow.encoders.sign()}), 4) for _ in range(2))
    assert once == again


def on_a_rank() -> tuple[list[float], list[Tensor], int]:
    model = net()
    step = step_of(model, {"*": flow.encoders.sign(rows=True)})
    losses = trained(step, 4)
    return losses, [p.to_local().detach().clone() for p in weights(model).values()], sent_bytes(step, 4)


@pytest.mark.sweep
def test_processes_compute_what_one_that_plays_all_ranks_does(ranks4: Ranks) -> None:
    found = ranks4(on_a_rank)
    model = net()
    step = step_of(model, {"*": flow.encoders.sign(rows=True)})
    losses, sent = trained(step, 4), sent_bytes(step, 4)
    for theirs, held, _ in found:
        assert theirs == losses
        assert all(torch.equal(x, y) for x, y in zip(held, found[0][1], strict=True))
    assert sum(each for _, _, each in found) == sent
