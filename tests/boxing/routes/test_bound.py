"""The bound on bytes: a brute force agrees with it on tiny cases, no plan is below it, and plans come close to it."""

import itertools
from collections.abc import Callable, Iterator
from statistics import mean
from typing import TypeAlias

import pytest
import torch

from sbpflow.boxing import between, lower_bound
from sbpflow.placement import placement, use_cluster
from sbpflow.placement.errors import SbpError
from sbpflow.sbp import B, Layout, P, S, Sbp, layout
from tests.boxing.oracle import GRIDS, SHAPES, Pair, broken, every_pair, grid, held, ordered, public, sample, term

ON_ALL_GRIDS = pytest.mark.parametrize("axes", GRIDS, ids=str)
OF_ALL_SIZES = pytest.mark.parametrize("size", SHAPES)
EVEN = (48, 48)  # divided by the ranks of every grid here, also in two steps and in both dims

Known: TypeAlias = tuple[frozenset[frozenset[int]], ...]  # for each rank the sums it can make, each a set of terms


def fewest_transfers(holders: list[frozenset[int]], needers: set[int], ranks: int) -> int:
    """The fewest messages after which all needers have the sum of all terms, found by trying every order of messages.

    A message carries one sum that the sender can make; the receiver may add it to sums of other terms.
    """
    whole = frozenset(range(len(holders)))
    start: Known = tuple(closed({frozenset({t}) for t in whole if r in holders[t]}) for r in range(ranks))
    layer, seen = {start}, {start}
    for count in itertools.count():
        if any(all(whole in known[r] for r in needers) for known in layer):
            return count
        layer = {after for known in layer for after in messages(known)} - seen
        seen |= layer
    raise AssertionError


def messages(known: Known) -> Iterator[Known]:
    for src, dst in itertools.permutations(range(len(known)), 2):
        for told in known[src] - known[dst]:
            yield (*known[:dst], closed({*known[dst], told}), *known[dst + 1 :])


def closed(sums: set[frozenset[int]]) -> frozenset[frozenset[int]]:
    """With every sum of sums that share no term."""
    found = set(sums)
    while more := {a | b for a, b in itertools.combinations(found, 2) if not a & b} - found:
        found |= more
    return frozenset(found)


def by_brute_force(src: Layout, dst: Layout) -> float:
    """The same bound, element by element, from the oracle's index sets alone; for targets that are not partial."""
    ranks = src.placement.flat
    own, total = dict.fromkeys(ranks, 0), 0
    for spot in itertools.product(*map(range, src.shape)):
        have, need = ({r for r in ranks if holds(lies, r, spot)} for lies in (src, dst))
        terms = sorted({term(src, r) for r in ranks})
        holders = [frozenset(r for r in have if term(src, r) == t) for t in terms]
        total += fewest_transfers(holders, need, len(ranks))
        for r in need:
            own[r] += len(terms) > 1 or r not in have
    return max(*own.values(), total / len(ranks)) * src.dtype.itemsize


def holds(lies: Layout, rank: int, spot: tuple[int, ...]) -> bool:
    return all(i in index.tolist() for i, index in zip(spot, held(lies, rank), strict=True))


@pytest.mark.parametrize(("axes", "shape"), [((2,), (3, 2)), ((3,), (4, 2)), ((4,), (2, 3)), ((2, 2), (4, 3))], ids=str)
def test_the_bound_is_what_a_brute_force_finds(axes: tuple[int, ...], shape: tuple[int, int]) -> None:
    layouts = ordered(grid(*axes), shape)
    pairs = [(a, b) for a, b in every_pair(layouts) if not b.state.partial and len(terms(a)) < 4]
    assert [(str(a), b.lie) for a, b in pairs if lower_bound(a, b) != by_brute_force(a, b)] == []


def terms(lies: Layout) -> set[tuple[int, ...]]:
    return {term(lies, r) for r in lies.placement.flat}


@pytest.mark.parametrize(
    ("src", "dst", "bytes_"),
    [
        (S(0), B, 384),  # all-gather: (n-1)/n of 512
        (P, S(0), 384),  # reduce-scatter: the same
        (P, B, 768),  # all-reduce: twice that
        (S(0), S(1), 96),  # all-to-all: an n-th of it
        (B, S(0), 0),
        (B, P, 0),
        (S(0), P, 0),
        (P, P, 0),
    ],
    ids=str,
)
def test_the_bound_is_tight_on_one_axis(src: Sbp, dst: Sbp, bytes_: int) -> None:
    line = placement("cpu:[0-3]")
    a, b = layout(line, src, (8, 8), torch.float64), layout(line, dst, (8, 8), torch.float64)
    assert lower_bound(a, b) == bytes_


def test_the_bound_of_a_permutation_is_the_local_buffer() -> None:
    one, other = (lies for lies in ordered(grid(2, 2), (8,)) if lies.state.dims in [((0, 1),), ((1, 0),)])
    assert lower_bound(one, other) == 2 * 8


