"""Tests on a played card, in processes that tests/test_played_card.py starts; elsewhere nothing is collected."""

import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if "PLAYED_CARD" in os.environ else ["test_*.py"]


@pytest.fixture(autouse=True)
def nothing_pends() -> Iterator[None]:
    """An error of a test is told in it."""
    yield
    torch.cuda.synchronize()
