"""A statement of one's own is one file: what plans, errors and docs need to know of a kind of line stands in it."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.nn.plan.language import statements, syntax
from sbpflow.nn.plan.language.diff import diff
from sbpflow.placement.errors import SbpError

FILE = '''
from dataclasses import dataclass

from sbpflow.nn.plan.language.statement import LineFault, LineForm, Statement
from sbpflow.nn.plan.language.terms import path_of, whole


@dataclass(frozen=True)
class Zero(Statement):
    """Weights that begin at zero, but for so many rows."""

    path: str
    rows: int = 0

    form = LineForm(
        heads=("zero",),
        grammar=r"""
zero: _ZERO PATH [_BUT INT _ROWS]
_BUT.2: /but(?!\\S)/i
_ROWS: /rows?/i
""",
        words={"INT": "so many rows"},
        examples={"zero head.weight": ("head.weight",), "zero head.weight but 2 rows": ("head.weight", 2)},
        says="weights that begin at zero",
    )

    @classmethod
    def read(cls, at, path, rows):
        return cls(path_of(path, at), 0 if rows is None else whole(rows, 1))

    def __str__(self):
        return f"zero {self.path}" + (f" but {self.rows} rows" if self.rows else "")

    def assign(self, to):
        names, _ = to.met_parameters(self, self.path)
        if any(to.parameters[name].ndim < 2 for name in names):
            raise LineFault(self, "path", "only matrices have rows")
        to.mark(self, names)

    def note(self, model, names, grids):
        for name in names:
            model.get_parameter(name).data[self.rows :] = 0
'''


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[statements.Statement]]:
    """The statement of a file, among all others."""
    (tmp_path / "zero.py").write_text(FILE)
    spec = importlib.util.spec_from_file_location("zero", tmp_path / "zero.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "zero", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(statements, "STATEMENTS", (*statements.STATEMENTS, module.Zero))
    syntax.reading.cache_clear()
    yield module.Zero
    syntax.reading.cache_clear()


def test_a_file_is_all_that_a_new_statement_takes(kind: type[statements.Statement]) -> None:
    for text, fields in kind.form.examples.items():
        (found,) = flow.Plan.read(f"  {text.upper().replace('HEAD.WEIGHT', 'head.weight')}  # why").statements
        assert found == kind(*fields)
        assert str(found) == text
    assert len(flow.Plan.read("zero.weight: data=S(0)\nzero -> data=B").statements) == 2  # modules may be called so

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    step = flow.compile(model, plan="grid (data=2)\n**: data=S(0)\nzero {0,1}.weight but 1 rows")
    step(torch.ones(2, 4))
    weight = model.get_parameter("1.weight")
    assert isinstance(weight, flow.GlobalTensor)
    assert [bool(row.any()) for row in weight.full_tensor()] == [True, False, False]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zero", ["expected a path, found the end of the line", "zero", "    ^", "as in zero head.weight"]),
        (
            "zero 0 but rows",
            ["expected so many rows, found 'rows'", "zero 0 but rows", "           ^", "as in zero head.weight"],
        ),
        (
            "zero 0 without",
            [
                "expected the end of the line or 'but', found 'without'",
                "zero 0 without",
                "       ^",
                "as in zero head.weight",
            ],
        ),
        ("zeor 0", ["no line begins with 'zeor'", "zeor 0", "^", "did you mean 'zero'? as in zero head.weight"]),
    ],
)
def test_errors_know_it(kind: type[statements.Statement], text: str, said: list[str]) -> None:
    with pytest.raises(SbpError) as caught:
        flow.Plan.read(text)
    first, shown, mark, fix = str(caught.value).split("\n")
    assert [first.partition(": ")[2], shown[6:], mark[6:], fix.strip()] == said


def test_what_a_model_does_not_have_is_shown_in_its_line(kind: type[statements.Statement]) -> None:
    with pytest.raises(SbpError, match=r"line 2: only matrices have rows\n  2 \| zero 0.bias\n +\^"):
        flow.compile(nn.Sequential(nn.Linear(4, 4)), plan="grid (data=2)\nzero 0.bias")


def test_two_plans_side_by_side_know_its_subject(kind: type[statements.Statement]) -> None:
    a, b = (flow.Plan.read(text) for text in ("zero head.weight", "zero head.weight but 2 rows"))
    assert [row.change for row in diff(a, b).rows] == ["changed"]


def test_without_its_file_it_is_none() -> None:
    with pytest.raises(SbpError, match="expected ':'"):
        flow.Plan.read("zero head.weight")
