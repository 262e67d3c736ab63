"""Figures of the step that ran last: its graph, course, memory, costs and norms."""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from ...actors.protocol.network import Network
from ...actors.schedules.delays import Delays
from ...actors.schedules.pipeline import Costs
from ...boxing.graph.physical import Physical
from ...boxing.graph.text.text import to_text
from ...boxing.kept import KeptErrors
from ...placement import Placement
from ...placement.errors import SbpError
from .choose.stage_balance import paths_of
from .launches import landed
from .optimizer.at_rest import AtRest, at_rest
from .optimizer.kept_errors import StepErrors
from .optimizer.loss_scale import LossScale
from .optimizer.nonfinite import SkippedSteps
from .options import Options
from .pieces import Pieces
from .run.costs import layer_costs
from .run.rank_times import RankTimes
from .step import Step

__all__ = ["PlannedViews"]


class PlannedViews:
    """Answers of a graph about its steps, which `Graph` plans and runs."""

    _options: Options
    _last: Step | None
    _scale: LossScale
    _skipped: SkippedSteps | None
    _kept: KeptErrors

    def _optimizers(self) -> Iterator[Optimizer]:
        raise NotImplementedError

    @property
    def planned(self) -> Step:
        """The step that ran last."""
        landed()
        if self._last is None:
            raise SbpError(
                f"{self._options.name} was not called yet, so there is nothing to look at\n"
                "  call it, or graph.plan_for(*arguments) to see the plan before anything runs"
            )
        return self._last

    @property
    def placement(self) -> Placement | None:
        """The ranks that the graph was given, by `placement=` or by the grid of a plan."""
        return self._options.placement

    @property
    def micro_batches(self) -> int:
        """Into how many parts a batch is cut, as `flow.data.shards` is to be told."""
        return self._options.micro_batches

    @property
    def grad_norm(self) -> Tensor:
        """The norm that all gradients together had in the step that ran last, before it clipped them."""
        step = self.planned
        if self._options.clip_grad_norm is None or not any(self._optimizers()):
            lacks = (
                "clip_grad_norm="
                if self._options.clip_grad_norm is None
                else "optimizer, before whose step gradients are clipped"
            )
            raise SbpError(
                f"{self._options.name} has no {lacks}, so there is no norm of gradients\n"
                "  give it both; a norm that clips nothing is clip_grad_norm=float('inf')"
            )
        norm = None if step.runner is None else step.runner.model.norm
        if norm is None:
            raise SbpError(
                f"{self._options.name} did not train yet\n  call it first: its step clips, and keeps the norm"
            )
        return norm

    @property
    def skipped(self) -> SkippedSteps:
        """The steps that were left out since a loss or a gradient was not finite: how many, and where it began."""
        if self._skipped is None:
            raise SbpError(
                f"{self._options.name} leaves no step out: numbers that are not finite go into its weights\n"
                "  make it with skip_nonfinite=True, to have such steps change nothing on all ranks"
            )
        return self._skipped

    @property
    def kept(self) -> StepErrors:
        """The parts of gradients that compression has left out so far, which is added to those of the next step."""
        return StepErrors(self._kept)

    @property
    def loss_scale(self) -> float:
        """The factor of the next step's losses, which keeps gradients of fp16 in the range of its numbers."""
        if self._last is None or self._last.plan.passes.scale is None:
            lacks = "was not called yet" if self._last is None else "trains nothing in fp16"
            raise SbpError(
                f"{self._options.name} {lacks}, so its losses have no scale\n"
                "  there is one where weights are cast to fp16 and an optimizer steps, or loss_scale= is given"
            )
        return self._scale.value

    @property
    def physical(self) -> Physical:
        """The graph that runs."""
        return self.planned.graph

    def text(self) -> str:
        """The physical graph as text, which `boxing.graph.text.parse.from_text` reads back."""
        return to_text(self.physical)

    def rank_times(self) -> RankTimes | None:
        """The median seconds, over the last 16 steps, that each rank works without waiting for others; printed, it
        names slow ranks. All processes ask; None where one process plays all ranks, or has none."""
        return self.planned.rank_times()

    def memory_at_rest(self) -> dict[int, AtRest]:
        """The bytes that each rank of this process holds between steps, counted on the tensors themselves. They are
        parameters, gradients that are left on them, and states of optimizers. `explain().memory` says beforehand what
        they will be."""
        runner = self.planned.runner
        if runner is None:
            raise SbpError(
                f"{self._options.name} did not run yet, and has made nothing that rests\n"
                "  call it first; what it will be: graph.plan_for(*arguments).explain().memory"
            )
        return at_rest(runner.model)

    def costs(self) -> tuple[Costs, ...]:
        """The seconds that each chunk of a pipelined step is predicted to take for one micro-batch. They serve to try
        schedules, as in `published("zb_h1").show(p, m, costs=step.costs())`. Its `exchange` is what it moves, forward
        and backward, among the ranks of its stage."""
        return self._pieces("without chunks").costs()

    def delays(self) -> Delays:
        """The number of updates by which weights are late, by chunk and by parameter, under a schedule without a flush.
        It is proved by the network, so it is known before anything runs."""
        return self._pieces("in which no weight is read late").delays()

    def layer_costs(self, layers: Iterable[nn.Module]) -> list[float]:
        """The seconds that each layer is predicted to take, with what comes between it and the next. They serve to cut
        by, as in `flow.nn.pipeline(layers, placements, costs=step.layer_costs(layers))`."""
        paths, listed = paths_of(self.planned.plan.passes.modules), list(layers)
        strange = next((part for part in listed if id(part) not in paths), None)
        if strange is not None:
            raise SbpError(
                f"layer_costs: {self._options.name} has no such module: {type(strange).__name__}\n"
                "  give it layers of the model that it was made with"
            )
        return layer_costs(self.planned.plan.decided, [paths[id(part)] for part in listed])

    def _pieces(self, lacks: str) -> Pieces:
        """The plan of a pipelined step, which others lack."""
        pieces = self.planned.plan.pieces
        if pieces is None:
            raise SbpError(
                f"{self._options.name} runs as one function, {lacks}\n"
                "  make it with micro_batches= or schedule=, as in schedule='1f1b', to have it run by actors"
            )
        return pieces

    @property
    def network(self) -> Network:
        """The actors of the step that was planned or ran last: print it, draw it by `draw_actors`, open it by `add`."""
        return self._pieces("without actors").proved.network
