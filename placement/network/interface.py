"""The ways of this host to others: its interfaces and addresses, and which address is its own in the run.

That one is of the interface that GLOO_SOCKET_IFNAME names, else of the way to MASTER_ADDR, where all meet. Whatever
listens for a run listens there and nowhere else.
"""

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from ..errors import PlacementError

__all__ = [
    "address_towards", "check_interface", "family_of", "has_cable", "interface_of", "is_here", "is_loopback",
    "resolves", "run_address",
]  # fmt: skip

SIOCGIFADDR = 0x8915  # asks Linux for the IPv4 address of an interface
PROBED = 1  # any port: a way is the same to all of them
OUTSIDE = "192.0.2.1"  # nobody has this address, to which the way is that to all others; nothing is sent


def run_address() -> str:
    """The address by which other processes of the run reach this one."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named and (found := _address_of(named)):
        return found
    meet = os.environ.get("MASTER_ADDR", "")
    alone = meet == "localhost" or meet.startswith("127.")  # all processes are on this host
    ways = [way for to in (meet or socket.gethostname(), socket.gethostname(), OUTSIDE) if (way := _way(to))]
    return next((way for way in ways if alone or not is_loopback(way)), ways[0] if ways else "127.0.0.1")


def has_cable() -> bool:
    """Whether the interface of this host's address has a carrier, as far as the system tells."""
    with suppress(OSError):
        if name := interface_of(run_address()):
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


def _way(to: str) -> str:
    """The address of this host on its way to another, "" if there is none; no packet is sent to find out."""
    with suppress(OSError):
        family, kind, protocol, _, where = socket.getaddrinfo(to, PROBED, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    return ""


def address_towards(address: str) -> str:
    """The address of this host in packets to another, "" if none go there."""
    return _way(address).partition("%")[0]


def is_loopback(address: str) -> bool:
    """Whether an address leads nowhere but to this host.

    >>> [is_loopback(each) for each in ("127.0.1.1", "localhost", "", "10.0.0.1")]
    [True, True, True, False]
    """
    return address in ("", "localhost", "::1") or address.startswith("127.")


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
    with suppress(OSError):
        if ":" in address:
            wanted = socket.inet_pton(socket.AF_INET6, address).hex()
            lines = map(str.split, Path("/proc/net/if_inet6").read_text().splitlines())
            return next((line[-1] for line in lines if line[0] == wanted), "")
        return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), "")
    return ""


def check_interface(names: str) -> None:
    """Refuse interfaces that this host lacks, as GLOO_SOCKET_IFNAME says them, before others wait for it."""
    known = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in names.split(",") if name and name not in known]:
        raise PlacementError(
            f"GLOO_SOCKET_IFNAME={names}: {socket.gethostname()} has no interface {missing[0]}\n"
            f"  it has {', '.join(known)}; without GLOO_SOCKET_IFNAME that towards MASTER_ADDR is taken"
        )
