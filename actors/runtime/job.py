"""The job of a runtime: a network and the work of its actors, checked before a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...placement.errors import ScheduleError
from ..protocol.network import Network
from ..protocol.state import Firing
from .progress import Guard

__all__ = ["Job", "Raw", "Work", "check_first", "check_given"]

Work: TypeAlias = Callable[[Firing], Sequence[Any] | None]  # a value for each give; for several slots at once, as many
# A firing: its actor, case and label, from when to when, and the labels of what it did besides.
Raw: TypeAlias = tuple[int, int, int, float, float, tuple[int, ...]]


@dataclass
class Job:
    """A network, the work of its actors, and how they are run."""

    network: Network
    work: Mapping[str, Work]
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    here: str | None = None
    initial: Mapping[str, Callable[[], Sequence[Any]]] = field(default_factory=dict)
    guard: Guard | None = None
    answers: Mapping[str, Sequence[Mapping[str, int]]] = field(default_factory=dict)  # by what receives: what is sent
    timeout: float | None = None  # seconds without progress; None: those of flow.init
    name: str = ""


def check_first(register: str, values: Sequence[Any], slots: int) -> None:
    """Whether there is a value for each slot that is filled at the start."""
    if len(values) != slots:
        raise ScheduleError(f"{len(values)} values for {register}, of which {slots} slots are filled at first")


def check_given(values: Sequence[Any], width: int) -> None:
    """Whether work gave a value for each register."""
    if len(values) != width:
        raise ScheduleError(f"the work of an actor that fills {width} registers gave {len(values)} values")
