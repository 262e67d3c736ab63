"""Code for cards runs on a played one (tools/played_card), in processes that these tests start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.played_card.build import NoCompiler, environment

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", [("tests/card",), ("tests/gpu",)], ids=lambda what: what[0])
def test_on_a_played_card(what: tuple[str, ...], seed: int) -> None:
    try:
        played = environment(seed=seed)
    except NoCompiler as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *what]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | played, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
