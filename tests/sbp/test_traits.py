"""Traits of ops: their rows are of ops that torch has, and say what torch does."""

import re

import pytest
import torch

import sbpflow.nn.graph.choose.decompose  # noqa: F401 - registers an op of our own
from sbpflow.sbp import traits as module
from sbpflow.sbp.traits import VIEWS, named, traits

PLACES = {"view.dtype": (torch.int32,), "type_as": (torch.zeros(1),), "to": (torch.float32,), "_to_copy": ()}
PLACES |= {"expand": ([2, 3, 4],), "expand_as": (torch.zeros(2, 3, 4),), "broadcast_to": ([2, 3, 4],)}
X = torch.randn(2, 3, 4)


def overloads(name: str) -> dict[str, torch._ops.OpOverload]:
    library, _, op = name.rpartition("::")
    packet = getattr(getattr(torch.ops, library or "aten"), op.partition(".")[0])
    return {overload: getattr(packet, overload) for overload in packet.overloads()}


@pytest.mark.parametrize("name", module._rows)
def test_every_row_is_of_an_op(name: str) -> None:
    found = overloads(name.removesuffix("*"))
    assert found
    assert name.endswith("*") or (name.partition(".")[2] or "default") in found


def test_every_trait_is_told() -> None:
    told = set(re.findall(r"\w+", "\n".join(re.findall(r"(?:^|`)([a-z, ]+?)(?:  |`)", module.__doc__ or "", re.M))))
    assert {trait for said in module._rows.values() for trait in said} <= told


def test_an_overload_has_its_own_row_or_that_of_all() -> None:
    assert traits("split.Tensor") == traits("split") == {"cut", "pieces"}
    assert "regrouped" not in traits("view.dtype")
    assert "unread" in traits("bernoulli.p")
    assert "unread" not in traits("bernoulli")
    assert not traits("randint_like.Tensor")  # reads its bounds from one
    assert not traits("mm")


@pytest.mark.parametrize("name", named("random"))
def test_what_is_random_draws_by_a_generator(name: str) -> None:
    assert any(torch.Tag.nondeterministic_seeded in op.tags for op in overloads(name).values())


@pytest.mark.parametrize("name", [n for trait in ("same", "permuted", "spread") for n in named(trait)])
def test_what_shows_its_input_otherwise_has_all_its_values(name: str) -> None:
    square = X[0, :2, :2] if name in ("t", "matrix_H", "mT", "mH", "numpy_T", "adjoint") else X
    dims = {"transpose": (0, 1), "swapaxes": (0, 1), "swapdims": (0, 1), "permute": ([2, 0, 1],)}
    dims |= {"movedim": (0, 1), "moveaxis": (0, 1)}
    made = getattr(torch.ops.aten, name)(square, *dims.get(name, PLACES.get(name, ())))
    assert traits(name) & VIEWS
    assert torch.equal(made.flatten().sort().values, square.flatten().sort().values)
