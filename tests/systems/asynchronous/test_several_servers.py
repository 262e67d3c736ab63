"""A parameter server of several ranks: each has some of the weights, and about as many bytes as the others."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from tests.ranks import Ranks

from .letters import reader
from .stages import Odd, layers, squares, whole
from .test_parameter_server import in_step, rows

WORKERS = [flow.placement("cpu", [i]) for i in range(2)]


def homes(model: nn.Module) -> Counter[int]:
    """The bytes of each server."""
    found = Counter[int]()
    for x in (*model.parameters(), *model.buffers()):
        assert isinstance(x, flow.GlobalTensor)
        (rank,) = x.placement.flat
        found[rank] += x.numel() * x.dtype.itemsize
    return found


def made(servers: list[int], of: nn.Module | None = None, **how: Any) -> tuple[Any, Any, flow.nn.ParameterServer]:
    model = flow.nn.to_servers(of or layers(3), flow.placement("cpu", servers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, flow.nn.ParameterServer(model, squares, optimizer, workers=WORKERS, **how)


def trained(servers: list[int], delay: int = 2) -> list[Tensor]:
    model, _, server = made(servers, delay=delay, seconds=[1, 3])
    server.run(rows(2, 5))
    return whole(model)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("make", [lambda: layers(6), reader], ids=["layers", "reader"])
def test_servers_have_about_as_many_bytes(make: Any, count: int) -> None:
    model = make()
    sizes = [x.numel() * x.dtype.itemsize for x in (*model.parameters(), *model.buffers())]
    held = homes(flow.nn.to_servers(model, flow.placement("cpu", range(10, 10 + count))))
    assert sum(held.values()) == sum(sizes)
    assert len(held) == count
    assert max(held.values()) <= sum(sizes) / count + max(sizes)
    if make is not reader and count in (1, 2, 3):
        assert len(set(held.values())) == 1


@pytest.mark.parametrize("servers", [[2], [2, 3], [4, 2, 5], [0, 1]], ids=str)
def test_a_round_of_a_worker_takes_its_parameters_twice_and_each_server_sends_its_own(servers: list[int]) -> None:
    model, _, server = made(servers, delay=1)
    held, sent = homes(model), Counter[tuple[str, int]]()
    with flow.record() as moves:
        server.run(rows(2, 3))
    for move in moves:
        if move.op in ("pull", "push"):
            home = move.boxing.src if move.op == "pull" else move.boxing.dst
            sent[move.op, home.placement.flat[0]] += move.boxing.total
    away = {rank: sum(where.flat != (rank,) for where in WORKERS) for rank in servers}  # a server may be a worker
    assert +sent == +Counter({(op, r): 3 * away[r] * size for op in ("pull", "push") for r, size in held.items()})


@cache
def of_one_server() -> tuple[list[Tensor], list[Tensor]]:
    return trained([2]), in_step(2, 5)


@pytest.mark.parametrize("servers", [[2, 3], [2, 3, 4], [0, 1]], ids=str)
def test_weights_are_those_of_one_server_to_the_bit(servers: list[int]) -> None:
    late, in_turn = of_one_server()
    assert all(map(torch.equal, trained(servers), late))
    assert all(map(torch.equal, trained(servers, delay=0), in_turn))


@pytest.mark.parametrize("delay", [0, 2])
def test_the_bound_of_the_delay_is_that_of_one(delay: int) -> None:
    several, one = (made(servers, delay=delay, seconds=[1, 3])[2].course_of(8) for servers in ([2, 3, 4], [2]))
    assert several.versions == one.versions
    assert max(several.delays) == delay


@pytest.mark.sweep
def test_four_processes_are_two_servers_and_two_workers(ranks4: Ranks) -> None:
    expected = trained([2, 3])
    for found in ranks4(trained, [2, 3]):
        assert all(map(torch.equal, found, expected))


def test_a_checkpoint_goes_to_other_servers(tmp_path: Path) -> None:
    model, optimizer, server = made([2, 3], delay=1)
    server.run(rows(2, 2))
    flow.save(tmp_path / "at", model, optimizer=optimizer)
    server.run(rows(2, 2, first=2))
    other, its, again = made([4, 2, 3], delay=1)
    flow.load(tmp_path / "at", other, optimizer=its)
    again.run(rows(2, 2, first=2))
    assert all(map(torch.equal, whole(model), whole(other)))


def test_tied_frozen_and_missing_weights() -> None:
    torch.manual_seed(0)
    model, _, server = made([2, 3, 4], of=Odd().double())
    assert model.body[1][0].weight is model.body[0][0].weight
    server.run(rows(2, 2))
    torch.manual_seed(0)
    alone = Odd().double()
    one = flow.nn.to_global(alone, flow.placement("cpu", [2]))
    flow.nn.ParameterServer(
        one, squares, torch.optim.AdamW(one.parameters(), lr=0.01), workers=WORKERS
    ).run(rows(2, 2))  # fmt: skip
    assert all(map(torch.equal, whole(model), whole(one)))
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    assert homes(flow.nn.to_servers(empty, flow.placement("cpu", [2, 3]))) == {2: 64, 3: 16}
    assert empty.weight.full_tensor().isfinite().all()  # type: ignore[attr-defined]


def test_what_is_global_already_is_refused() -> None:
    servers = flow.placement("cpu", [2, 3])
    with pytest.raises(flow.SbpflowError, match=r"0.0.weight is global already, \(S\(0\),\) on"):
        flow.nn.to_servers(flow.nn.to_global(layers(1), servers, S(0)), servers)
    model = layers(1)
    optimizer = torch.optim.SGD(model.parameters())
    flow.nn.to_servers(model, servers)
    with pytest.raises(flow.SbpflowError, match="a parameter that the model has not"):
        flow.nn.ParameterServer(model, squares, optimizer, workers=WORKERS)
