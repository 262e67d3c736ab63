"""Sublinear memory, mixed precision and ZeRO-Offload: what a step keeps, where, and in how many bytes."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sbpflow as flow

from ..small import batches, gpt, loss_fn, same_as_one_device

DATA = "grid (data=2)\ninput * <- data=S(0)\n**: data=B\n"
AGAIN = DATA + "recompute layers.*\n"
MASTERS = "cast ** to fp16\ncast {grads,states} ** to fp32\n"


def made(recompute: bool, root: int = 4) -> int:
    """The bytes that a step of root x root layers makes at its peak."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(*(nn.Linear(16, 16) for _ in range(root))) for _ in range(root)))
        x = torch.zeros(256, 16)
    plan = "grid (data=1)\n" + ("recompute *\n" if recompute else "")
    step = flow.compile(model, lambda model, x: model(x).square().mean(), plan=plan).plan_for(x)
    (rank,) = step.planned.memory().values()
    return rank.activations


def test_segments_of_sqrt_layers_keep_two_sqrt_layers_of_them() -> None:
    """One segment whole, and what goes into each."""
    layer = made(recompute=False) / 16
    assert made(recompute=True) <= 2 * 4 * layer


def test_the_forward_of_layers_runs_twice_and_nothing_changes() -> None:
    """A backward takes twice the products of its forward: 3 become 4, but for what lies around the layers."""
    flops = []
    for plan in (DATA, AGAIN):
        step = same_as_one_device(gpt(4), plan=plan)
        with FlopCounterMode(display=False) as counted:
            step(*batches(1)[0])
        flops.append(counted.get_total_flops())
    assert flops[1] / flops[0] == pytest.approx(4 / 3, rel=0.06)


@pytest.mark.parametrize("plan", ["grid (data=2)\n", "grid (pipe=2)\npipe layers over pipe by 1f1b, 2 micro-batches\n"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = flow.compile(
        model, lambda m, x: m["layers"](x.half()).float().square().mean(), optimizer, plan=plan + MASTERS
    )
    x = torch.randn(8, 8)
    step(x)
    scale, before = step.loss_scale, [p.detach().full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    x[-1, 0] = 1e30  # a sample of the last rank
    step(x)
    assert step.loss_scale == scale / 2
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), before, strict=True))  # type: ignore[attr-defined]


def test_offloaded_states_leave_a_device_its_weights_and_gradients() -> None:
    """ZeRO-Offload: 2 bytes a number and its share of the gradients; 12 lie on the host, and 4 arrive there."""
    plan = "grid (data=2)\n{grads,states} **: data=S(0)\ncast ** to bf16\ncast states ** to fp32\n"
    plan += "offload states ** to cpu ahead 2\n"
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 8))
    numbers = sum(value.numel() for value in model.parameters())
    step = flow.compile(
        model, lambda m, x: m(x.bfloat16()).float().square().mean(), torch.optim.AdamW(model.parameters()), plan=plan
    )
    step(torch.randn(8, 16))
    for held in step.planned.held().values():
        assert (held.parameters, held.gradients) == (2 * numbers, 2 * numbers / 2)
        assert (held.states, held.host) == (0, (12 + 4) * numbers / 2)


def test_offloading_changes_no_number() -> None:
    plan = "grid (data=2)\nstates **: data=S(0)\n"
    ends = []
    for more in ("", "offload states ** to cpu ahead 2\n", "offload states ** to disk\n"):
        model = gpt()
        step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters()), plan=plan + more)
        for batch in batches(3):
            step(*batch)
        ends.append([p.full_tensor() for p in model.parameters()])  # type: ignore[attr-defined]
    for other in ends[1:]:
        assert all(torch.equal(p, q) for p, q in zip(ends[0], other, strict=True))
