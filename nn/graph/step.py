"""A step for one shape of arguments: planned when it is made, and made to run by its first run."""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...actors.protocol.network import Network
from ...boxing.exchange.execute import transport
from ...boxing.graph.measures import Held
from ...boxing.graph.move_table import moves_of
from ...boxing.graph.physical import Value, Var, vars_in
from ...boxing.graph.text.text import fingerprint
from ...boxing.kept import KeptErrors
from ...placement.errors import SbpError, ScheduleError
from ...placement.structure import mapped
from ...placement.world import device, owned, world
from ...sbp import Layout
from ...sbp.call import tensors_in
from ...sbp.logical import Logical
from ..model.reading import begin_reading, end_reading
from ..tensors.agreement import same, told
from ..tensors.memory_formats import in_order
from ..tensors.tensor import GlobalTensor, wrap
from .capture.arguments import WrittenArguments, cutter, tensors_by_path
from .capture.results import CacheResults
from .capture.surroundings.garbage import uncollected
from .compiler.generated_calls import Shards, trimmed
from .host.memory import Folder, to_disk
from .memory.account import held_by_rank
from .memory.liveness import RankMemory
from .microbatch_runner import MicroBatchRunner
from .optimizer.adopted_model import AdoptedModel
from .optimizer.nonfinite import SkippedSteps
from .pieces import Pieces
from .plan import Planned
from .reads.modes import Modes
from .replayed_runner import ReplayedRunner
from .run.pipeline import Pipelined
from .run.program import Outcome, Program
from .run.rank_times import RankTimes, StepClock

__all__ = ["Step", "StraightRunner"]


class StraightRunner:
    """The runner of a step that is one function: cuts arguments, and gives gradients to the model."""

    def __init__(self, plan: Planned, model: AdoptedModel) -> None:
        self.plan, self.model, self.program = plan, model, plan.whole
        self.graph, self.constants, self.trains = plan.graph, plan.passes.constants, plan.trains
        sources = [s for s in plan.graph.sources if s.kind in ("input", "constant")]
        self.cut = {s.value.name: cutter(s.value.layout) for s in sources}
        results = {name: _in_memory(self.graph.values[name]) for name in vars_in(self.graph.result)}
        self.results = {name: (of, of.in_rows) for name, of in results.items()}

    def run(self, given: Mapping[str, Tensor]) -> Any:
        """One step on the tensors of its arguments."""
        shards = self.model.shards()
        self.model.late_means(())
        done = self.computed({**shards, **self.inputs(given)})
        self.take(done, given)
        return self.result(done.values)

    def inputs(self, given: Mapping[str, Tensor]) -> dict[str, Shards]:
        """The shards of its arguments and constants."""
        return {name: cut(given[name] if name in given else self.constants[name]()) for name, cut in self.cut.items()}

    def computed(self, shards: Mapping[str, Shards]) -> Outcome:
        """The outcome for these shards; nothing is changed yet."""
        return self.program(shards)

    def take(self, done: Outcome, given: Mapping[str, Tensor]) -> None:
        """The outcome counts for the model."""
        losses = [(self.graph.layout(name).placement, done.values[name]) for name, _ in self.graph.losses]
        self.model.take(done.values, losses, done.grads if self.trains else None, given)

    @property
    def returned(self) -> Sequence[str]:
        """The names of the values that it returns."""
        return tuple(self.results)

    def result(self, values: Mapping[str, Shards]) -> Any:
        """The result, made of the values of these names."""

        def put(var: Var) -> GlobalTensor:
            of, rows = self.results[var.name]
            found = values[var.name] if of.shape else trimmed(values[var.name])
            return wrap(tuple([x if rows and x.is_contiguous() else in_order(x, of) for x in found]), of)

        return self.plan.logical.rebuild(mapped(self.graph.result, Var, put))


def _in_memory(result: Value) -> Layout:
    """How a result lies, in memory too; one that repeats what it holds is written out."""
    of, order = result.layout, result.order or ()
    return of.in_order(order) if len(order) in (0, len(of.shape)) else of


