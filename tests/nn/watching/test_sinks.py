"""Sinks: what was written is read back by the libraries that others read it with."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sbpflow as flow
from sbpflow.nn.watching.sinks import FigureLine, sinks_of

LINES: list[dict[str, Any]] = [{"step": 10, "loss": 3.0, "gib": 1.5}, {"step": 20, "loss": 2.0, "gib": 1.75}]


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    made = EventAccumulator(str(folder))
    made.Reload()
    return [(event.step, event.value) for event in made.Scalars(name)]


def written(to: object, start: int = 0, error: str = "", lines: list[dict[str, Any]] = LINES) -> None:
    for sink in sinks_of(to, start):
        for line in lines:
            sink.write(line)
        sink.end(error)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of protobuf and tensorboard
def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    written(f"tensorboard:{tmp_path / 'run'}")
    assert scalars(tmp_path / "run", "loss") == [(10, 3.0), (20, 2.0)]
    assert scalars(tmp_path / "run", "gib") == [(10, 1.5), (20, 1.75)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_that_goes_on_hides_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    written(f"tensorboard:{tmp_path}")
    written(f"tensorboard:{tmp_path}", start=12, lines=[{"step": 20, "loss": 1.0}])
    assert scalars(tmp_path, "loss") == [(10, 3.0), (20, 1.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_writer_of_the_users_stays_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    written([writer])
    writer.add_scalar("mine", 4.0, 1)
    writer.close()
    assert scalars(tmp_path, "mine") == [(1, 4.0)]
    assert scalars(tmp_path, "loss") == [(10, 3.0), (20, 2.0)]


WANDB = """
import wandb
from tests.nn.watching.test_sinks import written
run = wandb.init(project="given")
written([run])
print("summary", dict(run.summary)["loss"], run.step)
run.finish()
written("wandb:team/project")
"""


def test_wandb_takes_lines_without_a_network(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONPATH": str(root)}
    environment |= {"WANDB_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WANDB], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "summary 2 21" in done.stdout
    runs = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(runs) == 2
    assert all(b"loss" in run.read_bytes() for run in runs)


def test_a_function_is_called_with_each_line() -> None:
    found: list[FigureLine] = []
    written(found.append)
    assert found == LINES


@pytest.mark.parametrize(
    ("to", "says"),
    [
        ("tensorbord:runs", "several are a list\n  did you mean 'tensorboard:runs'?"),
        ("wandb", "'wandb' lacks a name: write 'wandb:NAME'"),
        ("wandb:", "several are a list\n  did you mean 'wandb:NAME'?"),
        ("run.csv", "no sink is called 'run.csv'\n  to= takes a file 'run.jsonl'"),
        (Path("run"), "no sink is called 'run'"),
        ([3], "no sink is a int"),
    ],
)
def test_a_sink_that_is_none_is_told_with_those_there_are(to: object, says: str) -> None:
    with pytest.raises(flow.SbpError) as told:
        sinks_of(to, 0)
    assert says in str(told.value)
    assert "to= takes a file" in str(told.value)


@pytest.mark.parametrize(("module", "to"), [("tensorboard", "tensorboard:runs"), ("wandb", "wandb:mine")])
def test_a_package_that_is_missing_is_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, to: str
) -> None:
    for name in [module, "torch.utils.tensorboard"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(flow.MissingError, match=rf"{module} is not installed(.*\n)+  pip install 'sbpflow\[train\]'"):
        sinks_of(to, 0)
