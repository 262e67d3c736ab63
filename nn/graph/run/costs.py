"""Costs: what the chunks of a pipelined step are predicted to take for one micro-batch, and what a step takes then.

    costs      by chunk, forward, backward, weights, the hop to the next chunk; what a schedule is simulated with
    course     the schedule run with these: seconds of a step, of each stage, and the share in which stages stand still

The figures are those that signatures were chosen by: seconds of ops and prices of moves.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ....actors.protocol.network import Network
from ....actors.protocol.simulate import Simulation, simulate
from ....actors.schedules.chunk_ends import ended
from ....actors.schedules.pipeline import Costs
from ....actors.schedules.preview import bubble
from ....actors.schedules.schedule import Schedule
from ....boxing.graph.measures import Course
from ....boxing.graph.physical import Physical
from ....placement.cluster import default_cluster
from ....placement.hardware import Device
from ....sbp.joint.formulate import ChoiceNode
from ....sbp.joint.op_cost import adding_seconds
from ....sbp.logical import OffloadPlace
from ....sbp.state import local_numel
from ..choose.choose import Decided
from ..choose.stage_balance import layer_of_each
from ..lower.segments import Draw, Segment, Stage, made_by
from ..tasks.chunks import Chunks
from ..tasks.tasks import derived
from .network import Ends, skeleton

__all__ = ["MicroBatches", "chunk_costs", "copy_seconds", "course", "layer_costs", "once", "step_costs", "with_copies"]


def layer_costs(decided: Decided, paths: Sequence[str]) -> list[float]:
    """The seconds that each of these modules takes, forward and backward, for what the graph is of. What is in none of
    them counts for the one before it, as a head does, or for the first."""
    posed = decided.formulated
    nodes = zip(posed.nodes, decided.solution.choice, strict=True)
    ops = [(decided.logical.ops[node.index], posed.own(node, k)) for node, k in nodes if node.kind == "op"]
    found = [0.0] * len(paths)
    for at, (_, seconds) in zip(layer_of_each((op.origin.module for op, _ in ops), paths), ops, strict=True):
        found[at] += seconds
    return found


def chunk_costs(
    graph: Physical, decided: Decided, stages: Sequence[Stage], where: Chunks, sums: float = 0.0
) -> tuple[Costs, ...]:
    """The costs of every chunk, in seconds of one micro-batch, of which so many, as a share, add their gradients of
    weights to those of others."""
    posed, choice, weights = decided.formulated, decided.solution.choice, derived(stages, where)
    chunk_of = _chunks_of(decided, stages, where)
    parts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    hops: dict[int, float] = defaultdict(float)
    for at, node in enumerate(posed.nodes):
        chunk = chunk_of[at]
        if chunk is None:
            continue
        if node.kind == "source" and sums:
            parts[chunk]["weight"] += sums * _adding(graph, decided, node, choice[at])
        if node.kind != "op":
            continue
        op, seconds = decided.logical.ops[node.index], posed.own(node, choice[at])
        inputs = [decided.names[n] for n in op.inputs if n in decided.names]
        wants = [name for name in inputs if op.grad and graph.values[name].grad]
        back = posed.back(node, choice[at]) if wants else 0.0
        parts[chunk]["host"] += node.host.forward
        parts[chunk]["room"] += seconds
        parts[chunk]["forward"] += seconds - back
        if wants and graph.losses:
            ours = [name in weights for name in wants]
            share = 1.0 if all(ours) or not any(ours) else 0.5
            for part, took in (("", back), ("host ", node.host.backward)):
                parts[chunk][f"{part}weight"] += share * took * any(ours)
                parts[chunk][f"{part}backward"] += share * took * (not all(ours))
    group = {place: number for number, places in enumerate(where.placements) for place in places}
    for at, (edge, (number, _, _, of)) in enumerate(zip(posed.problem.edges, posed.tensors, strict=True)):
        source, chunk, spent = chunk_of[edge.i], chunk_of[edge.j], posed.spent(at, choice)
        ends = {group.get(place) for place in (of.here, of.there)} - {None}
        if len(ends) > 1:  # arguments are the caller's, and weights go once a step
            if source is not None and chunk == source + 1:
                hops[source] += spent.forward
            continue
        chunk = source if chunk is None else chunk
        if chunk is not None:
            again = 0.5 if of.again else 0.0  # of what goes forward, the share that goes so for the backward
            parts[chunk]["out"] += (1 - again) * spent.forward
            parts[chunk]["hidden"] += (1 - again) * spent.hidden_forward
            parts[chunk]["back"] += again * spent.forward
            parts[chunk]["hidden back"] += again * spent.hidden_forward + spent.hidden_backward
            parts[chunk]["weight" if decided.names.get(number) in weights else "back"] += spent.backward
    return tuple(_costs(parts[c], hops[c]) for c in range(len(where.group)))


def _adding(graph: Physical, decided: Decided, node: ChoiceNode, of: int) -> float:
    """The seconds in which a weight's gradient is added to that of other micro-batches."""
    source, name = decided.logical.sources[node.index], decided.names.get(node.index)
    if source.kind != "parameter" or not source.requires_grad or name not in graph.values:
        return 0.0
    place, kept = graph.layout(name).placement, node.candidates[of]
    lie = kept.lie if kept.once else kept.grads
    size = local_numel(lie.state.dims, tuple(source.fake.shape), place.shape)
    dtype = source.grads or source.fake.dtype
    return adding_seconds(size * dtype.itemsize, default_cluster(place).device_of(place))


