"""Views keep every split that some state can say: against brute force over shapes, states and grids."""

import random
from itertools import permutations, product
from math import prod
from typing import Any

import pytest
import torch

from sbpflow.sbp.book.views import carried
from sbpflow.sbp.call import Call
from sbpflow.sbp.check import check_rule, check_way
from sbpflow.sbp.registry import find
from sbpflow.sbp.state import Factors, State, drop, spans

ATEN = torch.ops.aten
GRIDS = [(2,), (3,), (2, 2), (3, 2), (2, 2, 2)]
VIEWS = [
    ((8, 6), (2, 4, 6)), ((8, 6), (48,)), ((8, 6), (16, 3)), ((6, 4), (4, 6)), ((12,), (3, 4)), ((12,), (2, 1, 6)),
    ((2, 7), (14,)), ((14,), (2, 7)), ((7, 4), (7, 2, 2)), ((3, 7, 2), (21, 2)), ((3, 4, 5), (12, 5)), ((5, 1), (1, 5)),
    ((1, 4), (4,)), ((4,), (4, 1)), ((2, 2, 2), (4, 2)), ((2, 3, 4), (4, 6)), ((16,), (2, 2, 4)), ((4, 0), (0, 2)),
    ((2, 6), (3, 4)), ((4, 6), (6, 4)), ((1, 1), (1,)), ((3, 2, 4), (3, 8)), ((9, 4), (3, 12)),
]  # fmt: skip
CASES = [(shape, target, sizes) for shape, target in VIEWS for sizes in GRIDS]
Dims = tuple[Factors, ...]


def held(shape: tuple[int, ...], dims: Dims, sizes: tuple[int, ...]) -> list[list[int]]:
    """The oracle: the flat indices that each rank holds."""
    numbers, found = torch.arange(prod(shape)).reshape(shape), []
    for coords in product(*map(range, sizes)):
        part = numbers
        for d, (size, factors) in enumerate(zip(shape, dims, strict=True)):
            index = [i for lo, hi in spans(size, factors, coords, sizes) for i in range(lo, hi)]
            part = part.index_select(d, torch.tensor(index, dtype=torch.int64))
        found.append(part.flatten().tolist())
    return found


def states(shape: tuple[int, ...], sizes: tuple[int, ...], axes: tuple[int, ...]) -> list[Dims]:
    """These axes on any dims, nested in any order, after holes of any size."""
    found = []
    holes = [-k for k in range(2, prod(shape) + 1)]
    for order in permutations(axes):
        for where in product(range(len(shape)), repeat=len(axes)):
            for before in product([0, *holes], repeat=len(axes)):
                dims: list[Factors] = [()] * len(shape)
                for axis, d, hole in zip(order, where, before, strict=True):
                    dims[d] += (hole, axis) if hole else (axis,)
                if all(s % -h == 0 for s, f in zip(shape, dims, strict=True) for h in f if h < 0):
                    found.append(tuple(dims))
    return found


def some_state(rng: random.Random, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Dims:
    dims: list[Factors] = [()] * len(shape)
    for axis in rng.sample(range(len(sizes)), len(sizes)):
        dims[rng.randrange(len(shape))] += (axis,)
    gone = frozenset(axis for axis in range(len(sizes)) if rng.random() < 0.25)
    return tuple(drop(factors, gone, sizes) for factors in dims)


@pytest.mark.parametrize(("shape", "target", "sizes"), CASES, ids=str)
def test_what_is_carried_is_what_ranks_hold(shape: Any, target: Any, sizes: Any) -> None:
    rng = random.Random(0)
    for dims in {some_state(rng, shape, sizes) for _ in range(30)}:
        after = carried(shape, target, dims, sizes)
        if after is not None:
            assert held(shape, dims, sizes) == held(target, after, sizes), dims


@pytest.mark.parametrize(("shape", "target", "sizes"), [c for c in CASES if len(c[2]) < 3], ids=str)
def test_whatever_can_be_carried_is(shape: Any, target: Any, sizes: Any) -> None:
    rng = random.Random(0)
    for dims in {some_state(rng, shape, sizes) for _ in range(4)}:
        want = held(shape, dims, sizes)
        if carried(shape, target, dims, sizes) is None and all(want):  # ranks without elements are not worth it
            axes = tuple({f for factors in dims for f in factors if f >= 0})
            exact = [d for d in states(target, sizes, axes) if held(target, d, sizes) == want]
            assert not exact, dims


@pytest.mark.parametrize(("shape", "target", "sizes"), CASES, ids=str)
def test_ways_hold_and_gather_only_what_must_be(shape: Any, target: Any, sizes: Any) -> None:
    rng, x = random.Random(1), torch.randn(shape, dtype=torch.float64)
    out = x.view(target)
    for dims in [some_state(rng, shape, sizes) for _ in range(2)]:
        free = set(range(len(sizes))) - {f for factors in dims for f in factors}
        state = State(dims, tuple(free)[:1])
        ways: Any = find(Call(ATEN.view.default, (x, target), {}, (out,), (state,), sizes))
        assert ways
        for way in ways:
            assert check_way(ATEN.view.default, (x, target), {}, way, sizes) is None, (state, way)
            assert way.inputs[0].partial == way.outputs[0].partial == state.partial
        assert len(ways) == 1 or ways[0].inputs[0] != state


def test_only_the_axis_in_the_way_is_gathered() -> None:
    x = torch.randn(6, 4)
    call = Call(ATEN.reshape.default, (x, (4, 6)), {}, (x.reshape(4, 6),), (State(((0,), (1,))),), (2, 2))
    ways: Any = find(call)
    assert [(way.inputs[0].dims, way.outputs[0].dims) for way in ways] == [(((0,), ()), ((0,), ()))]


def test_an_axis_in_the_way_may_split_another_dim() -> None:
    x = torch.randn(4, 3, 2)
    call = Call(ATEN.reshape.default, (x, (4, 6)), {}, (x.reshape(4, 6),), (State(((), (0,), ())),), (2,))
    ways: Any = find(call)
    assert [way.inputs[0].dims for way in ways] == [((), (), ()), ((0,), (), ()), ((), (), (0,)), ((), (0,), ())]
    assert [bool(way.inputs[0].windows) for way in ways] == [False] * 3 + [True]  # who splits rows asks neighbours
    assert [way.outputs[0].dims for way in ways] == [((), ()), ((0,), ()), ((), (-3, 0)), ((), (0,))]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("view", ((-1, 4),)), ("view", ((6, 2, 2, 3),)), ("view", ((72,),)), ("reshape", ((6, -1),)),
        ("_unsafe_view", ((24, 3),)), ("flatten.using_ints", (1,)), ("unflatten.int", (1, (2, -1))),
    ],
    ids=str,
)  # fmt: skip
def test_the_rule_is_right_and_complete(name: str, args: tuple[Any, ...]) -> None:
    report = check_rule(name, torch.randn(6, 4, 3, dtype=torch.float64), *args)
    assert not report.wrong
    assert not report.missing
