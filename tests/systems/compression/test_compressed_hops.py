"""Hops of pipelines in eight or four bits: activations one way, their gradients the other."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.ranks import Ranks
from tests.systems.compression.runs import ROWS, batch, loss_fn, trained

PIPE = flow.placement("cpu:[0-3] as (pipe=2, data=2)")


def piped(encoder: flow.encoders.Encoder | None, rows: int = 32, **how: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    flow.nn.place(model[:2], PIPE.at(pipe=0))
    flow.nn.place(model[2:], PIPE.at(pipe=1))
    if encoder is not None:
        flow.nn.compress(model, {"2": encoder}, kind="hops")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how = how or {"micro_batches": 4, "schedule": "1f1b"}
    return flow.compile(model, loss_fn, optimizer, inputs=ROWS, **how)


def hopped(step: Any) -> int:
    with flow.record() as moves:
        step(*batch(0))
    return sum(move.boxing.total for move in moves if move.op == "hop")


@pytest.mark.parametrize(("encoder", "each"), [("int8(block=32)", 8 * 32 + 8 * 4), ("int4()", 8 * 16 + 8 * 4)])
def test_a_hop_takes_a_byte_or_half_a_byte_an_element_and_a_scale_a_block(encoder: str, each: int) -> None:
    """Of four micro-batches of 8 rows, activations and their gradients."""
    made = flow.encoders.int8(block=32) if "int8" in encoder else flow.encoders.int4()
    assert hopped(piped(None)) == 4 * 2 * 8 * 32 * 4
    assert hopped(piped(made)) == 4 * 2 * each


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_account_counts_what_hops_as_bytes(schedule: str) -> None:
    plain, coded = (
        piped(each, micro_batches=4, schedule=schedule).plan_for(*batch(0)).explain().memory.ranks
        for each in (None, flow.encoders.int8(block=32))
    )
    assert coded.keys() == plain.keys()
    assert all(coded[rank].parameters == plain[rank].parameters for rank in plain)
    # A quarter of what hops is under way; what is decoded is kept for the backward, as what comes plainly is.
    assert all(plain[rank].activations / 2 < coded[rank].activations < plain[rank].activations for rank in plain)


def test_a_step_of_micro_batches_computes_what_rounded_activations_and_gradients_give() -> None:
    """The same by hand: rounded between the stages, forward and backward, in the blocks of each rank's rows."""
    encoder = flow.encoders.int8(block=32)
    step = piped(encoder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(3):
        x, y = batch(at)
        loss = (model[2:](Rounded.apply(model[:2](x), encoder)) - y).square().mean()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step(x, y).item() == pytest.approx(loss.item(), rel=1e-4)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, encoder: flow.encoders.Encoder) -> Tensor:
        ctx.encoder = encoder
        return encoder.decode(encoder.encode(x), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.encoder.decode(ctx.encoder.encode(grads[0]), grads[0]), None


@pytest.mark.sweep
def test_the_gap_in_loss_is_small() -> None:
    plain, eight, four = (trained(piped(e), 120) for e in (None, flow.encoders.int8(), flow.encoders.int4()))
    ends = [sum(losses[-20:]) for losses in (plain, eight, four)]
    assert abs(ends[1] / ends[0] - 1) < 0.02
    assert abs(ends[2] / ends[0] - 1) < 0.05


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "2bw"])
def test_other_schedules_and_straight_steps_hop_encoded_too(schedule: str) -> None:
    encoder = flow.encoders.int8(block=32)
    step = piped(encoder, micro_batches=4, schedule=schedule)
    assert hopped(step) == 4 * 2 * (8 * 32 + 8 * 4)
    straight = piped(encoder, placement=None)
    if schedule != "2bw":  # which updates weights meanwhile
        first = batch(1)
        step(*batch(0))
        straight(*batch(0))
        straight(*batch(0))
        assert step(*first).item() == pytest.approx(straight(*first).item(), rel=1e-4)


def test_a_hop_between_layers_that_run_as_one_stage_is_encoded_as_in_a_straight_step() -> None:
    """The first and the last layer share no rank, and both share one with the layer between."""

    def moves(**how: Any) -> tuple[list[tuple[str, int]], float]:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for layer, ranks in zip(model, ([0, 1], [1, 2], [2, 3]), strict=True):
            flow.nn.place(layer, flow.placement("cpu", ranks))
        flow.nn.compress(model, {"2": flow.encoders.int8()}, kind="hops")

        def loss(model: Any, x: Tensor) -> Tensor:
            shown = model[0](x)
            found: Tensor = (model[2](shown) + model[1](shown).sum()).square().mean()
            return found

        step = flow.compile(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), **how)
        with flow.record() as made:
            value = step(torch.ones(4, 8)).item()
        return [(str(move.op), move.boxing.total) for move in made if "code" in str(move.op)], value

    straight, by_actors = moves(), moves(schedule="1f1b")
    assert (len(straight[0]), straight) == (2, by_actors)


def on_a_rank() -> list[float]:
    return trained(piped(flow.encoders.int4()), 3)


def test_processes_hop_as_one_that_plays_all_ranks_does(ranks4: Ranks) -> None:
    alone = on_a_rank()
    assert all(each == alone for each in ranks4(on_a_rank))


def test_a_hop_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(flow.SbpError, match="encodes sums over ranks"):
        piped(flow.encoders.low_rank())(*batch(0))
    with pytest.raises(flow.SbpError, match=r"would encode a sum once more.*\n  leave out twice=True"):
        piped(flow.encoders.int8(twice=True))(*batch(0))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    flow.nn.place(model[0], flow.placement("cpu:[0-1] as (data=2)"))
    flow.nn.place(model[1], flow.placement("cpu:[2-2] as (data=1)"))
    flow.nn.compress(model, {"1": flow.encoders.int8()}, kind="hops")
    step = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(flow.SbpError, match="whose shapes differ"):
        step(*batch(0))
    flow.nn.compress(model, {"1": None, "0": flow.encoders.int8()}, kind="hops")
    with pytest.raises(flow.SbpError, match="nothing comes from other ranks"):
        flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))(*batch(0))
