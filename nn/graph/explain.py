"""The explanation of a graph: the costs of its ops and what would have been next, its memory, and the choice."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from ...boxing.graph.physical import Physical
from ...boxing.graph.report.facts import Cost, Held, MemoryReport, SearchReport
from ...boxing.graph.report.report import Report
from ...placement.cluster import default_cluster
from ...sbp.joint.options import Option
from ...sbp.joint.pins import is_pin_alone
from ...sbp.joint.solver.local_search import swaps
from ...sbp.joint.source_options import Stored
from ...sbp.state import Lie
from .choose.choose import Decided

__all__ = ["parts_of", "report", "said"]


def report(
    graph: Physical,
    decided: Decided,
    ranks: Mapping[int, Held],
    estimates: Sequence[str],
    limit: float | None,
    again: Sequence[str],
    stowed: Iterable[tuple[int, int]] = (),
) -> Report:
    """All that is known of a graph, where so much is held by rank, and so many bytes are stowed in memory and files."""
    found = decided.solution
    many = decided.formulated.rounds.stages
    cost, greedy, bound = found.cost / many, found.greedy / many, found.bound / many
    solution = SearchReport(cost, greedy, bound, found.method, found.seconds, many)
    memory = MemoryReport(ranks, None if limit is None else int(limit), estimates, decided.again)
    update, exposed, hidden, once = _times(decided)
    costs = tuple(_costs(decided))
    made = Report(graph, costs, memory, solution, exposed, hidden, update, again, once=once)
    copying = max((_copying(graph, *each) for each in stowed), default=0.0)
    return replace(made, copying=copying, waiting=_waiting(copying, made.compute or 0.0)) if copying else made


def _copying(graph: Physical, memory: int, files: int) -> float:
    """Seconds in which so many bytes go to the host's memory, and by way of it to files."""
    first = next(iter(graph.values.values())).layout.placement
    device = default_cluster(first).device_of(first)
    return (memory + files) / device.host_bandwidth + files / device.disk_bandwidth


def _waiting(copying: float, compute: float) -> float:
    """Seconds by which copies there take longer than the forward beside them, a third of all that is computed, and
    those back longer than the backward."""
    return max(0.0, copying - compute / 3) + max(0.0, copying - compute * 2 / 3)


def parts_of(decided: Decided) -> dict[str, float]:
    """The seconds of a choice, by what they are spent on: those of a stage, in the mean."""
    rounds = decided.formulated.rounds
    update, waits, _, once = _times(decided)
    waited = rounds.times * waits + once
    computing = decided.solution.cost - update - waited
    parts = {"computing": computing, "moves that all wait for": waited, "the optimizer": update}
    return {part: seconds / rounds.stages for part, seconds in parts.items()}


def _times(decided: Decided) -> tuple[float, float, float, float]:
    """Seconds of the optimizer, of moves that all wait for, of moves beside the computing, both of one micro-batch, and
    of moves that a step makes once besides; with the ops' they are the cost of the choice."""
    posed, choice = decided.formulated, decided.solution.choice
    problem, times = posed.problem, posed.rounds.times
    update = sum(posed.own(node, k) for node, k in zip(posed.nodes, choice, strict=True) if node.kind == "source")
    lasting = [at for at, edge in enumerate(posed.tensors) if edge.of.lasts]
    once = sum(spent.before + spent.behind for spent in (posed.spent(at, choice) for at in lasting))
    over = max(0.0, problem.beside(choice))
    waited = sum(float(e.matrix[choice[e.i], choice[e.j]]) for e in problem.edges) - once
    return update, (waited + over) / times, (problem.hides(choice) - over) / times, once


def _costs(decided: Decided) -> Iterator[Cost]:
    """Each op's own seconds; its runner-up is what it would take next if all others stayed. In micro-batches both
    are of one."""
    posed, choice = decided.formulated, decided.solution.choice
    next_best = swaps(posed.problem.priced(decided.solution.share), choice)
    for at, node in enumerate(posed.nodes):
        if node.kind != "op":
            continue
        op = decided.logical.ops[node.index]
        if is_pin_alone(op):
            continue
        seconds = posed.own(node, choice[at])
        swap = next_best[at]
        for number in op.numbers[:1]:
            if swap.seconds == inf or swap.candidate < 0:
                yield Cost(decided.names[number], seconds)
            else:
                yield Cost(
                    decided.names[number],
                    seconds,
                    said(node.candidates[swap.candidate], len(_sizes(decided, at))),
                    swap.seconds / posed.rounds.times,
                )


def _sizes(decided: Decided, at: int) -> tuple[int, ...]:
    node = decided.formulated.nodes[at]
    name = decided.names[decided.logical.ops[node.index].numbers[0]]
    return decided.graph.layout(name).placement.shape


def said(taken: Stored | Option | Lie, axes: int) -> str:
    """A candidate in the signatures that users write."""
    if isinstance(taken, Lie):
        sbp = taken.state.sbp(axes)
        return str(sbp[0]) if axes == 1 else f"({', '.join(map(str, sbp))})"
    if isinstance(taken, Stored):
        lie, grads, states = (said(each, axes) for each in taken[:3])
        gradient = "" if grads in (lie, states) else f", gradient as {grads}"
        return lie + gradient + ("" if lie == states else f", updated as {states}")
    ins, outs = ([said(lie, axes) for lie in lies] for lies in (taken.inputs, taken.outputs))
    return f"{', '.join(ins)} -> {', '.join(dict.fromkeys(outs))}"
