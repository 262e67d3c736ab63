"""Regions: runs of ops that a compiler makes one kernel of."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpflow.nn.graph.capture.trace import trace
from sbpflow.sbp.kernels.fused import FusedOp, fused_ops
from sbpflow.sbp.kernels.kernels import kernels_of


class Between(nn.Module):
    """Two products, between which there is a norm of a sum; the sum is read behind the second product as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.first(x)
        made: Tensor = y + self.second(F.gelu(self.norm(y).view(2, 2, 4)).view(4, 4))
        return made


def regions(model: nn.Module, *args: Tensor) -> tuple[list[str], list[FusedOp | None]]:
    logical, _ = trace(model, args, {}, {"": model})
    calls = [logical.call(op) for op in logical.ops]
    return [call.name for call in calls], fused_ops(logical, calls)


def test_a_region_reads_from_outside_once_and_writes_what_is_read_outside() -> None:
    names, found = regions(Between(), torch.ones(4, 4))
    kinds = dict(zip(names, found, strict=True))
    fused = [(name, of) for name, of in zip(names, found, strict=True) if of]
    assert [name for name, _ in fused] == ["add.Tensor", "layer_norm", "gelu", "add.Tensor"]
    first, norm, gelu, last = (of for _, of in fused)
    third = 1 / 3
    assert first == FusedOp((True, True), (True,), third)  # read by the last sum, behind a product
    assert norm == FusedOp((False, True, True), (False,), third)
    assert gelu == FusedOp((False,), (True,), third)
    assert last == FusedOp((True, True), (True,), 1.0)
    assert kinds["linear"] is None


def test_a_product_is_in_no_region_and_neither_is_a_look_up() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    names, found = regions(model, torch.zeros(3, dtype=torch.long))
    assert (names, found) == (["embedding", "linear"], [None, None])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Between() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_equal_blocks_have_equal_regions() -> None:
    names, found = regions(Blocks(), torch.ones(4, 4))
    many = len(names) // 4
    assert found[:many] == found[many : 2 * many] == found[3 * many : 4 * many]


def test_a_region_counts_one_launch_and_its_ends() -> None:
    model = Between()
    logical, _ = trace(model, (torch.ones(4, 4),), {}, {"": model})
    calls = [logical.call(op) for op in logical.ops]
    fused = fused_ops(logical, calls)
    kernels = [of.of(kernels_of(call)) for call, of in zip(calls, fused, strict=True) if of and of.share < 1]
    assert round(sum(each.forward.launches for each in kernels), 9) == 1
    assert [each.forward.traffic for each in kernels] == [(1, 1, 1), (0, 1, 1, 0), (0, 1)]
