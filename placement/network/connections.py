"""Connections of this process as its kernel counts them: bytes that the other end has, and seconds that these took.

A connection is busy while bytes are under way. Seconds in which the other process did not take what had come are no
fault of the link and are left out, and so the rate is that of the link alone, whoever computes or is stopped meanwhile.
Linux counts so; elsewhere there are no connections to be seen.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["ConnectionCount", "connection_counts", "end_connections"]

TCP_INFO = 11  # asks Linux for `struct tcp_info` of a connection
COUNTED = struct.Struct("=120xQ16xI20xQQ8x")  # bytes acknowledged, bytes not yet sent, microseconds busy, and not taken
FAMILY, IPV4, IPV6 = struct.Struct("=H"), struct.Struct("!xxH4s"), struct.Struct("!xxH4x16s")
MAPPED = "::ffff:"  # before an IPv4 address where a socket is of IPv6


class ConnectionCount(NamedTuple):
    """The counts of one connection since it was made."""

    bytes: int  # that the other end has acknowledged
    seconds: float  # in which the link was at it
    queued: int  # bytes that wait here for those before them


def connection_counts() -> dict[tuple[str, int, int], ConnectionCount]:
    """By address and port of the other end and the port here; the files of this process are asked one by one."""
    return dict(_counts()) if sys.platform == "linux" else {}


def _counts() -> Iterator[tuple[tuple[str, int, int], ConnectionCount]]:
    system = ctypes.CDLL(None)
    room = ctypes.create_string_buffer(256)
    for name in os.listdir("/proc/self/fd"):
        size, file = ctypes.c_uint32(256), int(name)
        # By the number alone: an object of Python's for somebody else's socket may set how it waits.
        if system.getsockopt(file, socket.IPPROTO_TCP, TCP_INFO, room, ctypes.byref(size)) or size.value < COUNTED.size:
            continue
        acknowledged, queued, busy, untaken = COUNTED.unpack_from(room.raw)
        ends = [_end(ask, file) for ask in (system.getpeername, system.getsockname)]
        if (there := ends[0]) is not None and (here := ends[1]) is not None:
            yield (*there, here[1]), ConnectionCount(acknowledged, max(busy - untaken, 0) / 1e6, queued)


def end_connections(address: str, port: int) -> int:
    """End those of this process to one address and port, whoever waits on them; their number."""
    if sys.platform != "linux":
        return 0
    system, found = ctypes.CDLL(None), 0
    for name in os.listdir("/proc/self/fd"):
        if _end(system.getpeername, int(name)) == (address, port):
            found += not system.shutdown(int(name), socket.SHUT_RDWR)
    return found


def _end(ask: "ctypes._NamedFuncPointer", file: int) -> tuple[str, int] | None:
    room, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if ask(file, room, ctypes.byref(size)):
        return None
    family = FAMILY.unpack_from(room.raw)[0]
    if family == socket.AF_INET:
        port, address = IPV4.unpack_from(room.raw)
    elif family == socket.AF_INET6:
        port, address = IPV6.unpack_from(room.raw)
    else:
        return None
    return socket.inet_ntop(family, address).removeprefix(MAPPED), port
