"""The explanation of a step: the costs of its ops and what would have been next, its memory, and the choice."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ...boxing.exchange.execute import slow_now
from ...boxing.graph.move_table import AccountKey, MoveAccount, updates
from ...boxing.graph.physical import Physical
from ...boxing.graph.report.facts import Cost, MemoryReport, SearchReport
from ...boxing.graph.report.report import Report
from ...boxing.graph.report.walked import Walked
from ...placement.cluster import default_cluster
from ...placement.device import family
from ...sbp.joint.pins import is_pin_alone
from ...sbp.joint.solver.local_search import swaps
from ..graph.choose.choose import Decided
from ..graph.memory.liveness import RankMemory
from ..graph.passes import said
from ..graph.run.costs import copy_seconds
from ..graph.run.program import Program
from ..graph.step import Step
from .hidden_moves import hidden_seconds
from .idle_axes import said_of_idle
from .memory_course import memory_course
from .model_work import model_work
from .op_candidates import candidates_of
from .task_schedules import by_the_clock, chunk_values, straight_schedule, straight_values, task_schedules

__all__ = ["explained", "parts_of", "walked", "with_idle"]


_idle: "WeakKeyDictionary[Step, Sequence[str]]" = WeakKeyDictionary()  # a line on each axis that does nothing


def explained(step: Step, idle: bool = True) -> Report:
    """The plan of a step and its reasons; in micro-batches, ops and moves are those of one. Unless `idle` is false it
    says what axes that do nothing could do."""
    with step.graph.priced():
        plan, live = step.plan, step.memory()
        made = _report(step, live)
        made = replace(made, links=_links(step.graph), devices=_devices(step.graph))
        made = replace(made, work=model_work(plan), walk=lambda: walked(step, made.memory))
        made = replace(made, cut=plan.balance.said, course=plan.pieces.course() if plan.pieces else made.course)
        if plan.options.cuda_graph:
            made = replace(made, recorded=getattr(step.runner, "said", "recorded from the third call on"))
        if plan.pieces and plan.pieces.late:
            made = replace(made, late=(plan.pieces.late.said,))
        return with_idle(made, step) if idle else made


def with_idle(report: Report, step: Step) -> Report:
    """The report of a step, with what axes that do nothing could do: to look takes as long as to plan the step."""
    if step not in _idle:
        with step.graph.priced():
            _idle[step] = tuple(said_of_idle(step.plan, report.predicted or 0.0))
    return replace(report, idle=_idle[step])


def walked(step: Step, memory: MemoryReport | None) -> Walked:
    """The details that the page of a step shows besides: worked out when a page is asked for."""
    with step.graph.priced():
        candidates, pieces = candidates_of(step.plan.decided), step.plan.pieces
        rank, held = max(memory.ranks.items(), key=lambda item: item[1].total) if memory and memory.ranks else (0, None)
        course = memory_course(step, rank, held) if held else None
        if pieces is None:
            assert isinstance(step.program, Program)
            costs = tuple(_costs(step.plan.decided))
            update = _spent(step.plan.decided).update
            return Walked(
                candidates, course, (straight_schedule(step.program, costs, update),), straight_values(step.program)
            )
        return Walked(candidates, course, tuple(task_schedules(pieces)), chunk_values(pieces))


def _links(graph: Physical) -> str:
    """How the links are known, each cluster once where kinds of devices have one each; and which are slow just now."""
    kinds = sorted({value.layout.placement.type for value in graph.values.values()})
    return "; ".join(dict.fromkeys([*(default_cluster(kind).said for kind in kinds), *slow_now()]))


def _devices(graph: Physical) -> str:
    """How the seconds of the devices are known; each kind once."""
    places = dict.fromkeys(value.layout.placement for value in graph.values.values())
    return "; ".join(dict.fromkeys(default_cluster(place).device_of(place).said for place in places))


def _report(step: Step, live: Mapping[int, RankMemory]) -> Report:
    """All that is known of a graph, whose ranks hold so much."""
    graph, decided, limit = step.graph, step.plan.decided, step.plan.options.memory
    estimates = max((of.estimates for of in live.values()), key=len, default=())
    found = decided.solution
    many = decided.formulated.rounds.stages
    cost, greedy, bound = found.cost / many, found.greedy / many, found.bound / many
    solution = SearchReport(cost, greedy if greedy < inf else None, bound, found.method, found.seconds, many)
    memory = MemoryReport(step.held_of(live), None if limit is None else int(limit), estimates, decided.again)
    spent, costs = _spent(decided), tuple(_costs(decided))
    if spent.hidden and isinstance(step.program, Program) and not _on_cards(graph):
        spent = _in_order(step.program, spent, costs)
    account = _account(graph, decided, spent.hidden)
    whole = _whole_updates(graph, account)
    late = whole if account.piped else 0.0
    made = Report(
        graph,
        costs,
        memory,
        solution,
        spent.waited + whole - late,
        spent.hidden,
        spent.update,
        step.program.again,
        once=spent.once + late,
        account=account,
        whole=whole,
        launching=0.0 if step.plan.options.cuda_graph else _launching(decided, costs, spent),
    )
    copying = max((_copying(graph, *of.stowed) for of in live.values()), default=0.0)
    return replace(made, copying=copying, waiting=_waiting(copying, costs)) if copying else made


def _on_cards(graph: Physical) -> bool:
    return any(family(value.layout.placement.type).card for value in graph.values.values())


def _in_order(program: Program, spent: "_Spent", costs: Sequence[Cost]) -> "_Spent":
    """The same with what the step's order hides in truth. The choice takes it that all computing hides all moves, which
    links between hosts are too slow for: a card's order is not asked, as its moves hide nearly so."""
    moving = spent.hidden + spent.waited
    hidden = min(max(hidden_seconds(by_the_clock(program, costs)), 0.0), spent.hidden)
    return spent._replace(hidden=hidden, waited=moving - hidden)


