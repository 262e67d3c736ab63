"""Choosing: a captured graph, its placements and limits in; the physical graph that costs least out."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from ....boxing.figures import duration
from ....boxing.graph.buckets import bucketed
from ....boxing.graph.insert import Choice, insert
from ....boxing.graph.physical import Physical
from ....placement import Placement, default_cluster
from ....placement.device import FAMILIES
from ....placement.errors import SbpError, ShortageError
from ....sbp.joint.demands import Demands, EncodedWay, RestPins, Rounds, SourcePin
from ....sbp.joint.formulate import ChoiceNode, Formulated, formulate
from ....sbp.joint.known_options import KnownOptions
from ....sbp.joint.move_cost import local_bytes
from ....sbp.joint.placements import Homes, homes
from ....sbp.joint.problem import Vector
from ....sbp.joint.solver.solve import Solution, Solver
from ....sbp.joint.uses import weights
from ....sbp.logical import Logical, LogicalOp
from ..lower.last_used import LastUsed
from ..memory.account import account
from .blocks_again import cheapest, run_again, worthwhile
from .composed import Uses, composed
from .decompose import expand, formula_of, looks
from .memory_limit import fitted
from .real_sums import has_hollow_sums
from .replicas import with_replicas

__all__ = ["Decided", "Pins", "decide"]

Pins: TypeAlias = Mapping[str, SourcePin]


@dataclass(frozen=True, eq=False)
class Decided:
    """The graph that runs, and how it was found."""

    graph: Physical
    logical: Logical
    formulated: Formulated
    solution: Solution
    names: Mapping[int, str]  # of the logical graph's values in the graph
    pose: Callable[[Logical], Formulated]  # of the same graph with other ops, or other origins of them
    again: tuple[str, ...] = ()  # blocks that the backward runs again to fit
    floor: float = 0.0  # seconds: with all memory there is, no plan that treats equal blocks alike takes less


def decide(
    logical: Logical,
    placement: Placement | None,
    *,
    pins: Callable[[Mapping[str, Placement]], Pins] = lambda homes: {},
    rests: Callable[[Mapping[str, Placement]], Mapping[str, RestPins]] = lambda homes: {},
    states: int = 0,
    limit: float | None = None,
    regather: bool = True,
    name: str = "graph",
    arguments_everywhere: bool = False,
    uses: Uses = MappingProxyType({}),
    encoders: Mapping[str, EncodedWay] = MappingProxyType({}),
    enough: float = inf,
    known: KnownOptions | None = None,
    rounds: Callable[[Homes], Rounds] | None = None,
) -> Decided:
    """The cheapest signatures of a graph, with all moves; `states` tensors belong to each parameter besides itself.

    `pins` is asked which sources must lie how, once it is known where they live, and `rests` of parameters how their
    gradients and what an optimizer keeps of them must. With a limit in bytes a rank, all these may lie in pieces, and
    the backward runs blocks again where that is not enough, or takes less. `regather` says whether what was gathered of
    parameters is gathered again for the backward. `arguments_everywhere` says that every rank has the arguments from
    its caller, `uses` which modules compute by composites, and `encoders` how gradients go home in fewer bytes. The
    best of what takes `enough` seconds is not looked for: with a limit, where nothing less fits, there is no plan;
    without, any will do. `known` is what other decisions on the same step and cluster have worked out. Where the graph
    is of one micro-batch, `rounds` is asked how often a step runs it, and what is least is the step.
    """
    worked = known or KnownOptions()
    first = homes(logical, placement)
    if uses:
        hinted = pins({s.name: there for s, there in zip(logical.sources, first.sources, strict=True)})
        logical = composed(logical, first, uses, hinted)
        first = homes(logical, placement)
    ranks = dict(zip(map(id, logical.ops), (where.size for where in first.ops), strict=True))
    logical = expand(logical, lambda op: ranks.get(id(op), 2))
    where, alone = homes(logical, placement), logical
    logical = with_replicas(logical, where, arguments_everywhere=arguments_everywhere)
    where = where if logical is alone else homes(logical, placement)
    places = {s.name: there for s, there in zip(logical.sources, where.sources, strict=True)}
    pinned = pins(places)
    buckets = {name: row.bucket for name, row in FAMILIES.items()}
    demands = Demands(pinned, states, limit is not None, buckets, rests(places), encoders, rounds and rounds(where))
    key = _key(logical, where, demands, (limit, regather, enough), name)
    before = _known.get(key)
    if before is not None:
        return before

    def decided_by(demands: Demands) -> Decided:
        def chosen(logical: Logical, solver: Solver, posed: Formulated, again: Sequence[str] = ()) -> Decided:
            def made(solution: Solution) -> tuple[Physical, Mapping[int, str]]:
                _check(solution, pinned)
                return insert(logical, where, _choice(posed, solution, where.sources, where.ops), name)

            if limit is None:
                solution = solver.solve(posed.problem.memory, None, level=enough)
                graph, names = made(solution)
            else:
                found = fitted(
                    posed,
                    where,
                    limit,
                    solver,
                    made,
                    lambda made: account(bucketed(made[0]), states, regather=regather),
                    lambda made, node: made[1][logical.ops[posed.nodes[node].index].numbers[0]],
                    lambda node: _gathered(logical, posed.nodes[node], where),
                )
                solution, (graph, names) = found.solution, found.made
            return Decided(graph, logical, posed, solution, names, posed_of, tuple(again))

        def with_again(blocks: Sequence[str]) -> Decided:
            other = run_again(logical, blocks)
            posed = posed_of(other)
            return chosen(other, Solver(posed.problem), posed, blocks)

        def posed_of(logical: Logical) -> Formulated:
            return formulate(logical, where, default_cluster, demands, _Formulas(logical), worked)

        posed = posed_of(logical)
        solver = Solver(posed.problem)
        if limit is None:
            decided = chosen(logical, solver, posed)
            decided = replace(decided, floor=decided.solution.bound)
        else:
            free = solver.solve(posed.problem.memory, None, branches=0)
            blocks = worthwhile(logical, posed, free) if logical.losses and free.choice else []
            plain: Decided | None = None
            try:
                plain = chosen(logical, solver, posed)
            except ShortageError:
                if not blocks:
                    raise
            spent = accumulate((block.seconds for block in blocks), initial=free.bound)
            blocks = blocks[: max(sum(seconds < enough for seconds in spent) - 1, 0)]
            if not blocks and plain is None:
                raise ShortageError(f"nothing that fits takes less than {duration(enough)}")
            decided = cheapest(plain, free.bound, blocks, with_again, lambda found: found.solution.cost)
            decided = replace(decided, floor=free.bound)
        return decided

    decided = decided_by(demands)
    if encoders and has_hollow_sums(decided.logical, decided.formulated, decided.solution.choice, encoders):
        with suppress(SbpError):  # as where a loss has a term that all ranks have whole, whose gradient is an addend
            decided = decided_by(replace(demands, real_sums=True))
    return _known.put(key, decided)


_known = LastUsed[Decided](32)


def _key(logical: Logical, where: Homes, demands: Demands, limit: Hashable, name: str) -> Hashable:
    """All that a decision depends on, so that the same step is not planned twice in one process."""
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
    )
    return sources, ops, ends, where, said, limit, clusters, name


class _Formulas:
    """Formulas of ops along a split dim; equal ones are captured once."""

    def __init__(self, logical: Logical) -> None:
        self.logical = logical
        self.known: dict[object, Logical | None] = {}

    def __call__(self, op: LogicalOp) -> Logical | None:
        if op.fixed is not None:
            return None
        call = self.logical.call(op)
        key = (op.op, tuple((tuple(x.shape), x.dtype) for x in call.inputs), str(op.args), str(op.kwargs), op.grad)
        if key not in self.known:
            self.known[key] = formula_of(op, call)
        return self.known[key]


def _gathered(logical: Logical, node: ChoiceNode, where: Homes) -> Vector:
    """Bytes of the weights that an op reads, and of their gradients, by what it chooses."""
    op = logical.ops[node.index]
    sizes = where.ops[node.index].shape
    held, found = weights(logical), np.zeros(len(node.candidates))
    for slot, n in enumerate(op.inputs):
        if n in held:
            x = logical.fakes[n]
            lying = [option.inputs[slot].state for option in node.candidates]
            times = 2 if op.grad and n in logical.wants_grad else 1
            found += times * local_bytes(lying, tuple(x.shape), x.dtype.itemsize, sizes)
    return found


def _choice(
    posed: Formulated, solution: Solution, sources: tuple[Placement, ...], ops: tuple[Placement, ...]
) -> Choice:
    stored, chosen, copies, results = {}, {}, {}, {}
    for node, k in zip(posed.nodes, solution.choice, strict=True):
        taken = node.candidates[k]
        if node.kind == "source":
            stored[node.index] = taken
        elif node.kind == "op":
            chosen[node.index] = posed.spreads.get((node.index, k), taken)
        elif node.kind == "copy":
            copies[node.index] = posed.copy_homes[node.index], taken
        else:
            results[node.index] = taken
    return Choice([stored[n] for n in range(len(sources))], [chosen[n] for n in range(len(ops))], copies, results)


def _check(solution: Solution, pins: Pins) -> None:
    if not solution.choice:
        said = ", ".join(f"{name}: {sbp}" for name, sbp in list(pins.items())[:4])
        raise SbpError(
            f"no choice of signatures fits what was asked for\n  pinned are {said or 'none'}\n"
            "  take back one by flow.nn.shard(model, {name: None})"
        )
