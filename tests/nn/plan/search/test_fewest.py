"""The fewest cards that do: counts from a bound upwards, a few of them, and the planner's answer for one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.__main__ import main
from sbpflow.nn.plan.resting import RestingBytes
from sbpflow.nn.plan.search.fewest import FewestCards, NothingFits, fewest

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))), torch.empty(64, 1024)
"""
NUMBERS = 4 * 1024**2
GIB = 2**30


def short(of: int = 100, limit: float = 30.0) -> NothingFits:
    return NothingFits(limit, "90 B: chosen", RestingBytes(of // 2, of - of // 2, 4 * of))


def tried(works: int, *, interrupted: int = 0) -> tuple[FewestCards[str], list[int]]:
    asked = list[int]()

    def attempt(count: int) -> str:
        asked.append(count)
        if count == interrupted:
            raise KeyboardInterrupt
        if count < works:
            raise flow.SbpError("it is too large")
        return f"plan for {count}"

    return fewest(short(), [2, 4, 8, 16, 32, 64], attempt, lambda line: None), asked


def test_counts_below_the_bound_are_not_tried_and_the_first_that_does_is_the_answer() -> None:
    assert tried(works=2) == (FewestCards(4, "plan for 4", (4,)), [4])  # 100 bytes take 4 of 30
    assert tried(works=16) == (FewestCards(16, "plan for 16", (4, 8, 16)), [4, 8, 16])


def test_tries_are_few_and_what_is_interrupted_ends_with_the_bound() -> None:
    assert tried(works=32) == (FewestCards(32, None, (4, 8, 16)), [4, 8, 16])
    assert tried(works=32, interrupted=8) == (FewestCards(8, None, (4,)), [4, 8])


def test_resting_bytes_are_those_of_the_account_on_one_rank() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(64, 32, bias=False), torch.empty(8, 64)
    for more, each in (("", 4 + 4 + 8), ("cast ** to bf16\ncast {grads,states} ** to fp32", 2 + 4 + 12)):
        found = flow.predict(model, x, f"grid cuda (data=1)\n{more}", cluster="h100x8")
        assert found.checked.report.memory is not None
        held = found.checked.report.memory.ranks[0]
        rest = found.resting
        assert (rest.weights, rest.gradients, rest.states) == (held.parameters, held.gradients, held.states)
        assert rest.weights + rest.gradients + rest.states == each * 64 * 32


def test_the_planner_says_how_many_ranks_it_takes_at_least() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(1024, 1024, bias=False), torch.empty(8, 1024)
    known = flow.cluster("h100x8")
    small = replace(known, device=replace(known.device, memory=3.36e6))
    with pytest.raises(NothingFits, match="take 3 ranks at least, and 6 unless states are on the host"):
        flow.find_plan(model, x, plan="grid cuda (data=2)", cluster=small)


def test_the_command_names_the_fewest_cards_and_their_plan_which_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODEL)
    words = ["plan", "mine.py:build", "--memory", str(7 * NUMBERS / 2 / GIB), "--json"]
    assert main([*words, "--gpus", "1xH100"]) == 2
    shown = capsys.readouterr()
    said = json.loads(shown.out)
    assert not said["fits"]
    assert said["why"] in shown.err
    many = said["fewest"]["cards"]
    assert said["fewest"]["tried"] == [2, 4, 8][: said["fewest"]["tried"].index(many) + 1]
    assert f"--gpus {many}xH100 does, by the plan " in shown.err
    assert said["fewest"]["found"]["prediction"]["ranks"] == many
    assert main([*words, "--gpus", f"{many}xH100"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == said["fewest"]["found"]["plan"]


def test_where_tries_do_not_suffice_a_bound_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODEL)
    monkeypatch.setattr("sbpflow.nn.plan.search.fewest.TRIES", 0)
    assert main(["plan", "mine.py:build", "--memory", str(NUMBERS / GIB), "--gpus", "2xH100"]) == 2
    said = capsys.readouterr().err
    assert "it takes 8 x H100 or more, a bound: of weights and gradients alone these have 3 MiB each" in said
    assert "try --gpus 8xH100" in said


def test_a_plan_that_needs_the_host_says_how_many_cards_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODEL)
    rest = (2 + 4 + 12) * NUMBERS
    assert main(["plan", "mine.py:build", "--memory", str(0.45 * rest / GIB), "--gpus", "1xH100"]) == 0
    said = capsys.readouterr().out
    assert "offload states" in said
    assert "hosts    without them 4 x H100 or more: weights, gradients and states are 72 MiB" in said
