"""How moves look and figures read, in pictures and tables: colours by the kind of move, bytes and seconds in words."""

import os
from typing import NamedTuple

__all__ = ["FAMILIES", "SHORT", "Family", "counted", "duration", "family", "user_path", "volume"]


class Family(NamedTuple):
    """Kinds of moves that look alike; `fill` is for light pages, `night` for those that follow a dark one."""

    kinds: tuple[str, ...]
    ink: str
    fill: str
    night_ink: str
    night: str


FAMILIES = {
    "free": Family(("view", "slice", "to_partial", "to_device"), "#57606a", "#eef1f4", "#8b949e", "#1c222a"),
    "gather": Family(("all_gather",), "#0b4f9e", "#cfe3ff", "#a9cdff", "#15355f"),
    "scatter": Family(("reduce_scatter",), "#8a4300", "#ffe0bd", "#ffc38a", "#593406"),
    "reduce": Family(("all_reduce", "all_reduce_once"), "#a3191f", "#ffd3d3", "#ffb0b0", "#661c22"),
    "exchange": Family(("all_to_all", "exchange", "halo", "halo_sum"), "#5b2fb0", "#e3d8ff", "#cdb8ff", "#3f2a72"),
    "transfer": Family(("transfer",), "#0c6b50", "#c9f0e2", "#8fe3c6", "#0e4a3a"),
}
SHORT = {
    "all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_reduce_once": "AR1",
    "all_to_all": "A2A", "exchange": "EX", "halo": "HALO", "halo_sum": "HALO+", "transfer": "TR",
}  # fmt: skip


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


def family(kind: str) -> str:
    """To which family of `FAMILIES` a kind of move belongs.

    >>> family("all_to_all"), family("slice")
    ('exchange', 'free')
    """
    return next(name for name, look in FAMILIES.items() if kind in look.kinds)
