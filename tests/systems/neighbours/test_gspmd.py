"""GSPMD's halo exchange: annotate the image once; every window after it takes rows of neighbours, and no more."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing.graph.text.parse import from_text
from sbpflow.boxing.graph.text.text import to_text
from tests.ranks import Ranks

from .models import F64, Bordered, Film, Shifted, UNet, squares, trained

HEIGHT = flow.placement("cpu:[0-3] as (height=4)")


class Spatial(nn.Module):
    """Windows of many kinds, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(2, 4, 5, padding="same"), nn.Conv2d(4, 4, 3, 2, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.wide(x)), 3, 1, 1, count_include_pad=False)
        x = F.lp_pool2d(self.deep(x), 2.0, 2)
        return x[:, :, 1:] - x[:, :, :-1]


def test_one_annotation_splits_all_that_follows() -> None:
    model, x = Spatial(), torch.randn(1, 2, 64, 8)
    want = model(x)
    flow.nn.to_global(model, HEIGHT)
    with torch.no_grad(), flow.record() as moves:
        found: Any = model(flow.tensor(x, placement=HEIGHT, sbp=S(2)))
    torch.testing.assert_close(found.full_tensor(), want)
    assert found.sbp == (S(2),)
    assert {m.route for m in moves if m.bytes} == {"halo"}


def test_a_plan_tells_the_bytes_of_halos_and_can_be_read_back() -> None:
    model = nn.Conv2d(3, 4, 3, padding=1)
    flow.nn.to_global(model, HEIGHT, B)
    split = flow.tensor(torch.randn(1, 3, 32, 8), placement=HEIGHT, sbp=S(2))
    with flow.use_cluster("flat"):
        step = flow.compile(model, lambda model, x: model(x).square().mean(), placement=HEIGHT)
        plan = step.plan_for(split)
        said = str(step.explain().full())
    assert "halo over height, 192 B a rank" in plan.text()
    assert "halo over height" in said
    assert to_text(from_text(plan.text())) == plan.text()


def test_gradients_of_gradients_go_through_halos() -> None:
    x, weight = torch.randn(1, 3, 12, 4, dtype=F64), torch.randn(2, 3, 3, 3, dtype=F64)

    def penalty(x: Any, weight: Any) -> Any:
        (slope,) = torch.autograd.grad(F.conv2d(x, weight, padding=1).pow(3).sum(), x, create_graph=True)
        return slope.square().sum()

    plain = x.clone().requires_grad_()
    split: Any = flow.tensor(x, placement=HEIGHT, sbp=S(2)).requires_grad_()
    penalty(plain, weight).backward()
    penalty(split, flow.tensor(weight, placement=HEIGHT, sbp=B)).backward()
    torch.testing.assert_close(split.grad.full_tensor(), plain.grad)


def test_bfloat16_goes_as_it_is() -> None:
    x, weight = torch.randn(1, 3, 16, 8, dtype=torch.bfloat16), torch.randn(4, 3, 3, 3, dtype=torch.bfloat16)
    with flow.record() as moves:
        found: Any = F.conv2d(
            flow.tensor(x, placement=HEIGHT, sbp=S(2)), flow.tensor(weight, placement=HEIGHT, sbp=B), padding=1
        )
    assert [m.bytes for m in moves if m.bytes] == [2 * 3 * 8 * 2]
    torch.testing.assert_close(found.full_tensor(), F.conv2d(x, weight, padding=1), rtol=0.02, atol=0.02)


BORDERS = ["circular", "reflect", "replicate"]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("mode", BORDERS)
@pytest.mark.sampled(2)
def test_borders_that_an_image_has_itself_come_from_neighbours(mode: str, eager: bool) -> None:
    """Of a ring the first rank's are the last one's."""
    batches = [(torch.randn(1, 3, 16, 4, dtype=F64), torch.randn(1, 9, 2, dtype=F64)) for _ in range(2)]
    with flow.use_cluster("flat"):
        moves = trained(Bordered(mode).double(), squares, HEIGHT, S(2), batches, eager=eager)
    first = next(m for m in moves if m.bytes)
    assert first.route == "halo"
    assert first.bytes <= 2 * 3 * 4 * 8  # two rows
    if eager:
        assert {m.route for m in moves if m.bytes} == {"halo", "halo_sum", "all_reduce"}


@pytest.mark.parametrize("mode", BORDERS)
@pytest.mark.sampled(1)
def test_a_plan_tells_of_borders_and_can_be_read_back(mode: str) -> None:
    model = Bordered(mode)
    flow.nn.to_global(model, HEIGHT, B)
    split = flow.tensor(torch.randn(1, 3, 16, 4), placement=HEIGHT, sbp=S(2))
    with flow.use_cluster("flat"):
        plan = flow.compile(model, lambda model, x: model(x).square().mean(), placement=HEIGHT).plan_for(split)
    word = {"circular": "wraps", "reflect": "mirrors", "replicate": "repeats"}[mode]
    assert f", {word}]" in plan.text()
    assert to_text(from_text(plan.text())) == plan.text()


def on_ranks() -> None:
    torch.set_default_dtype(F64)
    batches = [(torch.randn(1, 3, 16, 4), torch.randn(1, 2, 16, 4)) for _ in range(1)]
    with flow.use_cluster("flat"):
        for eager in (True, False):
            moves = trained(UNet(), squares, HEIGHT, S(2), batches, eager=eager)
            assert any("halo" in m.route for m in moves)
        batches = [(torch.randn(1, 3, 16, 4), torch.randn(1, 9, 2))]
        trained(Bordered("circular"), squares, HEIGHT, S(2), batches, eager=True)
        trained(Shifted(), squares, HEIGHT, S(0), [(torch.randn(28, 5, 3), torch.randn(14, 5, 2))], eager=True)
        batches = [(torch.randn(1, 2, 12, 4, 2), torch.randn(1, 2, 12, 4, 2))]
        trained(Film(), squares, HEIGHT, S(2), batches, eager=True)
    torch.set_default_dtype(torch.float32)


def test_real_ranks_train_on_pieces(ranks4: Ranks) -> None:
    ranks4(on_ranks)
