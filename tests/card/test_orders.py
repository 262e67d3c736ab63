"""Each wait, and each word to the allocator, by which the package orders streams: without it a test here fails.

`tests/races.py` takes them away, one at a time. Tests go round several times, since a late copy is not always late.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.runtime.card import Later, OnStream
from sbpflow.actors.runtime.job import Work
from sbpflow.actors.runtime.runtime import Runtime
from sbpflow.nn.checkpoint.save import Snapshot
from sbpflow.nn.graph.host.copies import Copies
from sbpflow.nn.graph.host.memory import ROOT
from sbpflow.nn.graph.host.states import StateMemory
from sbpflow.placement.device import recorded

ROUNDS = 12


def stream() -> Any:
    cuda: Any = torch.cuda
    return cuda.Stream()


def full(number: float, count: int = 64) -> Tensor:
    return torch.full((count,), float(number), device="cuda") * 1


def test_what_comes_later_is_read_behind_its_event_and_kept_for_the_reader() -> None:
    makes, reads = stream(), stream()
    for number in range(ROUNDS):
        with torch.cuda.stream(makes):
            later = Later((full(number), [full(number + 1)]), recorded(makes))
        with torch.cuda.stream(reads):
            one, (other,) = later.on(reads)
            got = one + other
        del one, other, later
        with torch.cuda.stream(makes):
            full(-1)  # takes memory that was given back too early
        reads.synchronize()
        assert got.tolist() == [2 * number + 1] * 64


def test_actors_on_streams_of_their_own_read_whole_values() -> None:
    actors = (Actor("a", "first", (), (Give("x"),), 8), Actor("b", "second", (Take("x"),)))
    got: list[Tensor] = []
    work: dict[str, Work] = {
        "a": OnStream(lambda firing: [full(firing.label)], stream()),
        "b": OnStream(lambda firing: got.append(firing.held[0][0].value.sum()), stream()),
    }
    with Runtime(Network(actors, (Register("x", 2),), "relay"), work) as runtime:
        runtime.run()
    torch.cuda.synchronize()
    assert [value.item() for value in got] == [64.0 * label for label in range(8)]


@pytest.mark.parametrize("dst", [B, S(0), S(1)], ids=str)
def test_a_move_on_the_side_is_behind_its_shards_and_before_its_readers(dst: Any) -> None:
    p = flow.placement("cuda:[0-3]")
    for number in range(ROUNDS):
        a, b = flow.layout(p, P, (4, 4)), flow.layout(p, dst, (4, 4))
        pending = flow.boxing.box_async([torch.full((4, 4), float(number), device=f"cuda:{k}") for k in range(4)], a, b)
        noise = [torch.ones(4, 4, device=f"cuda:{k}") for k in range(4)]
        shards = pending.wait()
        got = [shard * 1 for shard in shards]
        del shards, pending
        again = flow.boxing.box_async(noise, a, b).wait()
        assert all(bool((x == 4 * number).all()) for x in got)
        del again, noise


def test_states_go_to_the_host_and_back() -> None:
    memory = StateMemory("cpu", "w", (0,), None)
    for number in range(ROUNDS):
        gradient = full(number)
        (there,) = memory.brought([gradient])
        del gradient
        full(-1)
        memory.arrive()
        assert there.tolist() == [number] * 64
        (master,) = memory.put("master", [there + 1])
        master = master.pin_memory()
        (moved,) = memory.sent([master], [full(0)])
        got = moved * 2
        del moved
        memory.sent([torch.zeros(64).pin_memory()], [full(0)])  # into memory that was given back too early
        memory.arrive()
        master.zero_()
        assert got.tolist() == [2 * (number + 1)] * 64


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_copies_on_the_host_come_back(to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path))
    copies = Copies(to, "x")
    for number in range(ROUNDS):
        given = [full(number), full(number + 100), full(number + 200, 8)]
        away = copies.stow(given)
        del given
        full(-1), full(-1, 8)
        coming = away.fetch()
        del away
        back = coming.wait()
        got = [x * 1 for x in back]
        del back, coming
        away = copies.stow([full(-2), full(-2), full(-2, 8)])  # the same memory of the host, behind the way back
        wanted = [number, number + 100, number + 200]
        assert [x[0].item() for x in got] == [x[-1].item() for x in got] == wanted
        del away


def test_memory_of_what_comes_back_and_is_not_waited_for_is_used_again_behind_that() -> None:
    copies = Copies("cpu", "x")
    for number in range(ROUNDS):
        away = copies.stow([full(number)])
        coming = away.fetch()
        del away, coming
        (back,) = copies.stow([full(number + 1)]).fetch().wait()
        assert back.tolist() == [number + 1] * 64


def test_files_that_are_read_one_behind_the_other_share_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path))
    copies = Copies("disk", "x")
    for number in range(ROUNDS):
        away = [copies.stow([full(number + 10 * k)]) for k in range(4)]
        coming = [each.fetch() for each in away]
        got = [each.wait()[0] * 1 for each in coming]
        del coming, away
        assert [x[5].item() for x in got] == [number + 10 * k for k in range(4)]


@pytest.mark.parametrize("made_on", ["the same stream", "another stream"])
def test_a_snapshot_has_the_values_of_its_moment(made_on: str) -> None:
    snapshot, aside, here = Snapshot(), stream(), torch.cuda.current_stream()
    for number in range(ROUNDS):
        with torch.cuda.stream(aside if made_on == "another stream" else here):
            parts = [full(number), full(number + 50, 8)]
        here.wait_stream(aside)
        for part in parts:
            part.record_stream(here)
        copies = snapshot.taken(parts)
        if number % 2:
            for part in parts:
                part.fill_(-1)
        del parts, part
        with torch.cuda.stream(aside):
            full(-1), full(-1, 8)
        full(-1), full(-1, 8)
        assert [copy().tolist() for copy in copies] == [[number] * 64, [number + 50] * 8]
