"""Functions of lists: each tensor lies as it does, plain ones count as B, and numbers of a list come one by one."""

# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from tests.nn.either import LAYOUTS, Maker, X, Y, differs

LISTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, z: torch._foreach_add([x, x], [z, z]),
    "add to plain ones": lambda x, z: torch._foreach_add([z], [x]),
    "one plain pair": lambda x, z: torch._foreach_mul([x, z], [z, z]),
    "addcmul": lambda x, z: torch._foreach_addcmul([x], [z], [x], 2),
    "lerp": lambda x, z: torch._foreach_lerp([x], [z], 0.3),
    "a number": lambda x, z: torch._foreach_mul([x], torch.tensor(2.0, dtype=x.dtype)),
    "what broadcasts": lambda x, z: torch._foreach_add([x], [z[0]]),
    "in place": lambda x, z: torch._foreach_add_([x], [z]) and x,
    "copied": lambda x, z: (torch._foreach_copy_([x], [z]), x)[1],  # type: ignore[func-returns-value]
    "norm": lambda x, z: torch._foreach_norm([x, z]),
    "norm as an op": lambda x, z: torch.ops.aten._foreach_norm([x], 1),
    "norm as an overload": lambda x, z: torch.ops.aten._foreach_norm.Scalar([x]),
    "max": lambda x, z: torch._foreach_max([x]),
    "mul as an overload": lambda x, z: torch.ops.aten._foreach_mul.List([x], [z]),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_global_and_plain_tensors_give_what_plain_ones_do(name: str) -> None:
    assert not differs(lambda make: LISTS[name](make(X), Y.clone()))


def test_lists_of_plain_tensors_are_not_written_to() -> None:
    with pytest.raises(flow.SbpflowError, match="_foreach_add_ would write global tensors into plain ones"):
        torch._foreach_add_([Y.clone()], [Maker("S(0)")(X)])


@pytest.mark.parametrize("name", LAYOUTS)
def test_several_results_are_a_tuple_as_in_torch(name: str) -> None:
    x = Maker(name)(X)
    runs: list[Callable[[Tensor], Any]] = [
        lambda x: torch.atleast_1d(x, x),
        lambda x: torch.atleast_3d([x, x]),
        lambda x: x.split(2),
        lambda x: torch.ops.aten.split(x, 2),
        lambda x: torch.broadcast_tensors(x, x[0]),
    ]
    for run in runs:
        for _ in range(2):
            assert type(run(x)) is type(run(X))


def test_the_name_of_its_kind_is_that_of_its_values() -> None:
    x: Any = Maker("S(0)")(X)
    assert x.type() == X.type()
    assert x.type(torch.FloatTensor).dtype is torch.float32
    assert x.type("torch.LongTensor").dtype is torch.int64
