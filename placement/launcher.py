"""Launchers: what those other than torchrun say of a process, in torchrun's words.

Under MASTER_ADDR=node1 mpirun -n 4, OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 is RANK=2 WORLD_SIZE=4.
"""

import os
import warnings
from collections.abc import Mapping

from .errors import PlacementError
from .network.interface import is_loopback

__all__ = ["one_host", "starter", "torchruns_words", "warn_of_many_worlds"]

# By launcher the words for what torchrun calls RANK, WORLD_SIZE and LOCAL_RANK. The size of a SLURM job, SLURM_NTASKS,
# is there in its batch script too, which is one process; that of a step is in what srun has started.
LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpirun (MPICH, Intel MPI)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}
PORT = "29500"  # where nobody said one; torchrun's


def torchruns_words(environment: Mapping[str, str]) -> dict[str, str]:
    """The place of this process as srun or mpirun say it, in torchrun's words; empty without MASTER_ADDR.

    >>> torchruns_words({"PMI_RANK": "1", "PMI_SIZE": "4", "MASTER_ADDR": "node1"})
    {'RANK': '1', 'WORLD_SIZE': '4', 'MASTER_PORT': '29500'}
    """
    name = starter(environment)
    if not name or not environment.get("MASTER_ADDR"):
        return {}
    rank, size, local = LAUNCHERS[name]
    if environment.get("WORLD_SIZE", environment[size]) != environment[size]:
        raise PlacementError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} is set, but {name} started {environment[size]} processes\n"
            f"  leave WORLD_SIZE out, which is read from {size}, or set RANK too"
        )
    said = {"RANK": environment[rank], "WORLD_SIZE": environment[size], "MASTER_PORT": PORT}
    said |= {"LOCAL_RANK": environment[local]} if local in environment else {}
    return {name: value for name, value in said.items() if name not in environment}


def starter(environment: Mapping[str, str]) -> str:
    """The launcher, other than torchrun, that started this process as one of several; "" where none did."""
    if "RANK" in environment:
        return ""
    for name, (rank, size, _) in LAUNCHERS.items():
        if rank in environment and environment.get(size, "1") != "1":
            return name
    return ""


def warn_of_many_worlds() -> None:
    """Tell once that processes which were started together do not know of each other."""
    name = starter(os.environ)
    if name and os.environ[LAUNCHERS[name][0]] == "0":
        warnings.warn(
            f"{name} started {os.environ[LAUNCHERS[name][1]]} processes, and nothing says where they meet: each owns "
            f"every rank and runs by itself. Set MASTER_ADDR to the host of rank 0 (and MASTER_PORT, else {PORT}) to "
            "make them one run, or RANK=0 where each is to be one of its own",
            RuntimeWarning,
            stacklevel=2,
        )


def one_host(environment: Mapping[str, str]) -> bool:
    """Whether all processes are on this host: the launcher says so, or they meet at an address that only it has."""
    if {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= environment.keys():
        return environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"]
    return is_loopback(environment.get("MASTER_ADDR", ""))
