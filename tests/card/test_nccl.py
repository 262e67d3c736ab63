"""NCCL as it is played has NCCL's laws: order, streams, memory, communicators; and what moves over it has its value."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sbpflow as flow
from tests.gpu.shared_card import answers, nccl_hosts
from tests.ranks import Fresh
from tools.played_card.facade import count


def joined() -> int:
    """This rank, in a world of torch's own."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return rank


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
