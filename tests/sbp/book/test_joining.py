"""Joining and taking apart: all dims but one pass, and the parts are linear together."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.sbp.check import check_rule

torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
F64 = torch.float64
X, Y = torch.randn(4, 5, 6, dtype=F64), torch.randn(4, 3, 6, dtype=F64)
LINE = torch.randn(5, dtype=F64)
CALLS: list[tuple[Any, ...]] = [
    ("cat", [X, Y], 1), ("cat", [X, Y, X], -2), ("cat", [LINE, LINE + 1]), ("stack", [X, X + 1], 1),
    ("cat", [X, torch.empty(0, dtype=F64)], 0), ("stack", [LINE, LINE * 2], -1), ("vstack", [X, X + 1]),
    ("hstack", [X, Y]), ("hstack", [LINE, LINE * 3]), ("dstack", [X, X * 2]),
    ("split.Tensor", X, 2, 1), ("split_with_sizes", X, [1, 4, 1], -1), ("chunk", X, 3, 1), ("unbind.int", Y, 1),
    ("tensor_split.sections", X, 3, 1), ("tensor_split.indices", X, [1, 4], 2),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_the_rule_is_right_and_complete(call: tuple[Any, ...]) -> None:
    report = check_rule(*call)
    assert not report.wrong
    assert not report.missing


@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_meshes_split_along_each_dim(indexing: str) -> None:
    """Each result is linear in one tensor only, which a match cannot say, so that some signatures are missing."""
    report = check_rule("meshgrid.indexing", [LINE, X[0, 0]], indexing=indexing)
    assert not report.wrong
    assert all("S" not in text for text in report.missing)


CUTS: dict[str, Callable[..., Any]] = {
    "chunk": lambda x, dim: x.chunk(2, dim),
    "unsafe_chunk": lambda x, dim: torch.unsafe_chunk(x, 2, dim),
    "split": lambda x, dim: x.split(2, dim),
    "unsafe_split": lambda x, dim: torch.unsafe_split(x, 2, dim),
    "split in sizes": lambda x, dim: x.split([x.shape[dim] // 2] * 2, dim),
    "tensor_split": lambda x, dim: x.tensor_split(2, dim),
    "hsplit": lambda x, dim: x.hsplit(2),
    "vsplit": lambda x, dim: x.vsplit(2),
}
SBPS: list[Any] = [B, P, S(0), S(1)]
GRIDS = [(flow.placement("cpu", range(ranks)), 1) for ranks in (2, 4)] + [(flow.placement("cpu", [[0, 1], [2, 3]]), 2)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_parts_of_an_empty_tensor_have_their_shapes(shape: tuple[int, ...], name: str) -> None:
    for (where, axes), dim in product(GRIDS, range(2)):
        wanted = [part.shape for part in CUTS[name](torch.zeros(shape), dim)]
        for sbp in product(SBPS, repeat=axes):
            parts = CUTS[name](flow.zeros(shape, placement=where, sbp=sbp), dim)
            assert [part.shape for part in parts] == [part.full_tensor().shape for part in parts] == wanted, sbp
