"""The errors are what Python would have raised, and the caret stands under the place it means."""

import pickle

import pytest

from sbpflow.placement import errors
from sbpflow.placement.errors import SbpflowError, caret


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
