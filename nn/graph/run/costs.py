"""Costs: what the chunks of a pipelined step are predicted to take for one micro-batch, and what a step takes then.

    costs      by chunk, forward, backward, weights, the hop to the next chunk; what a schedule is simulated with
    course     the schedule run with these: seconds of a step, of each stage, and the share in which stages stand still

The figures are those that signatures were chosen by: rooflines of ops and prices of moves.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from ....actors.protocol.network import Network
from ....actors.protocol.simulate import simulate
from ....actors.schedules.chunk_ends import ended
from ....actors.schedules.pipeline import Costs
from ....actors.schedules.preview import bubble
from ....actors.schedules.schedule import Schedule
from ....boxing.graph.buckets import exchanges
from ....boxing.graph.move_table import buckets, updates
from ....boxing.graph.physical import Box, Physical
from ....boxing.graph.report.facts import Course
from ..choose.choose import Decided
from ..choose.stage_balance import layer_of_each
from ..lower.segments import Draw, Segment, Stage, made_by
from .chunks import Chunks
from .gradient_homes import brought_each_time
from .network import Ends, skeleton
from .tasks import derived

__all__ = ["chunk_costs", "course", "layer_costs", "once", "step_costs"]


def layer_costs(decided: Decided, paths: Sequence[str]) -> list[float]:
    """The seconds that each of these modules takes, forward and backward, for what the graph is of. What is in none of
    them counts for the one before it, as a head does, or for the first."""
    nodes = zip(decided.formulated.nodes, decided.solution.choice, strict=True)
    ops = [(decided.logical.ops[node.index], float(node.cost[k])) for node, k in nodes if node.kind == "op"]
    found = [0.0] * len(paths)
    for at, (_, seconds) in zip(layer_of_each((op.origin.module for op, _ in ops), paths), ops, strict=True):
        found[at] += seconds
    return found


def chunk_costs(graph: Physical, decided: Decided, stages: Sequence[Stage], where: Chunks) -> tuple[Costs, ...]:
    """The costs of every chunk, in seconds of one micro-batch."""
    made = {name: at for at, stage in enumerate(stages) for name in _names(stage)}
    weights = derived(stages, where)
    parts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for at, node in enumerate(decided.formulated.nodes):
        if node.kind != "op":
            continue
        op, seconds = decided.logical.ops[node.index], float(node.cost[decided.solution.choice[at]])
        names = [decided.names[n] for n in op.numbers if n in decided.names]
        chunk = next((where.of[made[name]] for name in names if name in made), None)
        if chunk is None:
            continue
        inputs = [decided.names[n] for n in op.inputs if n in decided.names]
        wants = [name for name in inputs if op.grad and graph.values[name].grad]
        share = seconds / 3 if wants else seconds  # backward is twice the forward, as it is priced
        parts[chunk]["forward"] += share
        if wants and graph.losses:
            ours = [name in weights for name in wants]
            half = share * 2 if all(ours) or not any(ours) else share
            parts[chunk]["weight"] += half * any(ours)
            parts[chunk]["backward"] += half * (not all(ours))
    hops: dict[int, float] = defaultdict(float)
    for at, stage in enumerate(stages):
        if not isinstance(stage, Box):
            continue
        price, chunk = graph.plan(stage).price.time, where.of[at]
        if chunk is not None:
            parts[chunk]["out"] += price
        elif at in where.hops and where.home.get(stage.output.name) == where.home[stage.source] + 1:
            hops[where.home[stage.source]] += price
    for back in graph.backs:
        at = made.get(back.of, -1)
        if at >= 0 and (chunk := where.of[at]) is not None and isinstance(stages[at], Box):
            kind = "weight" if back.of in weights else "back"
            parts[chunk][kind] += back.plan.price.time
    each_time = brought_each_time(graph, stages, where)
    for together in buckets(back for back in graph.backs if back.of in each_time):
        for chunk in each_time[together[0].of]:
            parts[chunk]["weight"] += sum(way.price.time for way in exchanges(together))
    return tuple(_costs(parts[c], hops[c]) for c in range(len(where.group)))


def _costs(of: Mapping[str, float], hop: float) -> Costs:
    """With moves inside of forward and backward as exchanges, as far as both have them: the rest of the longer is not
    hidden by any other task of this chunk, and counts as if it computed."""
    both = min(of["out"], of["back"])
    forward, backward = of["forward"] + of["out"] - both, of["backward"] + of["back"] - both
    return Costs(forward, backward, of["weight"], hop, exchange=both)


def once(
    graph: Physical,
    decided: Decided,
    stages: Sequence[Stage],
    where: Chunks,
    *,
    homed: Collection[str] = (),
    steps: bool = False,
) -> float:
    """Seconds of what is done once a step, before and behind all micro-batches: moves of weights, and of their
    gradients home, and the optimizer. Groups of ranks do that beside each other. What chunks do by themselves is not in
    it: gather weights, bring gradients of these home, and with `steps` their optimizers."""
    group = {place: number for number, places in enumerate(where.placements) for place in places}
    found: dict[int, float] = defaultdict(float)
    boxes = [box for at in where.once if isinstance(box := stages[at], Box)]
    moves = [graph.plan(box) for box in boxes if not (where.gathers and _near(graph, box))]
    each_time = brought_each_time(graph, stages, where)
    ends = [b for b in graph.backs if (b.of == b.into or b.of in where.weights) and b.of not in each_time]
    ends = [b for b in ends if b.into not in homed]
    moves += [way for together in buckets(ends) for way in exchanges(together)]
    moves += [move for _, move in updates(graph.sources)]
    for move in moves:
        found[group.get(move.src.placement, 0)] += move.price.time
    for name, seconds in step_costs(graph, decided).items():
        if not (steps and name in homed):
            found[group.get(graph.layout(name).placement, 0)] += seconds
    return max(found.values(), default=0.0)


def step_costs(graph: Physical, decided: Decided) -> dict[str, float]:
    """Seconds of the optimizer's step on each weight."""
    if not graph.losses:
        return {}
    nodes = enumerate(decided.formulated.nodes)
    named = ((at, node, decided.names.get(node.index)) for at, node in nodes if node.kind == "source")
    return {
        name: float(node.cost[decided.solution.choice[at]])
        for at, node, name in named
        if name is not None and name in graph.values
    }


