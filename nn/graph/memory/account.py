"""The account of memory: what a step takes at its peak on every rank, by kind; of plans to choose from and of the one
that runs."""

from collections import Counter
from collections.abc import Iterable, Mapping

from ....boxing.graph.physical import Physical
from ....boxing.graph.report.facts import Held
from ....sbp import Layout
from ..lower.localise import Localiser
from ..lower.segments import segments
from .liveness import RankMemory, memory

__all__ = ["account", "held_by_rank", "trained", "with_states"]


def account(graph: Physical, kept: int, *, regather: bool = True) -> dict[int, Held]:
    """Of every rank, where an optimizer keeps so many tensors of each parameter."""
    return with_states(memory(graph, segments(graph), Localiser(graph), regather=regather), trained(graph), kept)


def trained(graph: Physical) -> list[Layout]:
    """Where the gradients of parameters come home, and with them what an optimizer keeps."""
    return [s.home for s in graph.sources if s.kind == "parameter" and s.value.grad]


def held_by_rank(live: Mapping[int, RankMemory], graph: Physical, kept: int) -> dict[int, Held]:
    """The same of a graph whose peaks are known; where it does not train, nothing is kept."""
    return with_states(live, trained(graph) if graph.losses else [], kept)


def with_states(live: Mapping[int, RankMemory], homes: Iterable[Layout], kept: int) -> dict[int, Held]:
    """Bytes that a step takes, with those that an optimizer keeps besides of what lies so."""
    homes, ranks = Counter(homes), {}
    for rank, held in live.items():
        states = kept * sum(n * _bytes(home, rank) for home, n in homes.items() if rank in home.placement)
        ranks[rank] = Held(held.parameters, held.gradients, states, held.activations, held.total + states, held.moment)
    return ranks


def _bytes(of: Layout, rank: int) -> int:
    size = of.dtype.itemsize
    for n in of.local_shape(rank):
        size *= n
    return size
