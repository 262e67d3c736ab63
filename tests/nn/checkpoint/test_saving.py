"""Savings: what was written is let go."""

import weakref
from pathlib import Path

import pytest

from sbpflow.nn.checkpoint.saving import Saving


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_that_was_written_is_kept(tmp_path: Path, asynchronous: bool) -> None:
    class Work:
        def __call__(self) -> None:
            pass

    work = Work()
    saving, kept = Saving(tmp_path, work, asynchronous=asynchronous), weakref.ref(work)
    saving.wait()
    del work
    assert kept() is None
    assert saving.done
