"""`python -m sbpflow.examples`: programs and plans of the gallery, as they come with the package."""

import sys
from pathlib import Path

import pytest

from sbpflow.examples import PLANS, PROGRAMS
from sbpflow.examples.__main__ import main
from sbpflow.nn.plan.plan import Plan


def test_all_are_listed_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert "\n  mlp                Data parallelism: four ranks learn to tell" in told
    assert "\n  zero1              ZeRO-1: as data parallel" in told
    assert all(f"\n  {name} " in told for name in (*PROGRAMS, *PLANS))
    assert not {*PROGRAMS} & {*PLANS}


def test_a_plan_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zero1"]) == 0
    assert str(Plan.read(capsys.readouterr().out)) == str(Plan.load(PLANS["zero1"]))


def test_a_program_runs_with_the_words_behind_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if it were started where it lies: it finds the modules beside it."""
    program = tmp_path / "own.py"
    program.write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.WORD)\n")
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    monkeypatch.setitem(PROGRAMS, "own", program)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["own", "--check", "2"]) == 0
    assert capsys.readouterr().out == "__main__ ['--check', '2'] found\n"


def test_all_are_copied_to_a_new_folder_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert main(["copy", str(folder)]) == 0
    copied = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert {Path("gpt.txt"), Path("training/gpt.py"), Path("plans/zero1.plan"), Path("look_at_a_plan.ipynb")} < copied
    assert Path("__main__.py") not in copied
    (folder / "gpt.txt").write_text("mine")
    assert main(["copy", str(folder)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (folder / "gpt.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tensor_paralel"], "no example is called 'tensor_paralel'\n  did you mean 'tensor_parallel'?"),
        (["xyz"], "without a name it lists them"),
        (["copy"], "write copy FOLDER"),
    ],
)
def test_an_unknown_name_says_what_to_write(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err
