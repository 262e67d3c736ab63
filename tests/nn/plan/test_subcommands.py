"""The commands of a model under a plan that are not `plan`: what they print, as text and as json, and their errors."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sbpflow.__main__ import main
from sbpflow._interrupt import STOPPED
from sbpflow.nn.plan.commands.users_error import told_of_user
from sbpflow.placement import errors

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
    assert re.match(r"1f1b p=2 m=4: [\d.]+ [um]s, bubble ", told(capsys, "simulate", "mine.py:build", "stages.plan"))
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
        (["plan", "mine.py:build", "--ranks", "0"], "argument --ranks: '0': give a number of 1 or more"),
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
        (["report", "zero.plan", "mine.py:build", "-o", "mine.py/step.html"], "mine.py: File exists\n"),
        (["simulate", "1f1"], "did you mean '1f1b'"),
        (["simulate", "mine.py:build", "zero.plan"], "python -m sbpflow explain PLAN MODEL"),
        (
            ["check", "zero.plan", "mine.py"],
            "mine.py is Python, in which a function makes the model\n  write mine.py:build",
        ),
        (["check", "zero.plan", "mine.py:"], "mine.py has no function called ''\n  it has build, Net"),
        (["plan", "mine.py:build"], "give it ranks=4 (--ranks 4)"),
        (["diff", "zero.plan", "stages.plan", "-o", "both.html"], "diff --html zero.plan stages.plan MODEL"),
        (["diff", "zero.plan", "stages.plan", "mine.py:build", "-o", "both.svg"], "write -o both.html"),
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


WRONG_MODELS = {
    "a name that torch has not": (
        "import torch\ndef build():\n    return torch.nn.Linaer(4, 4)\n",
        "raises AttributeError: module 'torch.nn' has no attribute 'Linaer'",
        "  at {}:3: return torch.nn.Linaer(4, 4)\n",
    ),
    "what is no Python": ("def build(:\n    pass\n", "is no Python", '  File "{}", line 1\n    def build(:\n'),
    "a package that is not there": (
        "import nothing_such\n",
        "raises ModuleNotFoundError: No module named 'nothing_such'",
        "  at {}:1: import nothing_such\n",
    ),
    "a name that the model has not": (
        MODEL.replace("x = layer(x)", "x = self.drop(layer(x))"),
        "raises AttributeError: 'Net' object has no attribute 'drop'",
        "  at {}:11: x = self.drop(layer(x)).tanh()\n",
    ),
    "a result that is no dict": (
        MODEL.replace("layer(x)", "layer(x)['logits']"),
        "raises IndexError: too many",
        "  at {}:11: x = layer(x)['logits']",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["wrong.py:build", "wrong:build"])
@pytest.mark.parametrize(("text", "said", "line"), WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_an_error_of_the_users_own_code_is_told_with_the_users_lines(
    where: Path, form: str, text: str, said: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.py").write_text(text)
    sys.modules.pop("wrong", None)
    assert main(["check", "zero.plan", form]) == 2
    told = capsys.readouterr().err
    assert f"{form} {said}" in told
    assert line.format(where / "wrong.py") in told
    assert "sbpflow/" not in told


def test_an_error_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(AttributeError) as caught:
        errors.nearest(3, [])  # type: ignore[arg-type]
    assert told_of_user(caught.value, "mine.py:build") is None


def test_a_model_without_a_loss_is_told_what_stands_for_it(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "zero.plan", "mine.py:build"]) == 0
    said = capsys.readouterr()
    assert "mine.py:build names no loss function: the loss is the result's own, or else the mean of its" in said.err
    assert " samples/s, " in said.out  # a batch of floats has no words


def test_a_page_and_a_picture_go_into_a_folder_that_is_not_there(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "draw", "zero.plan", "mine.py:build") == "drew step.svg\n"
    assert told(capsys, "draw", "mine.py:build", "zero.plan", "-o", "a/b/step.html") == "drew a/b/step.html\n"
    assert told(capsys, "diff", "zero.plan", "stages.plan", "mine.py:build", "-o", "c/d.html")
    assert Path("a/b/step.html").exists()
    assert Path("c/d.html").exists()


def test_ctrl_c_ends_without_a_traceback(
    where: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sbpflow.nn.plan.commands.subcommands.stepped", interrupted)
    assert main(["explain", "zero.plan", "mine.py:build"]) == STOPPED
    assert capsys.readouterr().err.endswith("stopped\n")
