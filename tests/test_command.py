"""`python -m sbpflow simulate` shows a schedule by its name or from a file; Ctrl-C ends it while it imports, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sbpflow.__main__ import main
from sbpflow._interrupt import STOPPED
from sbpflow.actors import Schedule

ROOT = Path(__file__).resolve().parents[1]


def test_a_schedule_is_shown_by_its_name_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "line.svg"
    assert main(["simulate", "1f1b", "-p", "2", "-m", "3", "--svg", str(picture)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1f1b p=2 m=3: 12 units, bubble 25.0 %"
    assert said[-3:] == ["  device 0   F0 F1 .  .  B0--- F2 B1--- .  B2---",
                         "  device 1   .  F0 B0--- F1 B1--- F2 B2---", f"drew {picture}"]  # fmt: skip
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_a_schedule_is_read_from_a_file_which_says_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = Schedule("own", table=("F0 F1 B0 B1", "F0 B0 F1 B1"))
    path = tmp_path / "own.txt"
    path.write_text(str(own), encoding="utf-8")
    assert main(["simulate", str(path)]) == 0
    assert capsys.readouterr().out == f"{own.show()}\n"


def test_what_is_no_schedule_is_said_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "1f2b"]) == 2
    assert "no schedule is called '1f2b'\n  did you mean '1f1b'?\n" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "1f1b", "-p", "0"])
    assert "give a number of 1 or more" in capsys.readouterr().err


INTERRUPTS = """
import signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "MODULE":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background begin with it ignored
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "module", ["sbpflow.actors", "torch", "sbpflow.nn.plan", "sbpflow.__main__", "sbpflow.nn.plan.commands.subcommands"]
)
def test_ctrl_c_while_it_imports_ends_it_without_a_traceback(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS.replace("MODULE", module), encoding="utf-8")
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    words = [sys.executable, "-m", "sbpflow", "simulate", "1f1b"]
    done = subprocess.run(words, env=there, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (STOPPED, "", "stopped\n")
