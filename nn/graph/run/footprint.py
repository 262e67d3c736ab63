"""The footprint of a pipelined step: the bytes of one micro-batch, and of all that a schedule has under way at once."""

import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

from ....actors.runtime.channel import ahead
from ....boxing.figures import volume
from ....boxing.graph.measures import Held
from ....boxing.graph.physical import vars_in
from ....placement.errors import SbpError
from ..choose.choose import Decided
from ..choose.shortage import kept_most, shortage
from ..lower.segments import Segment
from ..memory.liveness import Kept, RankMemory, bytes_on, kept, memory
from ..microbatch.attention import attend
from .pipeline import Pipelined
from .tasks import Hop
from .variant import Variant
from .weights.weights import MeanDtype

__all__ = ["footprint", "left", "less", "outgrown"]

TASK = re.compile(r"[FBW](\d+)")


def footprint(program: Pipelined, *, regather: bool, states: int = 0, mean: MeanDtype) -> dict[int, RankMemory]:
    """The peak of every rank. What a chunk keeps from forward to backward counts once for each slot that is ever full;
    where weights are on two routes, they count so often. Gradients of weights are there twice, added up and those of
    one micro-batch; two tasks that run together have all that either has; hops hold what is under way, and receives
    that are posted ahead. Beside that stands what weights say for themselves, where optimizers keep so many `states` of
    each, and means of updates are of the dtype that `mean` says."""
    total: dict[int, RankMemory] = {}
    for route, variant in enumerate(program.firsts):
        for rank, mine in _of_route(program, variant, route, regather).items():
            held = total.get(rank)
            total[rank] = mine if held is None else _sum(held, mine)
    resident = list(program.weights.resident(program.proof.peak, states, mean))
    return {rank: one.beside(resident, rank) for rank, one in total.items()}


