"""States: who holds which indices, against nested `tensor_split` of the indices themselves."""

import pickle
import random
from collections.abc import Sequence
from itertools import chain, pairwise, product

import pytest
import torch

from sbpflow.sbp import B, P, S, Sbp, State
from sbpflow.sbp.state import Factors, Lie, Spans, drop, extent, fill, overlap, pieces, spans, state_of

SIZES = (2, 3, 2)  # of the axes
LENGTHS = [0, 1, 2, 3, 5, 7, 11, 12, 13, 24, 100]
WHERE = list(product(*map(range, SIZES)))
NESTS: list[Factors] = [
    (), (0,), (1,), (0, 1), (1, 0), (2, 0), (0, 1, 2), (1, 2, 0), (2, 1, 0),
    (-2, 1), (-3, 0), (-2, -3, 2), (0, -3, 2), (1, -2, 0), (-3, 1), (-5, 2),
]  # fmt: skip


def indices(size: int, factors: Sequence[int], where: Sequence[int]) -> list[int]:
    """The oracle: cut range(size) once for every factor."""
    held = [torch.arange(size)]
    for f in factors:
        cuts = [piece.tensor_split(SIZES[f] if f >= 0 else -f) for piece in held]
        held = [cut[where[f]] for cut in cuts] if f >= 0 else list(chain.from_iterable(cuts))
    return torch.cat(held).tolist()


def listed(held: Spans) -> list[int]:
    return list(chain.from_iterable(range(lo, hi) for lo, hi in held))


@pytest.mark.parametrize("factors", NESTS, ids=str)
def test_spans_are_the_nested_tensor_splits(factors: Factors) -> None:
    for size, where in product(LENGTHS, WHERE):
        assert listed(spans(size, factors, where, SIZES)) == indices(size, factors, where)


@pytest.mark.parametrize("factors", NESTS, ids=str)
def test_spans_are_ascending_apart_and_not_empty(factors: Factors) -> None:
    for size, where in product(LENGTHS, WHERE):
        held = spans(size, factors, where, SIZES)
        assert all(0 <= lo < hi <= size for lo, hi in held)
        assert all(a[1] < b[0] for a, b in pairwise(held))


@pytest.mark.parametrize("factors", [f for f in NESTS if all(x >= 0 for x in f)], ids=str)
@pytest.mark.parametrize("size", LENGTHS)
def test_pieces_share_a_dim_without_gap_or_overlap(size: int, factors: Factors) -> None:
    whole = [listed(spans(size, factors, where, SIZES)) for where in WHERE]
    apart = pieces(factors, SIZES)
    assert sorted(chain.from_iterable(whole)) == sorted(list(range(size)) * (len(WHERE) // apart))
    # One cut differs by one element between ranks, each further one by one more at most.
    assert max(map(len, whole)) - min(map(len, whole)) <= len(factors)


@pytest.mark.parametrize("size", LENGTHS)
def test_one_cut_gives_early_ranks_the_remainder(size: int) -> None:
    lengths = [len(listed(spans(size, (1,), (0, i, 0), SIZES))) for i in range(3)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths == [len(piece) for piece in torch.arange(size).tensor_split(3)]


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("factors", [f for f in NESTS if all(x >= 0 for x in f)], ids=str)
def test_dropping_an_axis_joins_what_its_ranks_held(factors: Factors, axis: int) -> None:
    left = drop(factors, frozenset({axis}), SIZES)
    assert axis not in left
    assert not left or left[-1] >= 0
    for size, where in product(LENGTHS, WHERE):
        peers = [(*where[:axis], i, *where[axis + 1 :]) for i in range(SIZES[axis])]
        joined = set(chain.from_iterable(indices(size, factors, peer) for peer in peers))
        assert set(listed(spans(size, left, where, SIZES))) == joined


@pytest.mark.parametrize("factors", [(), (1,), (-2, 1), (1, -2, 2), (-2, -2, 1)], ids=str)
def test_filling_cuts_what_a_rank_holds_further(factors: Factors) -> None:
    found = fill(factors, 0, SIZES)
    assert len(found) == 1 + factors.count(-2)
    for after in found:
        assert after.count(0) == 1
        for size, where in product(LENGTHS, WHERE):
            assert set(indices(size, after, where)) <= set(indices(size, factors, where))


@pytest.mark.parametrize("factors", [(0, 1), (0, 1, 2), (1, 0, 2)], ids=str)
def test_filling_the_hole_undoes_the_drop(factors: Factors) -> None:
    assert factors in fill(drop(factors, frozenset({0}), SIZES), 0, SIZES)


@pytest.mark.parametrize("seed", range(100))
def test_overlap_lists_what_two_ranks_share(seed: int) -> None:
    dice = random.Random(seed)
    size = dice.choice(LENGTHS)
    have, need = (spans(size, dice.choice(NESTS), dice.choice(WHERE), SIZES) for _ in range(2))
    left, right = listed(have), listed(need)
    runs = overlap(have, need)
    assert [left[a + k] for a, _, n in runs for k in range(n)] == sorted({*left} & {*right})
    assert [left[a + k] for a, _, n in runs for k in range(n)] == [right[b + k] for _, b, n in runs for k in range(n)]
    assert all(n > 0 for _, _, n in runs)
    assert all(a[0] + a[2] < b[0] or a[1] + a[2] < b[1] for a, b in pairwise(runs))


@pytest.mark.parametrize("sbp", list(product([S(0), S(1), B, P], repeat=3)), ids=str)
def test_a_signature_is_a_state_and_comes_back(sbp: tuple[Sbp, ...]) -> None:
    state = state_of(sbp, 2, SIZES)
    assert state.dims == tuple(tuple(a for a in range(3) if sbp[a] is S(d)) for d in range(2))
    assert state.partial == tuple(a for a in range(3) if sbp[a] is P)
    assert state.split == {a for a in range(3) if sbp[a] in (S(0), S(1))}
    assert state.sbp(3) == sbp


@pytest.mark.parametrize("kind", [P, P("max"), P("min")], ids=str)
def test_a_state_knows_its_reduction(kind: Sbp) -> None:
    assert state_of((B, kind, S(0)), 1, SIZES).sbp(3) == (B, kind, S(0))


def test_an_axis_of_one_rank_does_not_count() -> None:
    assert state_of((S(0), P("max"), S(1)), 2, (1, 1, 2)) == State(((), (2,)))
    assert state_of((P("max"), B, B), 2, (1, 1, 1)) == State(((), ()))


def test_a_state_is_a_value() -> None:
    state = State(((0, 1), (-2, 2)), (), "sum")
    assert pickle.loads(pickle.dumps(state)) == state
    assert len({state, State(((0, 1), (-2, 2)))}) == 1


@pytest.mark.parametrize("factors", NESTS, ids=str)
def test_the_extent_is_the_longest_piece(factors: Factors) -> None:
    for size in LENGTHS:
        longest = max(len(indices(size, factors, where)) for where in WHERE)
        found = extent(size, factors, SIZES)
        assert longest <= found <= size
        assert found == longest or any(f < 0 for f in factors)  # of pieces of pieces all may not be longest at once


def test_the_dual_of_the_dual_is_the_lie_again() -> None:
    for state in (State(((0,), ())), State(((), (1, 0))), State(((), ()), (1,)), State(((2,), ()), (0,))):
        free = tuple(a for a in range(3) if a not in state.split and a not in state.partial)
        for lie in (Lie(state), Lie(state, free)):
            assert lie.dual.dual == lie
