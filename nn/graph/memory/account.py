"""The account of memory: a step's peak on every rank, by kind, for plans to choose from and the one that runs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ....boxing.graph.measures import Held
from ....boxing.graph.move_table import buckets_home, of_owner, updates_of, value_for_owner
from ....boxing.graph.physical import Physical, Source
from ....boxing.plan import plan
from ....sbp import Layout
from ....sbp.logical import OffloadPlace
from ..lower.localise import Localiser
from ..lower.segments import segments
from .equal_ranks import alike
from .liveness import RankMemory, bytes_on, memory

MOMENTS = 2  # tensors that Adam's family keeps of each parameter
PLACES: tuple[OffloadPlace, ...] = ("cpu", "disk")

__all__ = ["account", "held_by_rank", "trained", "with_states"]


def account(graph: Physical, kept: int, *, regather: bool = True) -> dict[int, Held]:
    """The memory of every rank, where an optimizer keeps so many tensors of each parameter."""
    live = memory(graph, segments(graph), Localiser(graph), regather=regather)
    return _with_errors(with_states(live, trained(graph), kept), graph)


def trained(graph: Physical) -> list[Source]:
    """The parameters that an optimizer changes, and of which it keeps something."""
    return [s for s in graph.sources if s.kind == "parameter" and s.value.grad]


def held_by_rank(live: Mapping[int, RankMemory], graph: Physical, kept: int) -> dict[int, Held]:
    """The same of a graph whose peaks are known; where it does not train, nothing is kept."""
    return _with_errors(with_states(live, trained(graph) if graph.losses else [], kept), graph)


def _with_errors(held: dict[int, Held], graph: Physical) -> dict[int, Held]:
    """The same with what encoders keep of gradients."""
    coded = [(back.src, back.dst, back.encoding) for back in graph.backs if back.encoding is not None]
    if not coded:
        return held
    errors = {rank: sum(by.encoder.kept_bytes(src, dst, by.axes, rank) for src, dst, by in coded) for rank in held}
    return {
        rank: replace(of, states=of.states + errors[rank], total=of.total + errors[rank]) for rank, of in held.items()
    }


def with_states(live: Mapping[int, RankMemory], of: Iterable[Source], kept: int) -> dict[int, Held]:
    """Bytes of a step and of an optimizer's states: `kept` tensors of each parameter. Its own piece of a parameter
    counts too, unless that is a part of the parameter's memory. What the optimizer has whole for its step is there when
    activations are gone; so are the roots of second moments, which Adam's family takes of all parameters at once, and
    then the largest bucket in which what was changed goes home. On the host there are always a piece of its own and the
    buffer for its gradient too."""
    sources, ranks = list(of), {}
    rests = Counter((s.value.layout.with_state(s.value.layout.state), s.master) for s in sources if not s.offload)
    elsewhere = Counter(s.master for s in sources if s.owner is not None)  # than there is what is kept of these
    away = Counter((s.master, s.offload) for s in sources if s.offload)
    whole = Counter((way.dst, s.offload is None) for s in sources if s.whole is not None for way in updates_of(s))
    owned = Counter(of_owner(s) for s in sources if s.owner is not None)
    for s in sources:
        if s.owner is not None:  # its gradient, and its value unless it lies there
            whole[of_owner(s), True] += 2 - (value_for_owner(s).local_shape(s.owner) == of_owner(s).shape)
    layouts = dict.fromkeys([*(of for ends in rests for of in ends), *(of for of, _ in (*away, *whole))])
    ways = [plan(*ends) for ends in rests if ends[0] is not ends[1] and ends[0].dtype is ends[1].dtype]
    homeward = buckets_home(sources) if kept else []  # who keeps nothing may be no optimizer at all
    group = {rank: at for at, equal in enumerate(alike(layouts, ways)) for rank in equal}
    made: dict[tuple[int, int], Held] = {}  # by group, and by what lives there: equal ranks share that
    for rank, held in live.items():
        key = group.get(rank, -1), id(held)
        if key in made:
            ranks[rank] = made[key]
            continue
        states = held.means + sum(
            n * (kept + _is_own(*ends, rank)) * bytes_on(ends[1], rank) for ends, n in rests.items()
        )
        states += kept * sum(n * bytes_on(of, rank) for of, n in owned.items())
        states -= kept * sum(n * bytes_on(of, rank) for of, n in elsewhere.items())
        wide, wide_away = (
            sum(n * bytes_on(x, rank) for (x, at), n in whole.items() if at is here) for here in (True, False)
        )
        roots = sum(n * bytes_on(master, rank) for (_, master), n in rests.items()) if kept >= MOMENTS else 0
        home = max((sum(bytes_on(x, rank) for ends in bucket for x in ends) for bucket in homeward), default=0)
        total = max(held.total, held.parameters + held.gradients + max(wide, roots, home)) + states
        cpu, disk = (sum(n * bytes_on(x, rank) for (x, at), n in away.items() if at == to) for to in PLACES)
        ranks[rank] = made[key] = Held(
            held.parameters,
            held.gradients,
            states,
            held.activations,
            total,
            held.moment,
            held.host + (kept + 2) * cpu + disk + wide_away,
            held.disk + (kept + 1) * disk,
        )
    return ranks


def _is_own(lies: Layout, master: Layout, rank: int) -> bool:
    """Whether what an optimizer changes has memory of its own."""
    if lies is master or rank not in master.placement:
        return False
    return lies.dtype is not master.dtype or not plan(lies, master).is_view(rank)