def with_copies(
    costs: Sequence[Costs], copies: Mapping[int, Mapping[OffloadPlace, int]], device: Device
) -> tuple[Costs, ...]:
    """The same where chunks send so many bytes of each micro-batch to the host, and take them back: a task ends no
    sooner than its copies, which go beside what it computes."""
    made = list(costs)
    for chunk, sizes in copies.items():
        one, seconds = made[chunk], copy_seconds(device, sizes.get("cpu", 0), sizes.get("disk", 0))
        forward, backward = max(one.forward, seconds), max(one.backward, seconds - one.weight)
        made[chunk] = replace(one, forward=forward, backward=backward)
    return tuple(made)


def copy_seconds(device: Device, memory: int, files: int) -> float:
    """Seconds in which so many bytes go to the host's memory, and by way of it to files."""
    return (memory + files) / device.host_bandwidth + files / device.disk_bandwidth


def _chunks_of(decided: Decided, stages: Sequence[Stage], where: Chunks) -> list[int | None]:
    """The chunk in which each node of the problem is done: an op in that of its result. A copy goes where its tensor is
    made, or, of arguments, of weights and of what comes from elsewhere, where it is first used."""
    posed, names = decided.formulated, decided.names
    made = {name: at for at, stage in enumerate(stages) for name in _names(stage)}

    def chunk(numbers: Sequence[int]) -> int | None:
        known = [names[n] for n in numbers if n in names]
        found = next((where.of[made[name]] for name in known if name in made), None)
        return found if found is not None else next((where.home[name] for name in known if name in where.home), None)

    ops = decided.logical.ops
    found = [chunk(ops[node.index].numbers) if node.kind == "op" else None for node in posed.nodes]
    ends = list(zip(posed.problem.edges, posed.tensors, strict=True))
    copies = [at for at, node in enumerate(posed.nodes) if node.kind == "copy"]
    makers = {edge.j: edge.i for edge, tensor in ends if tensor.of.here is tensor.of.there}
    users = {edge.i: edge.j for edge, _ in reversed(ends)}
    for at in copies:
        source = found[makers[at]] if at in makers else None
        found[at] = found[users[at]] if source is None and at in users else source
    return found


def _costs(of: Mapping[str, float], hop: float) -> Costs:
    """The costs of a chunk, with moves inside of forward and backward as exchanges as far as both have them. The rest
    of the longer is not hidden by any other task of this chunk, and counts as if it computed. Of those beside the
    computing that counts for which there is no room. No task is shorter than the host takes to launch its kernels."""
    both = min(of["out"], of["back"])
    beside = of["hidden"] + of["hidden back"]
    over = max(0.0, 1 - of["room"] / beside) if beside else 0.0
    forward, backward = of["forward"] + of["out"] - both, of["backward"] + of["back"] - both
    weight = max(of["weight"] + over * of["hidden back"], of["host weight"])
    forward = max(forward + over * of["hidden"], of["host"] - both)
    return Costs(forward, max(backward, of["host backward"] - both), weight, hop, exchange=both)


def once(
    graph: Physical, decided: Decided, where: Chunks, *, homed: Collection[str] = (), steps: bool = False
) -> float:
    """Seconds of work once a step, before and behind all micro-batches: moves of weights and of their gradients home,
    and the optimizer. Groups of ranks do that beside each other. What chunks do by themselves is not in it: gather
    weights, bring gradients of these home, and with `steps` their optimizers."""
    posed, choice, names = decided.formulated, decided.solution.choice, decided.names
    group = {place: number for number, places in enumerate(where.placements) for place in places}
    found: dict[int, float] = defaultdict(float)
    for at, tensor in enumerate(posed.tensors):
        if tensor.of.lasts:
            spent, here = posed.spent(at, choice), group.get(tensor.of.here, 0)
            near = group.get(tensor.of.there, 0) == here
            found[here] += spent.before * (not (where.gathers and near))
            found[here] += spent.behind * (names.get(tensor.number) not in homed)
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


@dataclass(frozen=True)
class MicroBatches:
    """The way of m micro-batches through the stages, and of the ends of chunks, with the costs of each chunk. Tasks
    with moves `inside` run together with others, where the schedule says so."""

    schedule: Schedule
    routes: Sequence[Chunks]
    costs: Sequence[Costs]
    m: int
    slices: int
    trains: bool
    inside: Collection[str] = ()
    ends: Ends | None = None

    @property
    def network(self) -> Network:
        how = self.slices, self.trains, self.inside, self.costs
        actors, registers = skeleton(self.schedule, self.routes, self.m, *how)
        if self.ends is not None:
            ends = self.ends
            actors, registers = ended(actors, registers, ends.chunks, ends.folding, validated=ends.validated)
        return Network(tuple(actors), tuple(registers))

    def simulated(self) -> Simulation:
        """All of it on a clock."""
        return simulate(self.network)


def course(through: MicroBatches, more: float) -> Course:
    """The course of micro-batches through the stages; `more` seconds are spent once a step besides. Without a flush it
    tells, too, how much quicker one call of twice as many micro-batches is than two."""
    run, schedule, where, found = through.simulated(), through.schedule, through.routes[0], []
    draining = 0.0
    if through.trains and not schedule.synchronous and not schedule.table and through.ends is None:
        draining = 2 * run.end - replace(through, m=2 * through.m).simulated().end
    for group in sorted(set(where.group)):
        found.append((", ".join(map(str, where.placements[group])), run.busy(f"device {group}")))
    name = schedule.name if through.trains else ""
    return Course(name, through.m, run.end + more, bubble(run), tuple(found), more, draining)


def _names(stage: Stage) -> tuple[str, ...]:
    """All that a stage makes, also what only it uses."""
    if isinstance(stage, Segment):
        return tuple(y.name for op in stage.ops for y in op.outputs)
    return tuple(y.name for y in stage.op.outputs) if isinstance(stage, Draw) else made_by(stage)
