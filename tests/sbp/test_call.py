"""Walks over nested arguments: what they collect, replace and tell apart."""

import math
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from sbpflow.placement.structure import leaves
from sbpflow.sbp.call import Ref, fill, frozen, in_order, numbered, refs_in, renumbered, tensors_in

X, Y = torch.zeros(2), torch.ones(3)
Pair = namedtuple("Pair", "left right")
NESTED: dict[str, Any] = {
    "one": X,
    "a list": [X, 3, Y],
    "in each other": ({"mask": [X]}, (Y, "mean", None)),
    "a named tuple": Pair(X, [Y]),
    "torch's own": torch.return_types.max((X, Y)),
    "none": (1, "x"),
}


@pytest.mark.parametrize("name", NESTED)
def test_what_is_taken_out_can_be_put_back(name: str) -> None:
    tensors = tensors_in(NESTED[name])
    named = numbered(NESTED[name])
    back = fill(named, tensors)
    assert refs_in(named) == list(range(len(tensors)))
    assert not tensors_in(named)
    assert type(back) is type(NESTED[name])
    assert [*map(id, tensors_in(back))] == [*map(id, tensors)]


def test_some_numbers_change_and_the_others_stay() -> None:
    assert renumbered(([Ref(0)], {"other": Ref(3)}, 0), {0: 7}) == ([Ref(7)], {"other": Ref(3)}, 0)


def test_a_number_of_a_value_is_no_number_in_an_argument() -> None:
    assert leaves([Ref(4), 5], (Ref, int)) == [Ref(4), 5]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (1, True), ([1], (1,)), (0.0, -0.0), (0j, -0j), ({1}, {True}), (frozenset([0.0]), frozenset([-0.0])),
        (np.float32(0.0), np.float32(-0.0)), (Ref(1), (1,)), (slice(1), slice(None, 1, 1)),
    ],
)  # fmt: skip
def test_keys_tell_apart_what_python_holds_equal(one: Any, other: Any) -> None:
    assert frozen([one]) != frozen([other])
    assert {frozen({"x": one}): 1}[frozen({"x": one})]


def test_keys_are_equal_where_arguments_are() -> None:
    assert frozen({"p": math.nan, "dim": [0]}) == frozen({"dim": [0], "p": float("nan")})


def test_arguments_by_name_stand_as_in_the_schema() -> None:
    assert list(in_order(torch.ops.aten.clamp.default, {"max": 2, "min": 1})) == ["min", "max"]