def _of_route(program: Pipelined, variant: Variant, route: int, regather: bool) -> dict[int, RankMemory]:
    localiser = variant.localiser
    # Gradients go home in buckets behind all micro-batches, when no activations are kept any more.
    unpacked = replace(variant.graph, backs=tuple(replace(back, bucket=None) for back in variant.graph.backs))
    one = memory(unpacked, variant.stages, localiser, regather=regather, overlap=False, apart=True)
    stays = kept(variant.graph, variant.stages, localiser, regather=regather)
    many = sum(of == route for of, _ in program.keys)
    hops, shift = list(_hops(program, variant, many)), route * program.count
    found = {}
    slots_of: dict[tuple[int, ...], float] = {}  # of the chunks of a rank, as hundreds of ranks have them
    for rank, peak in one.items():
        mine = [c for c, group in enumerate(variant.where.group) if rank in variant.where.ranks(group)]
        numbers = tuple(c + route * program.count for c in mine)
        if numbers not in slots_of:
            slots_of[numbers] = _at_once(program, numbers)
        slots = slots_of[numbers]
        sequences = -(-slots // program.slices)  # that have begun and not ended
        more, behind = (max(0.0, n - 1) if mine else 0.0 for n in (slots, min(slots, many - 1)))
        # There are no sums before a first micro-batch has ended, and behind that one less is kept.
        parts = sum(bytes_on(of, rank) for of in variant.sums)
        added = parts if many > 1 else 0
        extra = round(max(more * stays[rank].bytes, behind * stays[rank].bytes + added))
        extra += max(0, parts - peak.gradients)  # those of one micro-batch lie so too, where they go home behind all
        extra += round(sequences * left(variant, rank))
        there = partial(_kept_slots, program, stays[rank].values, shift)
        extra += sum(_hopping(way, rank, there) for way in hops)
        if _pairs(program, mine):  # the other task has at most as much beside what it keeps
            extra += max(0, peak.activations - stays[rank].bytes)
        # On the host every slot has what a micro-batch stows.
        away = [round(of * (more + 1)) for of in (peak.host, peak.disk)]
        found[rank] = replace(peak, activations=peak.activations + extra, host=away[0], disk=away[1])
    for rank, others in _elsewhere(program, variant, shift, stays):
        found[rank] = replace(found[rank], activations=found[rank].activations + others)
    return found


def less(held: Held, one: Held, limit: float) -> float:
    """The room for one micro-batch with which all of them fit: each byte that it keeps, they keep so many times."""
    means = held.states - one.states
    stays = held.parameters + held.gradients + one.states
    times = max(1.0, (held.total - means - stays) / max(1, one.total - stays))
    return min(one.total - 1.0, stays + (limit - means - stays) / times)


def outgrown(program: Pipelined, decided: Decided, rank: int, held: Held, limit: float) -> SbpError:
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


class BundleUnderWay(NamedTuple):
    """The hops of one register that a step fills so often, and how many are sent, and have come and wait, at most."""

    hops: tuple[Hop, ...]
    fillings: int
    sent: int
    waiting: int


def _hops(program: Pipelined, variant: Variant, many: int) -> Iterator[BundleUnderWay]:
    """Ranks that keep to an order let go what they sent with the answer to it, and receive what they read next; others
    receive whatever is there, as much as the simulation has in a register."""
    mine = {id(hop) for hop in variant.tasks.hops}
    held = program.answers.under_way() if program.ordered else program.proof.peak
    for register, bundle in program.lowered[program.kinds[0]].bundles.items():
        if any(id(hop) in mine for hop in bundle.hops):
            peak = program.proof.peak[register]
            yield BundleUnderWay(bundle.hops, many, held.get(register, peak), 0 if program.ordered else peak - 1)


def _hopping(way: BundleUnderWay, rank: int, slots: Callable[[str, int], int]) -> int:
    """Bytes that hops hold on a rank beside what is counted already: of each value as many as `slots` says."""
    found, message = 0, sum(bytes_on(hop.pair[1], rank) for hop in way.hops)
    for hop in way.hops:
        sent, come = (bytes_on(of, rank) for of in hop.pair)
        found += sent * max(0, way.sent - slots(hop.sent, hop.source.chunk))
        most = way.waiting + ahead(message)
        found += come * max(0, min(most, way.fillings - slots(hop.come, hop.target.chunk)))
    return found


def _pairs(program: Pipelined, chunks: Collection[int]) -> bool:
    """Whether tasks of chunks run together with others."""
    queues = {f"device {program.where.group[c]}" for c in chunks}
    return any("&" in case for actor in program.network.actors if actor.queue in queues for case in actor.cases)


def _kept_slots(program: Pipelined, kept: Container[str], shift: int, value: str, chunk: int) -> int:
    """How many of a value are counted already: those that a chunk keeps for its backward, or the one at work."""
    return _slots(program, chunk + shift) if value in kept else 1


def _slots(program: Pipelined, chunk: int) -> int:
    """How many micro-batches a chunk keeps that it has begun and not ended, at most."""
    route, number = divmod(chunk, program.count)
    where, peak = program.firsts[route].where, program.proof.peak
    here = where.ranks(where.group[number])
    mine = []
    for name in (f"act.{chunk}", f"stash.{chunk}"):
        legs = program.opening.legs.get(name, {}) if program.opening else {}
        mine.append(sum(peak[leg] for leg, ranks in legs.items() if ranks == here) if legs else peak.get(name, 1))
    return max(mine)


def _elsewhere(
    program: Pipelined, variant: Variant, shift: int, stays: Mapping[int, Kept]
) -> Iterator[tuple[int, int]]:
    """Bytes that added actors have ranks keep: activations of others, and registers of a told size."""
    opening = program.opening
    if opening is None:
        return
    peak, where = program.proof.peak, variant.where
    for chunk, group in enumerate(where.group):
        for name in (f"act.{chunk + shift}", f"stash.{chunk + shift}"):
            for leg, ranks in opening.legs.get(name, {}).items():
                if ranks != where.ranks(group):
                    for rank, of in zip(ranks, where.ranks(group), strict=False):
                        yield rank, round(peak[leg] * stays[of].bytes / where.group.count(group))
    known = {register.name for register in opening.base.registers} | {leg for of in opening.legs.values() for leg in of}
    for register in opening.network.registers:
        if register.name not in known and not shift:
            for ranks in opening.readers(register.name):
                yield from ((rank, peak[register.name] * register.bytes) for rank in ranks)


def _at_once(program: Pipelined, chunks: Sequence[int]) -> float:
    """The same of all chunks of a rank together, in the mean of these: where it keeps to an order, at one time."""
    most = _mean([_slots(program, chunk) for chunk in chunks])
    if not program.ordered or program.slices > 1 or len(chunks) < 2:
        return most
    ends: dict[tuple[int, int], tuple[float, float]] = {}  # of micro-batches by chunk
    for ran in program.proof.firings:
        for task, label in [(task, label) for name, label in ran.parts if (task := TASK.fullmatch(name))]:
            key = int(task[1]), label
            first, last = ends.get(key, (ran.start, ran.end))
            ends[key] = min(first, ran.start), max(last, ran.end)
    mine = [span for (chunk, _), span in ends.items() if chunk in chunks]
    return min(most, max(sum(first <= at < last for first, last in mine) for at, _ in mine) / len(chunks))


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers) if numbers else 1.0


def _sum(a: RankMemory, b: RankMemory) -> RankMemory:
    moment = max(a, b, key=lambda one: one.activations).moment
    return RankMemory(
        a.parameters + b.parameters,
        a.gradients + b.gradients,
        a.activations + b.activations,
        (*a.estimates, *b.estimates),
        moment,
        a.host + b.host,
        a.disk + b.disk,
        max(a.stowed, b.stowed),
    )
