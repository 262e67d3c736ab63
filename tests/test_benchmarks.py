"""The benchmarks run: each script in its quick form, and those that wrap what is private always."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import refit
from benchmarks.parts import eager_ops, pipeline_peers
from tests.ranks import Fresh

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [*sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")), "hosts"]
LITTLE = {  # what a script takes besides, to be quick
    "checkpoint": ["--gib", "0.01"],
    "gpu": ["eager", "--device", "cpu"],
    "restart": ["--gib", "0.01"],
}


@pytest.mark.rest
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_in_its_quick_form(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *LITTLE.get(name, ())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def firings() -> Any:
    """A function of each task is wrapped as it is made."""
    return pipeline_peers.firings(1)


def ops() -> Any:
    """A process that is alone takes the world's and the transport's places."""
    eager_ops.OPS, eager_ops.CALLS = eager_ops.OPS[:1], 1
    return all("sbpflow" in ways for ways in eager_ops.ops(1).values())  # what fails is left out


def refits() -> Any:
    """Shards are read and written where they lie."""
    refit.WIDTH, refit.LAYERS = 8, 1
    return refit.measured(1)


@pytest.mark.parametrize(("ranks", "run"), [(1, firings), (1, ops), (4, refits)])
def test_what_is_private_is_still_as_it_is_wrapped(ranks: int, run: Callable[[], Any], fresh: Fresh) -> None:
    for end in fresh(ranks, run):
        assert end.answer, end.stderr
        assert end.answer.value, end.answer.error
