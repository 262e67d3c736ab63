"""Small networks for images, and their training beside one device."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.boxing.graph.move_table import moves_of
from sbpflow.placement import Placement

F64 = torch.float64
FLAT = flow.cluster("flat")
# To send a byte takes as long as to read a thousand, and a message as long as thirty: so it is with large images.
LINKS = replace(
    FLAT,
    levels=tuple(replace(level, latency=30.0) for level in FLAT.levels),
    device=replace(FLAT.device, memory_bandwidth=1e3, flops=dict.fromkeys(FLAT.device.flops, 1e4)),
)


class Residual(nn.Module):
    """Two convolutions with batch norm and a way past them, perhaps at half the size."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.up = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.down = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))
        self.past = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.down(F.relu(self.norms[0](self.up(x)))))
        return F.relu(y + self.past(x))


class ResNet(nn.Module):
    """A stem with a pool, blocks, a mean over space and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 7, 2, 3, bias=False), nn.BatchNorm2d(6)
        self.blocks = nn.Sequential(Residual(6, 6), Residual(6, 8, 2))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        found: Tensor = self.head(self.pool(self.blocks(x)).flatten(1))
        return found


class UNet(nn.Module):
    """Down by pools and up by transposed convolution or interpolation, with what was there on the way."""

    def __init__(self, *, learnt: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.deep, self.last = nn.Conv2d(6, 6, 3, padding=2, dilation=2), nn.Conv2d(10, 2, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 6, 2, 2) if learnt else nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.first(x))
        deep = F.relu(self.deep(F.relu(self.second(F.max_pool2d(wide, 2)))))
        found: Tensor = self.last(torch.cat([wide, self.up(deep)], 1))
        return found


class Bordered(nn.Module):
    """Convolutions whose borders are taken from the image itself, columns of windows, and a maximum that adapts."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode=mode)
        self.second = nn.Conv2d(4, 4, 3, 2, 1, padding_mode=mode)
        self.columns = nn.Linear(4 * 3 * 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Of 16 x 4 places."""
        x = F.relu(self.first(x))
        x = self.second(x) + F.adaptive_max_pool2d(x, (9, 2))
        found: Tensor = self.columns(F.unfold(x, (3, 2), padding=(1, 0)).mT)
        return found


class Shifted(nn.Module):
    """Of rows of places: windows of four after a shift, seen as samples, and back; then every other place."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.last = nn.Linear(4 * 3, 4 * 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        count, width, _ = x.shape
        y = x.roll((-1, -2), (0, 1)).reshape(count // 4, 4, width, 3).permute(0, 2, 1, 3)
        y = torch.tanh(self.mix(y.reshape(-1, 12)))
        y = y.reshape(count // 4, width, 4, 3).transpose(1, 2).reshape(count, width, 3).roll((1, 2), (0, 1)) + x
        found: Tensor = self.last(torch.cat([y[0::2], y[1::2]], 2))
        return found


class Film(nn.Module):
    """Convolutions of films: down by pools of time and space, up by a transposed one and by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 4, (3, 3, 1), padding=(1, 1, 0)), nn.BatchNorm3d(4)
        self.deep, self.groups = nn.Conv3d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.up, self.last = nn.ConvTranspose3d(4, 4, 2, 2), nn.Conv3d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.norm(self.first(x)))
        deep = F.relu(self.groups(self.deep(F.max_pool3d(wide, 3, 2, 1))))
        near = F.interpolate(F.avg_pool3d(deep, (2, 2, 1)), scale_factor=(2, 2, 1), mode="trilinear")
        found: Tensor = self.last(torch.cat([wide, self.up(deep + near)], 1))
        return found


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def trained(model: nn.Module, loss_fn: Any, where: Placement, sbp: Any, batches: Any, *, eager: bool) -> Any:
    """Train beside one device, and hold losses, weights and statistics to it; the moves of the last step."""
    alone = copy.deepcopy(model)
    flow.nn.to_global(model, where)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, alone)]
    step = None if eager else flow.compile(model, loss_fn, optimizers[0], placement=where)
    for x, y in batches:
        split = flow.tensor(x, placement=where, sbp=sbp)
        with flow.record() as moves:
            if step is None:
                optimizers[0].zero_grad()
                loss: Any = loss_fn(model, split, y)
                loss.backward()
                optimizers[0].step()
            else:
                loss = step(split, y)
        optimizers[1].zero_grad()
        want = loss_fn(alone, x, y)
        want.backward()
        optimizers[1].step()
        torch.testing.assert_close(loss.full_tensor(), want.detach(), rtol=1e-9, atol=1e-9)
    held = model.state_dict()
    for name, other in alone.state_dict().items():
        torch.testing.assert_close(held[name].full_tensor(), other, rtol=1e-8, atol=1e-8)
    return moves


def planned(
    model: nn.Module, loss_fn: Any, plan: str, batches: Sequence[Mapping[str, Tensor] | Sequence[Tensor]]
) -> Any:
    """Train a graph of a plan beside one device by SGD, and hold losses and weights to it, and what is sent to what was
    predicted; the table of its moves."""
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    given = [each if isinstance(each, Mapping) else dict(zip("xy", each, strict=True)) for each in batches]
    wanted, losses = [], []
    for each in given:
        optimizers[1].zero_grad()
        loss = loss_fn(alone, **each)
        loss.backward()
        optimizers[1].step()
        wanted.append(loss.item())
    with flow.use_cluster(LINKS):
        step = flow.compile(model, loss_fn, optimizers[0], plan=plan)
        for each in given:
            with flow.record() as moves:
                losses.append(step(**each).item())
    torch.testing.assert_close(losses, wanted)
    for name, value in alone.named_parameters():
        mine: Any = dict(model.named_parameters())[name]
        torch.testing.assert_close(mine.full_tensor(), value)
    rows = moves_of(step.physical, step.planned.program.again)
    assert sum(move.bytes for move in moves) == sum(row.bytes * row.count for row in rows)
    return rows


def routes(moves: Any) -> set[str]:
    """The ways in which something is sent."""
    return {move.route.split(" ")[0].removesuffix("_once") for move in moves if move.bytes}
