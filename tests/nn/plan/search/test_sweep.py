"""Sweeps: a row for each count of cards, what was found until somebody stops it, and a chart."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.__main__ import main
from sbpflow.nn.plan.prediction import Prediction
from sbpflow.nn.plan.search.fewest import NothingFits
from sbpflow.nn.plan.search.sweep import Attempted, Sweep, ends_of, swept
from sbpflow.nn.plan.search.sweep_chart import sweep_chart

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2))), torch.empty(1024, 512)
"""
STAR = "grid cuda (data=*)\ncast ** to bf16\n"


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODEL)
    Path("star.plan").write_text(STAR)
    Path("eight.plan").write_text("grid cuda (data=8, tensor=1)\n")
    return tmp_path


def predicted(count: int) -> Prediction:
    with torch.device("meta"):
        model, x = nn.Linear(512, 512, bias=False), torch.empty(1024, 512)
    return flow.predict(model, x, STAR, cluster="h100x8*2", ranks=count)


def of(*counts: int, stopped_at: int = 0) -> Sweep:
    rest = predicted(1).resting

    def attempt(count: int) -> Attempted:
        if count == stopped_at:
            raise KeyboardInterrupt
        if count == 1:
            raise NothingFits(10.0, "20 B: chosen", rest)
        if count == 3:
            raise flow.SbpError("3 do not divide it\n  take 4")
        return predicted(count), f"plan for {count}", STAR

    return swept("H100", counts, attempt, lambda line: None)


def test_a_row_says_what_a_count_gives_or_why_it_gives_nothing() -> None:
    made = of(1, 2, 3, 4)
    head, *rows = [re.split(r"  +", line.strip()) for line in list(made.lines(1e9, 2.5))[:5]]
    assert head == ["H100", "step", "samples/s", "of peak", "days", "money", "fits", "plan"]
    assert rows[0] == ["1", *"-----", "no", "no plan that was tried fits into 10 B a rank"]
    assert rows[1][:1] + rows[1][-2:] == ["2", "yes", "plan for 2"]
    assert rows[2] == ["3", *"-----", "?", "3 do not divide it"]
    known = predicted(4)
    assert rows[3][2] == f"{known.tokens_per_second:,.0f}"
    assert rows[3][5] == f"{known.training(1e9, price=2.5).money:,.0f}"
    assert "a batch of 1,024 samples, on all of them" in list(made.lines())
    assert "money" not in next(made.lines(1e9))


def test_what_is_stopped_has_the_rows_so_far() -> None:
    made = of(2, 4, 8, stopped_at=8)
    assert [row.cards for row in made.rows] == [2, 4]
    assert made.stopped
    assert list(made.lines())[-1] == "stopped before its end"
    assert json.loads(json.dumps(made.dict()))["stopped"]


@pytest.mark.parametrize("counts", [(2, 4), (1, 2, 4, 8), (4,), (1,), ()], ids=str)
def test_a_chart_has_a_mark_in_each_panel_for_each_prediction(counts: tuple[int, ...]) -> None:
    drawn = ElementTree.fromstring(sweep_chart(of(*counts)))
    marks = drawn.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(marks) == 2 * sum(count != 1 for count in counts)
    for mark in marks:
        assert 0 <= float(mark.attrib["cx"]) <= float(drawn.attrib["width"])
        assert 44 <= float(mark.attrib["cy"]) <= float(drawn.attrib["height"])
    assert "nan" not in sweep_chart(of(*counts))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_a_plan_that_takes_what_is_left_is_swept(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan", "mine.py:build", "star.plan", "--gpus", "xH100", "--sweep", "4..20"
    assert [line.split()[0] for line in told(capsys, *words).splitlines()[:4]] == ["H100", "4", "8", "16"]
    found = json.loads(told(capsys, *words, "--json", "--svg", "rows.svg"))
    one = json.loads(told(capsys, "plan", "mine.py:build", "star.plan", "--gpus", "8xH100", "--json"))
    assert found["rows"][1]["prediction"] == one["prediction"]
    assert found["rows"][1]["plan"] == STAR
    assert "<svg" in Path("rows.svg").read_text()


def test_the_planners_answers_are_swept_and_more_cards_take_no_longer(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "plan", "mine.py:build", "--gpus", "xA100", "--sweep", "1..2", "--json", "--total-tokens", "1e9"
    rows = json.loads(told(capsys, *words))["rows"]
    assert [row["cards"] for row in rows] == [1, 2]
    assert rows[1]["prediction"]["seconds"] < rows[0]["prediction"]["seconds"]
    assert "grid cuda (data=2)" in rows[1]["plan"]
    assert rows[0]["prediction"]["failures"]["days"] > 0


def test_ctrl_c_prints_the_rows_so_far(
    where: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(*args: object, ranks: int, **more: object) -> Prediction:
        if ranks == 8:
            raise KeyboardInterrupt
        return predicted(ranks)

    monkeypatch.setattr("sbpflow.nn.plan.commands.plan_command.predict", predict)
    with pytest.raises(SystemExit, match="130"):
        main(["plan", "mine.py:build", "star.plan", "--gpus", "xH100", "--sweep", "2..64", "--svg", "part.svg"])
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()[:3]] == ["H100", "2", "4"]
    assert "4 x H100" in shown.err
    assert "stopped before its end" in shown.out
    assert "(stopped before its end)" in Path("part.svg").read_text()


@pytest.mark.parametrize("said", ["8", "8..", "..8", "16..8", "0..8", "8...16", "8-16", ""])
def test_what_is_no_sweep_says_how_it_is_written(said: str) -> None:
    with pytest.raises(flow.SbpError, match=r"write the fewest and the most cards.*--sweep 8\.\.1024"):
        ends_of(said)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpus", "xH100"], "write so many, as in 8xH100, or a sweep: --gpus xH100 --sweep 8..64"),
        (["--gpus", "8xH100", "--sweep", "8..64"], "write --gpus xH100 --sweep 8..64"),
        (["--sweep", "8..64"], "give that too, as in --gpus xH100 --sweep 8..64"),
        (["--gpus", "xH100", "--sweep", "12..64"], "nodes have 8 cards, and all are 32768\n  write --sweep 8..64"),
        (["--gpus", "xH100", "--sweep", "8..64", "-o", "a.plan"], "-o a.plan is one plan"),
        (["--gpus", "xH100", "--sweep", "8..64", "--ranks", "4"], "leave it out"),
        (["--gpus", "xH100", "--sweep", "8..64", "--svg", "a.html"], "write a.svg"),
        (["--gpus", "8xH100", "--svg", "a.svg"], "give it one, as in --gpus xH100 --sweep 8..64"),
        (["eight.plan", "--gpus", "xH100", "--sweep", "8..64"], "as in grid cuda (data=*, tensor=1)"),
    ],
)
def test_words_of_a_sweep_that_say_nothing_say_what_to_write(
    where: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert main(["plan", "mine.py:build", *words]) == 2
    assert text in capsys.readouterr().err
