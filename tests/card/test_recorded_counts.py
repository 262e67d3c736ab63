"""A replayed step on a played card waits for nothing, asks for no memory, and finds all where it lay."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.card.recorded_steps import MODELS, OPTIMIZERS
from tools.played_card.facade import count

COUNTED = ("syncs", "waited", "allocations", "launched", "replays")
PLANS = ["grid cuda:[0] as (data=1)", "grid cuda:[0, 4] as (data=2)\n**: data=B\nstates **: data=S(0)"]


def addresses(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    parts = [part for state in optimizer.state.values() for part in state.values()]
    globals = [x for x in (*net.parameters(), *net.buffers(), *parts) if isinstance(x, flow.GlobalTensor)]
    return [shard.data_ptr() for x in globals for shard in x._shards]


@pytest.mark.parametrize("plan", PLANS, ids=["alone", "zero-1"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused", "sgd"])
@pytest.mark.parametrize("model", MODELS)
def test_a_replayed_step_waits_for_nothing_and_asks_for_no_memory(model: str, optimizer: str, plan: str) -> None:
    make, batch, loss = MODELS[model]
    with torch.device("cpu"):
        net = make()
    net = net.cuda()
    stepped = OPTIMIZERS[optimizer](net.parameters())
    step = flow.compile(net, loss, stepped, plan=plan, cuda_graph=True)
    ranks = 2 if "4" in plan else 1
    where = flow.placement("cuda", [0, 4][:ranks])
    batches: list[list[Tensor]] = [[x.cuda() for x in batch(n)] for n in range(8)]
    if ranks == 2:
        batches = [[flow.tensor(x, placement=where, sbp=flow.B) for x in each] for each in batches]
    losses: list[Any] = [step(*each) for each in batches[:3]]
    at = addresses(net, stepped)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in batches[3:]:
            before = [count(what) for what in COUNTED]
            losses.append(step(*each))
            after = [count(what) for what in COUNTED]
            made = dict(zip(COUNTED, (b - a for a, b in zip(before, after, strict=True)), strict=True))
            if ranks == 1:  # its two arguments are copied in, and its loss out
                assert made == {"syncs": 0, "waited": 0, "allocations": 1, "launched": 3, "replays": 1}
            assert (made["syncs"], made["waited"]) == (0, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert addresses(net, stepped) == at
    assert len({loss.item() for loss in losses}) == len(losses)


def test_memory_of_a_recorded_step_goes_with_it() -> None:
    net = nn.Linear(64, 64).cuda()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.05)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = model(x).square().mean()
        return made

    step = flow.compile(net, loss, sgd, plan=PLANS[0], cuda_graph=True)
    x = torch.ones(8, 64, device="cuda")
    for _ in range(4):
        step(x)
    reserved = count("reserved")
    for decay in (0.1, 0.2):
        sgd.param_groups[0]["weight_decay"] = decay  # recorded anew
        step(x)
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # memory is looked through when somebody asks for some
    assert count("reserved") - reserved < 4096
