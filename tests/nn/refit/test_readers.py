"""A refit is one event for other threads: what they compute is of the weights before it or of those behind it."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing.exchange import refill
from sbpflow.nn.graph.capture.repeats.likeness import Unlike, of_module
from sbpflow.nn.model import reading
from sbpflow.placement.errors import SbpError

LINE = flow.placement("cpu", [0, 1])
X = torch.linspace(-1, 1, 8).reshape(2, 4)
LIMIT = 60  # seconds, of what never takes long
HOW = ["eager", "plain", "compiled"]


class Gate(nn.Module):
    """A layer in the middle, at which a forward can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.come, self.go = threading.Event(), threading.Event()
        self.go.set()

    def forward(self, x: Tensor) -> Tensor:
        self.come.set()
        assert self.go.wait(LIMIT)
        return x

    def __deepcopy__(self, memo: Any) -> "Gate":
        return Gate()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 6), Gate(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.gate(self.first(x)).tanh())


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def run(*jobs: Callable[[], Any]) -> list[threading.Thread]:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for each in threads:
        each.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for each in threads:
        each.join(LIMIT)
        assert not each.is_alive()


def asked(waiting: int = 1) -> None:
    """Until so many refits wait, which the lock tells."""
    for _ in range(LIMIT * 100):
        if len(reading._writes) >= waiting:
            return
        threading.Event().wait(0.01)
    raise AssertionError("no refit waits")


def whole(x: Any) -> Tensor:
    made: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return made.detach()


@pytest.fixture
def models() -> Iterator[tuple[Net, Net, Tensor, Tensor]]:
    """The target, the source, and what the two give."""
    yield (target := net(1)), (source := net(2)), target(X).detach(), source(X).detach()
    assert not reading._reads
    assert not reading._writes


@pytest.mark.parametrize("before", [True, False], ids=["refitted before", "reading"])
@pytest.mark.parametrize("sbp", [None, B, S(0)], ids=str)
def test_a_refit_waits_for_a_forward_that_runs(models: Any, sbp: Any, before: bool) -> None:
    target, source, old, new = models
    if sbp is not None:
        flow.nn.to_global(target, LINE, lambda name, x: sbp)
    if before:
        flow.refit(copy.deepcopy(net(1)), target)
    x, answers = X if sbp is None else flow.tensor(X, placement=LINE, sbp=B), list[Tensor]()
    target.gate.go.clear()
    target.gate.come.clear()

    def ask() -> None:
        with nullcontext() if before else flow.nn.reading(target):
            answers.append(whole(target(x)))

    threads = run(ask)
    assert target.gate.come.wait(LIMIT)
    threads += run(lambda: flow.refit(source, target))
    asked()
    target.gate.go.set()
    join(threads)
    torch.testing.assert_close(answers, [old])
    torch.testing.assert_close(whole(target(x)), new)


