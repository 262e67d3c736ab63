"""Skip connections: what is done to them outside of layers is done in a chunk of layers, where the least is sent."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow

WIDTH = 4


class Stack(nn.Module):
    """Layers one behind the other, and what a function does around them."""

    def __init__(self, count: int, way: "Callable[[nn.ModuleList, Tensor], Tensor]") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)).double()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.layers, x)


def around(use: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    """A way in which the first layer's output is used behind the last."""

    def way(layers: nn.ModuleList, x: Tensor) -> Tensor:
        y = first = layers[0](x)
        for layer in layers[1:]:
            y = layer(y)
        return use(y, first)

    return way


def each(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x) + 0.1 * x
    return x


def unet(layers: nn.ModuleList, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    for number, layer in enumerate(layers):
        if number >= len(layers) // 2:
            x = x + 0.5 * kept.pop()
        x = layer(x)
        if number < len(layers) // 2:
            kept.append(x)
    return x


def early(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """A gate from the first layer, computed before the others, is used in the middle: it is small before it is wide."""
    x = layers[0](x)
    gate = torch.sigmoid(x.mean(-1, keepdim=True).repeat(1, WIDTH) * 0.5)
    for number, layer in enumerate(layers[1:], 1):
        x = layer(x) * gate if number == len(layers) // 2 else layer(x)
    return x


WAYS: dict[str, Callable[[nn.ModuleList, Tensor], Tensor]] = {
    "scaled": around(lambda y, first: y + first * 0.5),
    "scaled_first": around(lambda y, first: first * 0.5 + y),
    "gated": around(lambda y, first: y * torch.sigmoid(first)),
    "gated_and_scaled": around(lambda y, first: y * torch.sigmoid(first) + torch.tanh(first * 0.5)),
    "narrow": around(lambda y, first: y.mean(-1, keepdim=True) + first * 0.5),
    "each": each,
    "unet": unet,
    "early": early,
}


def sent(way: str, schedule: str, stages: int, count: int) -> int:
    """The bytes that a step sends from stage to stage; it does what one device does."""
    model = Stack(count, WAYS[way])
    plain, x = copy.deepcopy(model), torch.randn(8, WIDTH).double()
    flow.nn.pipeline(model.layers, [flow.placement("cpu", [rank]) for rank in range(stages)], schedule)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), torch.ones_like(x))

    step = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=4, schedule=schedule)
    with flow.record() as moves:
        loss = step(x)
    expected = loss_fn(plain, x)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(loss.full_tensor(), expected.detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-10, atol=1e-12)  # type: ignore[attr-defined]
    return sum(move.bytes for move in moves if move.op == "hop")


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (3, 6)])
@pytest.mark.parametrize("schedule", ["interleaved", "breadth_first", "zb_v"])
@pytest.mark.parametrize("way", WAYS)
def test_an_op_on_a_skip_connection_opens_no_chunk(way: str, schedule: str, stages: int, count: int) -> None:
    assert sent(way, schedule, stages, count)


@pytest.mark.parametrize(
    ("way", "stages", "values"),
    # Forward and backward, in numbers of a row: between layers, and then on the skip.
    [
        ("scaled", 3, 4 * WIDTH + 2 * WIDTH),
        ("scaled", 2, 2 * WIDTH),  # the second layer takes it anyway
        ("scaled_first", 3, 4 * WIDTH + 2 * WIDTH),
        ("gated_and_scaled", 3, 4 * WIDTH + 2 * WIDTH),
        ("narrow", 3, 4 * WIDTH + 2 * WIDTH),
        ("early", 4, 6 * WIDTH + 2),
    ],
)
def test_the_least_that_a_skip_connection_can_send(way: str, stages: int, values: int) -> None:
    """Two gates of one value are made where both are used; a wide one of a narrow value behind that."""
    assert sent(way, "1f1b", stages, stages) == values * 8 * torch.float64.itemsize
