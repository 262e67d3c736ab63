"""Boxing on CUDA: simulated ranks on one card, and NCCL ranks that share it."""

import itertools

import pytest
import torch

import sbpflow as flow
from sbpflow import B, P, S
from tests.gpu.shared_card import nccl_hosts
from tests.ranks import Fresh

KINDS: list[flow.sbp.Sbp] = [S(0), S(1), B, P]
PAIRS = list(itertools.product(KINDS, KINDS))
SHAPES = [(8, 12), (5, 7), (1, 2), (0, 3)]


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxing_on_one_card_keeps_the_value(src: flow.sbp.Sbp, dst: flow.sbp.Sbp, shape: tuple[int, int]) -> None:
    p = flow.placement("cuda:[0-3]")
    whole = torch.arange(float(shape[0] * shape[1])).reshape(shape).cuda()
    a, b = flow.layout(p, src, shape), flow.layout(p, dst, shape)
    assert torch.equal(flow.boxing.gather(flow.box(flow.boxing.scatter(whole, a), a, b), b), whole)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_an_asynchronous_move_runs_on_a_side_stream_and_syncs_no_host() -> None:
    p = flow.placement("cuda:[0-3]")
    whole = torch.randn(512, 512, device="cuda")
    a, b = flow.layout(p, P, (512, 512)), flow.layout(p, B, (512, 512))
    shards = flow.boxing.scatter(whole, a)
    torch.cuda.set_sync_debug_mode("error")  # a hidden synchronisation raises
    try:
        moved = flow.boxing.box_async(shards, a, b).wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(moved[3].to(whole.device), whole)


def test_a_move_between_host_and_card_keeps_the_value() -> None:
    whole = torch.arange(35.0).reshape(5, 7)
    host, card = flow.placement("cpu:[0-1]"), flow.placement("cuda:[0-3]")
    there, back = flow.layout(card, S(1), (5, 7)), flow.layout(host, S(0), (5, 7))
    shards = flow.box(flow.boxing.scatter(whole, back), back, there)
    assert all(shard.is_cuda for shard in shards)
    assert torch.equal(flow.boxing.gather(flow.box(shards, there, back), back), whole)


@pytest.mark.parametrize("ranks", [2, 4])
def test_nccl_ranks_that_share_a_card_box_every_pair(fresh: Fresh, ranks: int) -> None:
    ends = fresh(ranks, every_pair_over_nccl, ranks, timeout=70.0, environment=nccl_hosts)
    assert [end.answer and end.answer.value for end in ends] == [len(PAIRS) * len(SHAPES)] * ranks


def every_pair_over_nccl(ranks: int) -> int:
    flow.init(timeout=60)
    p = flow.placement("cuda", range(ranks))
    for shape in SHAPES:
        whole = torch.arange(float(shape[0] * shape[1])).reshape(shape).cuda()
        for src, dst in PAIRS:
            a, b = flow.layout(p, src, shape), flow.layout(p, dst, shape)
            assert torch.equal(flow.boxing.gather(flow.box(flow.boxing.scatter(whole, a), a, b), b), whole), (
                src,
                dst,
                shape,
            )
    return len(PAIRS) * len(SHAPES)
