"""The network interface that a run's hosts talk by, and its rate where the system knows it.

A card of the machine tells its rate, as does a bond of several. Virtual ones, such as a container's, tell a number that
means nothing, and the cards of most clouds tell none.
"""

import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Interface", "interface_of"]

NAMED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # users say it so
LEAST, MOST = 10, 10**6  # Mbit/s; what tells another number does not know


class Interface(NamedTuple):
    """An interface by its name, and bytes per second by its own word, 0 where that is not known; and how many adapters
    of InfiniBand or its kind stand beside it, which cards send by."""

    name: str
    rate: float
    adapters: int = 0


def interface_of(environment: Mapping[str, str], system: Path = Path("/")) -> Interface:
    """The interface by which this process reaches the others of its run."""
    said = next((environment[name] for name in NAMED if environment.get(name)), "")
    name = said.split(",")[0] or _towards(environment.get("MASTER_ADDR", ""), system / "proc/net/route")
    adapters = system / "sys/class/infiniband"
    many = len(list(adapters.iterdir())) if adapters.is_dir() else 0
    return Interface(name, _rate(system / "sys/class/net" / name) if name else 0.0, many)


def _towards(address: str, table: Path) -> str:
    """The interface of the route to an address, by the kernel's table of routes."""
    try:
        (there,) = struct.unpack("=I", socket.inet_aton(socket.gethostbyname(address or "0.0.0.0")))
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
        routes = [(int(row[7], 16), row[0]) for row in rows if there & int(row[7], 16) == int(row[1], 16)]
    except (OSError, ValueError, IndexError):
        return ""
    return max(routes, key=lambda route: route[0].bit_count(), default=(0, ""))[1]


def _rate(interface: Path) -> float:
    if not ((interface / "device").exists() or (interface / "bonding").exists()):
        return 0.0
    try:
        speed = int((interface / "speed").read_text())
    except (OSError, ValueError):
        return 0.0
    return speed * 1e6 / 8 if LEAST <= speed <= MOST else 0.0
