"""Resident memory: what ranks hold beside the work of a step, as it is told by who keeps it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ....sbp import Layout
from ..instructions.instruction import bytes_on

__all__ = ["Resident"]

ResidentKind: TypeAlias = Literal["states", "activations", "update", "host", "disk"]


@dataclass(frozen=True, eq=False)
class Resident:
    """Memory of every rank: among the states or activations, of its host or in files, all the time. An `update` is
    there for a moment, when optimizers step: activations are gone by then, and two of them are not there at once."""

    kind: ResidentKind
    bytes: Callable[[int], int]  # of a rank

    @classmethod
    def of(cls, kind: ResidentKind, layouts: Iterable[Layout] | Mapping[Layout, int], times: int = 1) -> "Resident":
        """Tensors that lie so, each so many times."""
        found = Counter(layouts)
        return cls(kind, lambda rank: times * sum(n * bytes_on(of, rank) for of, n in found.items()))