def _copying(graph: Physical, memory: int, files: int) -> float:
    """Seconds in which so many bytes go to the host's memory, and by way of it to files, on the first device."""
    first = next(iter(graph.values.values())).layout.placement
    return copy_seconds(default_cluster(first).device_of(first), memory, files)


def _waiting(copying: float, costs: Sequence[Cost]) -> float:
    """The seconds that copies to the host take beyond the forward, and copies back beyond the backward."""
    back = sum(cost.backward for cost in costs)
    forward = sum(cost.seconds for cost in costs) - back
    return max(0.0, copying - forward) + max(0.0, copying - back)


def _launching(decided: Decided, costs: Sequence[Cost], spent: "_Spent") -> float:
    """The seconds by which the host takes longer to launch a micro-batch's kernels than all ops and moves take."""
    host = sum(sum(node.host) for node in decided.formulated.nodes)
    return max(0.0, host - sum(cost.seconds for cost in costs) - spent.waited)


def parts_of(decided: Decided) -> dict[str, float]:
    """The seconds of a choice, by what they are spent on: those of a stage, in the mean."""
    rounds = decided.formulated.rounds
    spent = _spent(decided)
    waited, update = rounds.times * spent.waited + spent.once, spent.update
    computing = decided.solution.cost - update - waited
    parts = {"computing": computing, "moves that all wait for": waited, "the optimizer": update}
    return {part: seconds / rounds.stages for part, seconds in parts.items()}


class _Spent(NamedTuple):
    """Seconds of an optimizer's step, of a micro-batch's moves that all wait for and beside computing, and of moves
    once a step. With the ops' they are the cost of the choice."""

    update: float
    waited: float
    hidden: float
    once: float


