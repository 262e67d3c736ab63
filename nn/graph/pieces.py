"""The pieces of a planned step: the step of one micro-batch, for each kind that a batch is cut into and each route."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ...actors.protocol.network import Network
from ...actors.protocol.simulate import Simulation
from ...actors.schedules.delays import Delays, delays_of
from ...actors.schedules.pipeline import Costs
from ...boxing.exchange.execute import threads_exchange
from ...boxing.graph.measures import Course
from ...boxing.graph.physical import Physical
from ...placement.cluster import default_cluster
from ...placement.errors import SbpError
from ...sbp import Layout
from ...sbp.state import State
from .capture.arguments import cutter
from .choose.choose import Decided
from .compiler.generated_calls import Shards
from .memory.liveness import RankMemory
from .memory.resident import Resident
from .microbatch.batch import Batch, PieceKind
from .microbatch.micro import BatchDraw, Micro
from .optimizer.late_mean import wide_dtype
from .options import Options
from .run.costs import MicroBatches, chunk_costs, course, once, step_costs, with_copies
from .run.footprint import footprint
from .run.late_graph import LateGraph
from .run.network import shape_of
from .run.pairs import moving
from .run.pipeline import Pipelined
from .run.proved_pipeline import ProvedPipeline
from .run.task_memory import host_copies
from .run.variant import Variant
from .run.weights.chunk_weights import ChunkWeights
from .run.weights.same_weights import SameWeights
from .run.weights.step_state import VariantKey
from .run.weights.unpinned_weights import UnpinnedWeights
from .run.weights.validated_weights import ValidatedWeights
from .run.weights.weight_versions import WeightVersions
from .run.weights.weights import Weights

__all__ = ["Pieces", "Sized", "kept_of"]


@dataclass(frozen=True, eq=False)
class Sized:
    """The step of micro-batches of one kind, on one route: how it was decided, and its graph cut into chunks."""

    micro: Micro
    decided: Decided
    variant: Variant

    @cached_property
    def graph(self) -> Physical:
        """The graph that runs: moves of every micro-batch are in no bucket."""
        return self.variant.graph

    @cached_property
    def taken(self) -> Mapping[str, str]:
        """The values that are arguments, and the paths of these."""
        found = {s.value.name: s.value.name for s in self.graph.sources if s.kind == "input"}
        for box in self.graph.boxes:
            if box.source in found:
                found[box.output.name] = found[box.source]
        return found

    @cached_property
    def cut(self) -> Mapping[str, Callable[[Tensor], Shards]]:
        """How arguments are cut."""
        return {name: cutter(self.graph.layout(name)) for name in self.taken}


@dataclass(frozen=True, eq=False)
class Pieces:
    """The steps of all micro-batches of a batch, by route and kind; `groups` are those that make up each update of the
    weights, `room` is what one was given, in bytes a rank, and `results` says how each result lies along time."""

    options: Options
    batch: Batch
    kinds: Sequence[PieceKind]  # of the micro-batches
    sized: Mapping[tuple[int, PieceKind], Sized]
    groups: Sequence[Sequence[int]]
    results: Sequence[State]
    room: float | None
    scaled: bool = False  # whether losses have a scale
    states: int = 0  # that optimizers keep for each parameter
    late: LateGraph | None = None  # what is done behind all forwards

    @property
    def first(self) -> Sized:
        return self.sized[0, self.kinds[0]]

    @property
    def trains(self) -> bool:
        return bool(self.first.micro.logical.losses)

    @property
    def streams(self) -> bool:
        """Whether optimizers step while the step goes on."""
        return self.trains and not self.options.policy.synchronous

    @property
    def validated(self) -> bool:
        """Whether optimizers step chunk by chunk, and what one does depends on the gradients of all."""
        options = self.options
        asks = options.clip_grad_norm is not None or options.skip_nonfinite or self.scaled
        return self.trains and options.post_validation and asks

    @cached_property
    def program(self) -> Pipelined:
        """The pipeline as this process drives it."""
        return Pipelined(self.proved)

    @cached_property
    def proved(self) -> ProvedPipeline:
        """The pipeline, proved to end."""
        schedule, name = self.options.policy, str(self.options.name)
        variants = {key: one.variant for key, one in self.sized.items()}
        weights = self._weights(variants)
        late = self.late is not None and self.trains
        made = ProvedPipeline(variants, self.kinds, schedule, name, weights, self.batch.slices, late=late)
        if self.streams and schedule.unpinned == "corrected":
            weights.corrects(_delays(made).chunks)
        return made

    def _weights(self, variants: Mapping[VariantKey, Variant]) -> Weights:
        """How the pipeline that runs keeps weights."""
        schedule, name, folding = self.options.policy, str(self.options.name), self.options.ends
        if self.streams:
            return (UnpinnedWeights if schedule.unpinned else WeightVersions)(variants, self.kinds, schedule, name)
        routes = 1 + max(route for route, _ in variants)
        keys = [(k % routes, kind) for k, kind in enumerate(self.kinds)]
        if not self.trains or folding is None:
            return SameWeights(variants, keys)
        places = [place for each in self.first.variant.where.placements for place in each]
        if folding.beside and not all(map(threads_exchange, places)):
            folding = replace(folding, beside=False)
        kind = ValidatedWeights if self.validated else ChunkWeights
        return kind(variants, keys, folding, name, steps=self.options.post_validation)

    def delays(self) -> Delays:
        """How late weights are read, by chunk and by parameter."""
        schedule = self.options.policy
        if not self.streams:
            what = "has a flush" if self.trains else "trains nothing here"
            raise SbpError(
                f"{self.options.name}: schedule {schedule.name} {what}, so no weight is read late\n"
                "  delays are of schedules without a flush, such as 'pipedream', '2bw' and 'pipemare'"
            )
        found, weights = _delays(self.proved), self.proved.weights
        late = {name: found.chunks[chunk] for chunk, names in sorted(weights.late.items()) for name in names}
        return replace(found, parameters=late)

    def memory(self) -> dict[int, RankMemory]:
        """The bytes that a step takes at its peak on every rank."""
        regather = self.options.backend != "autograd"
        live = footprint(self.proved, regather=regather, states=self.states, mean=wide_dtype)
        beside = [self.drawn, *([] if self.late is None else [self.late.resident])]
        return {rank: of.beside(beside, rank) for rank, of in live.items()}

    @property
    def drawn(self) -> Resident:
        """The random numbers of the batch, which lie there all the time; those of one micro-batch are among its own."""
        each = (self.sized[key] for key in self.proved.keys[1:])
        held = [
            one.graph.layout(known.name) for one in each for known in one.micro.known if isinstance(known, BatchDraw)
        ]
        return Resident.of("activations", held)

    def costs(self) -> tuple[Costs, ...]:
        """Costs of every chunk for a micro-batch of the first kind, as predicted; on a second route they are alike."""
        one = self.first
        with one.graph.priced():
            many = len(self.batch.pieces)
            sums = (many - 1) / many if self.trains and not self.streams else 0.0
            made = chunk_costs(one.graph, one.decided, one.variant.stages, one.variant.where, sums)
            copies = host_copies(one.variant, regather=self.options.backend != "autograd")
            place = one.variant.where.placements[0][0]
            return with_copies(made, copies, default_cluster(place).device_of(place)) if copies else made

    def course(self) -> Course:
        """How micro-batches are predicted to go through the stages."""
        one = self.first
        with one.graph.priced():
            weights = self.proved.weights
            more = once(one.graph, one.decided, one.variant.where, homed=weights.alone, steps=weights.steps)
            return course(self._through, more)

    def network(self) -> Network:
        """The network of a step with what everything takes, as predicted."""
        with self.first.graph.priced():
            return self._through.network

    def simulation(self) -> Simulation:
        """The tasks of that course, on a clock in seconds."""
        with self.first.graph.priced():
            return self._through.simulated()

    @property
    def _through(self) -> MicroBatches:
        one = self.first
        routes = [each.variant.where for (_, kind), each in self.sized.items() if kind == self.kinds[0]]
        return MicroBatches(
            self.options.policy,
            routes,
            self.costs() * len(routes),
            len(self.batch.pieces) // self.batch.slices,
            self.batch.slices,
            self.trains,
            moving(self.proved.tasks.values()),
            self.proved.weights.ends(step_costs(one.graph, one.decided)),
        )


def _delays(proved: ProvedPipeline) -> Delays:
    shape = shape_of(proved.schedule, proved.where, len(proved.kinds) // proved.slices)
    return delays_of(proved.schedule, shape, proved.proof)


def kept_of(graph: Physical) -> dict[str, Layout]:
    """How parameters and buffers lie, which steps of other sizes have to keep to."""
    return {s.value.name: s.value.layout for s in graph.sources if s.kind in ("parameter", "buffer")}
