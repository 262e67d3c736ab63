"""The runner of a step that is recorded: plain steps first, then replays as long as all lies where it lay."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...boxing.graph.physical import Op, Physical
from ...boxing.record import following
from ...placement.errors import SbpError
from .capture.surroundings.garbage import uncollected
from .compiler.generated_calls import Shards
from .optimizer.adopted_model import AdoptedModel
from .recorded_update import Addresses, host_update
from .refusals import card_of_plan, refuse_draws
from .run.card_rates import CardRates
from .run.program import Outcome, Program
from .run.recorded_work import RecordedWork, copied

__all__ = ["ReplayedRunner", "StraightWork"]

WARM = 2  # plain steps, in which optimizers make their states and kernels are looked for
OFTEN = 3  # changes of settings, behind which the update is no more recorded


class StraightWork(Protocol):
    """A step that is one function, in its parts."""

    model: AdoptedModel
    program: Program
    graph: Physical

    def run(self, given: Mapping[str, Tensor]) -> Any: ...
    def inputs(self, given: Mapping[str, Tensor]) -> dict[str, Shards]: ...
    def computed(self, shards: Mapping[str, Shards]) -> Outcome: ...
    def take(self, done: Outcome, given: Mapping[str, Tensor]) -> None: ...
    def result(self, values: Mapping[str, Shards]) -> Any: ...

    @property
    def returned(self) -> Sequence[str]: ...


class ReplayedRunner:
    """Runs a straight step, as a card's graph from its third call on. `said` tells what of it is recorded, and why."""

    def __init__(self, straight: StraightWork, name: str) -> None:
        self.straight, self.name = straight, name
        self.model, self.program, self.graph = straight.model, straight.program, straight.graph
        self.device = card_of_plan(self.graph, name)
        refuse_draws(self.program.schedule.todo, name)
        self.warm = self.changes = 0
        self.recorded: _RecordedStep | None = None

    @property
    def said(self) -> str:
        if self.recorded is None:
            return f"recorded behind {WARM} steps as ever"
        return self.recorded.said

    def run(self, given: Mapping[str, Tensor]) -> Any:
        """One step on the tensors of its arguments."""
        if self.warm < WARM or following() or not self._stands():
            self.warm += 1
            return self.straight.run(given)
        held = self.model.shards()
        self.model.late_means(())
        inputs = self.straight.inputs(given)
        why = self._host_update(given)
        if not why and self.model.stepping:
            self.model.hold()
        now = self.recorded
        if now is None or not now.fits(why, inputs):
            if now is not None and now.rates is not None and not now.rates.same():
                self.changes += 1
                why = self._host_update(given)
            self.recorded = None  # its memory first
            now = self.recorded = self._record(why, held, inputs)
        return now.run(inputs, given)

    def _stands(self) -> bool:
        """Whether nobody else has left gradients, or changed what optimizers have in pieces, for the next update."""
        if not self.model.stepping:
            return True
        if any(not each.fresh for each in self.model.pieces.values()):
            return False
        return all(
            x.grad is None for each in self.model.trained.values() for x in {id(y): y for y in each.both}.values()
        )

    def _host_update(self, given: Mapping[str, Tensor]) -> str:
        self.model.look_at_optimizers()
        if self.changes >= OFTEN:
            return "settings of optimizers besides rates on the card change at every step"
        wanted = next((path for path, x in given.items() if x.requires_grad), None)
        if wanted is not None and self.model.trained:
            return f"the gradient of the argument {wanted} goes to it"
        return host_update(self.model)

    @uncollected()
    def _record(self, why: str, held: Mapping[str, Shards], inputs: Mapping[str, Shards]) -> "_RecordedStep":
        try:
            return _RecordedStep(self, why, held, inputs)
        except (RuntimeError, SbpError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            lines = "".join(f"\n  {line}" for line in _suspects(self.graph))
            raise SbpError(
                f"{self.name} has cuda_graph=True, and cannot be recorded: {str(error).splitlines()[0]}{lines}\n"
                "  have the card's shapes depend on no values, make tensors of numbers outside of the step, or leave "
                "cuda_graph= out"
            ) from error


class _RecordedStep:
    """A graph of a step: all of it, or `why` the host has the update."""

    def __init__(
        self, runner: ReplayedRunner, why: str, held: Mapping[str, Shards], inputs: Mapping[str, Shards]
    ) -> None:
        self.straight, self.model, self.why = runner.straight, runner.model, why
        optimizers = () if why else self.model.stepping
        self.addresses = Addresses(self.model, optimizers)
        self.rates = CardRates(optimizers, runner.device) if optimizers else None
        self.recording = RecordedWork(runner.device, inputs, lambda mine: self._work({**held, **mine}))
        self.done: Outcome = self.recording.made
        self.norm = None if why else self.model.norm
        self.written = [x for value in self.model.held.values() for x in value._shards]
        if optimizers:
            self.written += [x for each in self.model.pieces.values() for x in each.master._shards]
        self.alone = not (self.model.stepping and self.model.trained) or "argument" in why or "hooks" in why
        self.alone = self.alone or self.model.leaves

    @property
    def said(self) -> str:
        return f"all but the update, because {self.why}" if self.why else "all of the step"

    def _work(self, shards: Mapping[str, Shards]) -> Outcome:
        done = self.straight.computed(shards)
        if self.why:
            return done
        if self.rates is None:
            self.straight.take(done, {})
        else:
            with self.rates.given():
                self.straight.take(done, {})
        results = {name: done.values[name] for name in self.straight.returned}
        return Outcome(results, {})

    def fits(self, why: str, inputs: Mapping[str, Shards]) -> bool:
        """Whether a replay does what the step would."""
        same = self.rates is None or self.rates.same()
        return why == self.why and same and self.addresses.hold() and self.recording.takes(inputs)

    def run(self, inputs: Mapping[str, Shards], given: Mapping[str, Tensor]) -> Any:
        if self.rates is not None:
            self.rates.write()
        self.recording.run(inputs)
        if self.why:
            grads = self.done.grads
            if self.alone:  # they stay with whoever gets them
                grads = {name: copied(shards) for name, shards in grads.items()}
            self.straight.take(Outcome(self.done.values, grads), given)
        else:
            self._told()
        return self.straight.result({name: copied(self.done.values[name]) for name in self.straight.returned})

    def _told(self) -> None:
        """Python learns what the card has written."""
        torch.autograd.graph.increment_version(self.written)
        for value in self.model.held.values():
            value._moved = None
        for each in self.model.trained.values():
            each.settled()
        if self.norm is not None:
            self.model.norm = _copy(self.norm)


def _copy(norm: Tensor) -> Tensor:
    with torch.no_grad():
        return norm.clone()


SUSPECTS = ("index", "nonzero", "masked_select", "unique", "bincount", "repeat_interleave", "_local_scalar_dense")


def _suspects(graph: Physical) -> list[str]:
    """Lines of ops for which the host may have to wait for values."""
    ops = [step for step in graph.steps if isinstance(step, Op)]
    found = [f"{step.op} at {step.origin.line}" for step in ops if str(step.op).split(".")[1].startswith(SUSPECTS)]
    return list(dict.fromkeys(found))[:4]