@pytest.mark.parametrize("how", HOW)
def test_what_comes_halfway_through_a_refit_waits_for_its_end(
    models: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, source, old, new = models
    step: Callable[[Tensor], Any] = target
    x = X if how == "plain" else flow.tensor(X, placement=LINE, sbp=B)
    if how != "plain":
        flow.nn.to_global(target, LINE, S(0))
    if how == "compiled":
        step = flow.compile(target, placement=LINE)
    flow.refit(net(1), target)
    torch.testing.assert_close(whole(step(x)), old)
    half, go, answers, keep = threading.Event(), threading.Event(), list[Tensor](), refill._keep

    def slow(*args: Any) -> None:
        keep(*args)
        half.set()
        assert go.wait(LIMIT)

    monkeypatch.setattr(refill, "_keep", slow)
    monkeypatch.setattr(reading, "COURTESY", 0.0)  # that is for refits which wait, and not for one that writes
    threads = run(lambda: flow.refit(source, target, bucket_bytes=40))  # in several buckets
    assert half.wait(LIMIT)
    threads += run(lambda: answers.append(whole(step(x))))
    threads[-1].join(0.2)
    assert not answers
    go.set()
    join(threads)
    torch.testing.assert_close(answers, [new])


@pytest.mark.parametrize("how", HOW)
def test_threads_that_generate_get_answers_of_one_version(models: Any, how: str) -> None:
    target, source, old, new = models
    step: Callable[[Tensor], Any] = target
    other, x = copy.deepcopy(target), X if how == "plain" else flow.tensor(X, placement=LINE, sbp=B)
    if how != "plain":
        flow.nn.to_global(target, LINE, S(0))
    if how == "compiled":
        step = flow.compile(target, placement=LINE)
    flow.refit(other, target)
    answers, over = [whole(step(x))], threading.Event()

    def ask() -> None:
        while not over.is_set():
            answers.append(whole(step(x)))

    threads = run(ask, ask)
    for at in range(12):
        flow.refit(other if at % 2 else source, target)
    over.set()
    join(threads)
    assert all(torch.allclose(each, old) or torch.allclose(each, new) for each in answers)


def test_an_answer_of_several_forwards_is_of_one_version(models: Any) -> None:
    target, source, old, new = models
    with flow.nn.reading(target):
        threads = run(lambda: flow.refit(source, target))
        asked()
        answers = [target(X), target(X)]  # a read inside of another one waits for nobody
    join(threads)
    torch.testing.assert_close([*answers, target(X)], [old, old, new])


def test_a_refit_inside_of_a_read_of_its_target_is_refused(models: Any) -> None:
    target, source, old, _ = models
    with flow.nn.reading(target), pytest.raises(SbpError, match=r"inside flow\.nn\.reading"):
        flow.refit(source, target)
    with flow.nn.reading(source):
        flow.refit(net(1), target)
    torch.testing.assert_close(target(X), old)
    with pytest.raises(SbpError, match=r"a list, and no model"), flow.nn.reading([target]):  # type: ignore[arg-type]
        pass


def test_a_forward_that_fails_keeps_no_refit_waiting(models: Any) -> None:
    target, source, _, new = models
    flow.refit(net(1), target)
    with pytest.raises(RuntimeError, match="shapes"):
        target(torch.ones(3, 3))
    join(run(lambda: flow.refit(source, target)))
    torch.testing.assert_close(target(X), new)


def test_models_that_share_no_weights_do_not_wait_for_each_other(models: Any) -> None:
    target, source, _, new = models
    with flow.nn.reading(net(3)):
        join(run(lambda: flow.refit(source, target)))
    torch.testing.assert_close(target(X), new)


def test_a_forward_that_waits_for_another_thread_is_not_stuck_behind_a_refit(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, source, _, new = models
    monkeypatch.setattr(reading, "COURTESY", 0.01)
    with flow.nn.reading(target):
        threads = run(lambda: flow.refit(source, target))
        asked()
        join(run(lambda: _read(target)))
    join(threads)
    torch.testing.assert_close(target(X), new)


def _read(model: nn.Module) -> None:
    with flow.nn.reading(model):
        pass


def test_layers_that_were_refitted_one_by_one_are_still_captured_once() -> None:
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    before = of_module(layers[0], [], [])
    for layer in layers:
        flow.refit(nn.Linear(4, 4), layer)
    assert of_module(layers[0], [], []) == before == of_module(layers[2], [], [])
    layers[1].register_forward_hook(lambda module, args, result: -result)
    with pytest.raises(Unlike, match="a hook"):
        of_module(layers[1], [], [])


def test_copies_and_state_dicts_of_what_was_refitted_are_what_they_were(models: Any) -> None:
    target, source, _, new = models
    for _ in range(3):
        flow.refit(source, target)
    assert len(target._forward_hooks) == len(target._forward_pre_hooks) == 1
    torch.testing.assert_close(copy.deepcopy(target)(X), new)
    assert target.state_dict().keys() == source.state_dict().keys()


@pytest.mark.parametrize("inside", [True, False], ids=["inside of another", "alone"])
def test_a_read_lets_a_refit_that_waits_go_first_unless_that_waits_for_it(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []
    monkeypatch.setattr(reading._changed, "wait_for", lambda done, limit=None: asked.append(limit))
    tensors = frozenset([1])
    around = reading.begin_reading(tensors) if inside else None
    monkeypatch.setattr(reading, "_writes", [reading.Claim(0, tensors)])  # of another thread
    reading.end_reading(reading.begin_reading(tensors))
    monkeypatch.undo()
    if around is not None:
        reading.end_reading(around)
    assert asked == ([None] if inside else [reading.COURTESY, None])


def test_a_thread_waits_for_a_refit_that_reads_what_it_reads() -> None:
    written, source, come = torch.ones(2), torch.ones(2), threading.Event()

    def read() -> None:
        claim = reading.begin_reading(frozenset([id(source)]))
        come.set()
        reading.end_reading(claim)

    reader = threading.Thread(target=read)
    with reading.rewriting([written], [source]):
        reader.start()
        assert not come.wait(0.1)
    reader.join()
    assert come.is_set()
