"""Several cards whose ranks live in one process: each draws, casts and runs again as one card would."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sbpflow as flow
from sbpflow import B, P, S

from .host import as_on_host

PAIR = "cuda:[0-1]"


def cube(kind: str) -> Tensor:
    return torch.linspace(-1, 1, 2 * 4 * 5 * 3, dtype=torch.float64).reshape(2, 4, 5, 3).to(kind)


def test_what_every_card_draws_for_itself_is_the_same() -> None:
    """The numbers of a whole tensor are drawn on the first card, whose generator is then ahead of the others."""
    x = flow.tensor(torch.full((5, 7), 0.5, device="cuda"), placement=flow.placement(PAIR), sbp=B)
    torch.manual_seed(5)
    torch.rand_like(x)
    one, other = torch.bernoulli(x)._shards  # type: ignore[attr-defined]
    assert torch.equal(one.cpu(), other.cpu())

    plain = torch.full((5, 7), 0.5, device="cuda")
    torch.manual_seed(5)
    torch.rand_like(plain)
    wanted, ahead = torch.bernoulli(plain), torch.rand(1, device="cuda")
    assert torch.equal(one, wanted)
    torch.manual_seed(5)
    torch.bernoulli(torch.rand_like(x) * 0 + x)
    assert torch.equal(torch.rand(1, device="cuda"), ahead)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sbp", [B, S(0)], ids=str)
def test_what_a_region_saved_is_made_again_once_for_all_cards(sbp: flow.sbp.Sbp, reentrant: bool) -> None:
    """Autograd has a thread for each card; they would run the region again at the same time."""

    def program(kind: str) -> list[Tensor]:
        where = flow.placement(kind, range(2))
        x, w, v = (
            flow.tensor(cube(kind).reshape(8, 15)[:7, :7], placement=where, sbp=each, requires_grad=True)
            for each in (sbp, B, B)
        )
        y = checkpoint(
            lambda a: checkpoint(lambda b: (b @ w).tanh(), a, use_reentrant=reentrant) @ v, x, use_reentrant=False
        )
        y.square().sum().backward()
        return [each.grad.full_tensor() for each in (x, w, v) if each.grad is not None]

    as_on_host(program)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("sbp", [B, S(0), S(1)], ids=str)
def test_what_every_card_holds_of_a_tensor_or_a_model_is_its_own_piece(kind: str, ranks: int, sbp: Any) -> None:
    """A card that had been sent all of it kept all of it: a piece was a view of the copy."""
    where = flow.placement("cuda", range(ranks))
    x = flow.tensor(torch.ones(8, 4, device=kind), placement=where, sbp=sbp)
    turned = flow.tensor(torch.ones(4, 8, device=kind).t(), placement=where, sbp=sbp)
    model = flow.nn.to_global(nn.Linear(4, 8, device=kind), where, {"weight": sbp, "bias": S(0)})
    every: list[Any] = [x, turned, *model.parameters()]
    for each in every:
        for shard in each._shards:
            assert shard.untyped_storage().nbytes() == shard.nbytes


def test_addends_are_summed_in_their_own_dtype_under_autocast() -> None:
    """Autocast for cards makes the sum of half precision one of single; a boxing's result is of the tensor's dtype."""
    x = flow.tensor(
        torch.linspace(-1, 2, 24, device="cuda").reshape(4, 6), placement=flow.placement("cuda:[0-3]"), sbp=S(1)
    )
    x.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        addends = x @ x.T
        assert addends.sbp == (P,)  # type: ignore[attr-defined]
        found = addends.exp()
    found.float().sum().backward()  # type: ignore[no-untyped-call]
    plain = x.full_tensor().detach().clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        wanted = (plain @ plain.T).exp()
    wanted.float().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert plain.grad is not None
    assert found.dtype is wanted.dtype
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, rtol=5e-2, atol=1e-1)


@pytest.mark.parametrize("sbp", [S(0), S(1)], ids=str)
def test_a_call_that_names_a_card_names_that_of_its_rank(sbp: flow.sbp.Sbp) -> None:
    """A cast that says how memory lies is captured with the device of what it was given."""

    class Step(flow.nn.Graph):
        def build(self, x: Tensor) -> Tensor:
            y = (x * 2).to(memory_format=torch.channels_last)
            return F.avg_pool2d(y.to(x.device, torch.float64), 2).sum() + x

    def program(kind: str) -> list[Tensor]:
        where = flow.placement(kind, range(2))
        return [Step(placement=where)(flow.tensor(cube(kind), placement=where, sbp=sbp)).full_tensor()]

    as_on_host(program)


@pytest.mark.parametrize("infinite", [False, True])
def test_a_scaler_divides_what_every_card_holds(infinite: bool) -> None:
    """Its factor lies on one card, and an infinity in the piece of another skips the step on all."""

    def program(kind: str) -> list[Tensor]:
        where = flow.placement(kind, range(3))
        w = flow.tensor(cube(kind).reshape(8, 15)[:7], placement=where, sbp=S(0), requires_grad=True)
        factor = torch.ones(7, 15, dtype=torch.float64)
        factor[6, 3] = float("inf") if infinite else 2.0
        sgd, scaler = torch.optim.SGD([w], 0.1), torch.amp.GradScaler(kind, init_scale=8.0)
        for _ in range(2):
            sgd.zero_grad()
            scaler.scale((w * flow.tensor(factor.to(kind), placement=where, sbp=B)).sum()).backward()  # type: ignore[no-untyped-call]
            scaler.step(sgd)
            scaler.update()
        return [w.full_tensor().detach(), torch.tensor(scaler.get_scale())]

    as_on_host(program)
