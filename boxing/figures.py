"""Figures as one reads them: bytes, seconds and counts in words, and lines of code where a reader finds them."""

import os
from collections.abc import Sequence

__all__ = ["counted", "duration", "on_axis", "user_path", "volume"]


def volume(nbytes: float) -> str:
    """Bytes as one reads them.

    >>> volume(96), volume(786432), volume(3 * 2**30)
    ('96 B', '768 KiB', '3 GiB')
    """
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1000 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.3g} {unit}"


def duration(seconds: float) -> str:
    """Seconds as one reads them.

    >>> duration(0.00047), duration(0.0123)
    ('470 us', '12.3 ms')
    """
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def on_axis(seconds: Sequence[float]) -> list[str]:
    """Marks of one axis of time, all in the unit of the last.

    >>> on_axis([0.0, 0.02, 0.04]), on_axis([0.0, 0.75, 1.5])
    (['0 ms', '20 ms', '40 ms'], ['0 s', '0.75 s', '1.5 s'])
    """
    unit = duration(max(seconds, default=0.0)).rpartition(" ")[2]
    size = {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    return [f"{each / size:.3g} {unit}" for each in seconds]


def counted(many: int) -> str:
    """A large number as one reads it.

    >>> counted(0), counted(512), counted(131072000)
    ('', '512', '131 M')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if many >= size:
            return f"{many / size:.3g} {unit}"
    return str(many or "")


def user_path(line: str) -> str:
    """A line of code as a reader finds it: in a package by the package, else from where the program runs.

    >>> user_path("/usr/lib/python3/site-packages/transformers/models/llama.py:164")
    'transformers/models/llama.py:164'
    """
    for home in ("/site-packages/", "/dist-packages/"):
        if home in line:
            return line.rpartition(home)[2]
    return line.removeprefix(os.path.join(os.getcwd(), ""))
