"""An environment as a newcomer has it: the wheel, built from this tree, in a venv away from it, beside the needs that
are here."""

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.newcomer.desk import Desk

ROOT = Path(__file__).resolve().parents[2]
CLUTTER = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")


def built(home: Path) -> None:
    """A wheel of a copy of the tree, in which builds leave nothing; a venv; and links to all that is installed here,
    without this package, which an editable install has put there."""
    tree = shutil.copytree(ROOT, home / "tree", symlinks=True, ignore=CLUTTER)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(home / "wheels"), str(tree)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    venv.create(home / "venv", with_pip=True, symlinks=True)
    needs = home / "needs"
    needs.mkdir()
    for folder in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for each in folder.iterdir():
            if "sbpflow" not in each.name and each.suffix != ".pth" and not (needs / each.name).exists():
                (needs / each.name).symlink_to(each)
    (site,) = (home / "venv").glob("lib/python*/site-packages")
    (site / "needs.pth").write_text(str(needs))
    for each in site.glob("setuptools*"):  # of Python 3.11, too old for torch
        shutil.rmtree(each)
    launcher = home / "venv" / "bin" / "torchrun"  # which pip would have written with torch
    launcher.write_text(f"#!{launcher.with_name('python')}\nfrom torch.distributed.run import main\nmain()\n")
    launcher.chmod(0o755)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It is made once, for all workers of a run, and `pip install sbpflow` finds the wheel there."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if run else base) / "newcomer"
    home.mkdir(exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "made").exists():
            built(home)
            Desk(home, home).does("pip install sbpflow")
            (home / "made").touch()
    return home


@pytest.fixture
def desk(home: Path, tmp_path: Path) -> Desk:
    """A folder of the newcomer's own."""
    return Desk(home, tmp_path)
