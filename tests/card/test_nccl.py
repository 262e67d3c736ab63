"""NCCL as it is played has NCCL's laws: order, streams, memory, communicators; and what moves over it has its value."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sbpflow as flow
from tests.gpu.test_boxing_cuda import nccl_hosts
from tests.ranks import Ended, Fresh
from tools.played_card.facade import count


def joined() -> int:
    """This rank, in a world of torch's own."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return rank


def answers(ends: list[Ended]) -> list[Any]:
    errors = [end.answer.error if end.answer else end.stderr for end in ends]
    assert all(end.answer and not end.answer.error for end in ends), "\n".join(map(str, errors))
    return [end.answer and end.answer.value for end in ends]


def told(act: Callable[[], object]) -> str:
    try:
        act()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def communicators() -> list[int]:
    rank, seen = joined(), [count("communicators")]
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    dist.all_reduce(x)
    seen.append(count("communicators"))
    for _ in range(2):
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
    return [*seen, count("communicators"), int(x[0])]


def test_communicators_are_made_when_they_are_needed(fresh: Fresh) -> None:
    assert answers(fresh(2, communicators, environment=nccl_hosts)) == [[0, 1, 2, 4]] * 2


def refused() -> list[str]:
    joined()
    x = torch.ones(4, 4, device="cuda")
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cuda"))
    acts: list[Callable[[], object]] = [
        lambda: dist.all_reduce(x.t()[:, 1:]),
        lambda: backend.allreduce([torch.ones(3)]),
        lambda: dist.all_reduce(x.to(torch.int16)),
    ]
    return [told(act).partition("\n")[0] for act in acts]


def test_what_nccl_refuses_is_refused(fresh: Fresh) -> None:
    for said in answers(fresh(2, refused, environment=nccl_hosts)):
        for words, one in zip(("contiguous", "CUDA and dense", "not supported"), said, strict=True):
            assert words in one, said


def swapped() -> str:
    rank, x = joined(), torch.ones(4, device="cuda")
    return told(lambda: dist.all_reduce(x) if rank else dist.broadcast(x, 0))


def halves() -> str:
    rank, x = joined(), torch.ones(4, device="cuda")
    return told(lambda: dist.send(x, 1 - rank))


@pytest.mark.parametrize("act", [swapped, halves])
def test_calls_in_another_order_are_an_error_that_names_both(fresh: Fresh, act: Callable[[], str]) -> None:
    for said in answers(fresh(2, act, environment=nccl_hosts)):
        assert "rank 0 is at" in said or "rank 1 is at" in said
        assert said.count("test_nccl.py:") >= 2, said


def read_too_early() -> str:
    joined()
    x = torch.ones(1000, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    early = told(lambda: x + 1)
    work.wait()
    assert int(x.sum()) == 2000
    return early


def test_a_result_that_is_not_waited_for_is_a_race(fresh: Fresh) -> None:
    for said in answers(fresh(2, read_too_early, environment=nccl_hosts)):
        assert "nothing says which comes first" in said


def one_host(rank: int) -> dict[str, str]:
    return {"LOCAL_RANK": "0"}


def on_one_card() -> str:
    flow.init(timeout=20)
    p = flow.placement("cuda", [0, 1])
    return told(lambda: flow.tensor(torch.ones(4), placement=p, sbp=flow.S(0)).to_global(sbp=flow.B).to_local())


def test_two_ranks_on_one_card_of_one_host_are_refused(fresh: Fresh) -> None:
    for said in answers(fresh(2, on_one_card, environment=one_host)):
        assert "Duplicate GPU" in said


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
    step = flow.compile(net, loss, torch.optim.AdamW(net.parameters(), lr=0.05), plan=plan)
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
    step = flow.compile(net, loss, torch.optim.SGD(net.parameters(), lr=0.05), plan=plan)
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
