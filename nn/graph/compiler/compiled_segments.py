"""Compiled segments: those of a graph for the ranks owned here, and what their backwards take once more."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

from ....placement.device import family
from ....placement.errors import SbpError
from ....placement.world import owned
from ..lower.equal_ranks import equal_ranks
from ..lower.localise import Local, Localiser
from ..lower.segments import Segment, Stage
from .backends import Backend, Compiled, compiled

__all__ = ["CompiledSegments", "compiled_once"]

MOST = 1024
RUN = 64  # ranks that a process may run by itself


@lru_cache(MOST)
def compiled_once(local: Local, backend: Backend, weights: tuple[bool, ...] | None = None) -> Compiled:
    """A segment compiled, or one like it that another program of this process has compiled already."""
    return compiled(local, backend, weights)


class CompiledSegments:
    """The segments by number of stage and rank; equal ones are compiled once, whatever layer or rank they are of.

    `again` names the inputs that the backward of a segment takes once more on some rank here. With `weights`, backwards
    that have gradients both of these and of others are in two, and `halves` has the names for each half.

    A process has a few ranks, or it only plans, for thousands or for cards that are not here: then one of each group of
    equal ranks is asked, and what is asked besides is made when it is.
    """

    def __init__(
        self, localiser: Localiser, stages: Sequence[Stage], backend: Backend, weights: Collection[str] = ()
    ) -> None:
        self.graph, self.localiser, self.stages, self.backend = localiser.graph, localiser, stages, backend
        self.at: Mapping[tuple[int, int], Compiled] = _Made(self._one)
        self.flags: dict[int, tuple[bool, ...] | None] = {}
        self.again: dict[int, tuple[str, ...]] = {}
        self.halves: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        firsts = self._firsts()
        for number, stage in enumerate(stages):
            if not isinstance(stage, Segment):
                continue
            flags = tuple(name in weights for name in stage.wants)
            apart = self.flags[number] = flags if any(flags) and not all(flags) else None
            here = owned(stage.placement)
            ranks = here if firsts is None else firsts & {*here}
            mine = list(dict.fromkeys(self.at[number, rank] for rank in ranks))
            self.again[number] = _names(stage, [one.again for one in mine])
            if apart is not None:
                first, second = ([one.apart.again[half] for one in mine if one.apart] for half in (0, 1))
                self.halves[number] = _names(stage, first), _names(stage, second)

    @property
    def distinct(self) -> tuple[Compiled, ...]:
        """All that the ranks here run."""
        numbers = [(n, stage) for n, stage in enumerate(self.stages) if isinstance(stage, Segment)]
        return tuple(dict.fromkeys(self.at[n, rank] for n, stage in numbers for rank in owned(stage.placement)))

    def _firsts(self) -> frozenset[int] | None:
        """One of each group of equal ranks, where a process does not run all that are here."""
        placements = dict.fromkeys(stage.placement for stage in self.stages if isinstance(stage, Segment))
        here = {rank for place in placements for rank in owned(place)}
        planned = len(here) > RUN or not all(family(place.type).here for place in placements)
        return frozenset(group[0] for group in equal_ranks(self.graph)) if planned else None

    def _one(self, number: int, rank: int) -> Compiled:
        stage = self.stages[number]
        assert isinstance(stage, Segment)
        found = compiled_once(self.localiser.segment(stage, rank), self.backend, self.flags[number])
        if number in self.again and not {stage.inputs[at] for at in found.again} <= {*self.again[number]}:
            raise SbpError(
                f"rank {rank} takes other values for its backward than ranks that hold as much\n"
                f"  this is a fault of sbpflow: report it, with the ops of {_ops(stage)}"
            )
        return found


class _Made(dict[tuple[int, int], Compiled]):
    """The segments by stage and rank, each made when it is asked for."""

    def __init__(self, made: Callable[[int, int], Compiled]) -> None:
        super().__init__()
        self.made = made

    def __missing__(self, at: tuple[int, int]) -> Compiled:
        found = self[at] = self.made(*at)
        return found


def _ops(stage: Segment) -> str:
    return ", ".join(dict.fromkeys(str(op.op) for op in stage.ops))


def _names(stage: Segment, taken: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The inputs that some rank here takes."""
    return tuple(stage.inputs[at] for at in sorted({at for numbers in taken for at in numbers}))
