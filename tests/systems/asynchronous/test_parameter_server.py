"""A parameter server: workers pull weights and push gradients, and nobody is more updates late than a bound."""

import copy
import pickle
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.world import world
from tests.ranks import Fresh, Ranks

from .letters import held_out_loss, letters, read_loss, reader
from .stages import Odd, layers, numbers, squares, whole

Rows = list[list[tuple[Tensor, Tensor]]]


def served(
    workers: int, *, of: nn.Module | None = None, loss: Any = squares, lr: float = 0.01, servers: int = 2, **how: Any
) -> tuple[nn.Module, torch.optim.Optimizer, flow.nn.ParameterServer]:
    """Workers on the first ranks, and the weights in pieces on the next."""
    where = flow.placement("cpu", range(workers, workers + servers))
    model = flow.nn.to_global(of or layers(3), where, S(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    places = [flow.placement("cpu", [i]) for i in range(workers)]
    return model, optimizer, flow.nn.ParameterServer(model, loss, optimizer, workers=places, **how)


def rows(workers: int, rounds: int, samples: int = 8, first: int = 0) -> Rows:
    drawn = [numbers(samples * workers, first + at) for at in range(rounds)]
    return [list(zip(x.chunk(workers), y.chunk(workers), strict=True)) for x, y in drawn]


def in_step(workers: int, rounds: int) -> list[Tensor]:
    """The same by data parallel training."""
    model = layers(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    cut = {"x": S(0), "y": S(0)}
    step = flow.compile(model, squares, optimizer, placement=flow.placement("cpu", range(workers)), inputs=cut)
    for at in range(rounds):
        step(*numbers(8 * workers, at))
    return whole(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("seconds", [None, (1.0, 5.0, 0.3, 2.0)])
def test_without_a_delay_it_is_data_parallel_to_the_bit(workers: int, seconds: Any) -> None:
    model, _, server = served(workers, seconds=seconds and seconds[:workers])
    server.run(rows(workers, 4))
    assert server.delays == {0: 4 * workers}
    assert all(map(torch.equal, whole(model), in_step(workers, 4)))


@pytest.mark.parametrize("delay", [0, 2])
def test_a_round_of_a_worker_takes_its_parameters_twice(delay: int) -> None:
    _, _, server = served(3, delay=delay)
    with flow.record() as moves:
        server.run(rows(3, 5))
    size = sum(p.numel() * 8 for p in layers(3).parameters())
    sent = Counter[str]()
    for move in moves:
        sent[move.op] += move.boxing.total  # of what is sent between ranks
    assert +sent == {"pull": 3 * 5 * size, "push": 3 * 5 * size}


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_nobody_is_later_than_the_bound_and_the_quick_are_as_late(delay: int) -> None:
    _, _, server = served(3, delay=delay, seconds=[1, 2, 4])
    found = server.course_of(12)
    assert max(found.delays) == delay
    assert sum(found.delays.values()) == 3 * 12
    assert found.versions[2] == tuple(range(12))  # the slowest has the newest
    assert max(found.run.peak[f"push.{i}"] for i in range(3)) == delay + 1  # gradients that wait on the servers


def reference(course: Any, workers: int, rounds: int, lr: float) -> list[Tensor]:
    """w(t+1) = w(t) - lr mean of g_i(w(version of i in t))."""
    history = [layers(3)]
    for at, row in enumerate(rows(workers, rounds)):
        total: list[Tensor] = []
        for i, (x, y) in enumerate(row):
            seen = copy.deepcopy(history[course.versions[i][at]])
            grads = torch.autograd.grad(squares(seen, x, y), [*seen.parameters()])
            total = [a + b for a, b in zip(total, grads, strict=True)] if total else [*grads]
        after = copy.deepcopy(history[-1])
        for w, g in zip(after.parameters(), total, strict=True):
            w.data.sub_(g / workers, alpha=lr)
        history.append(after)
    return [*history[-1].parameters()]


def late() -> list[Tensor]:
    model = flow.nn.to_global(layers(3), flow.placement("cpu", [2, 3]), S(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = [flow.placement("cpu", [i]) for i in range(2)]
    server = flow.nn.ParameterServer(model, squares, optimizer, workers=places, delay=2, seconds=[1, 3])
    server.run(rows(2, 8))
    return whole(model)


def test_late_gradients_are_those_of_the_weights_that_were_pulled() -> None:
    _, _, server = served(2, delay=2, seconds=[1, 3])
    course = server.course_of(8)
    assert max(course.delays) == 2
    torch.testing.assert_close(late(), reference(course, 2, 8, 0.1), rtol=0, atol=1e-14)


def test_four_processes_are_servers_and_workers(ranks4: Ranks) -> None:
    expected = late()
    for found in ranks4(late):
        assert all(map(torch.equal, found, expected))


def ended_by(way: str) -> str:
    """The words that a rank is told where the second worker ends a run."""
    flow.init(timeout=12.0 if way == "sleeps" else 30.0)
    _, _, server = served(2, servers=1)
    server.run(rows(2, 1))

    def ends(*batch: Tensor) -> Tensor:
        if way == "raises":
            raise ValueError("no such sample")
        time.sleep(20)
        raise AssertionError("this run is over")

    if world().rank == 1:
        server.steps[1] = ends  # type: ignore[call-overload]
    try:
        server.run(rows(2, 2))
    except (ValueError, flow.SbpflowError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("raises", "ValueError: no such sample"),
        pytest.param("sleeps", "made no progress", marks=pytest.mark.sweep),
    ],
)
def test_all_ranks_are_told_by_which_worker_a_run_ended(fresh: Fresh, way: str, cause: str) -> None:
    """The others waited for the whole timeout, and named one that waited too."""
    told = [
        ended.answer and (ended.answer.value or ended.answer.error) for ended in fresh(3, ended_by, way, timeout=60.0)
    ]
    for rank in (0, 2):
        assert re.match(rf"rank 1 gave up.*{cause}", str(told[rank])), told


def test_workers_of_several_ranks_and_servers_that_are_workers() -> None:
    def trained(places: list[flow.Placement], servers: flow.Placement) -> list[Tensor]:
        model = flow.nn.to_global(layers(3), servers, S(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        flow.nn.ParameterServer(model, squares, optimizer, workers=places, delay=1, seconds=[1, 2]).run(rows(2, 4))
        return whole(model)

    alone = trained([flow.placement("cpu", [i]) for i in range(2)], flow.placement("cpu", [2, 3, 4]))
    pairs = trained([flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])], flow.placement("cpu", range(4)))
    torch.testing.assert_close(alone, pairs, rtol=0, atol=1e-14)


def test_frozen_tied_and_unused_weights() -> None:
    def began() -> Odd:
        torch.manual_seed(3)
        return Odd().double()

    model, _, server = served(2, of=began())
    server.run(rows(2, 3))
    alone = began()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for at in range(3):
        optimizer.zero_grad()
        squares(alone, *numbers(16, at)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.testing.assert_close(whole(model), [*alone.parameters()], rtol=0, atol=1e-12)


def test_between_runs_model_and_optimizer_are_all_there_is(tmp_path: Path) -> None:
    model, optimizer, server = served(2, delay=1, seconds=[1, 2])
    server.run(rows(2, 4))
    flow.save(tmp_path / "at", model, optimizer=optimizer)
    server.run(rows(2, 4, first=4))
    other, its, again = served(2, delay=1, seconds=[1, 2])
    flow.load(tmp_path / "at", other, optimizer=its)
    again.run(rows(2, 4, first=4))
    assert all(map(torch.equal, whole(model), whole(other)))
    for lose in (pickle.dumps, copy.deepcopy):
        with pytest.raises(flow.SbpflowError, match="save the model and the optimizer that it was given"):
            lose(server)


@pytest.mark.sweep
def test_a_model_of_bytes_learns_nearly_as_well_as_in_step() -> None:
    """Of workers that take 1, 1.1, 1.3 and 2 seconds, and are up to three updates late: 4.4 % behind."""
    model, alone = flow.nn.to_global(reader(), flow.placement("cpu", [4]), B), reader()
    optimizer, its = (torch.optim.AdamW(each.parameters(), lr=2e-3) for each in (model, alone))
    places = [flow.placement("cpu", [i]) for i in range(4)]
    seconds = [1.0, 1.1, 1.3, 2.0]
    server = flow.nn.ParameterServer(model, read_loss, optimizer, workers=places, delay=3, seconds=seconds)
    drawn = [letters(4 * 16, at) for at in range(120)]
    server.run([list(zip(x.chunk(4), y.chunk(4), strict=True)) for x, y in drawn])
    assert max(server.delays) == 3
    for batch in drawn:
        its.zero_grad()
        read_loss(alone, *batch).backward()  # type: ignore[no-untyped-call]
        its.step()
    mine, one = held_out_loss(model), held_out_loss(alone)
    assert one < 3.8  # it began with 4.9
    assert mine < 1.06 * one


def test_what_cannot_be() -> None:
    def refused(match: str, **how: Any) -> None:
        model = flow.nn.to_global(layers(1), flow.placement("cpu", [2]), B)
        given: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters()), "model": model, "loss_fn": squares}
        given |= {"workers": [flow.placement("cpu", [0]), flow.placement("cpu", [1])]}
        with pytest.raises(flow.SbpflowError, match=match):
            flow.nn.ParameterServer(**{**given, **how}).run(rows(2, 1))

    refused("delay=-1", delay=-1)
    refused("delay=1.5", delay=1.5)
    refused("workers=", workers=[])
    refused("both on rank 0", workers=[flow.placement("cpu", [0]), flow.placement("cpu", [0, 1])])
    refused("2 numbers above 0", seconds=[1.0])
    refused("2 numbers above 0", seconds=[1.0, 0.0])
    refused("round 0 has 2 batches for 1 workers", workers=[flow.placement("cpu", [0])])
    refused("is on no servers yet", model=layers(1))
    refused("a parameter that the model has not", optimizer=torch.optim.SGD([torch.zeros(1)]))

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.body = nn.BatchNorm1d(8).double(), layers(1)

        def forward(self, x: Tensor) -> Any:
            return self.body(self.norm(x))

    model = flow.nn.to_global(Running(), flow.placement("cpu", [2]), B)
    refused("is changed by each worker", model=model, optimizer=torch.optim.SGD(model.parameters()))
    server = served(2)[2]
    with pytest.raises(flow.SbpflowError, match="nothing ran yet"):
        _ = server.delays
    assert server.run([]) == []


def test_workers_follow_the_model_on_the_servers_between_runs() -> None:
    """They kept its modes and buffers of when the server was made, and trained what was frozen since."""

    class Halved(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("by", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, self.training) * self.get_buffer("by")

    model, _, server = served(2, of=Halved(), loss=lambda model, x: model(x).square().mean(), lr=0.1)
    held: Any = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    x = torch.ones(2, 4)
    model.eval()
    with torch.no_grad():
        held["by"].mul_(2.0)
    held["bias"].requires_grad_(False)
    before = {name: value.full_tensor().clone() for name, value in held.items()}
    ((loss, _),) = server.run([[(x,), (x,)]])
    wanted = ((x @ before["weight"].T + before["bias"]) * 2).square().mean()
    assert torch.allclose(loss.full_tensor(), wanted)  # type: ignore[attr-defined]
    assert torch.equal(held["bias"].full_tensor(), before["bias"])
    assert not torch.equal(held["weight"].full_tensor(), before["weight"])
