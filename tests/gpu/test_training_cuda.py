"""Training over NCCL comes to what one card does, in stages too; ranks that die or go astray are told of."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.gpu.shared_card import answers, nccl_hosts
from tests.ranks import Fresh


def model(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, width)).cuda()


def batch(step: int) -> Tensor:
    return torch.sin(torch.arange(64.0, device="cuda") * (step + 1)).reshape(8, 8)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x).square().mean()
    return made


def trained(plan: str) -> list[float]:
    flow.init(timeout=40)
    net = model()
    step = flow.compile(net, loss, torch.optim.AdamW(net.parameters(), lr=0.05), plan=plan, backend="code")
    return [float(step(batch(k))) for k in range(3)]


def alone() -> list[float]:
    net = model()
    adam, losses = torch.optim.AdamW(net.parameters(), lr=0.05), []
    for k in range(3):
        value = loss(net, batch(k))
        value.backward()  # type: ignore[no-untyped-call]
        adam.step()
        adam.zero_grad()
        losses.append(value.item())
    return losses


PLANS = {
    "data": (2, "grid (data=2)"),
    "tensor": (2, "grid (tensor=2)\n0: tensor=S(0)\n2: tensor=S(1)"),
    "weights in parts": (4, "grid (data=4)\n**: data=S(0)"),
    "1f1b": (2, "grid (pipe=2)\npipe * over pipe by 1f1b, 4 micro-batches"),
    "zero bubble": (4, "grid (pipe=4)\npipe * over pipe by zb_h1, 4 micro-batches"),
    "interleaved": (2, "grid (pipe=2)\npipe * over pipe by interleaved, 4 micro-batches"),
    "stages of two": (
        4,
        "grid (pipe=2, tensor=2)\npipe * over pipe by 1f1b, 4 micro-batches\n0: tensor=S(0)\n6: tensor=S(1)",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_model_trains_over_nccl_as_alone(fresh: Fresh, name: str) -> None:
    ranks, plan = PLANS[name]
    expected = alone()
    for losses in answers(fresh(ranks, trained, plan, timeout=80.0, environment=nccl_hosts)):
        assert losses == pytest.approx(expected, rel=1e-4)


def killed(plan: str, at: int) -> str:
    """The last rank dies in its third step."""
    flow.init(timeout=20)
    net = model()
    step = flow.compile(net, loss, torch.optim.SGD(net.parameters(), lr=0.05), plan=plan, backend="code")
    losses = [float(step(batch(k))) for k in range(2)]
    if int(os.environ["RANK"]) == at:
        os.kill(os.getpid(), 9)
    try:
        for k in range(2, 4):
            losses.append(float(step(batch(k))))
    except flow.TransportError as error:
        return str(error)
    return f"went on: {losses}"


@pytest.mark.parametrize("name", ["data", "1f1b", "stages of two"])
def test_a_rank_that_dies_is_told_and_no_number_comes_of_it(fresh: Fresh, name: str) -> None:
    ranks, plan = PLANS[name]
    ends = fresh(ranks, killed, plan, ranks - 1, timeout=70.0, environment=nccl_hosts)
    for end in ends[:-1]:
        told = str(end.answer.value) if end.answer else end.stderr
        assert "went on" not in told
        assert f"rank {ranks - 1} died" in told, told


def astray() -> str:
    """Ranks that ask for other moves, the first of which has its cards at work already."""
    flow.init(timeout=30)
    p = flow.placement("cuda", [0, 1])
    x: Any = flow.tensor(torch.arange(8.0).cuda(), placement=p, sbp=flow.S(0))
    try:
        y = (
            x.to_global(sbp=flow.B)
            if os.environ["RANK"] == "0"
            else (x * 2).to_global(sbp=flow.P).to_global(sbp=flow.B)
        )
        return f"went on: {y.to_local()[0]}"
    except flow.TransportError as error:
        return str(error)


def test_cards_that_wait_for_another_move_are_told_of(fresh: Fresh) -> None:
    for end in fresh(2, astray, timeout=60.0, environment=nccl_hosts):
        told = str(end.answer.value) if end.answer else end.stderr
        assert "went on" not in told
        assert "different moves" in told or "gave up" in told, told
