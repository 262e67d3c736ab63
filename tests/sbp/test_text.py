"""Every spelling of a signature is read, and what cannot be read is pointed at."""

import random
from itertools import product

import pytest

import sbpflow as flow
from sbpflow.placement import PlacementError, placement
from sbpflow.placement.errors import SbpError
from sbpflow.sbp import B, P, S, Sbp, SbpLike, signature
from sbpflow.sbp.text import parse

GRID = placement("cpu:[0-3] as (data=2, tensor=2)")
LINE = placement("cpu:[0-3]")
MAX = P("max")


def told(value: object) -> str:
    """An id without an address in it: workers must collect the same tests."""
    return getattr(value, "__name__", None) or ("object" if type(value) is object else repr(value))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (B, (B, B)),
        ("B", (B, B)),
        ("broadcast", (B, B)),
        ((S(0), B), (S(0), B)),
        ([S(0), B], (S(0), B)),
        (["S(0)", "B"], (S(0), B)),
        (("S(1)", P), (S(1), P)),
        ("(S(0), B)", (S(0), B)),
        ("( S( 0 ),B , )", (S(0), B)),
        ("(S(-1), P(max))", (S(-1), MAX)),
        ("(P('max'), P(\"max\"))", (MAX, MAX)),
        ("(P(sum), P())", (P, P)),
        ({"data": S(0)}, (S(0), B)),
        ({"tensor": "S(1)"}, (B, S(1))),
        ({"tensor": P, "data": S(0)}, (S(0), P)),
        ({}, (B, B)),
        ("{data: S(0)}", (S(0), B)),
        ("{'tensor': P, \"data\": S(2)}", (S(2), P)),
        ("{}", (B, B)),
        ("(split(0), broadcast)", (S(0), B)),
        ("(split(dim=1), partial_sum)", (S(1), P)),
        ("(sbp.split(0), sbp.broadcast)", (S(0), B)),
        ("(flow.sbp.split(0), flow.sbp.partial_sum())", (S(0), P)),
        ("(oneflow.sbp.split(dim=0), oneflow.sbp.broadcast())", (S(0), B)),
        ((flow.sbp.split(0), flow.sbp.broadcast), (S(0), B)),
        ((flow.sbp.partial_sum, flow.sbp.broadcast), (P, B)),
    ],
    ids=str,
)
def test_every_spelling_means_one_entry_an_axis(given: SbpLike, meant: tuple[Sbp, ...]) -> None:
    assert signature(given, GRID) == meant


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (S(0), S(0)),
        (P, P),
        ("S(0)", S(0)),
        ("(S(0),)", S(0)),
        ("(S(0))", S(0)),
        ((P,), P),
        ([MAX], MAX),
        ("oneflow.sbp.split(0)", S(0)),
    ],
    ids=str,
)
def test_one_axis_needs_no_tuple(given: SbpLike, meant: Sbp) -> None:
    assert signature(given, LINE) == (meant,)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_printed_reads_back(seed: int) -> None:
    dice = random.Random(seed)
    entries = tuple(dice.choices([S(0), S(1), S(-2), B, P, MAX, P("min")], k=dice.randint(1, 4)))
    p = placement("cpu", range(16)).reshape([2] * len(entries)) if len(entries) == 4 else None
    assert parse(repr(entries)) == entries
    assert p is None or signature(repr(entries), p) == entries


@pytest.mark.parametrize("typed", list(product(["S(0)", "B", "P"], repeat=2)), ids=str)
def test_a_dict_prints_and_reads_back(typed: tuple[str, str]) -> None:
    named = dict(zip(("data", "tensor"), map(parse, typed), strict=True))
    assert parse(repr(named)) == named


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("S(a)", 2),
        ("(S(0), Q)", 7),
        ("S 0", 2),
        ("(S(0) B)", 6),
        ("{data S(0)}", 6),
        ("(S(0), B", 8),
        ("S(0))", 4),
        ("S(1.5)", 3),
        ("(B, P(mean))", 6),
        ("P('mean')", 2),
        ("", 0),
        ("   ", 3),
        ("(S(0),\n Q)", 1),
    ],
)
def test_an_error_points_at_the_place(text: str, column: int) -> None:
    with pytest.raises(SbpError) as error:
        parse(text)
    lines = str(error.value).splitlines()
    mark = next(i for i, line in enumerate(lines) if line.strip() == "^")
    gutter = lines[mark - 1].index(" | ") + 3 if " | " in lines[mark - 1] else 2
    assert lines[mark].index("^") - gutter == column
    assert lines[mark - 1][gutter:] in text


def test_an_error_tells_what_to_write() -> None:
    with pytest.raises(SbpError, match=r"write S\(0\), B, P, P\(max\), a tuple"):
        parse("split 0")


@pytest.mark.parametrize("given", [S(0), P, "S(0)", (S(0),), [S(0), B, B], "(B, B, B)", ()], ids=str)
def test_a_wrong_count_is_refused_with_a_signature_that_fits(given: SbpLike) -> None:
    with pytest.raises(SbpError, match=r"entries, the placement 2 axes") as error:
        signature(given, GRID)
    assert "has axes data, tensor" in str(error.value)
    fix = str(error.value).rpartition("sbp=")[2]
    assert len(signature(fix, GRID)) == 2


@pytest.mark.parametrize("given", [{"dta": S(0)}, "{dta: S(0)}"], ids=str)
def test_an_unknown_axis_is_refused_with_the_nearest(given: SbpLike) -> None:
    with pytest.raises(PlacementError, match="did you mean 'data'"):
        signature(given, GRID)


def test_names_of_axes_without_names_are_refused() -> None:
    with pytest.raises(PlacementError, match="have no names"):
        signature({"data": S(0)}, LINE)


@pytest.mark.parametrize("entry", [0, None, 1.0, S, "(B, B)", "{data: B}", (B,)], ids=told)
def test_what_is_no_signature_is_refused_by_name(entry: object) -> None:
    for given in ((entry, B), {"data": entry}):
        with pytest.raises(SbpError, match="is no signature of an axis"):
            signature(given, GRID)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, None, 1.5, S, object()], ids=told)
def test_what_is_no_signature_at_all_is_refused(given: object) -> None:
    with pytest.raises(SbpError, match="no signature"):
        signature(given, GRID)  # type: ignore[arg-type]


def test_a_name_given_twice_in_text_is_refused() -> None:
    with pytest.raises(SbpError, match="twice"):
        parse("{data: S(0), data: B}")
