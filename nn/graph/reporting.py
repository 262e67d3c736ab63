"""What `explain` tells of a graph: the costs of its ops and what would have been next, its memory, and the choice."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from ...boxing.graph.physical import Graph
from ...boxing.graph.report import Cost, Memory, Report, Solution
from ...sbp import Layout
from ...sbp.joint.nearby import swaps
from ...sbp.joint.prices import Lie
from ...sbp.joint.ways import Option
from .account import with_states
from .decide import Decided
from .liveness import Memory as Live

__all__ = ["report"]


def report(
    graph: Graph,
    decided: Decided,
    live: Mapping[int, Live],
    trained: Mapping[str, Layout],
    kept: int,
    limit: float | None,
    again: Sequence[str],
) -> Report:
    """All that is known of a graph; `trained` says where parameters' gradients end, and `kept` tensors
    belong to the optimizer for each of them."""
    found = decided.solution
    solution = Solution(found.cost, found.greedy, found.bound, found.method, found.seconds)
    memory = Memory(with_states(live, trained.values(), kept), None if limit is None else int(limit))
    return Report(graph, tuple(_costs(decided)), memory, solution, again=again)


def _costs(decided: Decided) -> Iterator[Cost]:
    """Each op's own seconds; its runner-up is what it would take next if all others stayed."""
    posed, choice = decided.formulated, decided.solution.choice
    next_best = swaps(posed.problem, choice)
    for at, node in enumerate(posed.nodes):
        if node.kind != "op":
            continue
        op = decided.logical.ops[node.index]
        seconds = float(node.cost[choice[at]])
        swap = next_best[at]
        for number in op.numbers[:1]:
            if swap.seconds == inf or swap.candidate < 0:
                yield Cost(decided.names[number], seconds)
            else:
                yield Cost(
                    decided.names[number],
                    seconds,
                    _told(node.candidates[swap.candidate], len(_sizes(decided, at))),
                    swap.seconds,
                )


def _sizes(decided: Decided, at: int) -> tuple[int, ...]:
    node = decided.formulated.nodes[at]
    name = decided.names[decided.logical.ops[node.index].numbers[0]]
    return decided.graph.layout(name).placement.shape


def _told(option: Option, axes: int) -> str:
    def said(lie: Lie) -> str:
        sbp = lie.state.sbp(axes)
        return str(sbp[0]) if axes == 1 else f"({', '.join(map(str, sbp))})"

    return f"{', '.join(map(said, option.inputs))} -> {', '.join(dict.fromkeys(map(said, option.outputs)))}"
