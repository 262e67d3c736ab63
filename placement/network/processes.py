"""Processes of this host, as the system knows them."""

from pathlib import Path

__all__ = ["runs", "stopped"]


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
