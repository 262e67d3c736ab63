"""A played card records graphs as strictly as a card, and replays them in any order that they allow."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tools.played_card.facade import count

cuda: Any = torch.cuda


def made(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device="cuda").reshape(shape)


def recorded(function: Callable[[], Any]) -> tuple[Any, Any]:
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        result = function()
    return graph, result


def test_a_graph_runs_nothing_until_it_is_replayed() -> None:
    x = made(4)
    graph, y = recorded(lambda: x.add_(1) * 2)
    assert x.tolist() == [0, 1, 2, 3]
    for n in range(1, 4):
        graph.replay()
        assert y.tolist() == [2 * (k + n) for k in range(4)]


def test_a_replay_neither_waits_nor_allocates() -> None:
    x = made(64)
    graph, y = recorded(lambda: (x * 2).relu().softmax(0))
    before = count("allocations"), count("syncs"), count("waited")
    replays = count("replays")
    for _ in range(5):
        graph.replay()
    assert (count("allocations"), count("syncs"), count("waited")) == before
    assert count("replays") == replays + 5
    torch.testing.assert_close(y, (x * 2).relu().softmax(0))


def test_replays_keep_the_order_of_what_is_around_them() -> None:
    x = made(8)
    graph, y = recorded(lambda: x * 3)
    for n in range(20):
        x.fill_(n)
        graph.replay()
        z = y + 1
        assert z.tolist() == [3 * n + 1] * 8


def test_streams_that_fork_and_join_are_of_the_graph() -> None:
    x, side = made(8), cuda.Stream()

    def forked() -> Tensor:
        here = cuda.current_stream()
        side.wait_stream(here)
        y = x + 1
        with cuda.stream(side):
            z = x * 2
        here.wait_stream(side)
        z.record_stream(here)
        return y + z

    graph, y = recorded(forked)
    for _ in range(10):
        x.add_(1)
        graph.replay()
        assert torch.equal(y, x * 3 + 1)


def test_a_fork_that_does_not_join_is_an_error() -> None:
    x, side = made(8), cuda.Stream()

    def forked() -> Tensor:
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            return x * 2

    with pytest.raises(RuntimeError, match="unjoined work"):
        recorded(forked)


def test_a_race_inside_of_a_graph_is_seen() -> None:
    x, side = made(8), cuda.Stream()

    def race() -> None:
        here = cuda.current_stream()
        side.wait_stream(here)
        x.add_(1)
        with cuda.stream(side), pytest.raises(RuntimeError, match="nothing says which comes first"):
            x.add_(1)
        here.wait_stream(side)

    recorded(race)
    cuda.synchronize()


def test_a_race_with_a_replay_is_seen() -> None:
    x, side = made(8), cuda.Stream()
    graph, _ = recorded(lambda: x.add_(1))
    side.wait_stream(cuda.current_stream())
    graph.replay()
    with cuda.stream(side), pytest.raises(RuntimeError, match=r"in a graph.*nothing says which comes first"):
        x.sum()
    cuda.synchronize()


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "test_capture.py"),
    "bool": (lambda x: bool((x > 1).any()), "test_capture.py"),
    "mask": (lambda x: x[x > 1], "test_capture.py"),
    "cpu": (lambda x: x.cpu(), "test_capture.py"),
    "made on the host": (lambda x: x + torch.ones(4).to("cuda"), "test_capture.py"),
    "pageable": (lambda x: x.copy_(torch.ones(4), non_blocking=True), "test_capture.py"),
    "synchronize": (lambda x: cuda.synchronize(), "test_capture.py"),
    "query": (lambda x: cuda.current_stream().query(), "test_capture.py"),
    "seed": (lambda x: torch.manual_seed(1), "test_capture.py"),
    "state": (lambda x: cuda.get_rng_state(), "test_capture.py"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_record_is_an_error_with_its_line(what: str) -> None:
    refused, line = REFUSED[what]
    x, graph = made(4), cuda.CUDAGraph()
    stream = cuda.Stream()
    cuda.synchronize()
    with cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match=rf"not permitted when stream is capturing .*{line}"):
            refused(x)
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()
    assert (x + 1).tolist() == [1, 2, 3, 4]


def test_an_event_from_outside_is_not_waited_for() -> None:
    event = torch.Event("cuda")
    event.record()
    with pytest.raises(RuntimeError, match="dependency created on uncaptured work"):
        recorded(lambda: cuda.current_stream().wait_event(event))


def test_pinned_memory_is_read_at_each_replay() -> None:
    x, host = torch.empty(4, device="cuda"), torch.zeros(4).pin_memory()
    graph, _ = recorded(lambda: x.copy_(host, non_blocking=True))
    for n in range(3):
        host.fill_(n)
        graph.replay()
        assert x.tolist() == [n] * 4


def test_memory_of_a_graph_is_given_to_nobody_else() -> None:
    x = made(100)
    graph, y = recorded(lambda: (x * 2) + 1)
    at = y.data_ptr()
    others = [torch.empty(100, device="cuda") for _ in range(20)]
    assert not any(abs(other.data_ptr() - at) < 512 for other in others)
    del y
    again = torch.empty(100, device="cuda")
    assert again.data_ptr() != at
    graph.replay()
    cuda.synchronize()
    del graph
    gc.collect()


def test_memory_that_was_freed_since_is_an_error_at_replay() -> None:
    held = [made(100)]
    graph, _ = recorded(lambda: held[0] * 2)
    held.clear()
    with pytest.raises(RuntimeError, match=r"memory that it uses was freed since .*test_capture.py"):
        graph.replay()


@pytest.mark.parametrize("seed", [0, 3])
def test_each_replay_draws_what_the_next_call_would(seed: int) -> None:
    x = torch.ones(64, device="cuda")

    def drawn() -> tuple[Tensor, Tensor]:
        return torch.nn.functional.dropout(x, 0.5), torch.rand(4, device="cuda")

    graph, (kept, numbers) = recorded(drawn)
    torch.manual_seed(seed)
    wanted = [drawn() for _ in range(3)]
    after = torch.rand(3, device="cuda")
    torch.manual_seed(seed)
    for one, other in wanted:
        graph.replay()
        assert torch.equal(kept, one)
        assert torch.equal(numbers, other)
    assert torch.equal(torch.rand(3, device="cuda"), after)


def test_a_generator_takes_part_if_it_is_registered() -> None:
    own, x = torch.Generator("cuda"), torch.empty(4, device="cuda")
    with pytest.raises(RuntimeError, match="not in capture mode"):
        recorded(lambda: x.uniform_(generator=own))
    graph = cuda.CUDAGraph()
    graph.register_generator_state(own)
    with cuda.graph(graph):
        x.uniform_(generator=own)
    own.manual_seed(2)
    wanted = [torch.empty(4, device="cuda").uniform_(generator=own) for _ in range(2)]
    own.manual_seed(2)
    for each in wanted:
        graph.replay()
        assert torch.equal(x, each)


def test_graphs_of_one_pool_use_one_memory() -> None:
    x, pool = made(100), cuda.graph_pool_handle()
    first, second = cuda.CUDAGraph(), cuda.CUDAGraph()
    with cuda.graph(first, pool=pool):
        y = x * 2
    at = y.data_ptr()
    del y
    with cuda.graph(second, pool=pool):
        y = x * 3
    assert y.data_ptr() == at
    second.replay()
    assert torch.equal(y, x * 3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_training_step_is_recorded_and_is_what_it_was(fused: bool) -> None:
    def trained(graphed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
        ).cuda()
        how: Any = {"fused": True} if fused else {"capturable": True}
        adam = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2, device="cuda"), **how)
        x = made(4, 8)

        def step() -> Tensor:
            loss: Tensor = net(x).square().mean()
            torch.autograd.backward(loss)
            adam.step()
            adam.zero_grad(set_to_none=True)
            return loss

        for _ in range(2):
            step()
        graph = recorded(step)[0] if graphed else None
        for n in range(4):
            x.fill_(n)
            adam.param_groups[0]["lr"].fill_(1e-2 / (n + 1))
            graph.replay() if graph else step()
        return list(net.state_dict().values())

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)
