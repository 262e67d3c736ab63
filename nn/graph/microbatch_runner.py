"""The runner of a step in micro-batches: these are cut and seeded, run by actors, and their results joined."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...boxing.graph.physical import Var, vars_in
from ...boxing.record import asked
from ...placement.structure import mapped
from ...placement.world import world
from ...sbp import B
from ...sbp.call import Ref
from ...sbp.logical import Source
from ..tensors.tensor import GlobalTensor
from .capture.arguments import cutter
from .compiler.generated_calls import Shards, ones
from .microbatch.batch import evaluated, joined, weight_of
from .microbatch.prologue import Before, Pasts
from .optimizer.adopted_model import AdoptedModel
from .optimizer.post_validation import PostValidation, refuse_hooks
from .pieces import Pieces, Sized
from .plan import Planned
from .run.late_graph import LateRun

__all__ = ["MicroBatchRunner"]


class MicroBatchRunner:
    """Runs the pieces of a batch on one model. Actors bring the arguments of the paths `brought`."""

    def __init__(self, plan: Planned, pieces: Pieces, model: AdoptedModel, brought: Collection[str] = ()) -> None:
        self.plan, self.pieces, self.model, self.brought = plan, pieces, model, brought
        steps = pieces.streams or (pieces.trains and plan.options.post_validation)
        self.streams, self.learns = steps, plan.trains and not steps
        self.batch, self.graph, self.program, self.proved = pieces.batch, plan.graph, pieces.program, pieces.proved
        self.each = [pieces.sized[key] for key in self.proved.keys]  # of the micro-batches
        micros = [one.micro for one in self.each]
        name, everywhere = str(plan.options.name), self.proved.everywhere
        self.before = Before(self.batch, micros, pieces.groups, self._held, name, everywhere)
        constants = [s for s in plan.graph.sources if s.kind == "constant"]
        self.constants = {s.value.name: cutter(s.value.layout) for s in constants}
        updates = [self.batch.update(group) for group in pieces.groups]
        shares = [update.shares(piece) for update in updates for piece in update.pieces]
        self.late = None
        if pieces.late is not None:
            graphs = [one.graph for one in self.each]
            self.late = LateRun(pieces.late, graphs, pieces.results, self.batch, plan.options.backend)
        first = None if pieces.late is None else pieces.late.whole.losses
        self.seeds = [self._seeds(one, share, first) for one, share in zip(self.each, shares, strict=True)]
        names = self.proved.weights.validates
        self.validation = None if names is None else PostValidation(model, names)
        self.weights = [update.sizes[0] / self.batch.sizes[0] for update in updates for _ in update.pieces]

    @staticmethod
    def _seeds(one: Sized, shares: Sequence[float], first: int | None) -> dict[str, Shards]:
        """The gradients that the losses of a micro-batch start from, which is such a part of the update's samples: the
        `first` so many, as others come from what is done behind all forwards."""
        states = [one.micro.states[loss.number] for loss in one.micro.logical.losses]
        made: dict[str, Shards] = {}
        for number, ((name, given), state) in enumerate(zip(one.graph.losses[:first], states[:first], strict=True)):
            weight = weight_of(state, shares, name)
            if given is None:
                made[f"seed {number}"] = tuple(x * weight for x in ones(one.graph.layout(name).dual))
        return made

    def run(self, given: Mapping[str, Tensor]) -> Any:
        """One step on the tensors of its arguments."""
        held = self.model.shards()
        held.update({name: cut(self.plan.passes.constants[name]()) for name, cut in self.constants.items()})
        here = world().rank in (None, *self.proved.everywhere.flat)
        pieces = self.before.pieces(given) if here else [{**given, **none} for none in self.before.nothing()]
        if self.streams and self.plan.options.post_validation:
            refuse_hooks(self.model.optimizers, str(self.plan.options.name))
        if self.validation is not None:
            self.validation.begin()
        elif self.streams:
            self.model.hold()
        corrected = self.proved.weights.corrected
        means = self.model.late_means(corrected)
        if corrected:
            self.proved.weights.goes_on(means)
        # A buffer may become an argument, or another buffer or a weight as they are, which no task makes.
        given_back = {name: held[name] for name in self.graph.writes.values() if name in held}
        if self.streams:  # weights change before the step ends
            given_back = {name: tuple([x.clone() for x in of]) for name, of in given_back.items()}
        with asked(), Pasts(self.batch, self.each[0].micro.pasts) as pasts:
            inputs = [self._cut(k, piece, pasts) for k, piece in enumerate(pieces)]
            if self.late is not None:
                self.late.begin(self._known(given) if here else {})
            made, grads = self.program(held, inputs, self.seeds, self.model.update, self.validation, self.late)
        each = [(one.graph, values) for one, values in zip(self.each, made, strict=True)]
        losses = [(g.layout(x).placement, values[x]) for g, values in each for x, _ in g.losses if x in values]
        if self.validation is None or not self.validation.ends(losses):
            self.model.take({**given_back, **inputs[0], **made[0]}, losses, grads if self.learns else None, given)
        return self._joined([{**held, **mine, **values} for mine, values in zip(inputs, made, strict=True)])

    def _known(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of all samples that are made of arguments alone, for what is done behind all forwards."""
        assert self.late is not None
        graphs = self.late.late.whole.known
        found = {name: evaluated(graph, {**self.before.more(graph), **given}) for name, graph in graphs.items()}
        self.before.asked.clear()
        return found

    def _cut(self, k: int, piece: Mapping[str, Tensor], pasts: Pasts) -> dict[str, Shards]:
        """The arguments of one piece as they lie."""
        one = self.each[k]
        return {
            name: pasts.shards(k, one.taken[name], one.graph.layout(name))
            if one.taken[name] in one.micro.pasts
            else cut(piece[one.taken[name]])
            for name, cut in one.cut.items()
            if one.taken[name] not in self.brought
        }

    def _held(self, source: Source) -> Tensor:
        """A buffer or constant, whole."""
        if source.kind == "buffer":
            return self._everywhere(self.model.held[source.name])
        return self.plan.passes.constants[source.name]()

    def _everywhere(self, value: GlobalTensor) -> Tensor:
        """All of a buffer, on every rank of the pipeline."""
        if world().rank is None:
            return value.full_tensor()
        everywhere = value.to_global(placement=self.proved.everywhere, sbp=B)
        shard: Tensor = everywhere._shards[0].detach()
        return shard

    def _joined(self, values: Sequence[Mapping[str, Shards]]) -> Any:
        """The results of the batch."""
        each, late = self.each, self.late
        how = dict(zip(vars_in(self.graph.result), self.pieces.results, strict=True))
        names = [vars_in(one.graph.result) for one in each]

        def put(var: Var) -> GlobalTensor:
            at = names[0].index(var.name)
            layouts = [one.graph.layout(listed[at]) for one, listed in zip(each, names, strict=True)]
            parts = [mine.get(listed[at]) for mine, listed in zip(values, names, strict=True)]
            return joined(parts, layouts, how[var.name], self.batch, self.weights)

        with torch.no_grad():
            if late is None:
                return self.plan.logical.rebuild(mapped(self.graph.result, Var, put))
            whole = late.late.whole
            made = dict(zip(whole.early, map(put, self.graph.result[: len(whole.early)]), strict=True))
            made.update(late.results())
            return self.plan.logical.rebuild(mapped(whole.result, Ref, lambda ref: made[ref.number]))
