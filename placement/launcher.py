"""Launchers: what those other than torchrun say of a process, in torchrun's words, and how this host reaches others.

Under MASTER_ADDR=node1 mpirun -n 4, OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 is RANK=2 WORLD_SIZE=4.
"""

import os
import socket
import struct
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .errors import PlacementError

__all__ = [
    "address_towards", "check_interface", "interface_of", "is_here", "is_loopback", "one_host", "resolves", "starter",
    "torchruns_words", "warn_of_many_worlds",
]  # fmt: skip

# By launcher the words for what torchrun calls RANK, WORLD_SIZE and LOCAL_RANK. The size of a SLURM job, SLURM_NTASKS,
# is there in its batch script too, which is one process; that of a step is in what srun has started.
LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpirun (MPICH, Intel MPI)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}
PORT = "29500"  # where nobody said one; torchrun's
SIOCGIFADDR = 0x8915


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


def is_loopback(address: str) -> bool:
    """Whether an address leads nowhere but to this host.

    >>> [is_loopback(each) for each in ("127.0.1.1", "localhost", "", "10.0.0.1")]
    [True, True, True, False]
    """
    return address in ("", "localhost", "::1") or address.startswith("127.")


def address_towards(address: str) -> str:
    """The address of this host in packets to another, "" if none go there; no packet is sent to find out."""
    with suppress(OSError):
        family, kind, protocol, _, where = socket.getaddrinfo(address, int(PORT), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0]).partition("%")[0]
    return ""


def resolves(address: str) -> bool:
    """Whether this host knows the address of another by its name; an address is its own.

    >>> resolves("127.0.0.1"), resolves("no-such-host.invalid")
    (True, False)
    """
    try:
        socket.getaddrinfo(address or "localhost", None)
    except OSError:
        return False
    return True


def is_here(address: str) -> bool:
    """Whether an address or a name is one of this host: packets to it start where they end, or it cannot be told."""
    with suppress(OSError):
        found = {str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(address, None)}
        return is_loopback(address) or any(is_loopback(each) or address_towards(each) == each for each in found)
    return True


def interface_of(address: str) -> str:
    """The interface that has this address, as Linux tells; "" elsewhere."""
    with suppress(OSError, ImportError):
        if ":" in address:
            wanted = socket.inet_pton(socket.AF_INET6, address).hex()
            lines = map(str.split, Path("/proc/net/if_inet6").read_text().splitlines())
            return next((line[-1] for line in lines if line[0] == wanted), "")
        from fcntl import ioctl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # one without an address
                    said = ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    if socket.inet_ntoa(said[20:24]) == address:
                        return name
    return ""


def check_interface(names: str) -> None:
    """Refuse interfaces that this host lacks, as GLOO_SOCKET_IFNAME says them, before others wait for it."""
    known = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in names.split(",") if name and name not in known]:
        raise PlacementError(
            f"GLOO_SOCKET_IFNAME={names}: {socket.gethostname()} has no interface {missing[0]}\n"
            f"  it has {', '.join(known)}; without GLOO_SOCKET_IFNAME that towards MASTER_ADDR is taken"
        )
