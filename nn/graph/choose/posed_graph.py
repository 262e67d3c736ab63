"""A posed graph: the demands on its signatures, the problem that they make, and the graph by an answer to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from ....boxing.graph.buckets import bucketed
from ....boxing.graph.insert import Choice, insert
from ....boxing.graph.measures import Held
from ....boxing.graph.physical import Physical
from ....placement import default_cluster
from ....placement.device import FAMILIES
from ....placement.errors import SbpError
from ....sbp.joint.demands import Demands
from ....sbp.joint.formulate import Formulated, formulate
from ....sbp.joint.known_options import KnownOptions
from ....sbp.joint.placements import Homes
from ....sbp.joint.solver.propagation import held
from ....sbp.joint.solver.solve import Solution, Solver
from ....sbp.logical import Logical, LogicalOp
from ..memory.account import account
from .blocks_again import run_again
from .decompose import formula_of

__all__ = ["Choosing", "Decided", "PosedGraph"]


@dataclass(frozen=True, eq=False)
class Choosing:
    """A question: the cheapest signatures of a graph that lives there, under such demands.

    With a `limit` in bytes a rank, all that sources keep may lie in pieces, and the backward runs blocks again where
    that is not enough, or takes less. The best of the plans that take `enough` seconds is not looked for: with a limit,
    where nothing less fits, there is no plan; without, any will do. `regather` says whether values gathered of
    parameters are gathered again for the backward. Other choices on the same step and cluster share `known`.
    """

    logical: Logical
    where: Homes
    demands: Demands
    limit: float | None = None
    enough: float = inf
    regather: bool = True
    name: str = "graph"
    known: KnownOptions = field(default_factory=KnownOptions)

    def formulated(self, logical: Logical) -> Formulated:
        """The problem of the same graph with other ops, or other origins of them."""
        buckets = {name: row.bucket for name, row in FAMILIES.items()}
        demands = replace(self.demands, sharded=self.limit is not None, together=buckets)
        made = formulate(logical, self.where, default_cluster, demands, _Formulas(logical), self.known)
        return held(made, logical, demands.held) if demands.held else made

    def posed(self, again: Sequence[str] = ()) -> "PosedGraph":
        """The graph with its problem, where the backward runs such blocks again."""
        logical = run_again(self.logical, again) if again else self.logical
        return PosedGraph(self, logical, self.formulated(logical), tuple(again))


@dataclass(frozen=True, eq=False)
class Decided:
    """The graph that runs, and how it was found."""

    graph: Physical
    logical: Logical
    formulated: Formulated
    solution: Solution
    names: Mapping[int, str]  # of the logical graph's values in the graph
    asked: Choosing
    again: tuple[str, ...] = ()  # blocks that the backward runs again to fit
    floor: float = 0.0  # seconds: with all memory there is, no plan that treats equal blocks alike takes less

    def made_by(self, op: int) -> str:
        """The value that an op makes first."""
        return self.names[self.logical.ops[op].numbers[0]]

    def held(self) -> dict[int, Held]:
        """The memory of each rank."""
        return account(bucketed(self.graph), self.asked.demands.states, regather=self.asked.regather)


@dataclass(frozen=True, eq=False)
class PosedGraph:
    """A graph with its problem, and the one that solves it."""

    asked: Choosing
    logical: Logical
    formulated: Formulated
    again: tuple[str, ...]

    @cached_property
    def solver(self) -> Solver:
        return Solver(self.formulated.problem)

    def decided(self, solution: Solution) -> Decided:
        """The graph as a solution has it; an error if it is none."""
        if not solution.choice:
            said = ", ".join(f"{name}: {sbp}" for name, sbp in list(self.asked.demands.pins.items())[:4])
            raise SbpError(
                f"no choice of signatures fits what was asked for\n  pinned are {said or 'none'}\n"
                "  take back one by flow.nn.shard(model, {name: None})"
            )
        graph, names = insert(self.logical, self.asked.where, self._choice(solution), self.asked.name)
        return Decided(graph, self.logical, self.formulated, solution, names, self.asked, self.again)

    def _choice(self, solution: Solution) -> Choice:
        stored, chosen, copies, results = {}, {}, {}, {}
        for node, k in zip(self.formulated.nodes, solution.choice, strict=True):
            taken = node.candidates[k]
            if node.kind == "source":
                stored[node.index] = taken
            elif node.kind == "op":
                chosen[node.index] = self.formulated.spreads.get((node.index, k), taken)
            elif node.kind == "copy":
                copies[node.index] = self.formulated.copy_homes[node.index], taken
            else:
                results[node.index] = taken
        sources, ops = map(range, (len(self.logical.sources), len(self.logical.ops)))
        return Choice([stored[n] for n in sources], [chosen[n] for n in ops], copies, results)


class _Formulas:
    """Formulas of ops along a split dim; equal ones are captured once."""

    def __init__(self, logical: Logical) -> None:
        self.logical = logical
        self.known: dict[object, Logical | None] = {}

    def __call__(self, op: LogicalOp) -> Logical | None:
        if op.fixed is not None:
            return None
        call = self.logical.call(op)
        wants = tuple(n in self.logical.wants_grad for n in op.inputs)
        shapes = tuple((tuple(x.shape), x.dtype) for x in call.inputs)
        key = op.op, shapes, str(op.args), str(op.kwargs), op.grad, wants
        if key not in self.known:
            self.known[key] = formula_of(op, call, wants)
        return self.known[key]
