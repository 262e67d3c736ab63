"""Hosts of a run: which process is on which, as all of them say over the store that they met at.

    rank 0    <--host, interface--  1, 2, 3
    rank 0    --hosts, rates, the cluster file that it was given-->  1, 2, 3

So all price by the same figures, though the file be on one host only, and each interface tell its own rate.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PlacementError
from .this_host import this_host
from .wire import Interface, interface_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["FILE", "Hosts", "RunHosts", "file_said", "hosts_of_run"]

FILE = "SBPFLOW_CLUSTER"  # in the environment: a cluster's file, or the name of a preset


@dataclass(frozen=True)
class Hosts:
    """The number of each process's host, from 0, in the order of their first processes.

    >>> hosts = Hosts.of(["a", "a", "b", "c"])
    >>> hosts.numbers, hosts.count, hosts.members(0), hosts.taken(2, by=1)
    ((0, 0, 1, 2), 3, (0, 1), 0)
    """

    numbers: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> "Hosts":
        order = list(dict.fromkeys(names))
        return cls(tuple(order.index(name) for name in names))

    @cached_property
    def count(self) -> int:
        return max(self.numbers) + 1

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The processes of each host."""
        return tuple(map(self.members, range(self.count)))

    @property
    def alike(self) -> bool:
        """Whether hosts have equal numbers of processes, that follow each other."""
        size = len(self.members(0))
        return self.numbers == tuple(rank // size for rank in range(len(self.numbers)))

    def members(self, host: int) -> tuple[int, ...]:
        return tuple(process for process, number in enumerate(self.numbers) if number == host)

    def is_first(self, process: int) -> bool:
        """Whether a process does what is done once on its host."""
        return self.members(self.numbers[process])[0] == process

    def taken(self, host: int, *, by: int) -> int:
        """The host that takes a copy of what is on this one, so many places on in the ring."""
        return (host + by) % self.count


@dataclass(frozen=True)
class RunHosts:
    """The hosts of a run, their names and interfaces; and the cluster that rank 0 was told to price by, with the text
    of its file."""

    hosts: Hosts
    names: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    said: str = ""
    text: str = ""

    @property
    def of_ranks(self) -> dict[int, str]:
        """The name of each rank's host."""
        return {rank: self.names[number] for rank, number in enumerate(self.hosts.numbers)}


def file_said() -> tuple[str, str]:
    """The cluster that SBPFLOW_CLUSTER names, and the text of it where it is a file."""
    said = os.environ.get(FILE, "")
    if not said.endswith(".toml"):
        return said, ""
    try:
        return said, Path(said).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(f"cannot read the cluster file {said!r}, which {FILE} names\n  {error}") from error


def hosts_of_run(store: "Store", rank: int, size: int) -> RunHosts:
    """The hosts, as the first process finds out of all; each waits until all have said theirs."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size) and "SBPFLOW_HOST" not in os.environ:
        return RunHosts(Hosts((0,) * size), (_short(this_host()),), (Interface("", 0.0),), *file_said())
    store.set(f"said/{rank}", json.dumps([this_host(), *interface_of(os.environ)]))
    if rank == 0:
        said = [json.loads(store.get(f"said/{each}")) for each in range(size)]
        hosts = Hosts.of([name for name, *_ in said])
        firsts = [said[members[0]] for members in hosts.groups]
        names = [_short(name) for name, *_ in firsts]
        file, wrong = ("", ""), ""
        try:
            file = file_said()
        except PlacementError as error:
            wrong = str(error)
        store.set("hosts", json.dumps([hosts.numbers, names, [wire for _, *wire in firsts], file, wrong]))
    numbers, names, wires, file, wrong = json.loads(store.get("hosts"))
    if wrong:
        raise PlacementError(f"rank 0 {wrong}")
    return RunHosts(Hosts(tuple(numbers)), tuple(names), tuple(Interface(*wire) for wire in wires), *file)


def _short(host: str) -> str:
    return host.partition(":")[0]
