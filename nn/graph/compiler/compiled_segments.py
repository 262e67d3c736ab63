"""Compiled segments: those of a graph for the ranks owned here, and what their backwards take once more."""

from collections.abc import Collection, Sequence
from functools import lru_cache

from ....placement.world import owned
from ..lower.localise import Local, Localiser
from ..lower.segments import Segment, Stage
from .backends import Backend, Compiled, compiled

__all__ = ["CompiledSegments", "compiled_once"]

MOST = 1024


@lru_cache(MOST)
def compiled_once(local: Local, backend: Backend, weights: tuple[bool, ...] | None = None) -> Compiled:
    """A segment compiled, or one like it that another program of this process has compiled already."""
    return compiled(local, backend, weights)


class CompiledSegments:
    """The segments by number of stage and rank; equal ones are compiled once, whatever layer or rank they are of.

    `again` names the inputs that the backward of a segment takes once more on some rank here. With `weights`, backwards
    that have gradients both of these and of others are in two, and `halves` has the names for each half.
    """

    def __init__(
        self, localiser: Localiser, stages: Sequence[Stage], backend: Backend, weights: Collection[str] = ()
    ) -> None:
        self.graph, self.stages = localiser.graph, stages
        self.at: dict[tuple[int, int], Compiled] = {}
        self.again: dict[int, tuple[str, ...]] = {}
        self.halves: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        for number, stage in enumerate(stages):
            if not isinstance(stage, Segment):
                continue
            flags = tuple(name in weights for name in stage.wants)
            apart = flags if any(flags) and not all(flags) else None
            found: dict[Local, Compiled] = {}  # thousands of ranks may share one, which is then found by identity
            for rank in owned(stage.placement):
                local = localiser.segment(stage, rank)
                if local not in found:
                    found[local] = compiled_once(local, backend, apart)
                self.at[number, rank] = found[local]
            mine = list(dict.fromkeys(found.values()))
            self.again[number] = _names(stage, [one.again for one in mine])
            if apart is not None:
                first, second = ([one.apart.again[half] for one in mine if one.apart] for half in (0, 1))
                self.halves[number] = _names(stage, first), _names(stage, second)
        self.distinct = tuple(dict.fromkeys(self.at.values()))


def _names(stage: Segment, taken: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The inputs that some rank here takes."""
    return tuple(stage.inputs[at] for at in sorted({at for numbers in taken for at in numbers}))
