"""Two axes at once: whatever ways are found for inputs that lie anyhow, they hold."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from sbpflow.sbp.call import Call, tensors_in
from sbpflow.sbp.check import check_way
from sbpflow.sbp.choose import candidates
from sbpflow.sbp.registry import find
from sbpflow.sbp.schema import named_op
from sbpflow.sbp.state import Factors, State
from tests.sbp.book import (
    test_attention,
    test_dims,
    test_indexing,
    test_joining,
    test_losses,
    test_slices,
    test_writing,
)
from tests.sbp.book.windows import test_convolution

CALLS: list[tuple[Any, ...]] = [
    *test_dims.CALLS, *test_slices.CALLS, *test_indexing.CALLS, *test_writing.CALLS, *test_joining.CALLS,
    *test_losses.PAIRS, *test_convolution.CALLS,
    *((test_attention.SDPA, *args) for args, kwargs in test_attention.CALLS if not kwargs),
]  # fmt: skip


def some_state(rng: random.Random, x: Tensor, axes: list[int]) -> State:
    """Each axis, in any order, splits a dim or carries addends or does nothing."""
    dims: list[Factors] = [()] * x.dim()
    partial = []
    for axis in rng.sample(axes, len(axes)):
        d = rng.randrange(-2, x.dim())
        if d >= 0:
            dims[d] += (axis,)
        elif d == -1 and x.is_floating_point():
            partial.append(axis)
    return State(tuple(dims), tuple(sorted(partial)))


@pytest.mark.sampled(30)
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_ways_hold_on_two_axes(call: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
    rng, op, args = random.Random(0), named_op(call[0]), call[1:]
    outputs = tuple(tensors_in(op(*(x.clone() if isinstance(x, torch.Tensor) else x for x in args))))
    for _ in range(2):
        states = tuple(some_state(rng, x, [0, 1]) for x in tensors_in(list(args)))
        asked = Call(op, args, {}, outputs, states, sizes)
        for way in rng.sample(ways := candidates(asked, find(asked)), min(3, len(ways))):
            assert check_way(op, args, {}, way, sizes) is None, (states, way)
