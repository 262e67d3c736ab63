"""Placements: equal ones are one object, they index as numpy does, groups are the rows of a transpose."""

import copy
import gc
import itertools
import pickle
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import EllipsisType

import numpy as np
import pytest
import torch

from sbpflow.placement import Placement, PlacementError, placement
from tests.ranks import Fresh

NAMES = ("data", "tensor", "pipe", "größe")


def random_placement(seed: int) -> Placement:
    dice = random.Random(seed)
    shape = tuple(dice.randint(1, 4) for _ in range(dice.randint(1, 4)))
    size = int(np.prod(shape))
    ranks = dice.choice([list(range(size)), dice.sample(range(2 * size), size)])
    names = dice.choice([None, NAMES[: len(shape)]])
    return placement(dice.choice(["cpu", "cuda"]), np.reshape(ranks, shape), names)


@pytest.fixture(params=range(60))
def grid(request: pytest.FixtureRequest) -> Placement:
    return random_placement(request.param)


def test_equal_values_are_one_object() -> None:
    p = placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
    assert p is placement("cpu", np.arange(4).reshape(2, 2), ["data", "tensor"])
    assert p is placement("cpu", torch.arange(4).reshape(2, 2), ("data", "tensor"))
    assert p is placement("cpu", ((np.int64(0), 1), range(2, 4)), ("data", "tensor"))
    assert p is placement("cpu:[0-3] as (data=2, tensor=2)")
    assert p is placement("cpu:[0-3] as (2, 2)", names=("data", "tensor"))


@pytest.mark.parametrize(
    "other",
    [
        "cuda:[0-3] as (data=2, tensor=2)",
        "cpu:[0-3] as (tensor=2, data=2)",
        "cpu:[0-3] as (2, 2)",
        "cpu:[0-3]",
    ],
)
def test_different_values_are_different_objects(other: str) -> None:
    assert placement("cpu:[0-3] as (data=2, tensor=2)") != placement(other)


def test_equality_and_hash_are_those_of_identity() -> None:
    assert Placement.__eq__ is object.__eq__
    assert Placement.__hash__ is object.__hash__


def test_text_and_ranks_and_copies_give_the_same_object(grid: Placement) -> None:
    assert placement(str(grid)) is grid
    assert eval(repr(grid), {"placement": placement}) is grid
    assert placement(grid.type, grid.ranks, grid.names) is grid
    assert pickle.loads(pickle.dumps(grid)) is grid
    assert copy.deepcopy(grid) is copy.copy(grid) is grid


def read_and_written(pickled: bytes) -> bytes:
    return pickle.dumps(pickle.loads(pickled))


def test_pickle_returns_home_from_another_process(fresh: Fresh) -> None:
    p = placement("cuda", [[4, 5], [0, 1]], names=("data", "tensor"))
    (there,) = fresh(1, read_and_written, pickle.dumps(p))
    assert there.answer is not None, there.stderr
    assert pickle.loads(there.answer.value) is p