@pytest.mark.sampled(2)
@ON_ALL_GRIDS
@OF_ALL_SIZES
def test_no_plan_is_below_the_bound(axes: tuple[int, ...], size: str) -> None:
    pairs = sample(every_pair(ordered(grid(*axes), SHAPES[size])), 200, (axes, size))
    for prices in ("flat", "cpu"):
        with use_cluster(prices):
            assert broken(pairs, stays_above_the_bound) == []


@pytest.mark.sweep
@ON_ALL_GRIDS
@OF_ALL_SIZES
def test_no_plan_of_all_is_below_the_bound(axes: tuple[int, ...], size: str) -> None:
    with use_cluster("flat"):
        assert broken(every_pair(ordered(grid(*axes), SHAPES[size])), stays_above_the_bound) == []


def stays_above_the_bound(src: Layout, dst: Layout) -> None:
    assert between(src, dst).bytes >= lower_bound(src, dst) * (1 - 1e-12), f"{between(src, dst)}"


def meets_the_bound(src: Layout, dst: Layout) -> None:
    assert between(src, dst).bytes == lower_bound(src, dst), f"{between(src, dst)}, bound {lower_bound(src, dst)}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("which", [public, ordered])
@pytest.mark.parametrize("axes", [(4,), (8,), (2, 2), (2, 4), (3, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("shape", [EVEN, (33, 35), (2, 3)], ids=str)
def test_without_addends_plans_meet_the_bound(
    axes: tuple[int, ...], which: Callable[..., list[Layout]], shape: tuple[int, int]
) -> None:
    layouts = [lies for lies in which(grid(*axes), shape) if not lies.state.partial]
    with use_cluster("flat"):
        assert broken(every_pair(layouts), meets_the_bound) == []


def test_without_addends_plans_meet_the_bound_on_three_axes() -> None:
    layouts = [lies for lies in ordered(grid(2, 2, 2), EVEN) if not lies.state.partial]
    with use_cluster("flat"):
        assert broken(sample(every_pair(layouts), 300), meets_the_bound) == []


@pytest.mark.sweep
@pytest.mark.parametrize("shape", [EVEN, (33, 35)], ids=str)
def test_without_addends_all_plans_meet_the_bound_on_three_axes(shape: tuple[int, int]) -> None:
    layouts = [lies for lies in ordered(grid(2, 2, 2), shape) if not lies.state.partial]
    with use_cluster("flat"):
        assert broken(every_pair(layouts), meets_the_bound) == []


def ratios(pairs: list[Pair]) -> list[float]:
    """Bytes over bound, of the pairs whose target holds no addends and that have something to send."""
    chosen = [(a, b) for a, b in pairs if not b.state.partial and lower_bound(a, b)]
    return [between(a, b).bytes / lower_bound(a, b) for a, b in chosen]


@pytest.mark.parametrize("which", [public, ordered])
@pytest.mark.parametrize("axes", [(4,), (2, 2), (2, 4), (3, 2)], ids=str)
def test_plans_are_on_average_within_a_twentieth_of_the_bound(
    axes: tuple[int, ...], which: Callable[..., list[Layout]]
) -> None:
    with use_cluster("flat"):
        found = ratios(list(every_pair(which(grid(*axes), EVEN))))
    assert mean(found) <= 1.05
    assert max(found) <= 1.5


@pytest.mark.parametrize(
    ("which", "count"), [(public, 600), pytest.param(ordered, None, marks=pytest.mark.sweep)], ids=["sample", "all"]
)
def test_plans_on_three_axes_are_on_average_within_a_tenth_of_the_bound(
    which: Callable[..., list[Layout]], count: int | None
) -> None:
    pairs = list(every_pair(which(grid(2, 2, 2), EVEN)))
    with use_cluster("flat"):
        found = ratios(pairs if count is None else sample(pairs, count))
    assert mean(found) <= 1.10
    assert max(found) <= 1.5


@pytest.mark.sampled(8)
@ON_ALL_GRIDS
@OF_ALL_SIZES
def test_what_needs_nothing_is_sent_nothing(axes: tuple[int, ...], size: str) -> None:
    pairs = every_pair(ordered(grid(*axes), SHAPES[size]))
    free = [pair for pair in sample(pairs, 400, (axes, size)) if lower_bound(*pair) == 0 and not pair[1].state.partial]
    assert free
    assert [str(between(*pair)) for pair in free if between(*pair).bytes] == []


def test_a_bound_is_between_layouts_of_one_tensor() -> None:
    line = placement("cpu:[0-3]")
    for other in (layout(line, B, (4, 5)), layout(line, B, (4, 4), torch.float64)):
        with pytest.raises(SbpError, match="a bound is between layouts of one tensor"):
            lower_bound(layout(line, B, (4, 4)), other)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("ranks", ["cpu:[0-3]", "cpu:[4-7]", "cpu:[2-5]", "cpu:[0-7]", "cpu:[1]"])
@OF_ALL_SIZES
def test_no_plan_between_placements_is_below_the_bound(ranks: str, size: str) -> None:
    sources, targets = public(placement("cpu:[0-3]"), SHAPES[size]), public(placement(ranks), SHAPES[size])
    assert broken(every_pair(sources, targets), stays_above_the_bound) == []
