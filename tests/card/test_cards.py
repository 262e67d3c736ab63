"""Cards have some things done otherwise: numbers that are drawn, casts, reports, refusals."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.doctor import report
from sbpflow.placement.errors import SbpflowError

from .host import as_on_host, batch, cross_entropy


@pytest.mark.parametrize("sbp", [S(0), B], ids=str)
def test_an_eager_dropout_draws_what_the_kernel_of_a_card_draws(sbp: flow.sbp.Sbp) -> None:
    x = torch.ones(8, 4, device="cuda")
    torch.manual_seed(5)
    wanted = F.dropout(x, 0.5)
    torch.manual_seed(5)
    found = F.dropout(flow.tensor(x, placement=flow.placement("cuda:[0-3]"), sbp=sbp), 0.5)
    assert torch.equal(found.full_tensor().to("cuda:0"), wanted)  # type: ignore[attr-defined]


def test_numbers_like_a_global_tensor_are_its_own() -> None:
    x = flow.tensor(torch.ones(8, 4, device="cuda"), placement=flow.placement("cuda:[0-3]"), sbp=S(0))
    torch.manual_seed(5)
    one = torch.randn_like(x)
    torch.manual_seed(5)
    assert torch.equal(torch.randn_like(x).full_tensor(), one.full_tensor())  # type: ignore[attr-defined]


def test_autocast_on_cards_is_seen_in_a_graph() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    def program(kind: str) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
        step = flow.compile(
            model, loss, torch.optim.SGD(model.parameters(), 0.1), placement=flow.placement(kind, range(2))
        )
        return [step(x.float(), y).full_tensor() for x, y in (batch(at, kind) for at in range(2))]

    as_on_host(program, 2e-2)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_graph_with_dropout_draws_anew_and_again_from_a_seed(kind: str) -> None:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 5)).double()
    step = flow.compile(model, cross_entropy, plan=f"grid {kind} (data=2)")
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found.append(step(*batch(0, kind)).item())
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("way", ["fp8", "fp8_rowwise"])
def test_products_of_eight_bits_are_near_those_of_the_host(way: str) -> None:
    def program(kind: str) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16)).bfloat16()
        flow.nn.cast(model, {"0": way})
        place = flow.placement(kind, [0])
        step = flow.compile(model, lambda model, x: model(x).float().square().mean(), placement=place)
        x = torch.sin(torch.arange(16.0 * 32)).reshape(16, 32).to(kind, torch.bfloat16)
        return [step(x).full_tensor()]

    as_on_host(program, 5e-2)


def test_the_doctor_names_the_cards() -> None:
    assert "NVIDIA H100" in str(report())


def test_a_kind_that_is_misspelt_names_cards() -> None:
    with pytest.raises(SbpflowError, match="cuda"):
        flow.placement("gpu", [0])
