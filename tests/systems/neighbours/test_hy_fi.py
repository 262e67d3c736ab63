"""Hy-Fi: images split by rows beside batch, channels and layers: equal to one device, for k / 2 rows a side."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S

from .models import F64, ResNet, UNet, classes, squares, trained

HEIGHT = flow.placement("cpu:[0-3] as (height=4)")


@contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(F64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double():
        yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_a_convolution_of_split_rows_sends_half_a_kernel_of_rows_a_side(kernel: int) -> None:
    x, weight = torch.randn(2, 3, 32, 6), torch.randn(4, 3, kernel, kernel)
    split: Any = flow.tensor(x, placement=HEIGHT, sbp=S(2)).requires_grad_()
    weights: Any = flow.tensor(weight, placement=HEIGHT, sbp=B).requires_grad_()
    plain = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    with flow.record() as moves:
        found: Any = F.conv2d(split, weights, padding=kernel // 2)
        found.square().sum().backward()
    want = F.conv2d(plain[0], plain[1], padding=kernel // 2)
    want.square().sum().backward()  # type: ignore[no-untyped-call]
    assert found.sbp == (S(2),)
    row = 2 * 3 * 6 * 8
    assert {m.route: m.bytes for m in moves if "halo" in m.route} == {
        "halo": 2 * (kernel // 2) * row,
        "halo_sum": 2 * (kernel // 2) * row,
    }
    assert not any("gather" in m.route for m in moves)
    torch.testing.assert_close(found.full_tensor(), want)
    torch.testing.assert_close(split.grad.full_tensor(), plain[0].grad)
    torch.testing.assert_close(weights.grad.full_tensor(), plain[1].grad)


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("sbp", [S(1), S(2), S(3)], ids=str)
def test_group_norm_of_split_images_adds_up_numbers_of_groups(sbp: Any, affine: bool) -> None:
    x, more = torch.randn(2, 8, 9, 5), [torch.randn(8), torch.randn(8)] if affine else []
    given: list[Any] = [
        flow.tensor(x, placement=HEIGHT, sbp=sbp),
        *(flow.tensor(w, placement=HEIGHT, sbp=B) for w in more),
    ]
    plain = [x.clone(), *(w.clone() for w in more)]
    for each in (*given, *plain):
        each.requires_grad_()
    with flow.record() as moves:
        found: Any = F.group_norm(given[0], 4, *given[1:])
        found.pow(3).sum().backward()
    weight, bias = plain[1:] or (None, None)
    F.group_norm(plain[0], 4, weight, bias).pow(3).sum().backward()  # type: ignore[no-untyped-call]
    assert found.sbp == (sbp,)
    for mine, want in zip(given, plain, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), want.grad)
    assert all(move.bytes <= 4 * 2 * 8 * 8 for move in moves)  # a number for each channel of a sample, at most


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_a_residual_network_trains_on_rows_in_pieces(eager: bool) -> None:
    batches = [(torch.randn(2, 3, 64, 16), torch.randint(5, (2,))) for _ in range(3)]
    with flow.use_cluster("flat"):
        moves = trained(ResNet(), classes, HEIGHT, S(2), batches, eager=eager)
    assert any("halo" in m.route for m in moves)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("learnt", [True, False], ids=["transposed", "bilinear"])
def test_a_u_net_trains_on_rows_in_pieces_and_gathers_no_image(eager: bool, learnt: bool) -> None:
    batches = [(torch.randn(1, 3, 32, 8), torch.randn(1, 2, 32, 8)) for _ in range(3)]
    with flow.use_cluster("flat"):
        moves = trained(UNet(learnt=learnt), squares, HEIGHT, S(2), batches, eager=eager)
    routes = [m.route for m in moves]
    ways = 4 if learnt else 5  # convolutions of 3 x 3, and perhaps what leans on neighbours on its way up
    assert routes.count("halo") == ways
    assert routes.count("halo_sum") == ways - 1  # images have no gradient
    assert not any("all_gather" in route or "all_to_all" in route for route in routes)


def test_a_u_net_trains_on_a_plane_in_four() -> None:
    plane = flow.placement("cpu:[0-3] as (height=2, width=2)")
    batches = [(torch.randn(1, 3, 16, 16), torch.randn(1, 2, 16, 16)) for _ in range(3)]
    with flow.use_cluster("flat"):
        trained(UNet(), squares, plane, (S(2), S(3)), batches, eager=False)


class Half(nn.Module):
    """Half of a small network: wide inside, so that its channels can be split."""

    def __init__(self, before: int, stride: int) -> None:
        super().__init__()
        self.up = nn.Conv2d(before, 8, 3, stride, 1)
        self.down = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.down(F.relu(self.up(x))))


class Whole(nn.Module):
    """Both halves and a head; the loss is its own, so that a pipeline can cut it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = Half(3, 1), Half(8, 2), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.two(F.max_pool2d(self.one(x), 3, 2, 1))
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


@pytest.mark.sweep
def test_five_ways_at_once_on_sixteen_ranks_are_one_device() -> None:
    """Data, rows, channels and layers in pieces, and micro-batches that go through the layers both ways."""
    model = Whole()
    alone = copy.deepcopy(model)
    grid = "(data=2, height=2, tensor=2)"
    first, last = flow.placement(f"cpu:[0-7] as {grid}"), flow.placement(f"cpu:[8-15] as {grid}")
    flow.nn.place(model.one, first)
    flow.nn.place(nn.ModuleList([model.two, model.head]), last)
    split = {"*.up.weight": {"tensor": S(0)}, "*.up.bias": {"tensor": S(0)}, "*.down.weight": {"tensor": S(1)}}
    flow.nn.shard(model, {**split, "*.down.bias": B, "head.*": B})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone)]
    with flow.use_cluster("flat"):
        step = flow.compile(model, lambda model, x, y: model(x, y), optimizers[0], micro_batches=2, schedule="chimera")
        for _ in range(2):
            x, y = torch.randn(4, 3, 32, 8), torch.randint(5, (4,))
            with flow.record() as moves:
                loss = step(flow.tensor(x, placement=first, sbp=(S(0), S(2), B)), y)
            optimizers[1].zero_grad()
            want = alone(x, y)
            want.backward()
            optimizers[1].step()
            torch.testing.assert_close(loss.full_tensor(), want.detach())
    assert any("halo" in m.route for m in moves)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        held: Any = mine
        torch.testing.assert_close(held.full_tensor(), other.detach())
