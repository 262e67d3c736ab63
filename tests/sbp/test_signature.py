"""Signatures: one object each, printed as typed, and the same after every copy."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from sbpflow import sbp
from sbpflow.placement import SbpflowError
from sbpflow.placement.errors import SbpError
from sbpflow.sbp import B, Broadcast, P, Partial, S, Sbp, Split
from tests.ranks import Fresh

EVERY: list[Sbp] = [S(0), S(1), S(7), S(-1), B, P, P("max"), P("min")]
TYPED = ["S(0)", "S(1)", "S(7)", "S(-1)", "B", "P", 'P("max")', 'P("min")']


@pytest.mark.parametrize(("entry", "typed"), list(zip(EVERY, TYPED, strict=True)), ids=TYPED)
def test_a_signature_prints_as_it_is_typed(entry: Sbp, typed: str) -> None:
    assert repr(entry) == str(entry) == typed
    assert eval(typed, {"S": S, "B": B, "P": P}) is entry


@pytest.mark.parametrize("entry", EVERY, ids=str)
def test_copies_and_pickles_are_the_same_object(entry: Sbp) -> None:
    assert all(pickle.loads(pickle.dumps(entry, n)) is entry for n in range(pickle.HIGHEST_PROTOCOL + 1))
    assert copy.copy(entry) is entry
    assert copy.deepcopy([entry, entry])[1] is entry


def entries() -> list[Sbp]:
    return [S(3), B, P("min")]


def test_a_pickle_from_another_process_is_our_object(fresh: Fresh) -> None:
    (there,) = fresh(1, entries)
    assert there.answer is not None
    assert [a is b for a, b in zip(there.answer.value, entries(), strict=True)] == [True] * 3


def test_threads_that_make_the_same_signature_get_one_object() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda i: id(S(1000 + i % 5)), range(400)))
    assert len(found) == 5


def test_equality_is_identity_and_kinds_are_told_apart() -> None:
    assert len(set(EVERY)) == len(EVERY)
    assert all((a == b) is (a is b) for a in EVERY for b in EVERY)
    assert [type(e) for e in (S(0), B, P("max"))] == [Split, Broadcast, Partial]


@pytest.mark.parametrize("entry", EVERY, ids=str)
def test_a_signature_never_changes(entry: Sbp) -> None:
    with pytest.raises((AttributeError, TypeError)):
        entry.dim = 5  # type: ignore[misc, union-attr]
    with pytest.raises((AttributeError, TypeError)):
        entry.other = 5  # type: ignore[union-attr]


def test_oneflow_spells_the_same_objects() -> None:
    assert sbp.split(1) is S(1)
    assert sbp.split(dim=1) is S(1)
    assert sbp.broadcast is B
    assert sbp.partial_sum is P


def test_a_sum_is_partial_and_called_again_gives_its_kinds() -> None:
    assert P("sum") is P
    assert P("max")("min") is P("min")


@pytest.mark.parametrize("dim", ["0", 0.0, None, True, B], ids=repr)
def test_a_split_wants_a_whole_number(dim: object) -> None:
    with pytest.raises(SbpError, match=r"the dim is a whole number, as in S\(0\)"):
        S(dim)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "SUM", "", 0, None], ids=repr)
def test_a_partial_wants_a_known_reduction(reduction: object) -> None:
    with pytest.raises(SbpError, match=r'write P\("sum"\), P\("max"\) or P\("min"\)'):
        P(reduction)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", [["max"], {"max": 1}], ids=repr)
def test_even_what_has_no_hash_is_refused_in_words(reduction: object) -> None:
    with pytest.raises(SbpflowError):
        P(reduction)  # type: ignore[arg-type]
