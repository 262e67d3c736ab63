"""Sparse gradients: the largest hundredth of a gradient is sent with its indices, the rest waits (Aji and Heafield)."""

from math import ceil

import pytest
import torch

import sbpflow as flow
from sbpflow import B, P, S
from tests.systems.compression.runs import DATA, batch, encoded_sums, exact_sum, net, sent_bytes, step_of, trained


def test_sent_and_kept_are_the_total_to_the_bit() -> None:
    """In integers, which float32 adds exactly; and each element of an addend is either sent or kept."""
    rounds = [[torch.randint(-99, 99, (40, 25)).float() for _ in DATA] for _ in range(5)]
    sent, kept = encoded_sums(rounds, flow.encoders.topk(fraction=0.05))
    assert torch.equal(sent + kept.sum(0), exact_sum(rounds))
    assert all((error == 0).sum() >= ceil(0.05 * 1000) for error in kept)


def test_the_bytes_are_those_of_twice_k_numbers() -> None:
    step, ranks = step_of(net(128), {"*": flow.encoders.topk(fraction=0.01)}), DATA.size
    step(*batch(0))
    with flow.record() as moves:
        sent_bytes(step)
    many = sum(ceil(0.01 * weight.numel()) for weight in net(128).parameters())
    assert sum(move.boxing.total for move in moves if move.op == "encoded") == ranks * (ranks - 1) * many * 2 * 4


@pytest.mark.sweep
def test_what_waits_comes_in_the_end_and_what_is_dropped_does_not() -> None:
    ends = []
    for encoder in (None, flow.encoders.topk(fraction=0.02), flow.encoders.topk(fraction=0.02, feedback=False)):
        losses = trained(step_of(net(), None if encoder is None else {"*": encoder}), 200)
        ends.append(sum(losses[-40:]) / 40)
    assert ends[1] < 1.35 * ends[0]
    assert ends[2] > 1.5 * ends[1]


def test_bf16_gradients_are_sent_and_kept_as_they_are() -> None:
    errors = flow.encoders.KeptErrors()
    addends = [torch.randn(64).bfloat16() for _ in DATA]
    x = flow.from_local([a.clone() for a in addends], placement=DATA, sbp=P)
    come = x.to_global(sbp=B, encoder=flow.encoders.topk(fraction=0.25), kept=errors["w"])
    rows = errors.rows_of("w")
    assert rows is not None
    sent = [a - each["error"] for a, each in zip(addends, rows.ranks, strict=True)]
    assert torch.equal(torch.stack(sent).float().sum(0).bfloat16(), come.full_tensor())


def test_gradients_that_rest_in_pieces_are_those_pieces_of_the_sum() -> None:
    """ZeRO-2 and data parallelism: the same sums, of which each rank keeps its piece; all are sent, so that it does not
    matter that the largest of each piece are others than the largest of all."""
    losses = []
    for home in (S(0), B):
        model = net()
        flow.nn.shard(model, {"*": B})  # else a small weight may be cut, and its gradient no sum
        flow.nn.shard(model, {"*": {"data": home}}, kind=("grads", "states"))
        losses.append(trained(step_of(model, {"2.*": flow.encoders.topk(fraction=1.0)}), 4))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
