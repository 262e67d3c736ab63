"""Missing elements: those of the worst placed rank, for even pieces and rank by rank."""

from math import prod

import pytest

from sbpflow.boxing.routes.missing import missing, truly_missing
from sbpflow.sbp import Layout
from tests.boxing.oracle import GRIDS, broken, every_pair, grid, held, holed, ordered, sample


@pytest.mark.parametrize("axes", [(4,), (2, 2), (2, 4), (3, 2), (2, 2, 2)], ids=str)
def test_missing_is_what_the_worst_rank_lacks(axes: tuple[int, ...]) -> None:
    shape = (48, 48)
    layouts = [lies for lies in [*ordered(grid(*axes), shape), *holed(grid(*axes), shape)] if not lies.state.partial]
    pairs = sample(every_pair(layouts), 300, axes)
    assert broken(pairs, counts_what_is_missing) == []


def counts_what_is_missing(src: Layout, dst: Layout) -> None:
    found = missing(src.shape, src.state.dims, dst.state.dims, src.placement.shape)
    want = max(lacks(src, dst, rank) for rank in src.placement.flat)
    assert found == pytest.approx(want), f"{found} for {want}"


def lacks(src: Layout, dst: Layout, rank: int) -> int:
    """Elements that the rank needs and does not hold."""
    have, need = ([{*index.tolist()} for index in held(lies, rank)] for lies in (src, dst))
    return prod(map(len, need)) - prod(len(h & n) for h, n in zip(have, need, strict=True))


def test_who_holds_all_lacks_nothing_and_who_holds_half_lacks_half() -> None:
    assert missing((8,), ((),), ((0,),), (2,)) == 0
    assert missing((8,), ((0,),), ((),), (2,)) == 4


@pytest.mark.parametrize("axes", GRIDS, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (7, 2), (3, 11)], ids=str)
def test_bytes_truly_missing_are_those_of_the_worst_of_all_ranks(axes: tuple[int, ...], shape: tuple[int, int]) -> None:
    """Counted index by index on every rank, for splits that leave remainders and pieces that are empty."""

    def lacks(src: Layout, dst: Layout, rank: int) -> int:
        needs, common = 1, 1
        for have, need in zip(held(src, rank), held(dst, rank), strict=True):
            needs *= len(need)
            common *= len({*have.tolist()} & {*need.tolist()})
        return needs - common

    for src, dst in sample(every_pair(ordered(grid(*axes), shape)), 60, (axes, shape)):
        wanted = max(lacks(src, dst, rank) for rank in src.placement.flat)
        assert truly_missing(shape, src.state.dims, dst.state.dims, axes) == wanted, (src, dst)