def test_threads_that_ask_at_once_get_one_object() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda k: placement("cpu", range(1000 + k // 8)), range(64)))
    assert len(set(map(id, made))) == len({p.size for p in made}) == 8


def test_a_placement_nobody_holds_is_forgotten() -> None:
    gone = weakref.ref(placement("cpu", [987654]))
    gc.collect()
    assert gone() is None


def test_attributes_describe_the_grid(grid: Placement) -> None:
    array = np.array(grid.ranks)
    assert grid.shape == array.shape
    assert grid.flat == tuple(grid) == tuple(array.ravel())
    assert (grid.size, grid.ndim, len(grid)) == (array.size, array.ndim, array.size)


def test_a_placement_does_not_change() -> None:
    p = placement("cpu:[0-3]")
    with pytest.raises(AttributeError, match="does not change; make another"):
        p.size = 3
    with pytest.raises(AttributeError, match="does not change; 'size' cannot be deleted"):
        del p.size
    assert p.size == 4


def test_a_single_int_is_a_grid_of_one() -> None:
    assert placement("cpu", 3) is placement("cpu", [3]) is placement("cpu:[3]")


@pytest.mark.parametrize("seed", range(100))
def test_indexing_is_numpy_s(seed: int) -> None:
    p, dice = random_placement(seed), random.Random(seed)
    index: list[int | slice | EllipsisType] = []
    for size in p.shape:
        lo = dice.randrange(size)
        ways: list[int | slice] = [
            lo,
            lo - size,
            slice(lo, None),
            slice(None, None, -1),
            slice(None, lo + 1, 2),
        ]
        index.append(dice.choice(ways))
    cut = sorted(dice.choices(range(p.ndim + 1), k=2))
    parts = (*index[: cut[0]], ..., *index[cut[1] :])
    parts = parts if dice.random() < 0.5 else parts[: cut[0]]
    expected, found = np.array(p.ranks)[parts], p[parts]
    assert found.flat == tuple(expected.ravel())
    assert found.shape == (expected.shape or (1,))


def test_indexing_keeps_the_names_of_the_axes_it_keeps() -> None:
    p = placement("cpu:[0-7] as (pipe=2, data=2, tensor=2)")
    assert p[:, 1].names == ("pipe", "tensor")
    assert p[1, 1, 1] is placement("cpu:[7]")
    assert p[...] is p[:] is p[()] is p


@pytest.mark.parametrize("axis", range(3))
def test_at_is_indexing_by_name(axis: int) -> None:
    p = placement("cpu:[0-23] as (pipe=2, data=3, tensor=4)")
    index = [slice(None)] * axis
    assert p.names is not None
    assert p.at(**{p.names[axis]: 1}) is p[*index, 1]
    assert p.at(**{p.names[axis]: slice(1, None)}) is p[*index, 1:]
    assert p.at() is p


def test_an_axis_may_be_called_self() -> None:
    assert placement("cpu:[0-1] as (self=2)").at(self=1) is placement("cpu:[1]")


def test_axis_finds_names_and_indices_from_either_end() -> None:
    p = placement("cpu:[0-3] as (data=2, tensor=2)")
    assert [p.axis(a) for a in ("data", "tensor", 0, 1, -1, -2)] == [0, 1, 0, 1, 1, 0]


def test_coords_find_each_rank(grid: Placement) -> None:
    array = np.array(grid.ranks)
    assert all(array[grid.coords(rank)] == rank and rank in grid for rank in grid.flat)
    assert max(grid.flat) + 1 not in grid


def test_groups_are_the_rows_of_the_transposed_grid(grid: Placement) -> None:
    for count in range(grid.ndim + 1):
        for axes in itertools.permutations(range(grid.ndim), count):
            rest = [a for a in range(grid.ndim) if a not in axes]
            rows = np.array(grid.ranks).transpose(*rest, *axes).reshape(-1, int(np.prod([grid.shape[a] for a in axes])))
            assert grid.groups(axes) == tuple(map(tuple, rows.tolist()))
            assert all(grid.group(axes, rank) == group for group in grid.groups(axes) for rank in group)


def test_groups_count_axes_from_either_end() -> None:
    p = placement("cpu:[0-5] as (2, 3)")
    assert p.groups((-1,)) == p.groups((1,))


def test_groups_are_computed_once() -> None:
    p = placement("cpu:[0-5] as (2, 3)")
    assert p.groups((1,)) is p.groups((1,))
    assert p.group((1,), 4) is p.groups((1,))[1]


def test_reshape_and_names_keep_the_ranks() -> None:
    p = placement("cpu:[3, 1, 2, 0]")
    assert p.reshape((2, 2), ("a", "b")) is p.reshape((2, 2)).with_names(("a", "b"))
    assert p.reshape((2, 2)).reshape((4,)) is p
    assert p.with_names(("x",)).with_names(None) is p


def test_same_ranks_looks_past_the_grid() -> None:
    p = placement("cpu:[0-3]")
    assert p.same_ranks(placement("cpu:[3, 2, 1, 0] as (2, 2)"))
    assert not p.same_ranks(placement("cuda:[0-3]"))
    assert not p.same_ranks(placement("cpu:[0-4]"))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(4), "cpu:[0-3]"),
        ([0, 2, 1, 3], "cpu:[0, 2, 1, 3]"),
        ([*range(4), *range(8, 12)], "cpu:[0-3, 8-11]"),
        ([[0, 2], [1, 3]], "cpu:[0, 2, 1, 3] as (2, 2)"),
        ([5], "cpu:[5]"),
        ([[5]], "cpu:[5] as (1, 1)"),
    ],
)
def test_text_shortens_ascending_runs(ranks: range | list[int] | list[list[int]], text: str) -> None:
    assert str(placement("cpu", ranks)) == text


