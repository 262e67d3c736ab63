"""The errors are what Python would have raised, and the caret stands under the place it means."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from sbpflow.placement import cluster, errors, placement
from sbpflow.placement.errors import PlacementError, SbpflowError, caret, did_you_mean
from sbpflow.sbp import layout


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("PlacementError", ValueError),
        ("SbpError", ValueError),
        ("ShapeError", ValueError),
        ("DtypeError", TypeError),
        ("TransportError", RuntimeError),
        ("MissingError", ImportError),
    ],
)
def test_every_error_is_ours_and_python_s(name: str, builtin: type[Exception]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, SbpflowError)
    assert issubclass(kind, builtin)
    assert str(pickle.loads(pickle.dumps(kind("asked\n  found")))) == "asked\n  found"


@pytest.mark.parametrize("pos", range(5))
def test_caret_stands_under_its_character(pos: int) -> None:
    _, text, mark = caret("abcde", pos, "here").split("\n")
    assert text[mark.index("^")] == "abcde"[pos]


@pytest.mark.parametrize(
    ("text", "pos", "shown"),
    [
        ("", 0, "m\n  \n  ^"),
        ("ab", 99, "m\n  ab\n    ^"),
        ("ab", -1, "m\n  ab\n  ^"),
        ("\tab", 2, "m\n  \tab\n  \t ^"),
        ("one\ntwo\nthree", 5, "m\n  2 | two\n       ^"),
        ("one\ntwo", 3, "m\n  1 | one\n         ^"),
        ("one\r\ntwo", 5, "m\n  2 | two\n      ^"),
        ("one\n", 1, "m\n  one\n   ^"),
    ],
    ids=[
        "empty",
        "past_the_end",
        "before_the_start",
        "tab",
        "second_line",
        "line_end",
        "crlf",
        "final_newline",
    ],
)
def test_caret_shows_the_line_of_the_position(text: str, pos: int, shown: str) -> None:
    assert caret(text, pos, "m") == shown


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: placement("x" * 200_000),
        lambda: placement("cpu:[0-" + "9" * 4300 + "]"),
        lambda: placement("cpu", [0] * 100_000),
        lambda: placement("cpu:[0-3] as (a=" + "9" * 4400 + ")"),
        lambda: cluster("z" * 200_000),
        lambda: layout(placement("cpu:[0-1]"), "Q" * 200_000, (4,)),
        lambda: layout(placement("cpu:[0-1]"), "S(" + "9" * 5000 + ")", (4,)),
    ],
    ids=["text", "digits", "ranks", "size", "cluster", "signature", "dim"],
)
def test_an_error_does_not_echo_what_was_given_however_long_it_is(mistake: Callable[[], object]) -> None:
    with pytest.raises(SbpflowError) as error:
        mistake()
    assert len(str(error.value)) < 3000
    assert max(map(len, str(error.value).splitlines())) <= 2100


def test_a_caret_in_a_long_line_stands_below_its_place() -> None:
    first, shown, below = caret("a" * 5000 + "!" + "b" * 5000, 5000, "here").splitlines()
    assert (first, shown[below.index("^")]) == ("here", "!")
    assert len(shown) < 500
    assert caret("a" * 5000, 3, "x").splitlines()[2] == "     ^"


@pytest.mark.parametrize("ranks", ["cpu:[0-999999999999]", "cpu:[0-1048576]", "cpu:[5, 7-99999999]"])
def test_more_ranks_than_any_machine_has_are_refused_before_they_are_counted_out(ranks: str) -> None:
    with pytest.raises(PlacementError, match="1048576 ranks"):
        placement(ranks)


@pytest.mark.parametrize("ranks", [range(10**12), range(10**30), range(10**30, 0, -1)], ids=str)
def test_a_range_without_end_is_refused(ranks: range) -> None:
    with pytest.raises(PlacementError, match="at most 1048576 ranks"):
        placement("cpu", ranks)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lnear", "did you mean 'linear'?"),
        ("LINEAR", "did you mean 'linear'?"),
        ("layer1", "did you mean 'layer3' or 'layer2'?"),
        ("zzz", "there are linear, layer2, layer3, inner"),
    ],
)
def test_a_word_that_is_not_known_is_answered_with_the_nearest(word: str, said: str) -> None:
    """A second one only if it is as near: of 'lnear', 'inner' is not."""
    assert did_you_mean(word, ["linear", "layer2", "layer3", "inner"]) == said


def test_many_words_are_listed_in_part() -> None:
    assert did_you_mean("zzz", map(str, range(100))).endswith(", 28, 29 and 70 more")
    assert did_you_mean("zzz", ()) == "there are none"


def test_the_question_is_asked_in_one_place() -> None:
    rooms = Path(errors.__file__).resolve().parents[1]
    code = [path for room in ("placement", "sbp", "boxing", "actors", "nn") for path in (rooms / room).rglob("*.py")]
    asking = [path.name for path in code if "get_close_matches" in path.read_text(encoding="utf-8")]
    assert asking == ["errors.py"]
