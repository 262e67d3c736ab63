"""Colours and short names of moves by their kind, in pictures and tables."""

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["FAMILIES", "FONT", "IDLE", "INK", "LINE", "SHORT", "Family", "dark", "families", "family"]

FONT = "Helvetica,Arial,sans-serif"
INK = "#1f2328"  # text on colours
LINE = "#7d8590"  # lines and plain text: readable on white and on near black
IDLE = "#7d859026"  # the ground of a row


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


def dark(rules: str) -> str:
    """Rules of CSS for who reads on a dark page."""
    return f"@media (prefers-color-scheme:dark){{{rules}}}"


def families(rule: Callable[[str, str, str], str]) -> str:
    """The rules of CSS that name, ink and fill of each family give, by day and in the dark."""
    night = "".join(rule(name, look.night_ink, look.night) for name, look in FAMILIES.items())
    return "".join(rule(name, look.ink, look.fill) for name, look in FAMILIES.items()) + dark(night)


def family(kind: str) -> str:
    """To which family of `FAMILIES` a kind of move belongs.

    >>> family("all_to_all"), family("slice")
    ('exchange', 'free')
    """
    return next(name for name, look in FAMILIES.items() if kind in look.kinds)
