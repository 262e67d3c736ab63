"""Choosing: a captured graph, its placements and limits in; the physical graph that costs least out."""

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

from ....boxing.figures import duration
from ....placement import Placement, default_cluster
from ....placement.errors import SbpError, ShortageError
from ....sbp.joint.placements import Homes, homes
from ....sbp.logical import Logical
from ..lower.last_used import LastUsed
from .blocks_again import cheapest, worthwhile
from .decompose import expand, looks
from .memory_limit import fitted
from .posed_graph import Choosing, Decided
from .real_sums import has_hollow_sums
from .replicas import with_replicas

__all__ = ["Choosing", "Decided", "decide", "taken_apart"]


def taken_apart(
    logical: Logical, placement: Placement | None, *, arguments_everywhere: bool = False
) -> tuple[Logical, Homes]:
    """The graph with ops replaced by parts that may lie better, and with replicas, for which every rank may have the
    arguments from its caller; and where all of it lives."""
    ranks = dict(zip(map(id, logical.ops), (there.size for there in homes(logical, placement).ops), strict=True))
    logical = expand(logical, lambda op: ranks.get(id(op), 2))
    where = homes(logical, placement)
    made = with_replicas(logical, where, arguments_everywhere=arguments_everywhere)
    return made, where if made is logical else homes(made, placement)


def decide(asked: Choosing) -> Decided:
    """The cheapest signatures of a graph, with all moves; the same question is answered once in a process."""
    key = _key(asked)
    before = _known.get(key)
    if before is not None:
        return before
    found, encoders = _best(asked), asked.demands.encoders
    if encoders and has_hollow_sums(found.logical, found.formulated, found.solution.choice, encoders):
        with suppress(SbpError):  # as where a loss has a term that all ranks have whole, whose gradient is an addend
            found = _best(replace(asked, demands=replace(asked.demands, real_sums=True)))
    return _known.put(key, found)


def _best(asked: Choosing) -> Decided:
    """The cheapest of those that fit, with blocks that the backward runs again where that helps."""
    posed, limit = asked.posed(), asked.limit
    memory = posed.formulated.problem.memory
    if limit is None:
        found = posed.decided(posed.solver.solve(memory, None, level=asked.enough))
        return replace(found, floor=found.solution.bound)
    free = posed.solver.solve(memory, None, branches=0)
    blocks = worthwhile(posed.logical, posed.formulated, free) if posed.logical.losses and free.choice else []
    plain: Decided | None = None
    try:
        plain = fitted(posed, limit)
    except ShortageError:
        if not blocks:
            raise
    spent = accumulate((block.seconds for block in blocks), initial=free.bound)
    blocks = blocks[: max(sum(seconds < asked.enough for seconds in spent) - 1, 0)]
    if not blocks and plain is None:
        raise ShortageError(f"nothing that fits takes less than {duration(asked.enough)}")
    found = cheapest(
        plain, free.bound, blocks, lambda again: fitted(asked.posed(again), limit), lambda f: f.solution.cost
    )
    return replace(found, floor=free.bound)


_known = LastUsed[Decided](32)


def _key(asked: Choosing) -> Hashable:
    """All that a decision depends on, so that the same step is not planned twice in one process."""
    logical, where, demands = asked.logical, asked.where, asked.demands
    sources = tuple(
        (s.name, s.kind, looks(s.fake), s.requires_grad, s.grads, s.states, s.offload) for s in logical.sources
    )
    ops = tuple(
        (
            op.op,
            str(op.args),
            str(op.kwargs),
            op.numbers,
            tuple(map(looks, op.outputs)),
            op.grad,
            op.origin,
            op.lies,
            op.fixed,
        )
        for op in logical.ops
    )
    ends = str(logical.result), logical.losses, tuple(logical.writes.items())
    clusters = tuple(default_cluster(place) for place in dict.fromkeys((*where.sources, *where.ops)))
    said = (
        *(tuple(of.items()) for of in (demands.pins, demands.rests, demands.encoders)),
        demands.states,
        demands.rounds,
        demands.compiled,
        demands.held,
        demands.update,
    )
    return sources, ops, ends, where, said, asked.limit, asked.regather, asked.enough, clusters, asked.name
