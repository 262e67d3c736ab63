"""Options and matrices that formulating has worked out, for other formulations of the same step on the same cluster."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from .problem import Vector

__all__ = ["KnownOptions"]


@dataclass(frozen=True, eq=False)
class KnownOptions:
    """Known options of sources, ops and copies, and matrices between them. Keys hold all that they depend on, but for
    the cluster and how many bytes of gradients go at once.

    States and lies are told apart by identity in keys, and stay the same objects since they are kept here.
    """

    options: dict[Hashable, Any] = field(default_factory=dict)
    matrices: dict[Hashable, tuple[Vector, Vector | None]] = field(default_factory=dict)
