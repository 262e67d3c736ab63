"""A played card is as strict as a card: devices, waits, memory and hidden syncs."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from tools.played_card.facade import count

RACE = "nothing says which comes first"


def made(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device="cuda").reshape(shape)


def side() -> Any:
    cuda: Any = torch.cuda
    return cuda.Stream()


def test_tensors_of_two_devices_do_not_mix() -> None:
    x = made(3)
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + other
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3]  # a number may lie on the host


def test_a_kernel_runs_when_it_is_waited_for() -> None:
    late = 0
    for _ in range(20):
        host = torch.zeros(4).pin_memory()
        host.copy_(made(4) + 1, non_blocking=True)
        late += not host.any()
        torch.cuda.synchronize()
        assert host.tolist() == [1, 2, 3, 4]
    assert late > 5


def test_pageable_memory_is_waited_for_and_read_at_once() -> None:
    for _ in range(10):
        source, target = torch.ones(4), torch.zeros(4)
        x = torch.empty(4, device="cuda")
        x.copy_(source, non_blocking=True)
        source.zero_()
        target.copy_(x * 2, non_blocking=True)
        assert target.tolist() == [2] * 4


def test_pinned_memory_that_is_written_too_early_is_seen() -> None:
    early = 0
    for _ in range(20):
        source = torch.ones(4).pin_memory()
        x = torch.empty(4, device="cuda")
        x.copy_(source, non_blocking=True)
        source.zero_()
        early += x.tolist() == [0] * 4
    assert early > 5


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("use", ["reads", "writes", "is read"])
def test_a_use_that_nothing_orders_is_an_error_with_both_lines(use: str, ordered: bool) -> None:
    x, stream, now = made(8), side(), torch.cuda.current_stream()
    if use == "is read":
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            kept = x * 2
            kept.record_stream(now)

    def go() -> None:
        if use == "is read":
            x.zero_()
        else:
            with torch.cuda.stream(stream):
                x.add_(1) if use == "writes" else (x * 2).record_stream(now)

    first, second = (now, stream) if use == "is read" else (stream, now)
    if ordered:
        first.wait_stream(second)
        go()
    else:
        with pytest.raises(RuntimeError, match=rf"test_played.py:\d+.*test_played.py:\d+.*{RACE}"):
            go()
    torch.cuda.synchronize()  # before x is freed


def test_an_event_orders_what_was_recorded_and_no_more() -> None:
    x, stream = made(8), side()
    event = torch.Event("cuda")
    event.record()
    x.add_(1)
    stream.wait_event(event)
    with torch.cuda.stream(stream), pytest.raises(RuntimeError, match=RACE):
        x.add_(1)


def test_a_wait_of_the_host_orders_all_that_it_launches_then() -> None:
    x, stream = made(8), side()
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(stream):
        x.add_(1)
    stream.synchronize()
    assert x.tolist() == list(range(1, 9))


def test_rows_of_one_buffer_are_used_by_two_streams() -> None:
    x, stream = made(8, 8), side()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x[:, ::2].add_(1)
    x[:, 1::2].add_(2)
    with pytest.raises(RuntimeError, match=RACE):
        x[0].sum()
    torch.cuda.synchronize()


@pytest.mark.parametrize("said", [True, False])
def test_memory_that_another_stream_uses_is_freed_with_a_word(said: bool) -> None:
    stream, x = side(), made(64)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 2
    y.record_stream(torch.cuda.current_stream())
    if said:
        x.record_stream(stream)
        del x
        made(64)
        return
    del x
    with pytest.raises(RuntimeError, match=r"freed at .*test_played.py.*Tensor.record_stream, or a wait, says it"):
        torch.cuda.synchronize()


def test_freed_memory_is_given_again_at_once_and_holds_no_numbers() -> None:
    x = made(1000)
    at = x.data_ptr()
    del x
    again = torch.empty(1000, device="cuda")
    assert again.data_ptr() == at
    assert bool(again.isnan().all())
    allocated = torch.cuda.memory_allocated()
    del again
    assert torch.cuda.memory_allocated() == allocated - 4096


SYNCS: list[Callable[[Tensor], object]] = [
    lambda x: x.sum().item(),
    lambda x: bool((x > 1).any()),
    lambda x: x.nonzero(),
    lambda x: x[x > 1],
    lambda x: x.cpu(),
    lambda x: torch.ones(3).to("cuda"),
]


@pytest.mark.parametrize("sync", SYNCS)
def test_a_test_can_forbid_syncs(sync: Callable[[Tensor], object]) -> None:
    x = made(3)
    before = count("syncs")
    sync(x)
    assert count("syncs") > before
    torch.cuda.set_sync_debug_mode("error")
    try:
        (x * 2 + 1).relu().sum()
        with pytest.raises(RuntimeError, match=r"synchronizing CUDA operation .*test_played.py"):
            sync(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_index_outside_is_told_at_the_next_wait() -> None:
    made(3)[torch.tensor([5], device="cuda")]
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.cuda.synchronize()


def test_numbers_depend_on_the_seed_and_how_far_it_is_drawn() -> None:
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    x, y = torch.rand(5, device="cuda"), torch.nn.functional.dropout(made(64), 0.5)
    torch.rand(5)  # the host's numbers are others
    torch.cuda.set_rng_state(state)
    assert torch.equal(x, torch.rand(5, device="cuda"))
    assert torch.equal(y, torch.nn.functional.dropout(made(64), 0.5))
    assert state.numel() == 16
    assert not torch.equal(x, torch.rand(5, device="cuda"))


def test_a_card_computes_what_the_host_does() -> None:
    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            net = torch.nn.Sequential(
                torch.nn.Conv2d(3, 4, 3, groups=1), torch.nn.BatchNorm2d(4), torch.nn.GELU(), torch.nn.Flatten(),
                torch.nn.Linear(4 * 36, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2),
            )  # fmt: skip
        net = net.double().to(device)
        adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(3):
            x = torch.sin(torch.arange(2.0 * 3 * 64, dtype=torch.float64) + step).reshape(2, 3, 8, 8).to(device)
            net(x).square().mean().backward()
            adam.step()
            adam.zero_grad()
        return [value.cpu() for value in net.state_dict().values()]

    for one, other in zip(trained("cuda"), trained("cpu"), strict=True):
        torch.testing.assert_close(one, other)


def test_the_order_of_kernels_is_another_for_another_seed() -> None:
    program = (
        "import torch; x = torch.zeros(20).pin_memory()\n"
        "for k in range(20): x[k:k + 1].copy_(torch.ones(1, device='cuda'), non_blocking=True)\n"
        "print(int(x.sum()))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PLAYED_SEED": str(seed)}, capture_output=True
        )
        for seed in (0, 0, 1, 2)
    ]
    found = [each.stdout for each in said]
    assert found[0] == found[1], said
    assert len(set(found)) > 1, said


def test_a_plan_that_names_no_kind_lies_where_the_weights_are() -> None:
    model = torch.nn.Linear(4, 4, device="cuda")
    step = flow.compile(model, lambda model, x: model(x).square().mean(), plan="grid (data=2)")
    assert step(made(2, 4)).placement.type == "cuda"


PLANS = ["grid (data=1)", "grid (data=2)", "grid (data=2)\n2 micro-batches", "grid (tensor=2)\n0: tensor=S(0)"]
PLANS += ["grid (pipe=2)\npipe * over pipe by 1f1b, 2 micro-batches"]


@pytest.mark.parametrize("plan", PLANS)
def test_dropout_draws_what_the_kernel_of_a_card_draws(plan: str) -> None:
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 2)).cuda()
    model, x = copy.deepcopy(alone), made(8, 4)
    step = flow.compile(model, lambda model, x: model(x).square().mean(), plan=plan)
    torch.manual_seed(1)
    mine = [step(x).item() for _ in range(2)]
    torch.manual_seed(1)
    assert mine == pytest.approx([alone(x).square().mean().item() for _ in range(2)], rel=1e-5)


def staged(model: torch.nn.Sequential, way: str) -> None:
    stages = [flow.placement("cuda", [0]), flow.placement("cuda", [1])]
    if way == "pipeline":
        flow.nn.pipeline(model, stages)
    else:
        for at, stage in zip((0, 2), stages, strict=True):
            flow.nn.place(model[at], stage)


@pytest.mark.parametrize("way", ["pipeline", "place"])
def test_stages_that_were_placed_by_hand_find_their_tensors_on_the_card(way: str) -> None:
    alone = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 4)).cuda()
    model, x = copy.deepcopy(alone), made(8, 4)
    staged(model, way)

    def loss(model: torch.nn.Module, x: Tensor) -> Tensor:
        made: Tensor = (model(x) - torch.arange(4.0, device="cuda")).square().mean()
        return made

    step = flow.compile(model, loss, micro_batches=2)
    torch.manual_seed(1)
    mine = step(x).item()
    torch.manual_seed(1)
    assert mine == pytest.approx(loss(alone, x).item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_of_half_precision_keeps_its_means_in_single(dtype: torch.dtype) -> None:
    def gradients(kind: str) -> list[Tensor]:
        x = torch.linspace(-1, 2, 32, device="cpu").reshape(4, 8).sin().to(kind, dtype).requires_grad_()
        weight = torch.linspace(0, 1, 8, device="cpu").to(kind, dtype).requires_grad_()
        torch.nn.functional.layer_norm(x, (8,), weight).square().sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad.cpu().float(), weight.grad.cpu().float()]

    for one, other in zip(gradients("cpu"), gradients("cuda"), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-1, atol=1e-1)
    if dtype is torch.bfloat16:
        made = torch.native_layer_norm(torch.ones(2, 8, device="cuda", dtype=dtype), [8], None, None, 1e-5)
        assert [each.dtype for each in made] == [dtype, torch.float32, torch.float32]


def test_nothing_is_drawn_for_what_is_empty() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3, device="cuda")
    torch.manual_seed(0)
    torch.rand(0, 2, device="cuda")
    torch.empty(0, device="cuda").normal_()
    assert torch.equal(torch.rand(3, device="cuda"), wanted)


def test_a_view_is_for_inference_if_its_base_is() -> None:
    x = torch.ones(4, 2, device="cuda")
    with torch.inference_mode():
        assert not x[1:].is_inference()
        made = x * 2
    assert made.is_inference()
    assert made.narrow(0, 1, 2).is_inference()
    assert x.is_conj() == x.to(torch.complex64).conj().conj().is_conj()


def test_a_batch_norm_that_is_not_trained_is_that_of_the_host() -> None:
    def run(kind: str) -> Tensor:
        with torch.device("cpu"):
            layer = torch.nn.BatchNorm1d(4).eval()
            x = torch.linspace(0, 1, 24).reshape(6, 4)
        made: Tensor = layer.to(kind)(x.to(kind))
        return made.detach().cpu()

    assert torch.equal(run("cuda"), run("cpu"))
