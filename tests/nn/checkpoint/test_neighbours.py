"""Checkpoints in the memory of hosts: one host is lost, and its part is on the next; of two that are, all are told."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import S
from sbpflow.nn.checkpoint.manifest import read_manifest
from sbpflow.nn.files.raw import traffic
from sbpflow.placement.errors import SbpflowError
from tests.ranks import Fresh


def hosts(number: int) -> Any:
    """Ranks that stand for hosts, so many on each."""
    return lambda rank: {"SBPFLOW_HOST": f"host {rank // number}"}


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Weights in parts on all ranks, and biases that all have."""
    torch.manual_seed(1)
    grid = flow.placement("cpu", range(flow.init(timeout=30).size or 1))
    model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 8))
    flow.nn.to_global(model, grid, {"*.weight": S(0)})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def own_folder(folder: Path, number: int) -> Path:
    return folder / f"host-{(flow.init(timeout=30).rank or 0) // number}"


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    values: list[Any] = [*model.parameters()]
    values += [x for state in optimizer.state.values() for x in state.values()]
    return [(x.full_tensor() if isinstance(x, flow.GlobalTensor) else x).flatten().tolist() for x in values]


def train_and_keep(folder: Path, number: int) -> tuple[list[list[float]], int, int]:
    """Two checkpoints in each host's memory; the values, and bytes of files that were sent and received."""
    mine = own_folder(folder, number)
    model, optimizer = made()
    grid = flow.placement("cpu", range(4))
    for step in (1, 2):
        x = flow.tensor(torch.ones(8, 16) * step, placement=grid, sbp=S(0))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with traffic() as bytes_:
            name = mine / f"step-{step}"
            flow.save(name, model, optimizer=optimizer, step=step, neighbours=1, keep=2, asynchronous=step == 2).wait()
            torch.distributed.barrier()
    return held(model, optimizer), bytes_.sent, bytes_.received


def go_on(folder: Path, number: int) -> tuple[Any, list[list[float]], int, int]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = flow.newest(own_folder(folder, number), neighbours=1)
    words = " ".join(str(each.message) for each in told)
    model, optimizer = made()
    if found is None:
        try:
            flow.load(own_folder(folder, number) / "step-2", model, optimizer=optimizer, neighbours=1)
        except SbpflowError as error:
            return (None, words, str(error)), [], 0, 0
        raise AssertionError("it was loaded")
    with traffic() as bytes_:
        flow.load(found.path, model, optimizer=optimizer, neighbours=1)
    return (found.step, words, ""), held(model, optimizer), bytes_.received, bytes_.read


def answers(fresh: Fresh, size: int, number: int, function: Any, *args: object) -> list[Any]:
    ended = fresh(size, function, *args, number, environment=hosts(number))
    assert all(each.code == 0 and each.answer is not None for each in ended), ended
    return [each.answer.value for each in ended if each.answer is not None]


def test_a_host_is_lost_and_all_goes_on_from_memory(fresh: Fresh, tmp_path: Path) -> None:
    kept = answers(fresh, 4, 1, train_and_keep, tmp_path)
    manifest = (tmp_path / "host-0" / "step-2" / "manifest.json").stat().st_size
    files = [sorted((tmp_path / f"host-{at}" / "step-2").glob(f"{at:05d}-*")) for at in range(4)]
    sizes = [sum(file.stat().st_size for file in own) for own in files]
    for rank in range(4):  # each share goes once to the next host, which has the biases itself
        there = {f.name for f in (tmp_path / f"host-{(rank + 1) % 4}" / "step-2").iterdir()}
        sent = sum(f.stat().st_size for f in files[rank] if f.name in there)
        assert kept[rank][1] == sent + (3 * manifest if rank == 0 else 0)
        assert 0 < sent < sizes[rank]
    shutil.rmtree(tmp_path / "host-1")
    for rank, ((step, words, _), values, received, _) in enumerate(answers(fresh, 4, 1, go_on, tmp_path)):
        assert (step, words) == (2, "")
        assert values == kept[0][0]
        assert (0 < received - manifest < sizes[1]) if rank == 1 else received == 0
    shutil.rmtree(tmp_path / "host-2")
    for (step, words, error), *_ in answers(fresh, 4, 1, go_on, tmp_path):
        assert step is None
        assert "00001-000.safetensors" in words
        assert "load one from a disk" in words
        assert "flow.load: the hosts have not all of" in error


@pytest.mark.sweep
def test_an_older_one_is_taken_where_the_newest_has_lost_a_piece(fresh: Fresh, tmp_path: Path) -> None:
    answers(fresh, 4, 1, train_and_keep, tmp_path)
    shutil.rmtree(tmp_path / "host-1")
    shutil.rmtree(tmp_path / "host-2" / "step-2")
    for (step, words, _), values, *_ in answers(fresh, 4, 1, go_on, tmp_path):
        assert (step, bool(values)) == (1, True)
        assert "step-2: 00001-000.safetensors" in words


@pytest.mark.sweep
@pytest.mark.parametrize("number", [1, 2])
def test_processes_of_a_host_share_its_writing_and_fewer_hosts_go_on(fresh: Fresh, tmp_path: Path, number: int) -> None:
    kept = answers(fresh, 4, number, train_and_keep, tmp_path)
    first, last = (read_manifest(tmp_path / f"host-{host}" / "step-2") for host in (0, 3 // number))
    assert first.said == last.said
    assert number == 1 or all(each.lost(each.present()) == set() for each in (first, last))
    shutil.rmtree(tmp_path / "host-0")
    (tmp_path / "host-1").rename(tmp_path / "host-0")  # those that are left count from 0
    for at in (2, 3) if number == 1 else ():
        (tmp_path / f"host-{at}").rename(tmp_path / f"host-{at - 1}")
    for (step, _, _), values, *_ in answers(fresh, 4 - number, number, go_on, tmp_path):
        assert (step, values) == (2, kept[0][0])
