"""The footprint of a pipelined step: the memory of tasks, folded over the firings and slots that the proof counted."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ....actors.protocol.simulate import Ran
from ....actors.runtime.channel import ahead
from ....boxing.figures import volume
from ....boxing.graph.measures import Held
from ....boxing.graph.physical import vars_in
from ....placement.errors import SbpError
from ..choose.choose import Decided
from ..choose.shortage import kept_most, shortage
from ..lower.segments import Segment
from ..memory.liveness import PLACES, RankMemory, bytes_on
from ..microbatch.attention import attend
from .proved_pipeline import ProvedPipeline
from .task_memory import RouteMemory, memory_of_tasks
from .variant import Variant
from .weights.weights import MeanDtype

__all__ = ["LiveBytes", "footprint", "left", "less", "levels", "outgrown"]

TASK = re.compile(r"([FBWU])(\d+)(?:\.\d+)?")


def footprint(program: ProvedPipeline, *, regather: bool, states: int = 0, mean: MeanDtype) -> dict[int, RankMemory]:
    """The peak of every rank, as the proof ran through its tasks: what chunks keep of micro-batches under way, what
    tasks take while they run, two that run together both of it, and gradients that were added up. Where weights are on
    two routes they are there twice; hops hold what is under way, and receives that are posted ahead. Beside that stands
    what weights say for themselves, where optimizers keep so many `states` of each, and means of updates are of the
    dtype that `mean` says."""
    sent = program.answers.under_way() if program.ordered else program.proof.peak
    of_rank: dict[int, list[RouteMemory]] = defaultdict(list)
    more: Counter[int] = Counter()
    for route, variant in enumerate(program.firsts):
        for ranks, mine in memory_of_tasks(variant, route * program.count, regather=regather):
            even = all(of.even for hop in variant.tasks.hops for of in hop.pair)
            first = _hopping(program, route, mine, ranks[0], sent)
            for rank in ranks:
                of_rank[rank].append(mine)
                more[rank] += first if even else _hopping(program, route, mine, rank, sent)
    for rank, others in _elsewhere(program, of_rank):
        more[rank] += others
    resident = list(program.weights.resident(program.proof.peak, states, mean))
    known: dict[tuple[int, ...], RankMemory] = {}  # of hundreds of equal ranks
    found = {}
    for rank, parts in sorted(of_rank.items()):
        key = tuple(map(id, parts))
        one = known[key] = known.get(key) or _fold(program, parts, rank)
        found[rank] = replace(one, activations=one.activations + more[rank]).beside(resident, rank)
    return found


class LiveBytes(NamedTuple):
    """Bytes that are live on a rank at a firing of its queue, `sums` of gradients and what is made `once` among them,
    beside parameters."""

    ran: Ran
    chunk: int
    live: int
    sums: int
    once: int


def levels(program: ProvedPipeline, rank: int, *, regather: bool) -> Iterator[LiveBytes]:
    """The levels of a rank over a step, one after the other."""
    parts = [
        mine
        for route, variant in enumerate(program.firsts)
        for ranks, mine in memory_of_tasks(variant, route * program.count, regather=regather)
        if rank in ranks
    ]
    yield from _levels(program, parts, rank)


def _levels(program: ProvedPipeline, parts: Sequence[RouteMemory], rank: int) -> Iterator[LiveBytes]:
    """The levels of a rank with chunks of these routes, without what hops hold. Where ranks keep to no order, slots are
    as full as they ever are."""
    chunks = {chunk: of for part in parts for chunk, of in part.chunks.items()}
    slots = {chunk: _slots(program, chunk) for chunk in chunks}
    under = Counter() if program.ordered else Counter(slots)  # micro-batches under way
    last, streams = "W" if program.schedule.split else "B", not program.schedule.synchronous
    once = sum(part.once for part in parts)
    stays = once + sum(_many(program, chunk // program.count) * of.results for chunk, of in chunks.items())
    sums: dict[int, int] = {}
    queue = next((queue for queue, ranks in program.places.items() if rank in ranks), None)
    for ran in program.proof.of(queue) if queue else ():
        found = [(task[1], int(task[2])) for name, _ in ran.parts if (task := TASK.fullmatch(name))]
        mine = [(kind, chunk) for kind, chunk in found if chunk in chunks and (kind != "U" or streams)]
        under.update(chunk for kind, chunk in mine if kind == "F" and program.ordered)
        live = stays + sum(sums.values())
        for kind, chunk in mine:
            makes_sums = kind == last and chunk not in sums
            live += chunks[chunk].first if makes_sums else chunks[chunk].passing[kind]
        for chunk, of in chunks.items():  # where there are sums, one has ended
            most_under = min(slots[chunk], _many(program, chunk // program.count) - bool(sums.get(chunk)))
            live += min(under[chunk], most_under) * of.kept[None]
        if mine:
            yield LiveBytes(ran, mine[0][1], live, sum(sums.values()), once)
        for kind, chunk in mine:
            under[chunk] -= kind == last and program.ordered
            if kind == last:
                sums[chunk] = chunks[chunk].sums
            elif kind == "U":  # an update has had them
                sums.pop(chunk, None)


def _fold(program: ProvedPipeline, parts: Sequence[RouteMemory], rank: int) -> RankMemory:
    """The memory of a rank with chunks of these routes, without what hops hold: the most that is there at a firing of
    its queue in the proof."""
    chunks = {chunk: of for part in parts for chunk, of in part.chunks.items()}
    slots = {chunk: _slots(program, chunk) for chunk in chunks}
    full = max(_levels(program, parts, rank), key=lambda level: level.live, default=None)
    most, fullest = (0, -1) if full is None or full.live <= 0 else (full.live, chunks[full.chunk].fullest)
    sequences = -(-max(slots.values(), default=0) // program.slices)  # that have begun and not ended
    most += sum(sequences * left(variant, rank) for variant in program.firsts)
    # What is brought home of two routes is added up anew.
    after = sum(part.after for part in parts) + (parts[0].gradients if len(parts) > 1 else 0)
    away = {to: sum(slots[chunk] * of.kept[to] for chunk, of in chunks.items()) for to in PLACES}
    first, *others = (part.told(0, fullest) for part in parts)
    gradients = sum(part.gradients for part in parts)
    return replace(
        first,
        parameters=sum(one.parameters for one in (first, *others)),
        gradients=gradients,
        activations=max(0, max(most, after) - gradients) + sum(one.activations for one in (first, *others)),
        host=away["cpu"],
        disk=away["disk"],
        lasting=0 if full is None or full.live < after else full.once + max(0, full.sums - gradients),
    )


def less(held: Held, one: Held, limit: float) -> float:
    """The room for one micro-batch with which all of them fit: each byte that it keeps, they keep so many times."""
    means = held.states - one.states
    stays = held.parameters + held.gradients + one.states
    times = max(1.0, (held.total - means - stays) / max(1, one.total - stays))
    return min(one.total - 1.0, stays + (limit - means - stays) / times)


def outgrown(program: ProvedPipeline, decided: Decided, rank: int, held: Held, limit: float) -> SbpError:
    """The error that a step does not fit: which stage on which rank, what takes most there, and what would help."""
    where, name = program.where, program.schedule.name
    stages = sorted(set(where.group))
    mine = next(group for group in stages if rank in where.ranks(group))
    ran = [chunk for chunk, group in enumerate(where.group) if group == mine]
    slots = max(_slots(program, chunk) for chunk in ran)
    kept = kept_most(decided, rank)
    if len(stages) == 1:
        head = f"{program.name} does not fit into {volume(limit)} a rank"
    else:
        on = ", ".join(map(str, where.placements[mine]))
        head = f"stage {mine + 1} of {len(stages)} of {program.name}, on {on}, does not fit into {volume(limit)} a rank"
    many = len(program.kinds) // program.slices
    head += f"\n  rank {rank} has {slots} of {many} micro-batches under way at once under {name}"
    more = ["layers of this stage may be placed on another"] if len(stages) > 1 else []
    every = slots == many > 1  # is kept, however many there are
    if every:
        more.append(f"schedule='1f1b' keeps no more than {len(set(where.group))} of them at once")
    return SbpError(shortage(head, limit, held, f"{kept}, of each" if kept else "", 0 if every else many, more))


def left(variant: Variant, rank: int) -> int:
    """Bytes that slices of a sequence leave for later ones: keys and values of all of it, and as much of gradients."""
    found = 0
    for stage in variant.stages:
        for op in stage.ops if isinstance(stage, Segment) and rank in stage.placement.flat else ():
            if op.op is attend:
                for of in map(variant.graph.layout, vars_in(op.args[1:3])):
                    *rows, _, width = of.local_shape(rank)
                    found += 2 * prod(rows) * op.args[5] * width * of.dtype.itemsize
    return found


def _hopping(program: ProvedPipeline, route: int, part: RouteMemory, rank: int, sent: Mapping[str, int]) -> int:
    """Bytes that hops hold on a rank beside those of what chunks keep, or have at work: `sent` ones of a register that
    are not known to be over, and receives that are posted. Ranks that keep to an order receive what they read next;
    others receive whatever is there, as much as the simulation has in a register."""
    found, mine, peak = 0, set(map(id, program.firsts[route].tasks.hops)), program.proof.peak

    def counted(value: str, chunk: int) -> int:
        return _slots(program, chunk + route * program.count) if value in part.stays else 1

    for register, bundle in program.lowered[program.kinds[0]].bundles.items():
        hops = [hop for hop in bundle.hops if id(hop) in mine]
        posted = ahead(sum(bytes_on(hop.pair[1], rank) for hop in hops)) + (
            0 if program.ordered else peak[register] - 1
        )
        for hop in hops:
            leaves, arrives = (bytes_on(of, rank) for of in hop.pair)
            found += leaves * max(0, sent.get(register, peak[register]) - counted(hop.sent, hop.source.chunk))
            found += arrives * max(0, min(posted, _many(program, route) - counted(hop.come, hop.target.chunk)))
    return found


def _many(program: ProvedPipeline, route: int) -> int:
    """The micro-batches that take a route."""
    return program.taking[route]


def _slots(program: ProvedPipeline, chunk: int) -> int:
    """How many micro-batches a chunk keeps that it has begun and not ended, at most."""
    route, number = divmod(chunk, program.count)
    where, peak = program.firsts[route].where, program.proof.peak
    here = where.ranks(where.group[number])
    mine = []
    for name in (f"act.{chunk}", f"stash.{chunk}"):
        legs = program.opening.legs.get(name, {}) if program.opening else {}
        mine.append(sum(peak[leg] for leg, ranks in legs.items() if ranks == here) if legs else peak.get(name, 1))
    return max(mine)


def _elsewhere(program: ProvedPipeline, of_rank: Mapping[int, Sequence[RouteMemory]]) -> Iterator[tuple[int, int]]:
    """Bytes that added actors have ranks keep: activations of others, and registers of a told size."""
    opening = program.opening
    if opening is None:
        return
    peak = program.proof.peak
    for rank, parts in of_rank.items():
        for chunk, of in ((chunk, of) for part in parts for chunk, of in part.chunks.items()):
            route, number = divmod(chunk, program.count)
            here = program.firsts[route].where.ranks(program.firsts[route].where.group[number])
            for name in (f"act.{chunk}", f"stash.{chunk}"):
                for leg, ranks in opening.legs.get(name, {}).items():
                    if ranks != here:
                        yield ranks[here.index(rank)], peak[leg] * of.kept[None]
    known = {register.name for register in opening.base.registers} | {leg for of in opening.legs.values() for leg in of}
    for register in opening.network.registers:
        if register.name not in known:
            for ranks in opening.readers(register.name):
                yield from ((rank, peak[register.name] * register.bytes) for rank in ranks)
