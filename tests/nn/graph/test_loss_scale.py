"""A loss scale keeps gradients of fp16 in range, on all ranks alike; autocast and GradScaler go on working."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B
from sbpflow.nn.graph.optimizer.loss_scale import unscaled
from sbpflow.placement.errors import SbpError, ScheduleError
from tests.nn.graph.by_hand import BF16, FP16, FP32, ByHand, batches, masters, mixed, net, square_loss, trained
from tests.ranks import Ranks


class Scaled(ByHand):
    """fp16 with a loss scale: a step whose gradients are not finite is left out, and the scale halves."""

    def __init__(self, model: nn.Module, scale: float = 2.0**16) -> None:
        super().__init__(model, FP16, scale=scale)
        plain, self.skipped = self.optimizer.step, 0

        def step() -> Any:
            if all(p.grad is not None and p.grad.isfinite().all() for p in self.master.parameters()):
                return plain()
            self.skipped, self.scale = self.skipped + 1, self.scale / 2

        self.optimizer.step = step  # type: ignore[method-assign, assignment]


PIPE = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]


def halves(where: str) -> tuple[Any, Any, dict[str, Any]]:
    """A model in fp16 on two or four ranks, or in two stages."""
    model: Any = mixed(net(), "fp16")
    if where != "stages":
        return flow.nn.shard(model, {"*": B}), flow.placement("cpu", range(int(where))), {}
    flow.nn.place(model[:3], PIPE[0])
    flow.nn.place(model[3:], PIPE[1])
    return model, None, {"micro_batches": 2}


def steep_loss(model: nn.Module, x: Tensor) -> Any:
    """Of which gradients are too large for fp16 at first, and those of the first layer for longest."""
    return square_loss(model, x * 60) * 20


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["1", "2", "4", "stages"])
def test_a_scale_is_found_at_which_fp16_trains(where: str) -> None:
    model, place, options = halves(where)
    data, hand = [(x,) for x in batches(12)], Scaled(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = flow.compile(model, steep_loss, optimizer, placement=place, **options)
    losses, scales = [], []
    for each in data:
        losses.append(step(*each).detach().full_tensor())
        wanted = hand.step(steep_loss, *each)
        torch.testing.assert_close(losses[-1], wanted, rtol=2e-2, atol=1e-3)
        scales.append((step.loss_scale, hand.scale))
    assert hand.skipped > 0
    assert hand.scale < 2.0**16
    assert all(mine == theirs for mine, theirs in scales)
    tol = 1e-2 if where == "stages" else 1e-3
    for p, q in zip(masters(optimizer), hand.master.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor().detach(), q.detach(), rtol=tol, atol=tol)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["2", "4", "stages"])
def test_an_overflow_anywhere_skips_the_step_everywhere(where: str) -> None:
    model, place, options = halves(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = flow.compile(model, square_loss, optimizer, placement=place, loss_scale=64.0, clip_grad_norm=1.0, **options)
    step(batches()[0])
    before = [p.detach().full_tensor().clone() for p in masters(optimizer)]
    bad = batches()[1].clone()
    bad[-1, 0] = 1e30  # a sample of the last rank, or micro-batch
    step(bad)
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(masters(optimizer), before, strict=True))
    assert all(p.grad is None for p in [*model.parameters(), *masters(optimizer)])
    assert step.loss_scale == 64.0  # as it was said
    step(batches()[2])
    assert not all(torch.equal(p.full_tensor(), q) for p, q in zip(masters(optimizer), before, strict=True))


def test_gradients_are_clipped_without_the_scale() -> None:
    norms = []
    for scale in (None, 1.0, 1024.0):
        model = mixed(net(), "fp16")
        step, _, _ = trained(model, flow.placement("cpu", range(2)), loss_scale=scale, clip_grad_norm=0.1)
        norms.append(step.grad_norm.item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-2) == pytest.approx(norms[2], rel=1e-2)


def test_gradients_that_hooks_see_have_no_scale() -> None:
    model, seen = mixed(net(), "fp16"), []
    model[0].weight.register_hook(lambda grad: seen.append(grad.detach().full_tensor().float().norm().item()))
    trained(model, flow.placement("cpu", range(2)), loss_scale=1024.0)
    plain = net()
    square_loss(plain, batches()[0]).backward()
    assert seen[0] == pytest.approx(float(plain[0].weight.grad.norm()), rel=2e-2)


def test_nothing_is_scaled_where_nothing_is_fp16_or_no_optimizer_steps() -> None:
    model = mixed(net())
    step, _, _ = trained(model, flow.placement("cpu", range(2)))
    with pytest.raises(SbpError, match="trains nothing in fp16"):
        _ = step.loss_scale
    model = flow.nn.cast(net(), {"*": "fp16"})
    step = flow.compile(model, square_loss, placement=flow.placement("cpu", range(2)))
    with pytest.raises(SbpError, match="was not called yet"):
        _ = step.loss_scale
    step(batches()[0])
    plain = net()
    square_loss(plain, batches()[0]).backward()
    first: Any = model
    torch.testing.assert_close(first[0].weight.grad.full_tensor().float(), plain[0].weight.grad, rtol=2e-2, atol=1e-3)


def test_arguments_get_their_gradient_without_the_scale() -> None:
    model = mixed(net(), "fp16")
    x = batches()[0].requires_grad_()
    trained(model, flow.placement("cpu", range(2)), data=[(x,)], loss_scale=1024.0)
    y = batches()[0].requires_grad_()
    square_loss(net(), y).backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, y.grad, rtol=2e-2, atol=1e-3)


def test_a_scale_without_an_optimizer_is_an_error() -> None:
    step = flow.compile(net(), square_loss, placement=flow.placement("cpu", range(2)), loss_scale=8.0)
    with pytest.raises(SbpError, match=r"loss_scale=8.0 and no optimizer"):
        step(batches()[0])


def test_a_schedule_that_updates_meanwhile_does_not_train_fp16() -> None:
    model, _, _ = halves("stages")
    optimizer = torch.optim.Adam(model.parameters())
    step = flow.compile(model, square_loss, optimizer, micro_batches=4, schedule="pipedream")
    with pytest.raises(ScheduleError, match="trains them in fp16"):
        step(batches()[0])


def overflowing(kind: str) -> list[Any]:
    """On each rank: the scale before and after an overflow, and the master's first weight."""
    model, place, options = halves(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = flow.compile(model, square_loss, optimizer, placement=place, **options)
    found: list[Any] = []
    for at, x in enumerate(batches(4)):
        x = x.clone()
        if at == 2:
            x[-1, 0] = 1e30
        step(x)
        found.append((step.loss_scale, [p.detach().full_tensor() for p in masters(optimizer)] if kind == "2" else None))
    return found


@pytest.mark.parametrize("kind", ["stages", "2"])  # stages of two ranks first: two others have nothing to do
def test_an_overflow_on_real_ranks(kind: str, ranks4: Ranks) -> None:
    alone = overflowing(kind)
    every = ranks4(overflowing, kind)
    scales = [scale for scale, _ in alone]
    assert scales[2] == scales[1] / 2
    for found in every[:2]:
        assert [scale for scale, _ in found] == scales
        for (_, mine), (_, theirs) in zip(found, alone, strict=True) if kind == "2" else ():
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_autocast_goes_on_working(ranks: int) -> None:
    model, plain = net(), net()

    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            return model(x).float().square().mean()

    _, optimizer, losses = trained(model, flow.placement("cpu", range(ranks)), loss_fn)
    one = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for x, mine in zip(batches(), losses, strict=True):
        loss = loss_fn(plain, x)
        torch.testing.assert_close(mine, loss.detach(), rtol=2e-2, atol=2e-3)
        loss.backward()
        one.step()
        one.zero_grad()
    assert {p.dtype for p in masters(optimizer)} == {FP32}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_grad_scaler_around_a_graph_without_optimizer(ranks: int) -> None:
    model, plain = net(), net()
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]

    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        return scalers[0].scale(square_loss(model, x))

    step = flow.compile(model, loss_fn, placement=flow.placement("cpu", range(ranks)))
    one, mine, seen = torch.optim.SGD(plain.parameters(), lr=0.1), None, []
    for at, x in enumerate(batches()):
        x = x * torch.inf if at == 2 else x
        step(x)
        mine = mine or torch.optim.SGD(model.parameters(), lr=0.1)
        scalers[1].scale(square_loss(plain, x)).backward()
        for scaler, optimizer in zip(scalers, (mine, one), strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        seen.append(tuple(scaler.get_scale() for scaler in scalers))
    assert seen == [(8.0, 8.0), (16.0, 16.0), (8.0, 8.0), (8.0, 8.0), (16.0, 16.0)]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-6)


