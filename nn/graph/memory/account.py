"""The account of memory: a step's peak on every rank, by kind, for plans to choose from and the one that runs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ....boxing.boxing import between
from ....boxing.graph.measures import Held
from ....boxing.graph.move_table import buckets_home, of_owner, updates_of, value_for_owner
from ....boxing.graph.physical import Back, Physical, Source
from ....sbp import Layout
from ..lower.equal_ranks import alike
from ..lower.localise import Localiser
from ..lower.segments import segments
from .liveness import PLACES, RankMemory, bytes_on, memory
from .resident import Resident

MOMENTS = 2  # tensors that Adam's family keeps of each parameter

AT_ONCE = 2**29  # bytes of parameters that one step of an optimizer takes at once, unless one alone is larger

__all__ = ["AT_ONCE", "account", "held_by_rank"]


def account(graph: Physical, kept: int, *, regather: bool = True) -> dict[int, Held]:
    """The memory of every rank, where an optimizer keeps so many tensors of each parameter."""
    return held_by_rank(memory(graph, segments(graph), Localiser(graph), regather=regather), graph, kept)


def held_by_rank(live: Mapping[int, RankMemory], graph: Physical, kept: int) -> dict[int, Held]:
    """The same of a graph whose peaks are known. Where it does not train, nothing is kept."""
    sources = [s for s in graph.sources if s.kind == "parameter" and s.value.grad] if graph.losses else []
    coded = [back for back in graph.backs if back.encoding is not None]
    parts = [*_with_optimizers(sources, kept), *map(_error, coded)]
    layouts = [of for s in sources for of in (s.master, s.value.layout, *(way.dst for way in updates_of(s)))]
    layouts += [of_owner(s) for s in sources if s.owner is not None]
    layouts += [of for back in coded for of in (back.src, back.dst)]
    ways = [between(_lies(s), s.master) for s in sources if s.value.layout.dtype is s.master.dtype]
    group = {rank: at for at, equal in enumerate(alike(layouts, ways)) for rank in equal}
    keys = {rank: (group.get(rank, -1), one) for rank, one in live.items()}  # equal ranks are worked out once
    firsts = {key: rank for rank, key in keys.items()}
    found = {key: _held(live[rank].beside(parts, rank)) for key, rank in firsts.items()}
    return {rank: found[key] for rank, key in keys.items()}


def _held(of: RankMemory) -> Held:
    shares = of.parameters, of.gradients, of.states, of.activations, of.total
    lasting = min(of.lasting, max(0, of.activations - of.update))  # what optimizers need for a moment comes and goes
    return Held(*shares, of.moment, of.host, of.disk, lasting)


def _with_optimizers(sources: Sequence[Source], kept: int) -> Iterator[Resident]:
    """The memory of optimizers that keep so many tensors of each parameter. A parameter's own piece counts too,
    unless that is a part of the parameter's memory. What the optimizer has whole for its step is there when activations
    are gone; so are the roots of second moments, which Adam's family takes of all parameters that step at once, and the
    largest bucket in which what was changed goes home. On the host there are always a piece of its own and the buffer
    for its gradient too."""
    here = [s for s in sources if not s.offload]
    yield Resident.of("states", Counter(s.master if s.owner is None else of_owner(s) for s in here), kept)
    pieces = Counter((_lies(s), s.master) for s in here)
    yield Resident("states", lambda rank: sum(n * _is_own(*ends, rank) for ends, n in pieces.items()))
    whole = Counter((way.dst, s.offload is None) for s in sources if s.whole is not None for way in updates_of(s))
    for s in here:
        if s.owner is not None:  # its gradient, and its value unless it lies there
            whole[of_owner(s), True] += 2 - (value_for_owner(s).local_shape(s.owner) == of_owner(s).shape)
    yield Resident.of("update", {of: n for (of, near), n in whole.items() if near})
    yield Resident.of("host", {of: n for (of, near), n in whole.items() if not near})
    if kept >= MOMENTS:
        yield Resident.of("update", Counter(s.master for s in here if s.whole is not None))
        pieces_of = Counter(s.master for s in here if s.whole is None)
        yield Resident("update", lambda rank: _at_once(pieces_of, rank))
    for bucket in buckets_home(sources) if kept else []:  # who keeps nothing may be no optimizer at all
        yield Resident.of("update", Counter(of for ends in bucket for of in ends))
    cpu, disk = (Counter(s.master for s in sources if s.offload == to) for to in PLACES)
    yield Resident.of("host", cpu, kept + 2)
    yield Resident.of("host", disk)
    yield Resident.of("disk", disk, kept + 1)


def _at_once(pieces: Mapping[Layout, int], rank: int) -> int:
    """The bytes of the pieces on a rank that step at once."""
    sizes = {of: bytes_on(of, rank) for of in pieces}
    return min(sum(many * sizes[of] for of, many in pieces.items()), max([AT_ONCE, *sizes.values()]))


def _error(back: Back) -> Resident:
    """The errors of an encoder of a gradient."""
    by = back.encoding
    assert by is not None
    return Resident("states", lambda rank: by.encoder.kept_bytes(back.src, back.dst, by.axes, rank))


def _lies(source: Source) -> Layout:
    return source.value.layout.with_state(source.value.layout.state)


def _is_own(lies: Layout, master: Layout, rank: int) -> int:
    """The bytes of what an optimizer changes, where that has memory of its own."""
    if lies is master or rank not in master.placement:
        return 0
    return 0 if lies.dtype is master.dtype and between(lies, master).is_view(rank) else bytes_on(master, rank)
