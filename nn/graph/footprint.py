"""The footprint of a pipelined step: the bytes of one micro-batch, and of all that a schedule has under way at once."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ...actors.simulate import Run
from ...boxing.graph.physical import vars_in
from ...sbp import Layout
from .liveness import Memory, kept, memory
from .local import Localiser
from .pipelined import Pipelined
from .segments import Segment
from .sliced import attend
from .variant import Variant

__all__ = ["footprint", "left"]


def footprint(program: Pipelined, *, regather: bool) -> dict[int, Memory]:
    """The peak of every rank. What a chunk keeps from forward to backward counts once for each slot that is ever full;
    where weights are kept in several versions or on two routes, they count so often. Gradients of weights are there
    twice, added up and those of one micro-batch, and what hops send and receive may wait for all of a step's."""
    total: dict[int, Memory] = {}
    for route, variant in enumerate(program.firsts):
        for rank, mine in _of_route(program, variant, route, regather).items():
            held = total.get(rank)
            total[rank] = mine if held is None else _sum(held, mine)
    return total


def _of_route(program: Pipelined, variant: Variant, route: int, regather: bool) -> dict[int, Memory]:
    localiser = Localiser(variant.graph)
    one = memory(variant.graph, variant.stages, localiser, regather=regather, overlap=False)
    stays = kept(variant.graph, variant.stages, localiser, regather=regather)
    many = sum(of == route for of, _ in program.keys)
    found = {}
    for rank, peak in one.items():
        mine = [c for c, group in enumerate(variant.where.group) if rank in variant.where.ranks(group)]
        numbers = [c + route * program.count for c in mine]
        slots = _mean([_slots(program.proof, c) for c in numbers])
        more = max(0.0, slots - 1) if mine else 0.0
        versions = _mean([program.proof.peak.get(f"w.{c}", 1) for c in numbers])
        sequences = -(-slots // program.slices)  # that have begun and not ended
        extra = round(more * stays[rank] + max(0.0, versions - 1) * peak.parameters + sequences * left(variant, rank))
        extra += summed(variant, rank) if many > 1 else 0
        # What the slots keep of forward hops is counted with them.
        extra += many * hopping(variant, rank, "BW") + round(max(0.0, many - slots)) * hopping(variant, rank, "F")
        found[rank] = replace(peak, activations=peak.activations + extra)
    return found


def left(variant: Variant, rank: int) -> int:
    """What slices of a sequence leave for later ones: keys and values of all of it, and as much of gradients."""
    found = 0
    for stage in variant.stages:
        for op in stage.ops if isinstance(stage, Segment) and rank in stage.placement.flat else ():
            if op.op is attend:
                for of in map(variant.graph.layout, vars_in(op.args[1:3])):
                    *rows, _, width = of.local_shape(rank)
                    found += 2 * prod(rows) * op.args[5] * width * of.dtype.itemsize
    return found


def summed(variant: Variant, rank: int) -> int:
    """The gradients of weights as they are added up."""
    tasks = variant.tasks
    added = {slot: tasks.layouts[part] for part, slot in tasks.sums.items()}
    return sum(_bytes(of, rank) for of in added.values())


def hopping(variant: Variant, rank: int, kinds: str) -> int:
    """Bytes that a rank sends to tasks of these kinds elsewhere and receives for its own, of one micro-batch."""
    return sum(_bytes(of, rank) for hop in variant.tasks.hops if hop.target.kind in kinds for of in hop.pair)


def _bytes(of: Layout, rank: int) -> int:
    return prod(of.local_shape(rank)) * of.dtype.itemsize if rank in of.placement else 0


def _slots(run: Run, chunk: int) -> int:
    """How many micro-batches a chunk has begun and not ended, at most."""
    return max(run.peak.get(f"{name}.{chunk}", 1) for name in ("act", "stash"))


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers) if numbers else 1.0


def _sum(a: Memory, b: Memory) -> Memory:
    estimates = (*a.estimates, *b.estimates)
    return Memory(a.parameters + b.parameters, a.gradients + b.gradients, a.activations + b.activations, estimates)
