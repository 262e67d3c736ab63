"""The watch over a step: what is stuck is told by a thread that is not."""

import gc
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.state import Firing
from sbpflow.actors.runtime import progress
from sbpflow.actors.runtime.job import Work
from sbpflow.actors.runtime.runtime import Runtime
from sbpflow.placement.errors import ScheduleError
from tests.actors.ticks import LIMIT, Clock


def network(*queues: str) -> Network:
    actors = Actor("a", queues[0], (), (Give("x"),), 4), Actor("b", queues[-1], (Take("x"),))
    return Network(actors, (Register("x", 2),), "chain")


CLOCK = Clock(0.01)


def told() -> str:
    """Text that comes to stderr while the thread that asks is the one that is stuck."""
    with redirect_stderr(StringIO()) as heard:
        CLOCK.goes = True
        for _ in range(int(LIMIT * 100)):
            time.sleep(0.01)
            if "who waits for whom" in heard.getvalue():
                break
        CLOCK.goes = False
    return heard.getvalue()


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "monotonic", CLOCK)
    before = flow.init().timeout
    flow.init(timeout=0.1)
    yield
    flow.init(timeout=before)


@pytest.mark.parametrize("queues", [("q",), ("q", "r")], ids=["alone", "with_others"])
@pytest.mark.parametrize("stuck", ["a", "b"])
def test_a_stage_that_never_returns_is_told_while_it_does_not(stuck: str, queues: tuple[str, ...]) -> None:
    said: list[str] = []
    quick: dict[str, Work] = {"a": lambda firing: [1], "b": lambda firing: None}

    def hang(firing: Firing) -> Any:
        if not said:  # who has told of it may not yet have ended the step when this one fires again
            said.append(told())  # it returns only when somebody else has told of it
        return quick[stuck](firing)

    with Runtime(network(*queues), {**quick, stuck: hang}) as runtime:
        with pytest.raises(ScheduleError, match=r"chain made no progress for 0.1 s") as caught:
            runtime.run()
        (first,) = said
        assert first.count("who waits for whom") == 1
        assert f"{stuck} (fired 0) is at work" in first
        at = re.search(r"test_progress\.py:(\d+)", first)  # where that thread is
        assert at is not None
        assert int(at[1]) in {line for *_, line in told.__code__.co_lines()}
        assert "flow.init(timeout=)" in str(caught.value)
    with Runtime(network(*queues), quick) as runtime:
        runtime.run()


def test_who_waits_for_the_stuck_one_is_told() -> None:
    said: list[str] = []
    second = threading.Event()

    def make(firing: Firing) -> list[int]:
        if firing.label == 1:
            second.set()
        return [1]

    def hang(firing: Firing) -> None:
        assert second.wait(LIMIT)
        if not said:
            said.append(told())

    with (
        pytest.raises(ScheduleError, match=r"chain made no progress for 0.1 s; at work: r"),
        Runtime(network("q", "r"), {"a": make, "b": hang}) as runtime,
    ):
        runtime.run()
    assert "a (fired 2) waits for x: 0 of 1 free, by b" in said[0]


def test_a_step_that_is_over_is_held_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that looks held the last step that it had seen, and all of its memory, until another one began."""
    looked, look = threading.Event(), progress.Progress.look

    def seen(watch: progress.Progress) -> None:
        look(watch)
        looked.set()

    monkeypatch.setattr(progress.Progress, "look", seen)

    def make(firing: Firing) -> list[int]:
        assert looked.wait(LIMIT)
        return [1]

    with Runtime(network("q"), {"a": make, "b": lambda firing: None}) as runtime:
        runtime.run()
    held = weakref.ref(make)
    del make, runtime
    for _ in range(int(LIMIT * 10)):
        gc.collect()
        if held() is None:
            break
        time.sleep(0.01)
    assert held() is None


HANGS: list[int] = []
SAID: list[str] = []


@torch.library.custom_op("sbpflow_tests::hanging", mutates_args=())
def hanging(x: Tensor) -> Tensor:
    while HANGS:
        HANGS.pop()
        SAID.append(told())
    return x.clone()


hanging.register_fake(torch.empty_like)
hanging.register_autograd(lambda ctx, grad: grad)
flow.rule("sbpflow_tests::hanging", "* -> *")


class Hanging(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.sbpflow_tests.hanging(super().forward(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [0, 1], ids=["calling_thread", "other_thread"])
def test_the_limit_set_behind_a_first_step_holds_for_the_next(stage: int) -> None:
    flow.init(timeout=300)
    layers = nn.Sequential(*[Hanging(4, 4) if n == stage else nn.Linear(4, 4) for n in range(2)])
    flow.nn.pipeline(layers, [flow.placement("cpu", [0]), flow.placement("cpu", [1])])
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    step = flow.compile(layers, lambda model, x: model(x).square().mean(), optimizer, micro_batches=4)
    step(torch.ones(8, 4))
    flow.init(timeout=0.1)
    HANGS.append(stage)
    with pytest.raises(ScheduleError, match=rf"made no progress for 0.1 s; at work: device {stage} at .*test_progress"):
        step(torch.ones(8, 4))
    assert f"F{stage} (fired 0) is at work" in SAID.pop()
    step(torch.ones(8, 4))
