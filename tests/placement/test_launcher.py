"""Launchers other than torchrun: their words are read, and processes that know nothing of each other are told."""

import os
import socket
import warnings

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement import PlacementError, TransportError, world
from sbpflow.placement.doctor import findings
from sbpflow.placement.launcher import one_host, torchruns_words
from sbpflow.placement.network import absent
from sbpflow.placement.network.interface import address_towards, check_interface, interface_of
from tests.ranks import Fresh

# Two processes as each launcher starts them; those of Open MPI 5.0 and MPICH 5.0 as they were seen, of SLURM as its
# manual says.
STARTED = {
    "srun": lambda rank: {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"
    },
    "mpirun (Open MPI)": lambda rank: {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "PMIX_RANK": str(rank),
    },
    "mpirun (MPICH, Intel MPI)": lambda rank: {
        "PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"
    },
}  # fmt: skip


@pytest.mark.parametrize("launcher", STARTED)
def test_the_words_of_a_launcher_are_read_where_it_is_said_at_which_host_all_meet(launcher: str) -> None:
    said = STARTED[launcher](1)
    assert torchruns_words(said) == {}
    read = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    assert torchruns_words(said | {"MASTER_ADDR": "node1"}) == read
    mine = {"MASTER_ADDR": "node1", "MASTER_PORT": "4000", "LOCAL_RANK": "3"}
    assert torchruns_words(said | mine) == {"RANK": "1", "WORLD_SIZE": "2"}
    assert torchruns_words(said | {"MASTER_ADDR": "node1", "RANK": "0", "WORLD_SIZE": "8"}) == {}  # under torchrun too


def test_a_batch_script_of_slurm_and_a_step_of_one_process_are_alone() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "MASTER_ADDR": "node1"}
    assert torchruns_words(batch) == torchruns_words(batch | {"SLURM_STEP_NUM_TASKS": "1"}) == {}


def test_a_size_that_is_not_the_launchers_is_refused() -> None:
    said = STARTED["srun"](0) | {"MASTER_ADDR": "node1", "WORLD_SIZE": "3"}
    with pytest.raises(PlacementError, match=r"WORLD_SIZE=3 is set, but srun started 2 processes\n  leave WORLD_SIZE"):
        torchruns_words(said)


def test_the_doctor_tells_what_a_launcher_lacks() -> None:
    alone, told = (
        next(line for line in findings(said) if line.thing == "launcher")
        for said in (STARTED["srun"](0), STARTED["srun"](0) | {"MASTER_ADDR": "127.0.0.1"})
    )
    assert str(alone).endswith("srun, and no MASTER_ADDR: set it to the host of rank 0, where all meet")
    assert told.ok
    assert told.found == "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"


def started_by(launcher: str, meet: bool) -> tuple[object, ...]:
    """A move of a process that another launcher has started."""
    os.environ.update(STARTED[launcher](int(os.environ.pop("RANK"))))
    for name in ("WORLD_SIZE", "LOCAL_RANK", *(() if meet else ("MASTER_ADDR",))):
        os.environ.pop(name, None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rank = flow.init(timeout=60).rank
    p = flow.placement("cpu", range(2))
    whole = flow.tensor(torch.arange(4.0), placement=p, sbp=S(0)).to_global(sbp=B)
    return rank, whole.numpy().tolist(), [str(each.message).partition(",")[0] for each in told]


@pytest.mark.parametrize("launcher", STARTED)
def test_processes_of_a_launcher_are_one_world(fresh: Fresh, launcher: str) -> None:
    found = [end.answer and end.answer.value for end in fresh(2, started_by, launcher, True)]
    assert found == [(rank, [0.0, 1.0, 2.0, 3.0], []) for rank in range(2)]


def test_processes_that_do_not_know_where_to_meet_are_told_once(fresh: Fresh) -> None:
    found = [end.answer and end.answer.value for end in fresh(2, started_by, "srun", False)]
    assert found == [(None, [0.0, 1.0, 2.0, 3.0], told) for told in (["srun started 2 processes"], [])]


def test_an_interface_is_found_by_the_address_towards_a_host() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") == ""
    assert interface_of("127.0.0.1") in ("lo", "lo0", "")  # "" where it is not Linux
    assert interface_of("203.0.113.1") == ""


def test_processes_are_on_one_host_where_a_launcher_says_so_or_they_meet_at_loopback() -> None:
    assert one_host({"MASTER_ADDR": "127.0.1.1"})
    assert not one_host({"MASTER_ADDR": "10.0.0.1"})
    assert one_host({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert not one_host({"MASTER_ADDR": "localhost", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})


# why ranks do not meet


def test_an_interface_that_is_not_there_is_refused_before_others_wait() -> None:
    name = socket.if_nameindex()[0][1]
    check_interface(name)
    check_interface("")
    with pytest.raises(PlacementError, match=rf"has no interface none9\n  it has .*{name}") as error:
        check_interface(f"{name},none9")
    assert "without GLOO_SOCKET_IFNAME that towards MASTER_ADDR is taken" in str(error.value)


@pytest.mark.parametrize(
    ("rank", "address", "told"),
    [
        ("1", "no-such-host.invalid", "this host does not know the name MASTER_ADDR=no-such-host.invalid"),
        ("0", "203.0.113.1", "MASTER_ADDR=203.0.113.1 is another host: it must be the one that rank 0 is on"),
        ("0", "127.0.0.1", "others did not come to 127.0.0.1:29500"),
        ("1", "127.0.0.1", "nobody answered at 127.0.0.1:29500, where rank 0 lets all meet"),
    ],
)
def test_who_does_not_meet_the_others_is_told_what_is_wrong_with_the_address(
    rank: str, address: str, told: str
) -> None:
    assert absent._unmet(rank, address, "29500").startswith(told)


def meet_without_rank_2() -> str | None:
    if os.environ["RANK"] == "2":
        return None
    with pytest.raises(TransportError) as error:
        flow.init(timeout=2)
    return str(error.value).splitlines()[1].strip()


def test_rank_0_that_holds_the_store_is_not_among_those_that_did_not_come(fresh: Fresh) -> None:
    answer = fresh(3, meet_without_rank_2)[1].answer
    assert answer is not None
    assert answer.value.startswith("rank 2 did not come: not started")


def test_ranks_that_were_told_different_numbers_of_ranks_say_so() -> None:
    store = HashStore()
    for rank, size in enumerate("343"):
        store.set(world._came(rank), size)
    assert absent.absent((store, 0, 3), world._came, "").startswith(
        "rank 1 was told that there are 4 ranks, this one 3\n  all hosts must be"
    )
    store.set(world._came(1), "3")
    told = absent.absent((store, 0, 3), world._came, "")
    assert told.startswith("all were started, and one has ended since")


def meet_at_a_port_that_is_taken() -> str:
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))), pytest.raises(TransportError) as error:
        flow.init(timeout=2)
    return str(error.value).splitlines()[1].strip()


def test_a_port_that_is_taken_is_told(fresh: Fresh) -> None:
    answer = fresh(1, meet_at_a_port_that_is_taken)[0].answer
    assert answer is not None
    assert answer.value == (
        "another program has this port of rank 0's host: choose another MASTER_PORT, the same on all hosts"
    )
