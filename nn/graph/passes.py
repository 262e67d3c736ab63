"""The passes of a graph, from a model to a step that runs: one line each, in their order.

Planning a step makes those up to *physical* (`plan_step`), its first run the others. With SBPFLOW_DUMP=dir in the
environment each step writes what its passes give, a file each, as text.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...boxing.figures import volume
from ...boxing.graph.encode import encoded
from ...boxing.graph.insert import insert
from ...boxing.graph.physical import Physical
from ...placement import Cluster, Placement, default_cluster
from ...placement.errors import SbpError
from ...placement.structure import ByIdentity
from ...placement.world import world
from ...sbp import Layout
from ...sbp.joint.demands import Demands, Rounds, SourcePin
from ...sbp.joint.known_options import KnownOptions
from ...sbp.joint.options import Option
from ...sbp.joint.placements import Homes, homes
from ...sbp.joint.solver.solve import Solver
from ...sbp.joint.source_options import Stored
from ...sbp.kernels.update_kernels import update_kernels
from ...sbp.logical import Logical
from ...sbp.state import Lie
from ..model.annotate import LayerMoves, placement_of
from ..model.cast import in_half
from ..model.compress import compressed_grads, compressed_hops
from ..model.fp8 import refuse_eights
from ..model.inside import uses_of
from .capture.arguments import StepCall, cache_flows, flat, input_flows
from .capture.trace import SCALER, Constants, trace
from .choose.choose import Choosing, Decided, decide, taken_apart
from .choose.composed import check_uses, composed
from .choose.decompose import expand
from .choose.parameters import (
    default_placement,
    input_pins,
    named_values,
    pins_of,
    placed,
    rests_of,
)
from .compiler.backends import compiled_types
from .instructions.codegen import function
from .lower.segments import segments
from .microbatch.along import along
from .optimizer.adopt import owned_by, states_of, stepped_whole
from .optimizer.loss_scale import LossScale
from .optimizer.on_shards import ALONE
from .optimizer.relocation import ModelMove
from .options import Options
from .reads.guard import ReadGuard
from .reads.walk import around, guarded
from .reads.watch import AttributeReads, reading
from .run.pipeline import Pipelined
from .run.program import Program
from .tasks.straight import schedule

__all__ = ["PASSES", "Dump", "Pass", "Passes"]


class Pass(NamedTuple):
    """A pass by name, the function that makes it, and what it gives."""

    name: str
    made_by: Callable[..., Any]
    gives: str

    @property
    def by(self) -> str:
        """Where to read it."""
        return f"{self.made_by.__module__.partition('.')[2]}.{self.made_by.__qualname__}"


PASSES = (
    Pass("captured", trace, "every ATen call of a step, none of them in place"),
    Pass("placed", placed, "the same with a placement for what was annotated"),
    Pass("microbatch", along, "in pipelines: the step of one micro-batch"),
    Pass("decomposed", expand, "ops taken apart where parts may lie better"),
    Pass("chosen", Solver.solve, "a signature for each source and op, and what all of them cost"),
    Pass("physical", insert, "the moves between them, gradients in buckets"),
    Pass("segments", segments, "the runs of ops between which nothing moves"),
    Pass("order", schedule, "forward and backward as one list, or tasks of a pipeline"),
    Pass("source", function, "one Python function, or the network of a pipeline's actors"),
)


class Passes:
    """The passes with which one step is planned, each with what it gives written down.

    They change nothing but what is noted here of modules: `names` are attributes that captures have read, `reads` is
    all that they went by, and `constants` how to read those that they met; `deeds` is what the program does to Python's
    values. `rest` is where what nobody placed lives, an optimizer keeps so many `states` of each parameter. `flows` is
    how arguments are to lie, by their paths. Where weights are trained in fp16, `scale` is the factor of losses. With a
    `move`, what is global already may come to lie otherwise.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        options: Options,
        call: StepCall,
        scale: LossScale | None = None,
        move: ModelMove | None = None,
    ) -> None:
        self.modules, self.options, self.name = dict(modules), options, str(options.name)
        self.flows = input_flows(options.flows, call.inputs, call.names, self.name, call.caches)
        self.cached, self.move = frozenset(filter(call.is_cached, call.inputs)), move
        self.learns, self.states = bool(optimizers), states_of(optimizers)
        self.update = update_kernels(optimizers, self.states, ALONE)
        self.whole = stepped_whole(optimizers, named_values(modules))
        self.optimizers = list(optimizers)
        self.rest = default_placement(modules, options.placement, call.inputs)
        self.uses = uses_of(modules)
        self.dump = Dump(self.name)
        self.names: AttributeReads = {}
        self.reads = ReadGuard()
        self.constants: Constants = {}
        self.deeds: Sequence[Callable[[], None]] = ()
        self.before: Mapping[tuple[ByIdentity, Any], Any] = {}
        self.scale = scale if optimizers and (options.loss_scale is not None or in_half(modules)) else None

    @property
    def free(self) -> bool:
        """Whether global parameters are to move."""
        return self.move is not None and not self.move.done

    @property
    def device(self) -> str:
        """The kind of device for which a call is captured: that of all placements, if it is one."""
        kinds = {self.rest.type} if self.rest else {each.type for each in placement_of(self.modules).values()}
        return kinds.pop() if len(kinds) == 1 else "cpu"

    def captured(self, call: StepCall, *, watched: bool = False) -> Logical:
        """The computation of a call; where the program was `watched` before, clocks that it asks are not looked for."""
        refuse_eights(self.modules, self.rest)
        owner = getattr(call.build, "__self__", None)
        reach, lacked = around(owner, self.modules), set[tuple[int, str]]()
        owners = [] if owner is None else [type(owner)]
        with reading(self.names, nn.Module, *owners, roots=reach.objects, lacked=lacked):
            cache_flows(self.options.flows, call)
            given = flat(call.build, call.args, call.kwargs)
            try:
                logical, constants = trace(
                    given,
                    (),
                    call.inputs,
                    self.modules,
                    device=self.device,
                    placement=self.rest,
                    samples_apart=self.options.piped,
                    scale=None if self.scale is None else self.scale.tensor,
                    clocks=reach.clocks and not watched,
                    lacked=lacked,
                )
            except RuntimeError as error:
                if not torch.is_grad_enabled():
                    error.add_note(f"{self.name} was called under torch.no_grad(), where build cannot call backward()")
                raise
        if self.learns and (scaler := next((name for name in constants if name.startswith(SCALER)), "")):
            raise SbpError(
                f"{self.name} has an optimizer, and its loss the {scaler}: the graph steps by itself, and no scaler "
                "could look at gradients before\n"
                "  leave the optimizer out, and call scaler.step(optimizer) and scaler.update() behind the graph; or "
                "cast weights to fp16 by flow.nn.cast, for which the graph scales the loss itself"
            )
        self.constants |= constants
        self.deeds, self.before = logical.deeds, logical.before
        if not self.learns:  # nothing is kept for an optimizer
            logical = replace(logical, sources=tuple(replace(s, states=None) for s in logical.sources))
        self.dump("captured", lambda: str(logical))
        return logical

    def settle(self, build: Callable[..., Any]) -> None:
        """Nothing is captured any more: what was read is as it is now."""
        self.reads = guarded(getattr(build, "__self__", None), self.modules, self.names, self.before)

    def placed(self, logical: Logical, moved: LayerMoves, homes: Mapping[str, Placement] | None = None) -> Logical:
        """The same as layers were placed, of which some are moved; of some parameters homes are known already."""
        check_uses(logical, self.uses)
        known = placed(logical, self.modules, homes or {}, moved, free=self.free)
        self.dump("placed", lambda: str(known))
        return known

    def decided(
        self,
        logical: Logical,
        inputs: Mapping[str, Tensor],
        room: float | None,
        kept: Mapping[str, Layout] = {},
        rest: Placement | None = None,
        enough: float = inf,
        known: KnownOptions | None = None,
        rounds: Callable[[Homes], Rounds] | None = None,
    ) -> Decided:
        """The signatures, and all moves, within so many bytes a rank; some parameters lie in a way that is kept. The
        best of those that take `enough` seconds is not looked for; `known` is of others for this step and cluster, and
        `rounds` says how often a step runs what the graph is of."""
        there = rest or self.rest
        if self.uses:
            where = homes(logical, there)
            logical = composed(logical, where, self.uses, self.pins(inputs, kept, where.by_name(logical)))
        # A rank of a pipeline takes arguments from its caller.
        logical, where = taken_apart(logical, there, arguments_everywhere=self.options.piped)
        places = where.by_name(logical)
        demands = Demands(
            self.pins(inputs, kept, places),
            self.states,
            rests=rests_of(self.modules, places, states=self.learns, read=self.read_whole(places)),
            encoders=compressed_grads(self.modules, self.options.compress),
            rounds=rounds and rounds(where),
            compiled=compiled_types(self.options.backend),
            held=tuple(self.options.hold),
            update=self.update,
        )
        regather = self.options.backend != "autograd"
        known = known or KnownOptions()
        made = decide(Choosing(logical, where, demands, room, enough, regather, self.name, known))
        graph = replace(self.encoded(made.graph), cluster=_cluster_of(made.graph), given=self.options.piped)
        made = replace(made, graph=graph)
        if room is not None and any(back.encoding is not None for back in made.graph.backs):
            self._fits_errors(made, room)
        if self.whole:
            made = replace(made, graph=self.stepped(made.graph))
            if room is not None:
                self._fits(made, room)
        self.dump("decomposed", lambda: str(made.logical))
        self.dump("chosen", lambda: "\n".join(_choices(made)))
        return made

    def by_itself(self, logical: Logical) -> Decided:
        """The signatures of a graph of arguments alone, of which nothing is said."""
        logical, where = taken_apart(logical, self.rest)
        demands = Demands({}, 0, compiled=compiled_types(self.options.backend))
        regather = self.options.backend != "autograd"
        made = decide(Choosing(logical, where, demands, None, inf, regather, self.name, KnownOptions()))
        return replace(made, graph=replace(made.graph, cluster=_cluster_of(made.graph)))

    def pins(
        self, inputs: Mapping[str, Tensor], kept: Mapping[str, Layout], places: Mapping[str, Placement]
    ) -> dict[str, SourcePin]:
        """How sources must lie that are at such places."""
        pins = pins_of(self.modules, inputs, places, free=self.free) | input_pins(
            self.flows, inputs, places, self.cached
        )
        return pins | {name: of.state for name, of in kept.items()}

    def encoded(self, graph: Physical) -> Physical:
        """The graph with the encoders that are said of gradients and hops."""
        grads = compressed_grads(self.modules, self.options.compress)
        made = encoded(graph, grads, compressed_hops(self.modules))
        if self.scale is not None and any(back.encoding is not None for back in made.backs):
            raise SbpError(
                f"{self.name} trains in fp16, and compresses gradients: errors that are kept are of the loss scale "
                "that a step had\n  train in bf16, which has none, or leave the compression out"
            )
        return made

    def read_whole(self, homes: Mapping[str, Placement]) -> set[str]:
        """The parameters whose gradients optimizers have whole on all ranks for their step."""
        if not self.whole:
            return set()
        return self.whole.keys() - owned_by(self.optimizers, named_values(self.modules), homes).keys()

    def _fits_errors(self, made: Decided, room: float) -> None:
        """Refuse errors for which there is no room: signatures were chosen without them."""
        most = max(of.total for of in made.held().values())
        if most > room:
            raise SbpError(
                f"{self.name} does not fit into {volume(room)} a rank: with the errors of compressed gradients it "
                f"takes {volume(most)}\n  take memory= {volume(most)}, or encoders with feedback=False"
            )

    def stepped(self, graph: Physical) -> Physical:
        """The graph with what optimizers step whole: on one rank each, or on all where one of them has nothing that is
        on another placement."""
        if not graph.losses:
            return graph
        held = {s.value.name: s for s in graph.sources if s.value.grad and s.value.name in self.whole}
        values = named_values(self.modules)
        trained = [s for s in graph.sources if s.value.name in self.whole and values[s.value.name].requires_grad]
        # Also of those that no gradient reaches now, so that each has the same owner at every step.
        homes = {s.value.name: s.value.layout.placement for s in trained if s.offload is None}
        ranks = owned_by(self.optimizers, values, homes)
        one = len({s.value.layout.placement for s in held.values()}) == 1
        sources = tuple(
            s
            if s.value.name not in held
            else replace(s, owner=ranks[s.value.name])
            if s.value.name in ranks
            else replace(s, whole=self.whole[s.value.name] if one else None)
            for s in graph.sources
        )
        return replace(graph, sources=sources)

    def _fits(self, made: Decided, room: float) -> None:
        """Refuse an update that takes more than there is room for: signatures were chosen without it."""
        held = made.held()
        rank = max(held, key=lambda rank: held[rank].total)
        if held[rank].total > room:
            many = sum(s.whole is not None or s.owner is not None for s in made.graph.sources)
            raise SbpError(
                f"{self.name} does not fit into {volume(room)} a rank: the step of its optimizer takes "
                f"{volume(held[rank].total)} on rank {rank}\n"
                f"  it is none that treats every element alone, so it has {many} parameters whole for its step, with "
                f"their gradients and states\n  take one that does, as AdamW, or memory= {volume(held[rank].total)}"
            )


