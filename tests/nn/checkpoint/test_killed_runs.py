"""Runs under torchrun of which ranks are killed at random moments: restarted, they end as one that nobody killed."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.nn.checkpoint.killed_run import KINDS, end_of, left


def session(home: Path, kind: str, seed: int, kills: int) -> dict[str, Any]:
    home.mkdir()
    agent = ["--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1", "--max-restarts", str(kills + 2)]
    run = ["-m", "tests.nn.checkpoint.killed_run", str(home), kind, str(seed), str(kills)]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *agent, *run],
        capture_output=True, text=True, timeout=1500, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return end_of(home)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    return cache(lambda kind: session(tmp_path_factory.mktemp("unbroken") / "run", kind, 0, 0))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_ends_as_one_that_is_not(
    tmp_path: Path, unbroken: Callable[[str], dict[str, Any]], kind: str
) -> None:
    """Sixty kills of all kinds."""
    kills = 12
    assert session(tmp_path / "run", kind, 1, kills) == unbroken(kind)
    lives = (tmp_path / "run" / "lives").read_text()
    assert len(lives) == kills
    assert lives.count("+") * 3 >= kills * 2  # behind a first checkpoint
    assert all(names == ["step-38", "step-40"] for names in left(tmp_path / "run"))
