"""A user's script is clean for the type checkers that people use, at their strictest for what it takes from here.

The package itself is for `mypy` to check, which `make test` runs beside the tests.
"""

import os
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("users_script.py")
ROOT = SCRIPT.parents[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with what `pip install --editable` puts there, and the packages of this one.

    Checkers read the paths in .pth files of an environment and run no code of theirs, so that of an installation by a
    hook on imports they see nothing.
    """
    home = tmp_path_factory.mktemp("environment")
    build = "import setuptools.build_meta as build, sys; build.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(home)], cwd=ROOT, capture_output=True, check=True)
    (wheel,) = home.glob("*.whl")
    venv.create(home / "venv", symlinks=True)
    (site,) = (home / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    others = dict.fromkeys(str(Path(module.__file__ or "").parents[1]) for module in (pytest, torch))
    (site / "others.pth").write_text("\n".join(others))  # their own .pth files are not read
    return home / "venv" / "bin" / "python"


def checked(tmp_path: Path, *command: str) -> str:
    """Output of a checker for the script where it lies alone, as at a user's; empty if it finds nothing."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text())
    ours = {"MYPYPATH", "PYTHONPATH"}  # a user's shows no way to here
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    line = [sys.executable, "-m", *command, str(script)]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300)
    return done.stdout + done.stderr if done.returncode else ""


def test_the_script_runs() -> None:
    runpy.run_path(str(SCRIPT))


@pytest.mark.alone
def test_mypy_strict_finds_nothing(tmp_path: Path, python: Path) -> None:
    """With what `mypy` has learnt here of torch, where it ran; else it reads that for 14 s."""
    there, cache = ROOT / ".mypy_cache", tmp_path / "cache"
    if there.is_dir():
        shutil.copytree(there, cache)
    options = ("--config-file=", f"--python-executable={python}", f"--cache-dir={cache}")
    assert checked(tmp_path, "mypy", "--strict", *options) == ""


def test_pyright_finds_nothing(tmp_path: Path, python: Path) -> None:
    """By basedpyright, whose wheel brings the checker and its own node along: nothing is fetched when it runs."""
    pytest.importorskip("basedpyright")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    assert checked(tmp_path, "basedpyright", "--pythonpath", str(python), "--level", "error") == ""
