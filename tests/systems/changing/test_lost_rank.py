"""A rank is lost and comes back: 4 ranks, 3, and 4 again, and training goes on as if nothing had been."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.systems.changing.layered import Layered, batch, loss_fn

STAGES = "grid cpu:[0-3] as (pipe=2, data=2)\npipe layers over pipe by 1f1b, 2 micro-batches\n"
THREE = "grid cpu:[0-2] as (data=3)\n"
PIECES = "grid cpu:[0-3] as (data=4)\n**: data=S(0)\n"


def made() -> tuple[Layered, optim.Optimizer]:
    torch.manual_seed(0)
    model = Layered(4, lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())).double()
    return model, optim.AdamW(model.parameters(), lr=1e-2)


def alone(steps: int) -> list[float]:
    """The losses of one device."""
    model, optimizer = made()
    found = []
    for at in range(steps):
        loss = loss_fn(model, *batch(at))
        found.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return found


def lose(model: nn.Module, optimizer: optim.Optimizer, rank: int) -> None:
    """The memory of a rank is gone: nothing there is a number."""
    held: list[Any] = [*model.state_dict().values()]
    held += [part for state in optimizer.state.values() for part in state.values() if isinstance(part, Tensor)]
    for value in held:
        if isinstance(value, flow.GlobalTensor) and rank in value.placement:
            value._shards[value.placement.flat.index(rank)].detach().fill_(torch.nan)


@pytest.mark.parametrize("lost", range(4))
def test_copies_have_what_the_lost_rank_had(lost: int) -> None:
    left = [rank for rank in range(4) if rank != lost]
    model, optimizer = made()
    step = flow.compile(model, loss_fn, optimizer, plan=STAGES)
    losses = [step(*batch(at)).item() for at in range(2)]
    lose(model, optimizer, lost)
    step.move(plan=f"grid cpu:{left} as (data=3)\n", lost=[lost])
    losses += [step(*batch(at)).item() for at in range(2, 4)]
    step.move(plan=STAGES)  # it is back, and has nothing
    losses += [step(*batch(at)).item() for at in range(4, 6)]
    assert losses == pytest.approx(alone(6), abs=1e-12)
    assert {rank for value in model.parameters() for rank in value.placement.flat} == {0, 1, 2, 3}  # type: ignore[attr-defined]


def test_only_what_the_rank_that_is_back_needs_is_sent() -> None:
    model, optimizer = made()
    step = flow.compile(model, loss_fn, optimizer, plan=THREE)
    step(*batch(0))
    step.move(plan="grid cpu:[0-3] as (data=4)")
    with flow.record() as moves:
        step(*batch(1))
    sent = sum(move.boxing.total for move in moves if move.op.startswith("moved"))
    assert sent == 3 * sum(value.numel() * 8 for value in model.parameters())  # a weight and its two moments, once
    assert all(move.boxing.received(rank) == 0 for move in moves if move.op.startswith("moved") for rank in range(3))


def test_without_copies_a_checkpoint_has_it(tmp_path: Path) -> None:
    model, optimizer = made()
    step = flow.compile(model, loss_fn, optimizer, plan=PIECES)
    losses = [step(*batch(at)).item() for at in range(2)]
    flow.save(tmp_path / "step-2", model, optimizer=optimizer, plan=step, step=2)
    step(*batch(2))
    lose(model, optimizer, 3)
    step.move(plan=THREE, lost=[3])
    with pytest.raises(SbpError, match=r"is lost: no rank that is left(.|\n)*flow.load\(flow.newest"):
        step(*batch(3))
    model, optimizer = made()
    found = flow.newest(tmp_path)
    assert found
    flow.load(found.path, model, optimizer=optimizer)
    step = flow.compile(model, loss_fn, optimizer, plan=THREE)
    losses += [step(*batch(at)).item() for at in range(found.step, 4)]
    step.move(plan=PIECES)
    losses += [step(*batch(at)).item() for at in range(4, 6)]
    assert losses == pytest.approx(alone(6), abs=1e-12)


def test_no_rank_is_left() -> None:
    model, optimizer = made()
    step = flow.compile(model, loss_fn, optimizer, plan=THREE)
    step(*batch(0))
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    step.move(plan="grid cpu:[4-5] as (data=2)", lost=range(3))
    with pytest.raises(SbpError, match="rank 0, rank 1, rank 2"):
        step(*batch(1))
    assert all(torch.equal(before[name], value.full_tensor()) for name, value in model.state_dict().items())
    step.move(plan=PIECES)  # what is lost stays so until a move has come to its end
    with pytest.raises(flow.SbpflowError, match="without rank 0"):
        step(*batch(1))
