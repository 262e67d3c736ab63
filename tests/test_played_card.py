"""Code for cards runs on a played one (tools/played_card), in processes that these tests start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import card_lines
from tools.played_card.build import NoCompiler, environment

ROOT = Path(__file__).resolve().parent.parent
ALL = [
    ("tests/gpu",),
    *((str(path.relative_to(ROOT)), "--sweep") for path in sorted(Path(ROOT, "tests/card").glob("test_*.py"))),
]
# Where ordinary tests of tensors and graphs are.
ORDINARY = [
    *(f"tests/nn/{room}" for room in ("tensors", "eager", "eager_parts", "graph", "plan", "model", "composites")),
    *(f"tests/nn/test_{name}.py" for name in ("families", "tower_families", "aliases", "losses", "moves", "state")),
    *("tests/nn/test_training.py", "tests/boxing", "tests/actors"),
]
# Statements that name a card and that neither tests/card nor tests/gpu reach, by file: why.
UNREACHED = {
    "boxing/exchange/dist.py": "the rates of hosts are asked for where one of them is slow, which tests of hosts make",
    "nn/model/recompute/core_replay.py": "a card's thread of autograd runs it, in which no line is seen",
}


def played(seed: int) -> dict[str, str]:
    try:
        return environment(seed=seed)
    except NoCompiler as error:
        pytest.skip(str(error))


def ran(command: list[str], more: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.sampled(0, sweep=len(ALL))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", ALL, ids=lambda what: what[0])
def test_on_a_played_card(what: tuple[str, ...], seed: int) -> None:
    ran([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *what], played(seed))


@pytest.mark.sweep
def test_ordinary_tests_come_to_the_same_on_cards() -> None:
    """A sample of some minutes; values and devices that differ are ours, and tools/card_plugin.py has what is not."""
    drawn = ["--sample", "120", "--drawn-by", "1", *ORDINARY]
    ran([sys.executable, "-m", "tools.card_tests", "--tb=short", *drawn], played(1))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2))
def test_ten_races_that_are_put_in_by_hand_are_seen(seed: int) -> None:
    played(seed)
    assert "10 of 10 seen" in ran([sys.executable, "-m", "tests.races", "--seed", str(seed), "--count", "10"], {})


@pytest.mark.sweep
def test_nearly_all_that_names_a_card_is_run(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/card", "tests/gpu"]
    ran(command, played(0) | {"CARD_LINES": str(file)})
    left, every = card_lines.unreached(file), card_lines.statements()
    assert {each.path for each in left} <= UNREACHED.keys(), "\n".join(map(str, left))
    assert len(left) <= 0.05 * len(every)
