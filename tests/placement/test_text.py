"""The text form of a placement: free in its spaces, and pointing at what it cannot read."""

import pytest

from sbpflow.placement import PlacementError, placement
from sbpflow.placement.text import EXAMPLE, parse


@pytest.mark.parametrize(
    "text",
    [
        "cpu:[0-3] as (data=2, tensor=2)",
        "cpu:[0-3]as(data=2,tensor=2)",
        "  cpu : [ 0 - 3 , ]\n as\t( data = 2 , tensor = 2 , )  ",
        "cpu:[0, 1, 2-3] as (data=2, tensor=2)",
        "cpu:[00-03] as (data=02, tensor=2)",
    ],
)
def test_spaces_and_spelling_are_free(text: str) -> None:
    assert placement(text) is placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))


@pytest.mark.parametrize("name", ["asx", "as_", "a1", "cpu", "größe", "_"])
def test_any_identifier_names_an_axis(name: str) -> None:
    assert parse(f"cpu:[0] as ({name}=1)").names == (name,)


def test_the_order_of_ranks_is_kept() -> None:
    assert parse("cuda:[8-9, 0-1]").flat == (8, 9, 0, 1)


@pytest.mark.parametrize(
    ("text", "pos", "message"),
    [
        ("", 0, "expected a device type, found the end"),
        ("cpu", 3, "expected ':', found the end"),
        ("cpu:0-3", 4, "expected '[', found '0-3'"),
        ("cpu:[0-3", 8, "expected ',' or ']', found the end"),
        ("cpu:[0-3  ", 8, "expected ',' or ']', found the end"),
        ("cpu:[0-3 as (4)", 9, "expected ',' or ']', found 'as'"),
        ("cpu:[]", 5, "expected a number, found ']'"),
        ("cpu:[a]", 5, "expected a number, found 'a'"),
        ("cpu:[0 1]", 7, "expected ',' or '-' or ']', found '1'"),
        ("cpu:[0--3]", 7, "expected a number, found '-3'"),
        (":[0]", 0, "expected a device type, found ':'"),
        ("cpu:[0-3] in (4)", 10, "expected 'as' or the end, found 'in'"),
        ("cpu:[0-3] as ()", 14, "expected a number or an axis name, found ')'"),
        ("cpu:[0-3] as (4", 15, "expected ')' or ',', found the end"),
        ("cpu:[0-3] as (x)", 15, "expected '=', found ')'"),
        ("cpu:[0-3] as (x=y)", 16, "expected a number, found 'y'"),
        ("cpu:[0-3] as (2, x=2)", 17, "expected ')' or a number, found 'x'"),
        ("cpu:[0-3] as (4))", 16, "expected the end, found ')'"),
    ],
)
def test_what_cannot_be_read_is_pointed_at(text: str, pos: int, message: str) -> None:
    with pytest.raises(PlacementError) as refused:
        placement(text)
    assert str(refused.value) == f"{message}\n  {text}\n  {' ' * pos}^\n  {EXAMPLE}"


@pytest.mark.parametrize(
    ("text", "pos", "first", "last"),
    [
        ("gpu:[0]", 0, "unknown device type 'gpu'", "\n  known are cpu, cuda\n  did you mean 'cuda'?"),
        ("cpu:[3-1]", 5, "the range 3-1 runs backwards", "\n  a range ascends: 1-3"),
        ("cpu:[0-3, 2]", 10, "a placement holds each rank once, but 2 stands twice", ""),
        ("cpu:[0-3] as (3)", 14, "the grid has 3 places, but 4 ranks are given", ""),
        ("cpu:[0-3] as (x=2, y=3)", 16, "the grid has 2 x 3 = 6 places, but 4 ranks are given", ""),
        ("cpu:[0-3] as (x=2, x=2)", 19, "axis name 'x' stands twice", ""),
        (
            "cpu:[0] as (if=1)",
            12,
            "an axis name is a Python identifier, as in p.at(data=0)",
            "\n  found 'if'",
        ),
        (
            "cpu:[0] as (a.b=1)",
            12,
            "an axis name is a Python identifier, as in p.at(data=0)",
            "\n  found 'a.b'",
        ),
    ],
)
def test_what_cannot_be_is_pointed_at(text: str, pos: int, first: str, last: str) -> None:
    with pytest.raises(PlacementError) as refused:
        placement(text)
    assert str(refused.value) == f"{first}\n  {text}\n  {' ' * pos}^{last}"


def test_the_right_line_of_several_is_shown() -> None:
    with pytest.raises(PlacementError, match=r"(?m)^  2 \| as \(5\)\n          \^$"):
        placement("cpu:[0-3]\nas (5)")


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(PlacementError, match="a placement needs a text, or a type and ranks\n  found 3\n"):
        placement(3)  # type: ignore[arg-type]
