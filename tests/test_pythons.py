"""The wheel is tried by each interpreter that is here; one that is missing, or has no torch, is told."""

import tomllib
import venv
from pathlib import Path

from tools.pythons import NAMES, tried

ROOT = Path(__file__).resolve().parents[1]


def test_an_interpreter_that_is_not_here_is_passed_over(tmp_path: Path) -> None:
    assert tried(tmp_path / "no.whl", "python3.99", tmp_path) == "passed over, it is not here"


def test_one_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    """As a version that is listed by a manager of versions, and not chosen."""
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert tried(tmp_path / "no.whl", str(shim), tmp_path) == "passed over, it does not run here"


def test_one_without_torch_is_passed_over(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    assert tried(tmp_path / "no.whl", str(tmp_path / "bare/bin/python"), tmp_path) == "passed over, it has no torch"


def test_they_are_those_that_the_project_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={NAMES[0].removeprefix('python')}"
    page = (ROOT / "docs/install.md").read_text()
    assert f"Python {NAMES[0].removeprefix('python')} to {NAMES[-1].removeprefix('python')};" in page
