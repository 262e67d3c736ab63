"""This host: its identity, by which all of a run know whether they share memory, and its processes."""

import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["memory_folder", "runs", "stopped", "this_host"]


def memory_folder() -> str:
    """A folder of files in memory, where the system has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def this_host() -> str:
    """The host that this process is on; what SBPFLOW_HOST says, where several stand for hosts of their own.

    Containers of one machine may have one name; they are one host only if they see each other's memory and processes.
    """
    seen = [str(os.stat(memory_folder()).st_dev)]
    with suppress(OSError):
        seen.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return os.environ.get("SBPFLOW_HOST") or ":".join([socket.gethostname(), _boot_id(), *seen])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def runs(pid: int) -> bool:
    """Whether a process of this host still runs."""
    return _state(pid) not in "ZX"  # a zombie's memory is gone though its number is not


def stopped(pid: int) -> bool:
    """Whether a process of this host was stopped by a signal."""
    return _state(pid) in "T"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