def _spent(decided: Decided) -> _Spent:
    posed, choice = decided.formulated, decided.solution.choice
    problem, times = posed.problem, posed.rounds.times
    own = list(zip(posed.nodes, choice, strict=True))
    sources = [(node, k) for node, k in own if node.kind == "source"]
    update = sum(posed.own(node, k) - posed.moving(node, k) for node, k in sources)
    inside = sum(posed.moving(node, k) for node, k in own if node.kind == "op")
    ends = sum(posed.moving(node, k) for node, k in sources)
    lasting = [at for at, edge in enumerate(posed.tensors) if edge.of.lasts]
    once = sum(spent.before + spent.behind for spent in (posed.spent(at, choice) for at in lasting))
    over = max(0.0, problem.beside(choice))
    waited = sum(float(e.matrix[choice[e.i], choice[e.j]]) for e in problem.edges) - once
    late = once + ends if posed.piped else once
    now = waited + over if posed.piped else waited + over + ends
    return _Spent(update, now / times + inside, (problem.hides(choice) - over) / times, late)


def _account(graph: Physical, decided: Decided, hidden: float) -> MoveAccount:
    """The seconds of moves by which it was chosen, by values of the graph; each move that may go on beside computing
    has its part of those that are hidden."""
    posed, choice = decided.formulated, decided.solution.choice
    origin: dict[str, str] = {}
    for box in graph.boxes:
        origin[box.output.name] = origin.get(box.source, box.source)
    root = {number: origin.get(name, name) for number, name in decided.names.items()}
    each: dict[AccountKey, float] = defaultdict(float)
    late: dict[AccountKey, float] = defaultdict(float)
    beside: dict[AccountKey, float] = defaultdict(float)
    for at, tensor in enumerate(posed.tensors):
        name, spent = root.get(tensor.number), posed.spent(at, choice)
        if name is not None:
            each[name, "forward"] += spent.forward + spent.hidden_forward
            each[name, "backward"] += spent.backward + spent.hidden_backward
            beside[name, "forward"] += spent.hidden_forward
            beside[name, "backward"] += spent.hidden_backward
            late[name, "forward"] += spent.before
            late[name, "backward"] += spent.behind
    inside = 0.0
    for node, k in zip(posed.nodes, choice, strict=True):
        if node.kind == "source" and node.index in root:
            (late if posed.piped else each)[root[node.index], "update"] += posed.moving(node, k)
        inside += posed.moving(node, k) if node.kind == "op" else 0.0
    whole = frozenset(s.value.name for s in graph.sources if s.whole is not None or s.owner is not None)
    most = sum(beside.values())
    hides = {key: hidden * seconds / most for key, seconds in beside.items()} if most else {}
    return MoveAccount(each, late, inside, {*root.values()}, whole, posed.piped, hides)


def _whole_updates(graph: Physical, account: MoveAccount) -> float:
    """Seconds by which updates of whole tensors move for longer than the choice has it."""
    if not account.stepped_whole:
        return 0.0
    moved = [(names, way.price.time) for names, way in updates(graph.sources)]
    routes = sum(seconds for names, seconds in moved if not account.stepped_whole.isdisjoint(names))
    return routes - sum(account.seconds((name, "update")) for name in account.stepped_whole)


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
        moving = posed.moving(node, choice[at])
        seconds = posed.own(node, choice[at]) - moving
        back = min(posed.back(node, choice[at]), seconds)
        swap = next_best[at]
        for number in op.numbers[:1]:
            if swap.seconds == inf or swap.candidate < 0:
                yield Cost(decided.names[number], seconds, backward=back)
            else:
                yield Cost(
                    decided.names[number],
                    seconds,
                    said(node.candidates[swap.candidate], len(_sizes(decided, at))),
                    swap.seconds / posed.rounds.times,
                    back,
                )


def _sizes(decided: Decided, at: int) -> tuple[int, ...]:
    node = decided.formulated.nodes[at]
    name = decided.names[decided.logical.ops[node.index].numbers[0]]
    return decided.graph.layout(name).placement.shape
