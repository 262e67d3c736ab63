"""Pieces: all processes together write each element once, and those that hold the same write alike."""

from collections.abc import Callable

import pytest
import torch

import sbpflow as flow
from sbpflow.nn.files.pieces import SMALL, Shares, cut, intersection, sizes_of
from sbpflow.sbp import Layout
from sbpflow.sbp.state import State

GRID = flow.placement("cpu:[0-5] as (a=2, b=3)")
STATES = {
    "B": State(((), ())),
    "S(0)": State(((0,), ())),
    "S(1)": State(((), (1,))),
    "S(0), S(1)": State(((0,), (1,))),
    "nested": State(((1, 0), ())),
    "a hole": State(((-3, 0), ())),
    "a hole inside": State(((0, -2, 1), ())),
    "strided along both": State(((-2, 0), (-2, 1))),
}
SHAPES = [(13, 8), (1, 1), (2, 700), (600, 40), (0, 4), (5, 0)]
OWNERS: dict[str, Callable[[int], int]] = {
    "one process": lambda rank: 0,
    "a process a rank": lambda rank: rank,
    "two processes": lambda rank: rank // 3,
}


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", STATES)
def test_each_element_is_written_once_by_one_who_has_it(name: str, shape: tuple[int, ...], owner: str) -> None:
    of, process = Layout(GRID, STATES[name], shape, torch.float32), OWNERS[owner]
    found = Shares(process).of(of)
    times, held = torch.zeros(shape), torch.zeros(6, *shape, dtype=torch.bool)
    for rank in GRID.flat:
        rows, columns = ([i for lo, hi in dim for i in range(lo, hi)] for dim in of.spans(rank))
        held[process(rank)][
            torch.tensor(rows, dtype=torch.int64)[:, None], torch.tensor(columns, dtype=torch.int64)
        ] = 1
    for member, regions in found.items():
        for region in regions:
            inside = tuple(slice(lo, hi) for lo, hi in region)
            times[inside] += 1
            assert held[member][inside].all()
            assert 0 not in sizes_of(region) or not of.numel
    assert bool((times == 1).all())
    assert sum(map(len, found.values())) >= 1  # an empty tensor too has a name and a shape


def test_replicas_share_alike() -> None:
    of = Layout(GRID, State(((0,), ())), (1200, 64), torch.float32)
    shares = Shares(lambda rank: rank)
    sizes = [sum(sizes_of(r)[0] * sizes_of(r)[1] for r in regions) for regions in shares.of(of).values()]
    assert sizes == [1200 * 64 // 6] * 6


def test_what_is_small_goes_to_who_had_least() -> None:
    shares = Shares(lambda rank: rank)
    had = dict.fromkeys(range(6), 0)
    for number in range(60):
        of = Layout(GRID, State(((),)), (number % 7 + 1,), torch.float32)
        ((member, ((region,),)),) = shares.of(of).items()
        had[member] += region[1]
    assert max(had.values()) - min(had.values()) <= 7
    assert max(had.values()) * 4 < SMALL


def test_a_number_has_one_writer() -> None:
    of = Layout(GRID, State(()), (), torch.float32)
    ((_, regions),) = Shares(lambda rank: rank).of(of).items()
    assert regions == [()]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("region", [((2, 5), (0, 40)), ((0, 9),), ((3, 4), (1, 3)), ()], ids=str)
def test_a_cut_covers_its_box(region: tuple[tuple[int, int], ...], parts: int) -> None:
    found = cut(region, parts)
    assert len(found) <= max(parts, 1)
    size = torch.Size(sizes_of(region)).numel()
    sizes = [torch.Size(sizes_of(each)).numel() for each in found]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= max(size / max(sizes_of(region), default=1), size / parts / 16)
    assert all(intersection(a, b) is None for a in found for b in found if a is not b)


def test_a_box_of_nothing_is_cut_along_a_dim_that_has_something_and_is_never_none() -> None:
    assert cut(((0, 0), (0, 4)), 2) == [((0, 0), (0, 2)), ((0, 0), (2, 4))]
    assert cut(((3, 3),), 2) == [((3, 3),)]
    assert cut(((0, 0), (2, 2)), 3) == [((0, 0), (2, 2))]