P = 'placement("cpu:[0-7] as (pipe=2, data=4)")'
WHOLE = "\n  give an int, a range, nested lists of ints, or an integer array"
INDEXED = "a placement is indexed by ints, slices and `...`, not {}\n  in " + P


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda p: p.at(pip=0), f"no axis 'pip' in {P}\n  its axes are pipe, data\n  did you mean 'pipe'?"),
        (lambda p: p.axis("x"), f"no axis 'x' in {P}\n  its axes are pipe, data"),
        (lambda p: p.axis(2), f"no axis 2 in {P}\n  its axes are pipe, data"),
        (
            lambda p: p.with_names(None).axis("x"),
            "no axis 'x' in placement(\"cpu:[0-7] as (2, 4)\")\n"
            "  its 2 axes have no names: use 0 to 1, or name them, p.with_names(...)",
        ),
        (
            lambda p: p.with_names(None).at(data=0),
            'at(data) needs named axes\n  placement("cpu:[0-7] as (2, 4)") has no names\n'
            "  index it by position, p[0], or name its axes first, p.with_names(...)",
        ),
        (lambda p: p.at(data=4), f"position 4 is out of range on axis 'data' of size 4\n  in {P}"),
        (lambda p: p[-3], f"position -3 is out of range on axis 'pipe' of size 2\n  in {P}"),
        (lambda p: p[0, 0, 0], f"index (0, 0, 0) has too many parts\n  {P} has 2 axes"),
        (lambda p: p[..., ...], f"index (Ellipsis, Ellipsis) has too many parts\n  {P} has 2 axes"),
        (lambda p: p[1:1], f"index slice(1, 1, None) selects no rank\n  in {P}"),
        (lambda p: p[True], INDEXED.format("True")),
        (lambda p: p[None], INDEXED.format("None")),
        (lambda p: p[[0]], INDEXED.format("[0]")),
        (lambda p: p.coords(9), f"rank 9 is not in {P}"),
        (lambda p: p.group((0,), 9), f"rank 9 is not in {P}"),
        (lambda p: p.groups((0, -2)), f"axes (0, -2) name an axis twice\n  in {P}"),
        (lambda p: p.groups((2,)), f"no axis 2 in {P}\n  its axes are pipe, data"),
        (lambda p: p.reshape((3,)), f"cannot reshape {P} to (3,)\n  it has 8 ranks"),
        (lambda p: p.reshape((-2, -4)), f"cannot reshape {P} to (-2, -4)\n  it has 8 ranks"),
        (
            lambda p: p.with_names("ab"),
            "names are a tuple, one for each axis\n  found the text 'ab'\n  try ('ab',)",
        ),
        (lambda p: p.with_names(["a"]), "2 axes of shape (2, 4) need as many names\n  found 1: ('a',)"),
        (lambda p: p.with_names(["a", "a"]), "axis names must differ\n  found a, a"),
        (
            lambda p: p.with_names(["a", "b-c"]),
            "an axis name is a Python identifier, as in p.at(data=0)\n  found 'b-c'",
        ),
        (
            lambda p: p.with_names(["a", "if"]),
            "an axis name is a Python identifier, as in p.at(data=0)\n  found 'if'",
        ),
        (lambda p: placement("cpu", []), "a placement needs at least one rank\n  found ranks []"),
        (lambda p: placement("cpu", [[], []]), "a placement needs at least one rank\n  found ranks [[], []]"),
        (
            lambda p: placement("cpu", [[0], [1, 2]]),
            "the ranks are ragged\n  parts of [[0], [1, 2]] have shapes (1,) and (2,)\n  make all parts alike",
        ),
        (lambda p: placement("cpu", [0, -1]), "ranks count from 0\n  found -1 in [0, -1]"),
        (
            lambda p: placement("cpu", [0, 1, 0]),
            "a placement holds each rank once\n  found rank 0 twice in [0, 1, 0]",
        ),
        (lambda p: placement("cpu", [True]), "ranks are whole numbers\n  found True of type bool" + WHOLE),
        (
            lambda p: placement("cpu", np.array([0.5])),
            "ranks are whole numbers\n  found 0.5 of type float" + WHOLE,
        ),
        (
            lambda p: placement("cpu", np.array([True])),
            "ranks are whole numbers\n  found True of type bool" + WHOLE,
        ),
        (
            lambda p: placement("cpu", torch.ones(1)),
            "ranks are whole numbers\n  found 1.0 of type float" + WHOLE,
        ),
        (lambda p: placement("cpu", ["0"]), "ranks are whole numbers\n  found '0' of type str" + WHOLE),
        (
            lambda p: placement("cuba", 0),
            "unknown device type 'cuba'\n  known are cpu, cuda\n  did you mean 'cuda'?",
        ),
        (
            lambda p: placement("gpu", 0),
            "unknown device type 'gpu'\n  known are cpu, cuda\n  did you mean 'cuda'?",
        ),
        (
            lambda p: placement("cpu:[0]", [0]),
            "ranks are given twice: in the text 'cpu:[0]' and as an argument\n  keep one of them",
        ),
    ],
)
def test_refusals_say_what_was_asked_and_found(ask: Callable[[Placement], object], message: str) -> None:
    with pytest.raises(PlacementError) as refused:
        ask(placement("cpu:[0-7] as (pipe=2, data=4)"))
    assert str(refused.value) == message
