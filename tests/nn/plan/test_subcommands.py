"""The commands of a model under a plan that are not `plan`: what they print, as text and as json, and their errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from sbpflow.__main__ import main
from sbpflow._interrupt import STOPPED

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

def build():
    return Net(), torch.empty(64, 16)
"""


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODEL)
    Path("stages.plan").write_text("grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 4 micro-batches\n")
    Path("zero.plan").write_text("grid (data=4)\n**: data=S(0)\nexpect memory <= 1 MiB\n")
    Path("open.plan").write_text("grid (data=?)\n")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def read(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(told(capsys, *words, "--json"))


def test_check_answers_as_plan_does_in_either_order(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_plan = told(capsys, "plan", "mine.py:build", "zero.plan")
    assert told(capsys, "check", "zero.plan", "mine.py:build") == as_plan
    assert told(capsys, "check", "mine.py:build", "zero.plan") == as_plan
    found = read(capsys, "check", "zero.plan", "mine.py:build", "--cluster", "h100x8")
    assert found["expect"][0]["holds"]
    assert found["prediction"]["assumed"].startswith("H100: fitted")


def test_explain_tells_each_op_and_move(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "explain", "zero.plan", "mine.py:build")
    assert "layers.0  linear" in said
    found = read(capsys, "explain", "zero.plan", "mine.py:build")
    assert found == read(capsys, "check", "zero.plan", "mine.py:build")["report"]


def test_a_report_is_a_page(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "report", "zero.plan", "mine.py:build") == "drew step.html\n"
    assert "<html" in Path("step.html").read_text()
    found = read(capsys, "report", "zero.plan", "mine.py:build", "-o", "other.html")
    assert found == {"file": "other.html", "bytes": Path("other.html").stat().st_size}


def test_a_diff_as_json_has_the_rows_and_what_each_costs(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read(capsys, "diff", "zero.plan", "stages.plan", "--model", "mine.py:build")
    assert found["rows"][0] == {"change": "changed", "a": "grid (data=4)", "b": "grid (pipe=2, data=2)"}
    assert {name: of["fits"] for name, of in found["checked"].items()} == {"zero.plan": True, "stages.plan": True}


def test_schedules_and_the_machine_are_told_as_json(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read(capsys, "simulate", "1f1b", "-p", "2", "-m", "2")
    assert found["order"] == ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    assert found["bubble"] == pytest.approx(1 / 3)
    course = read(capsys, "simulate", "mine.py:build", "stages.plan", "--svg", "line.svg")
    assert len(course["order"]) == 2
    assert course["seconds"] > 0
    assert Path("line.svg").exists()
    things = {one["thing"]: one for one in read(capsys, "doctor")["findings"]}
    assert things["python"]["ok"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chek", "zero.plan"], "no command is called 'chek'\n  did you mean 'check'?"),
        (["xyz"], "there are doctor, demo, "),
        (["plan"], "required: MODEL\n  as in python -m sbpflow plan LlamaForCausalLM --gpus 8xH100"),
        (["plan", "Llama", "--gpuss", "8"], "no option is called --gpuss\n  did you mean '--gpus'?"),
        (["plan", "Llama", "--dtype", "bf61"], "'bf61' is none of them\n  did you mean 'bf16'?"),
        (["doctor", "--measure", "lnks"], "did you mean 'links'?"),
        (["diff", "a", "b", "model", "c"], "'c' is one word too many"),
    ],
)
def test_unknown_words_name_the_nearest(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "nowhere.plan", "mine.py:build"], "nowhere.plan: No such file"),
        (["check", "open.plan", "mine.py:build"], "write python -m sbpflow plan mine.py:build open.plan"),
        (["report", "zero.plan", "mine.py:build", "-o", "step.svg"], "write -o step.html"),
        (["simulate", "1f1"], "did you mean '1f1b'"),
    ],
)
def test_what_cannot_be_says_what_to_write(
    where: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("check", "zero.plan", "narrow.py:build"), ("plan", "narrow.py:build", "open.plan", "--ranks", "2")]
)
def test_an_op_that_torch_refuses_is_told_without_a_traceback_and_names_the_model(
    words: tuple[str, ...], where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line is the user's where torch's own module is the model: that of runpy is none."""
    Path("narrow.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(4, 4), torch.empty(8, 5)\n")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "mat1 and mat2 shapes cannot be multiplied (8x5 and 4x4)\n" in said
    assert "aten.linear.default at narrow.py:build\n  of input (8, 5) float32" in said


def test_ctrl_c_ends_without_a_traceback(
    where: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sbpflow.nn.plan.commands.subcommands.stepped", interrupted)
    assert main(["explain", "zero.plan", "mine.py:build"]) == STOPPED
    assert capsys.readouterr().err.endswith("stopped\n")
