"""The address of this host in the run: that of the interface over which its processes reach the others.

It is the interface that GLOO_SOCKET_IFNAME names, else the one of the way to MASTER_ADDR, where all meet. Whatever
listens for a run listens there and nowhere else.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["family_of", "has_cable", "run_address"]

SIOCGIFADDR = 0x8915  # asks Linux for the IPv4 address of an interface
OUTSIDE = "192.0.2.1"  # nobody has this address, to which the way is that to all others; nothing is sent


def run_address() -> str:
    """The address by which other processes of the run reach this one."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named and (found := _address_of(named)):
        return found
    meet = os.environ.get("MASTER_ADDR", "")
    alone = meet == "localhost" or meet.startswith("127.")  # all processes are on this host
    ways = [way for way in _ways(meet or socket.gethostname(), socket.gethostname(), OUTSIDE) if way]
    return next((way for way in ways if alone or not _is_loopback(way)), ways[0] if ways else "127.0.0.1")


def has_cable() -> bool:
    """Whether the interface of this host's address has a carrier, as far as the system tells."""
    address = run_address()
    with suppress(OSError):
        for _, name in socket.if_nameindex():
            if _address_of(name) == address:
                return Path(f"/sys/class/net/{name}/carrier").read_text().strip() != "0"
    return True


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _address_of(name: str) -> str | None:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            said = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(said[20:24])
    except (OSError, ImportError):
        return None


def _ways(*to: str) -> Iterator[str]:
    """The addresses of this host on its ways to others."""
    port = int(os.environ.get("MASTER_PORT", "1"))
    for name in to:
        with suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                yield str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
