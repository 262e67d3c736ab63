"""Traces whose reuse of layers tests look at."""

from typing import Any

import pytest

import sbpflow.nn.graph.capture.trace as tracing
from sbpflow.nn.graph.capture.repeats.layer_reuse import Repeats


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Repeats]:
    """The reuse of layers by each trace of a test, to look at how many calls it took over."""
    made: list[Repeats] = []

    class Noted(Repeats):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(tracing, "Repeats", Noted)
    return made
