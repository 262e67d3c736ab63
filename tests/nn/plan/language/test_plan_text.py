"""A plan is its text: it prints, saves and copies exactly, and its errors show its lines."""

import copy
import pickle
from pathlib import Path

import pytest

from sbpflow import Plan, SbpError
from sbpflow.nn.plan.language.statements import Limit, Rest

TEXT = "\ufeff# what it is\r\n\r\ngrid (data = 2)\t# two ranks # or more\n\n  **:  data=S(0)\n#end"


@pytest.mark.parametrize("text", ["", "\n", "grid (data=2)", "grid (data=2)\n", "\n\n", TEXT, TEXT + "\n"], ids=repr)
def test_it_prints_saves_and_copies_exactly(text: str, tmp_path: Path) -> None:
    plan = Plan.read(text)
    plan.save(tmp_path / "a.plan")
    for same in (Plan.load(tmp_path / "a.plan"), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert str(same) == text
        assert same == plan
        assert same.lines == plan.lines
    assert [line.number for line in plan.lines] == list(range(1, len(text.splitlines()) + 1))
    assert eval(repr(plan)) == plan


def test_lines_have_their_comments_and_columns() -> None:
    plan = Plan.read(TEXT)
    assert [line.comment for line in plan.lines] == ["what it is", "", "two ranks # or more", "", "", "end"]
    assert plan.lines[2].spans == {"statement": 0, "axes": 6, "axis:data": 6, "size:data": 13}
    assert plan.lines[4].spans == {"statement": 2, "path": 2, "axis:data": 7, "entry:data": 12}
    assert str(plan.without_comments()) == "grid (data = 2)\n**:  data=S(0)\n"
    assert plan.without_comments().statements == plan.statements


def test_a_plan_of_statements_has_a_line_each() -> None:
    said = Plan.read(TEXT).statements
    assert str(Plan.of(said)) == "grid (data=2)\n**: data=S(0)\n"
    assert Plan.of(said).statements == said


class More(Plan):
    """A plan that can do more."""


def test_what_is_made_of_a_plan_is_of_its_class() -> None:
    plan = More.read(TEXT, "a.plan")
    assert repr(plan).startswith("More.read(")
    for made in (pickle.loads(pickle.dumps(plan)), plan.without_comments(), More.of(plan.statements)):
        assert type(made) is More


def test_errors_of_a_statement_point_at_its_part() -> None:
    plan = Plan.read(TEXT, "a.plan")
    grid, rest = plan.statements
    assert str(plan.wrong(rest, "axis:data", "there is no axis data", "there are none")) == (
        "a.plan, line 5: there is no axis data\n  5 |   **:  data=S(0)\n             ^\n  there are none"
    )
    assert str(plan.wrong(rest, "schedule", "whatever")).endswith("  5 |   **:  data=S(0)\n        ^")
    assert str(plan.conflict(rest, grid, "they differ")) == (
        "a.plan, lines 3 and 5: they differ\n  3 | grid (data = 2)\t# two ranks # or more\n      ^\n"
        "  5 |   **:  data=S(0)\n        ^"
    )
    assert "line 5" in str(plan.wrong(Rest("**", rest.entries), "path", "equal ones are found too"))  # type: ignore[attr-defined]
    with pytest.raises(SbpError, match="plan: no line says limit memory 1 B"):
        raise Plan.read("").wrong(Limit(1), "limit", "none")


def test_what_is_no_file_of_text(tmp_path: Path) -> None:
    def error(data: bytes) -> str:
        (tmp_path / "x.plan").write_bytes(data)
        with pytest.raises(SbpError) as caught:
            Plan.load(tmp_path / "x.plan")
        return str(caught.value).removeprefix(str(tmp_path / "x.plan"))

    assert error(b"grid (data=2)\n**: d\xfcta=B") == (
        ", line 2: expected UTF-8 text, found the byte 0xfc\n  2 | **: d\N{REPLACEMENT CHARACTER}ta=B\n"
        "  save it as UTF-8; is it this file?"
    )
    assert "line 1: expected UTF-8 text, found UTF-16" in error("grid (data=2)".encode("utf-16"))
    assert "a file of more than" in error(b"#" * (1 << 24 | 1))
    assert "found '\\x00'" in error(b"\x00" * 10)
    for path, what in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(SbpError, match=f"{path}: {what}\n  a plan is a file of text"):
            Plan.load(path)
    with pytest.raises(SbpError, match=r"plan, line 2: .* is half a letter\n  decode"):
        Plan.read("\n# \ud800")
    with pytest.raises(SbpError, match=r"a plan is a text, found bytes\n  flow.Plan.load reads a file"):
        Plan.read(b"grid")  # type: ignore[arg-type]
