"""A user's script is clean for the type checkers that people use, at their strictest for what it takes from here."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("users_script.py")
ROOT = SCRIPT.parents[1]


def checked(tmp_path: Path, *command: str) -> str:
    """What a checker says of the script where it lies alone, as at a user's; empty if it finds nothing."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text())
    environment = os.environ | {
        "MYPYPATH": str(ROOT),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    line = [sys.executable, "-m", *command, str(script)]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300)
    return done.stdout + done.stderr if done.returncode else ""


def test_the_script_runs() -> None:
    runpy.run_path(str(SCRIPT))


def test_mypy_strict_finds_nothing(tmp_path: Path) -> None:
    assert (
        checked(tmp_path, "mypy", "--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'script'}") == ""
    )


def test_pyright_finds_nothing(tmp_path: Path) -> None:
    """By basedpyright, whose wheel brings the checker and its own node along: nothing is fetched when it runs."""
    pytest.importorskip("basedpyright")
    (tmp_path / "pyrightconfig.json").write_text(f'{{"typeCheckingMode": "standard", "extraPaths": ["{ROOT}"]}}')
    assert checked(tmp_path, "basedpyright", "--pythonpath", sys.executable, "--level", "error") == ""
