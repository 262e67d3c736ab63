"""Captures: what several plans of one step share, so that a planner that tries many captures once.

A capture looks at what is cast, run again, run eagerly, computed by composites, and said to flow; how parameters rest
comes later. So it is known by these and by the kind of device, and by the placement where the program makes tensors
that have one.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from torch import nn

from ...placement import Placement
from ...sbp.joint.known_options import KnownOptions
from ...sbp.logical import Logical
from ..eager_parts.marks import eager_of
from ..model.cast import types_of, works_of
from ..model.flows import flows_of
from ..model.fp8 import eights_of
from ..model.inside import uses_of
from ..model.recompute.recomputation import recomputed_of
from .capture.arguments import StepCall
from .passes import Passes

__all__ = ["Captures"]


class Captures:
    """The captures of one build for arguments of one kind, on one cluster. Modules change meanwhile in nothing but
    their notes.

    The best of plans that take `enough` seconds is not looked for; `known` is what choosing has worked out, also for
    other steps on that cluster. What a program asks of clocks is looked for in the `first` of its captures alone, whose
    others may have other arguments or fewer layers: seeing it takes as long as a capture."""

    def __init__(self, first: "Captures | None" = None, known: KnownOptions | None = None) -> None:
        self.first, self.watched = first or self, False
        self.enough = inf
        self.known = known or KnownOptions()
        self.made: list[tuple[Any, Placement | None, Logical, Passes]] = []

    def of(self, passes: Passes, call: StepCall) -> Logical:
        """The capture for these passes: one that was made, or a new one."""
        key = _noted(passes.modules), passes.device, passes.learns, passes.options.piped, passes.scale
        found = next((each for each in self.made if each[0] == key and each[1] in (None, passes.rest)), None)
        if found is None:
            logical = passes.captured(call, watched=self.first.watched)
            self.first.watched = True
            placed = any(op.placement is not None for op in logical.ops)
            self.made.append((key, passes.rest if placed else None, logical, passes))
            return logical
        *_, logical, of = found
        passes.constants |= of.constants
        passes.names |= of.names
        passes.deeds, passes.before = of.deeds, of.before
        passes.dump("captured", lambda: str(logical))
        return logical


def _noted(modules: Mapping[str, nn.Module]) -> tuple[Any, ...]:
    """All notes that a capture looks at."""
    said = types_of(modules), works_of(modules), eights_of(modules), uses_of(modules)
    return *said, flows_of(modules), recomputed_of(modules), eager_of(modules)