class Step:
    """A planned step, and from its first run on what runs it."""

    def __init__(
        self,
        plan: Planned,
        optimizers: Sequence[Optimizer],
        kind: Hashable,
        modes: Modes,
        skipped: SkippedSteps | None = None,
        kept: KeptErrors | None = None,
    ) -> None:
        self.plan, self.optimizers, self.skipped, self.kept = plan, optimizers, skipped, kept
        self.kind, self.modes = kind, modes
        self.clock = StepClock()
        self.graph, self.name = plan.graph, str(plan.options.name)
        self.runner: StraightRunner | ReplayedRunner | MicroBatchRunner | None = None
        self.tensors = frozenset[int]()  # identities of those that modules hold, from the first run on
        self.brought: dict[str, str] = {}  # arguments that added actors bring: the register of each, by path

    @property
    def open_network(self) -> Network:
        """The network that actors are added to."""
        return self.opened().proved.network

    def opened(self) -> Pieces:
        """The pieces of a step that actors run; refused where none do."""
        if self.plan.pieces is None:
            raise ScheduleError(
                f"{self.name} runs as one function, which no actor can be added to\n"
                "  make it with schedule='1f1b', as in flow.compile(..., schedule='1f1b'), to have it run by actors"
            )
        return self.plan.pieces

    def add(self, addition: Callable[[Pieces, Mapping[str, str]], dict[str, str]]) -> None:
        """Have more actors take part, from the first run on: `addition` opens the network of the pieces, and returns
        which registers bring arguments. It is given the arguments by path, as the user calls them."""
        pieces = self.opened()
        if self.runner is not None:
            raise ScheduleError(
                f"{self.name} has run, and what runs it was made: no actor can be added now\n"
                "  add before the first run, as in step.plan_for(*arguments).add(...); or compile the model anew"
            )
        self.brought |= addition(pieces, self.graph.called)

    def _placeholders(self, given: Mapping[str, Tensor]) -> None:
        """Refuse values for arguments that added actors bring."""
        for path, register in self.brought.items():
            if not given[path].is_meta:
                name = self.graph.called.get(path, path)
                raise ScheduleError(
                    f"{self.name}: {name} is brought by the register {register}, and was given too\n"
                    f"  pass a tensor of its shape without values: torch.empty_like({name}, device='meta')"
                )

    @property
    def program(self) -> Program | Pipelined:
        return self.plan.program

    @property
    def model(self) -> AdoptedModel:
        """The model's values as the step has them, from its first run on."""
        assert self.runner is not None
        return self.runner.model

    def stands(self) -> bool:
        """Whether a run does what was planned: all that a capture went by is as it was."""
        return self.plan.passes.reads.holds() and self.in_place()

    def in_place(self) -> bool:
        """Whether modules have the values that they had, or, from the first run on, those that this one made."""
        return self.plan.stands() if self.runner is None else self.model.in_place()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One step on these arguments; plain tensors must be the same on every rank."""
        runner = self.runner or self.prepare()
        given = tensors_by_path(args, kwargs)
        self._placeholders(given)
        plain = {path: x for path, x in given.items() if type(x) is not GlobalTensor and x.layout is torch.strided}
        same({path: x for path, x in plain.items() if not x.is_meta}, self.graph.ranks, f"the step {self.name}")
        back = self.plan.logical.rebuild
        if isinstance(back, WrittenArguments):
            back.check(given)
        claim = begin_reading(self.tensors)
        try:
            self.clock.begin()
            result = runner.run(given)
        except (RuntimeError, IndexError) as error:
            if re.search("out of (bounds|range)", str(error)):
                error.add_note(f"in the step {self.name}, {_places_taken(self.plan.logical)}")
            raise
        finally:
            end_reading(claim)
        for deed in self.plan.passes.deeds:
            deed()
        self.clock.end(runner.program.outcome)
        if isinstance(back, WrittenArguments):
            result, values = result
            back.put_back(given, values)
            back = back.rebuild
        if isinstance(back, CacheResults):
            result = back.put_back(args, kwargs, result)
        if self.plan.logical.losses:
            for x in tensors_in(result):
                if isinstance(x, GlobalTensor):
                    x._of_step = self.name
        return result

    def rank_times(self) -> RankTimes | None:
        """The seconds that ranks work at a step; all processes ask, and there is none where one plays all ranks."""
        rows = told([round(self.clock.usual * 1e9)], self.graph.ranks, "times of ranks")
        if rows is None:
            return None
        seconds = {r: row[0] / 1e9 for r, row in zip(self.graph.ranks.flat, rows, strict=True)}
        return RankTimes(seconds, run.of_ranks if (run := world().run) else {})

    @uncollected()
    def prepare(self) -> StraightRunner | ReplayedRunner | MicroBatchRunner:
        """All that the first run does before it can run; when that fails, modules stay what they were."""
        transport()  # processes meet here, since a rank that the plan leaves out may never come to a move
        plan = self.plan
        for where in dict.fromkeys(value.layout.placement for value in self.graph.values.values()):
            for rank in owned(where):
                device(where, rank)  # there has to be one
        full = self._lacks_disk()
        self._agree(full is None)
        if full is not None:
            raise full
        self.program.prepare()
        plan.passes.dump.program(self.program)
        limit, moved, passes = plan.options.clip_grad_norm, plan.balance.moved, plan.passes
        how = plan.kept, passes.rest, moved, limit, passes.scale, self.skipped, self.kept, passes.move
        leaves = plan.options.leave_gradients
        with torch.inference_mode(mode=False):  # what is made there could never be trained
            model = AdoptedModel(passes.modules, self.optimizers, self.graph, *how, leaves)
        self.tensors = frozenset(map(id, model.held.values()))
        for x in model.held.values():
            if self.optimizers and not leaves and isinstance(x, GlobalTensor):
                x._of_step = self.name
        if plan.pieces:
            self.runner = MicroBatchRunner(plan, plan.pieces, model, self.brought)
        elif plan.options.cuda_graph:
            self.runner = ReplayedRunner(StraightRunner(plan, model), self.name)
        else:
            self.runner = StraightRunner(plan, model)
        return self.runner

    def _lacks_disk(self) -> SbpError | None:
        """Why what is offloaded to disk cannot lie there."""
        if not to_disk(self.graph):
            return None
        held = self.held()
        try:
            folder = Folder(self.name)
            try:
                folder.check(sum(of.disk for rank, of in held.items() if world().rank in (None, rank)))
            finally:
                folder.remove()
        except SbpError as error:
            return error
        return None

    def _agree(self, room: bool) -> None:
        """All ranks must have made the same plan, or they would wait for each other for ever; and have room on disk."""
        where = self.graph.sources[0].value.layout.placement if self.graph.sources else None
        rows = told([fingerprint(self.graph), int(room)], where, "plan") if where is not None else None
        if rows and len({row[0] for row in rows}) > 1:
            raise SbpError(
                f"ranks of {where!r} made different plans of {self.graph.name}\n"
                "  build must do the same on every rank: look for what depends on the rank, as its number or its data"
            )
        if rows and room and not all(row[1] for row in rows):
            raise SbpError(
                f"{self.name} offloads to disk, and there is no room for that on another rank\n  see what it says there"
            )

    def memory(self) -> dict[int, RankMemory]:
        """The bytes that a step takes at its peak on every rank."""
        return self.plan.memory()

    def held(self) -> dict[int, Held]:
        """The same by kind, with the states of optimizers."""
        return self.held_of(self.memory())

    def held_of(self, live: Mapping[int, RankMemory]) -> dict[int, Held]:
        return held_by_rank(live, self.graph, self.plan.passes.states)

    def __repr__(self) -> str:
        sent = sum(row.total * row.count for row in moves_of(self.graph, self.program.again))
        of = "for one micro-batch" if self.plan.pieces else "in all"
        return f"{self.graph.name}: {len(self.graph.steps)} steps, {sent} bytes sent {of}"


def _places_taken(logical: Logical) -> str:
    """The calls of a graph that numbers in tensors tell which places to take, with their lines."""
    names = ("embedding", "gather", "index", "nll_loss", "scatter", "take", "cross_entropy", "one_hot")
    found = (f"{op.name} at {op.origin.line}" for op in logical.ops if op.name.startswith(names))
    return "where places are taken by numbers in " + ", ".join(list(dict.fromkeys(found))[:4])
