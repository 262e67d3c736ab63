"""The run on a card, tried without one: its arguments, its limits, and the way of each part on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu as parts
from benchmarks.predicted import models
from tests.ranks import Fresh
from tools import card_tests, gpu

ROOT = Path(__file__).resolve().parent.parent


def test_all_parts_together_take_less_than_nine_minutes() -> None:
    assert sum(each.limit for each in gpu.PARTS) <= gpu.NINE_MINUTES
    names = [each.name for each in gpu.PARTS]
    assert names == ["recorded", "training", "doctor", "models", "moves", "graph", "boxing", "pipeline"]
    assert [each.name for each in gpu.MORE] == ["eager", "examples", "ordinary"]
    assert {*parts.PARTS} < {*names, *(each.name for each in gpu.MORE)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["eager", "graph", "pipeline", "examples"])
def test_a_part_goes_its_way_on_a_cpu(name: str) -> None:
    found = parts.PARTS[name]("cpu", True)
    assert found
    assert not gpu.broken(found), found


def two_ranks() -> dict[str, dict[str, list[float] | str]]:
    return parts.boxing("cpu", True)


def test_moves_beside_the_raw_collective_go_their_way_on_a_cpu(fresh: Fresh) -> None:
    first, other = fresh(2, two_ranks)
    assert first.answer is not None, first.stderr
    assert other.answer is not None, other.stderr
    assert first.answer.error is None, first.answer.error
    assert not gpu.broken(first.answer.value), first.answer.value


def test_a_way_that_fails_is_told_and_the_others_go_on() -> None:
    def fails() -> None:
        raise ValueError("not here\nnor there")

    found = parts.measured("cpu", True, {"op": {"torch": lambda: None, "other": fails}})
    assert found["op"]["other"] == "ValueError: not here"
    assert isinstance(found["op"]["torch"], list)
    assert gpu.broken(found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["eager", "code"])
def test_models_go_their_way_on_a_cpu(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WARM", "ROUNDS", "STEPS"):
        monkeypatch.setattr(models, name, 1)
    found = models.measured(models.CASES["BERT base, autocast"], way, "cpu", "cpu", small=True)
    assert not gpu.broken({"model": found}), found
    assert (f"{way}, predicted" in found) is (way != "eager")


def part(name: str, code: str, limit: int = 60) -> gpu.Part:
    return gpu.Part(name, limit, ("-c", code))


SLEEPS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
TELLS = 'print(\'noise\'); print(\'{"op": {"torch": [2.0, 4.0], "sbpflow": [3.0, 9.0]}}\')'


def test_no_part_stops_another_and_all_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    each = (part("stuck", SLEEPS, 1), part("breaks", "raise SystemExit('no card')"), part("says", TELLS))
    monkeypatch.setattr(gpu, "PARTS", each)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--out", str(tmp_path)])
    assert gpu.main() == 1
    told = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [told[name]["state"] for name in ("stuck", "breaks", "says")] == ["out of time", "failed", "well"]
    assert "no card" in told["breaks"]["said"]
    table = (tmp_path / "gpu.md").read_text()
    assert "| says | op | sbpflow | 6.0 us | 3.0 us | 2.00 |" in table
    assert table in capsys.readouterr().out


def test_the_script_for_a_bare_machine_brings_wheels_along_and_hands_on_its_arguments(tmp_path: Path) -> None:
    """The tests for a card are all found without one."""
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(ROOT / "tools" / "gpu.sh"), "--device", "cpu", "--only", "moves", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "gpu.json").read_text())["parts"]["moves"]["said"]
    assert "test_nccl_ranks_that_share_a_card_box_every_pair[4]" in said
    assert " tests collected" in said


def test_ordinary_tests_lay_their_tensors_on_cards() -> None:
    text = 'p = placement("cpu:[0-3]", cluster="cpu")\nassert x == "cpus"'
    assert card_tests.on_cards("test_x.py", text) == 'p = placement("cuda:[0-3]", cluster="cpu")\nassert x == "cpus"'
    for name, said in (("ranks.py", "set_default_device"), ("ranks.py", "NCCL_HOSTID"), ("conftest.py", "GRACE = 20")):
        assert said in card_tests.on_cards(name, (ROOT / "tests" / name).read_text(encoding="utf-8"))
