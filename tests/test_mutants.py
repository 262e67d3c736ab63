"""Tests see what they are for: ten of the changes that break the library, each caught by tests that run by default."""

import random
from pathlib import Path

import pytest

from tests.mutants import LIST, Change, changes, copied, listed, tried

FITTING = [each for each in listed() if each.fits()]
CHANGES = random.Random(0).sample(FITTING, min(10, len(FITTING)))


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("mutants"))


@pytest.mark.sweep
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.path)
def test_a_change_that_breaks_the_library_is_caught(change: Change, tree: Path) -> None:
    assert tried(change, tree), str(change)


@pytest.mark.sweep
def test_most_of_the_list_still_fits() -> None:
    """A line that was written anew takes its change with it: `python -m tests.mutants draw 20` draws others."""
    assert len(listed()) >= 20
    assert len(FITTING) > 0.7 * len(listed())


def test_a_list_is_read_as_it_is_written() -> None:
    assert "\n\n".join(map(str, listed())) + "\n" == LIST.read_text()


def test_nothing_is_changed_that_no_test_could_see() -> None:
    source = 'def f(x: int = 1) -> None:\n    """1 < 2"""\n    assert x < 2\n    raise ValueError(x + 1)\n'
    assert not list(changes(source))