def _near(graph: Physical, box: Box) -> bool:
    return graph.layout(box.source).placement is box.output.layout.placement and graph.plan(box).sends


def course(
    schedule: Schedule,
    routes: Sequence[Chunks],
    costs: Sequence[Costs],
    m: int,
    *,
    slices: int,
    trains: bool,
    more: float,
    inside: Collection[str] = (),
    ends: Ends | None = None,
) -> Course:
    """How m micro-batches go through the stages, and chunks end; `more` seconds are spent once a step besides. Tasks
    with moves `inside` run together with others, where the schedule says so."""
    actors, registers = skeleton(schedule, routes, m, slices, trains, inside, costs)
    if ends is not None:
        actors, registers = ended(actors, registers, ends.chunks, ends.folding, validated=ends.validated)
    run = simulate(Network(tuple(actors), tuple(registers)))
    where, found = routes[0], []
    for group in sorted(set(where.group)):
        found.append((", ".join(map(str, where.placements[group])), run.busy(f"device {group}")))
    return Course(schedule.name if trains else "", m, run.end + more, bubble(run), tuple(found))


def _names(stage: Stage) -> tuple[str, ...]:
    """All that a stage makes, also what only it uses."""
    if isinstance(stage, Segment):
        return tuple(y.name for op in stage.ops for y in op.outputs)
    return tuple(y.name for y in stage.op.outputs) if isinstance(stage, Draw) else made_by(stage)