def test_a_grad_scaler_in_a_graph_that_steps_by_itself_is_an_error() -> None:
    scaler, model = torch.amp.GradScaler("cpu"), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = flow.placement("cpu", range(2))
    step = flow.compile(model, lambda m, x: scaler.scale(square_loss(m, x)), optimizer, placement=where)
    with pytest.raises(SbpError, match=r"the graph steps by itself(?s:.*)scaler.step\(optimizer\)"):
        step(batches()[0])

    def steps(model: nn.Module, x: Tensor) -> Any:
        loss = square_loss(model, x)
        scaler.step(optimizer)
        return loss

    with pytest.raises(SbpError, match=r"GradScaler.step at .*test_loss_scale"):
        flow.compile(model, steps, placement=where)(batches()[0])
    assert torch.amp.GradScaler("cpu").scale(torch.ones(())).item() == 65536.0  # torch's own again


def test_gradients_lose_their_scale_where_they_are_unless_others_share_the_memory() -> None:
    packed, sums = torch.arange(8.0), torch.arange(6.0)
    given = [(packed[:3], packed[3:8]), (sums,), (sums[2:4],), (torch.ones(1).expand(4),), (torch.empty(0),)]
    wanted = [tuple(x / 4 for x in shards) for shards in given]
    found = unscaled(given, 4.0)
    new, plain, old = ([x for of in each for x in of] for each in (found, wanted, given))
    assert all(map(torch.equal, new, plain))
    kept = [x.data_ptr() == y.data_ptr() for x, y in zip(new, old, strict=True)]
    assert kept[:5] == [True, True, False, False, False]


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"micro_batches": 2, "post_validation": True}])
def test_the_norm_of_a_step_that_overflows_is_not_that_of_the_step_before(options: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    how: dict[str, Any] = {"placement": PIPE[0], "loss_scale": 8.0, "clip_grad_norm": 1.0}
    step = flow.compile(model, square_loss, torch.optim.SGD(model.parameters(), 0.1), **how, **options)
    large = torch.full((2, 4), float("inf"))
    with pytest.raises(SbpError, match="did not train yet"):
        _ = step.plan_for(large).grad_norm
    step(large)  # the first, as with a scale that is found
    assert step.grad_norm.isnan().item()
    step(torch.ones(2, 4))
    assert step.grad_norm.item() > 0
    step(large)
    assert step.grad_norm.isnan().item()
