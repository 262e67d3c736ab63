"""The command line of plans, on models of a file and of transformers."""

import json
import re
from pathlib import Path

import pytest

from sbpflow.__main__ import main

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

class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.ModuleList(nn.Linear(2048, 2048) for _ in range(2)) for _ in range(2))
    def forward(self, x):
        for layer in [*self.left, *self.right]:
            x = layer(x).tanh()
        return x

def twins():
    return Twins(), torch.empty(4096, 2048)

def nothing():
    return 3
"""
STAGES = "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 4 micro-batches\n"


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODEL)
    Path("stages.plan").write_text(STAGES)
    Path("zero.plan").write_text("grid (data=4)\n**: data=S(0)\nexpect memory <= 1 MiB\n")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_a_plan_is_checked(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "plan", "mine.py:build", "zero.plan")
    assert "zero.plan: " in said
    assert "ok   expect memory <= 1 MiB" in said
    found = json.loads(told(capsys, "plan", "mine.py:build", "zero.plan", "--json"))
    assert found["expect"][0]["holds"]


def test_a_plan_is_found_and_written(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mine.py:build", "--ranks", "4", "-o", "found.plan"]) == 0
    shown = capsys.readouterr()
    assert "wrote found.plan" in shown.out
    assert "ZeRO-3: " in shown.err  # progress
    assert told(capsys, "plan", "mine.py:build", "found.plan").startswith("found.plan: ")


def test_a_step_is_drawn_and_two_plans_are_compared(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "draw", "mine.py:build", "zero.plan", "-o", "step.svg")
    told(capsys, "draw", "mine.py:build", "zero.plan", "-o", "step.html")
    assert "<svg" in Path("step.svg").read_text()
    assert "<html" in Path("step.html").read_text()
    said = told(capsys, "diff", "zero.plan", "stages.plan", "--model", "mine.py:build")
    assert "**: data=S(0)" in said
    assert "stages.plan: " in said


def test_two_plans_are_a_page(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "diff", "--html", "zero.plan", "stages.plan", "mine.py:build", "-o", "two.html")
    assert said == "drew two.html\n"
    assert '"names":["zero.plan","stages.plan"]' in Path("two.html").read_text()
    assert main(["diff", "--html", "zero.plan", "stages.plan"]) == 2
    fix = capsys.readouterr().err.splitlines()[-1].partition("python -m sbpflow ")[2]
    assert main(fix.replace("MODEL", "mine.py:build").split()) == 0


def test_a_pipeline_is_simulated(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1f1b" in told(capsys, "simulate", "mine.py:build", "stages.plan")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_two_pipelines_are_simulated_drawn_and_compared(
    where: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    lines = f"pipe left over pipe by {schedule}, 4 micro-batches\npipe right over pipe by {schedule}\n"
    Path("two.plan").write_text(f"grid (pipe=2)\n{lines}expect no all_reduce\n")
    said = told(capsys, "simulate", "mine.py:twins", "two.plan", "--svg", "line.svg")
    devices = [line for line in said.splitlines() if line.startswith("  device ")]
    assert len([line for line in devices if {*"Ff"} <= {*line}]) == 2  # each has a chunk of both towers
    assert "<svg" in Path("line.svg").read_text()
    told(capsys, "draw", "mine.py:twins", "two.plan", "-o", "step.svg")
    assert "ok   expect no all_reduce" in told(capsys, "plan", "mine.py:twins", "two.plan")
    Path("other.plan").write_text(f"grid (pipe=2)\n{lines.replace('right over pipe', 'right over pipe[1:]')}")
    said = told(capsys, "diff", "two.plan", "other.plan")
    assert f"~  pipe right over pipe by {schedule}" in said


def test_a_model_of_transformers_by_its_class_and_by_its_config(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, T5Config

    GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, architectures=["GPT2LMHeadModel"]).save_pretrained(".")
    Path("dp.plan").write_text("grid (data=2)\n")
    assert "dp.plan: " in told(capsys, "plan", "config.json", "dp.plan", "--batch", "4", "--tokens", "8")
    config = T5Config(num_layers=1, d_model=16, d_kv=8, d_ff=32, num_heads=2, vocab_size=32)
    config.architectures = ["T5ForConditionalGeneration"]  # which does not say with which word a decoder starts
    config.save_pretrained("t5")
    assert "dp.plan: " in told(capsys, "plan", "t5", "dp.plan", "--batch", "4", "--tokens", "8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "mine.py:bild"], "did you mean 'build'?"),
        (["plan", "mine.py:nothing"], "returns int"),
        (["plan", "your.py:build"], "there is no file"),
        (["plan", "no.such.module:build"], "cannot import"),
        (["plan", "LamaForCausalLM"], "did you mean 'LlamaForCausalLM'"),
        (["plan", "mine.py"], "write mine.py:"),
        (["plan", "mine.py:build", "nowhere.plan"], "nowhere.plan: No such file"),
        (["draw", "mine.py:build", "zero.plan", "-o", "step.bmp"], "bmp"),
        (["simulate", "mine.py:build", "zero.plan"], "has no pipeline"),
        (["diff", "zero.plan", "nowhere.plan"], "nowhere.plan"),
        (["plan", "mine.py:build", "zero.plan", "--cluster", "h100*2"], "no cluster is called"),
    ],
)
def test_what_cannot_be_is_said_without_a_traceback(
    where: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_cards_are_rented_by_their_names(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "plan", "mine.py:twins", "--gpus", "8xh100", "--total-tokens", "1e9", "--price", "2.5")
    assert "cast ** to bf16" in said
    assert "\n8 x H100, fits: H100 has 79.2 GiB, of which 4% are kept free; what comes and goes" in said
    assert re.search(r"training 1e\+09 tokens in [\d.]+ days, [\d,]+ at 2.5 a device and hour", said)
    assert "assumed  H100: fitted, on published steps" in said
    found = json.loads(told(capsys, "plan", "mine.py:twins", "--gpus", "2xA100", "--dtype", "fp32", "--json"))
    assert found["prediction"]["ranks"] == 2
    assert "cast ** to fp32" in found["plan"]
    assert "grid cuda (data=2)" in found["plan"]
    checked = json.loads(told(capsys, "plan", "mine.py:twins", "Twins.plan", "--gpus", "2xA100", "--json"))
    assert checked["prediction"] == found["prediction"]


def test_devices_that_compute_unevenly_are_told_of_plans_and_searches(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpus", "8xH100", "--jitter", "0.03", "--slow", "0.2", "--one-in", "16", "--seed", "2"]
    said = told(capsys, "plan", "mine.py:twins", *words)
    assumed = "for waiting on the slowest; assumed tasks scatter by 3 %, one card in 16 takes 20 % longer, seed 2\n"
    assert re.search(r"\n  jitter   expected [\d.]+ .?s, 95% of steps under [\d.]+ .?s, of which ", said)
    assert assumed in said
    assert "~ the slowest" in said
    checked = told(capsys, "plan", "mine.py:twins", "Twins.plan", *words)
    assert [line for line in checked.splitlines() if "jitter" in line] == [
        line for line in said.splitlines() if "jitter" in line
    ]
    found = json.loads(told(capsys, "plan", "mine.py:twins", "Twins.plan", *words, "--json"))["prediction"]
    assert found["seconds"] == found["jitter"]["expected"] > found["jitter"]["plain"]


def test_degrees_are_looked_for(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "plan", "mine.py:twins", "--gpus", "8xH100", "--seek", "--memory", "60", "-o", "found.plan")
    assert "grid cuda (" in said
    assert "pipelines: the layers that repeat are in no one list" in said
    assert "expect memory <= 60 GiB" in Path("found.plan").read_text()
    Path("open.plan").write_text("grid cuda (data=?, tensor=2)\nseek micro-batches\n")
    found = json.loads(told(capsys, "plan", "mine.py:twins", "open.plan", "--gpus", "8xH100", "--json"))
    assert "grid cuda (data=4, tensor=2)" in found["plan"]
    assert found["file"] == "Twins.plan"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--gpus", "8xH100", "--jitter", "-1"],
            "--jitter -1: jitter cannot be: scatter = -1.0\n  a share from 0 to 1",
        ),
        (["--gpus", "8xH100", "--slow", "0.2"], "--slow 0.2: jitter cannot be: slow = 0.2 alone\n  say both how many"),
        (["--gpus", "8xH100", "--seed", "1"], "--seed 1 is of a jitter\n  say how much tasks scatter, as in --jitter"),
        (["--jitter", "0.1"], "say of which, as in --gpus 8xH100 or --cluster mine.toml"),
        (["--gpus", "8xH10"], "write so many cards of a kind, as in 8xH100"),
        (["--gpus", "H100"], "write so many cards of a kind"),
        (["--gpus", "0xH100"], "write so many cards of a kind"),
        (["--gpus", "12xH100"], "nodes have 8 cards\n  take 8 or 16"),
        (["--gpus", "8xH100", "--cluster", "cpu"], "beside --cluster"),
        (["--price", "2"], "of how many words, as in --total-tokens 15e12"),
        (["zero.plan", "--memory", "2"], "write it there, as in expect memory <= 2.0 GiB"),
        (["zero.plan", "--dtype", "bf16"], "write it there, as in cast ** to bf16"),
        (["zero.plan", "-o", "other.plan"], "-o other.plan is for what is looked for"),
        (["zero.plan", "--seek"], "write it there, as in seek pipe, data, tensor"),
        (["missing.plan", "--seek"], "missing.plan"),
        (["--memory", "0"], "--memory 0.0 is no room"),
        (["--total-tokens", "0"], "--total-tokens 0.0 is no training"),
        (["--total-tokens", "nan"], "--total-tokens nan is no training"),
        (["--rate", "2"], "of how many words, as in --total-tokens 15e12"),
        (["--total-tokens", "1e9", "--rate", "-2"], "failures cannot be: rate = -2.0"),
    ],
)
def test_what_is_wrong_of_cards_says_what_to_write(
    where: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert main(["plan", "mine.py:twins", *words]) != 0
    assert text in capsys.readouterr().err