_steps = count(1)


class Dump:
    """The files of one step: `dir/rank0/Net-1/05-chosen.txt` and so on; none where nobody asked for them."""

    def __init__(self, name: str) -> None:
        said = os.environ.get("SBPFLOW_DUMP")
        self.folder = Path(said) / f"rank{world().rank or 0}" / f"{name}-{next(_steps)}" if said else None

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """Write what a pass gave; of several, as for micro-batches of other sizes, one behind the other."""
        number = next(at for at, each in enumerate(PASSES, 1) if each.name == name)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"{number:02}-{name}.txt").open("a") as file:
                file.write(f"{text()}\n")

    def program(self, made: Program | Pipelined) -> None:
        """Write the passes of a program that was prepared."""
        if self.folder is not None:
            for name, text in made.passes().items():
                self(name, lambda text=text: text)  # type: ignore[misc]


def _cluster_of(graph: Physical) -> Cluster | None:
    """The cluster that prices all of it; none where kinds of devices have one each."""
    types = {value.layout.placement.type for value in graph.values.values()}
    found = {id(of): of for of in map(default_cluster, types)}
    return next(iter(found.values())) if len(found) == 1 else None


def _choices(decided: Decided) -> Iterator[str]:
    solution, logical, names = decided.solution, decided.logical, decided.names
    yield f"{solution.cost:.6g} s by {solution.method}; no plan is below {solution.bound:.6g} s"
    for node, k in zip(decided.formulated.nodes, solution.choice, strict=True):
        if node.kind == "source":
            number, what = node.index, logical.sources[node.index].name
        elif node.kind == "op":
            (number, *_), what = logical.ops[node.index].numbers, str(logical.ops[node.index].op)
        else:
            number, what = node.index, node.kind
        axes = decided.graph.layout(names[number]).placement.ndim
        taken = said(node.candidates[k], axes)
        yield f"%{number} {what}: {taken}, one of {len(node.candidates)}, {decided.formulated.own(node, k):.3g} s"


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
