"""Post-validation: optimizers of chunks step before all gradients are known, and that is made good where it was wrong.

    known so far   ->  step as if the others changed nothing; a copy of weights and states is kept
    all is known   ->  finite, and clipped by nothing:  the step stands
                       clipped:                         back to the copy, and the step with what is clipped
                       not finite:                      back to the copy

Where what is known already says that the step cannot stand, it waits until all is known. The norm of all gradients is
worked out of the norms of each as `clip` does it, so that a step is to the bit that of who waits for all of them first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....boxing.exchange.execute import token
from ....placement import Placement
from ....placement.errors import SbpError
from ....placement.world import device, owned, world
from ...eager.norms import norms
from ...tensors.factories import whole_everywhere
from ...tensors.tensor import GlobalTensor, wrap
from ..compiler.generated_calls import Shards
from .adopt import has_hooks
from .adopted_model import AdoptedModel
from .before_step import BeforeStep
from .loss_scale import overflowed, unscaled
from .on_shards import step_on_shards
from .settle import settle
from .trained import Trained

__all__ = ["PostValidation", "refuse_hooks"]


def refuse_hooks(optimizers: Sequence[Optimizer], name: str) -> None:
    """Refuse hooks of steps: they would be called for each chunk, also for steps that are taken back."""
    for each in optimizers:
        if has_hooks(each):
            raise SbpError(
                f"{name}: {type(each).__name__} has a hook of its steps, and post_validation makes one for each chunk\n"
                "  remove it, and call what it does behind the graph; or leave post_validation= out"
            )


@dataclass
class _Stepping:
    """A chunk in a step: its gradients as its optimizers want them, and its values before the step, if it stepped."""

    grads: Mapping[str, Shards]  # at home
    come: list[tuple[Trained, Shards]]
    left: list[tuple[Trained, Shards]]  # at home, of parameters that no optimizer has
    kept: BeforeStep | None = None


class PostValidation:
    """The steps of a model's chunks, in which the named parameters have gradients.

    Chunks tell each other a number for the norm of each gradient; behind these, how often one was not finite, and how
    often a loss was not."""

    def __init__(self, model: AdoptedModel, names: Sequence[str]) -> None:
        if model.offloaded:
            raise SbpError(
                f"{model.graph.name}: post_validation keeps copies of what it may take back on devices, and this is "
                "offloaded\n  leave post_validation= out, or clip_grad_norm=, skip_nonfinite= and loss_scale="
            )
        self.model, self.names = model, tuple(names)
        self.number = {name: at for at, name in enumerate(names)}
        self.chunks: dict[int, _Stepping] = {}
        self.told: Tensor | None = None
        self.spoilt: dict[str, Shards] = {}  # gradients of a step in which some are not finite
        self.factor = 1.0
        self.stand: set[int] = set()  # chunks whose step is the one that was to be
        self.undone = 0  # chunks that stepped and were taken back, in all steps

    def begin(self) -> None:
        """Begin a step. Hooks and gradients that others left on parameters are refused, because they would count."""
        model, self.chunks, self.told, self.spoilt, self.stand = self.model, {}, None, {}, set()
        model.hold()
        model.look_at_optimizers()
        self.factor = 1.0 if model.scale is None else model.scale.value
        for name in self.names:
            each = model.trained[name]
            if id(each.parameter) not in model.stepped:
                if model.limit is not None:
                    raise self.refused(name, "has no optimizer and counts in the norm", "give it one")
                continue
            if each.parameter._hooks is not None:
                raise self.refused(name, "has a hook for its gradient", "remove it")
            if each.parameter.grad is not None or each.master.grad is not None:
                raise self.refused(name, "has a gradient from outside of the graph", "call optimizer.zero_grad()")

    @staticmethod
    def refused(name: str, what: str, fix: str) -> SbpError:
        return SbpError(f"{name} {what}, which post_validation cannot count\n  {fix}, or leave post_validation= out")

    def known(self, chunk: int, grads: Mapping[str, Shards], losses: Sequence[tuple[Placement, Shards]]) -> Tensor:
        """The numbers of one chunk."""
        model = self.model
        come = {name: (model.trained[name], shards) for name, shards in grads.items()}
        where = next(each.home.placement for each, _ in come.values())
        line = Placement(where.type, where.flat, (where.size,), None)
        looks = model.scale is not None or model.skipped is not None
        bad = looks and overflowed([(each.home.placement, shards) for each, shards in come.values()], line)
        spoilt = model.skipped is not None and bool(losses) and overflowed(losses, line)
        left = [pair for pair in come.values() if id(pair[0].parameter) not in model.stepped]
        come = {name: pair for name, pair in come.items() if id(pair[0].parameter) in model.stepped}
        brought = [(each, each.brought(shards)) for each, shards in come.values()]
        if model.scale is not None:
            plain = unscaled([shards for _, shards in brought], self.factor)
            brought = [(each, shards) for (each, _), shards in zip(brought, plain, strict=True)]
        self.chunks[chunk] = _Stepping(grads, brought, left)
        found = torch.zeros(len(self.names) + 2, dtype=torch.float64, device=device(where, owned(where)[0]))
        found[-2], found[-1] = bad, spoilt
        if model.limit is not None:
            for name, norm in zip(come, norms([wrap(shards, each.held) for each, shards in brought]), strict=True):
                found[self.number[name]] = norm._shards[0].double() if isinstance(norm, GlobalTensor) else norm
        return found

    def step(self, chunk: int, known: Tensor) -> None:
        """Step by what is known so far, unless that cannot stand."""
        at = self.chunks[chunk]
        with self.model.updating:
            if not self.bad(known) and not self.clips(known):
                at.kept = BeforeStep([each for each, _ in at.come], self.model.optimizers)
                self.stepped(at.come, None)

    def validate(self, chunk: int, known: Tensor) -> None:
        """Keep a chunk's step or take it back, and make another one where there is to be one."""
        at, bad, clips = self.chunks[chunk], self.bad(known), self.clips(known)
        self.told = known
        if bad:
            self.spoilt.update(at.grads)
        with self.model.updating:
            if at.kept is not None and (bad or clips):
                self.taken_back(at, at.kept)
                self.undone += 1
            if not bad:
                self.stand.add(chunk)
                self.model.left(at.left, self.factor)
                if clips or at.kept is None:
                    self.stepped(at.come, self.norm(known) if clips else None)
            del self.chunks[chunk]

    @staticmethod
    def taken_back(at: _Stepping, kept: BeforeStep) -> None:
        kept.restore()
        settle([each for each, _ in at.come if each.master is not each.parameter])

    def undo(self) -> Sequence[int]:
        """Take back what chunks did in a step that an error has ended. It returns the chunks for which that cannot be:
        those that knew all, and in several processes, whose ranks do not know how far others came, all that stepped."""
        begun = {chunk: at for chunk, at in self.chunks.items() if at.kept is not None}
        self.chunks = {}
        if self.stand or world().rank is not None:
            return [*self.stand, *begun]
        for at in begun.values():
            assert at.kept is not None
            self.taken_back(at, at.kept)
            for each, _ in at.come:
                each.master.grad = None
        return []

    def ends(self, losses: Sequence[tuple[Placement, Shards]]) -> bool:
        """The end of a step, of which all ranks are told alike: whether it changed nothing."""
        model, told, spoilt = self.model, self.told, self.spoilt
        self.told, self.spoilt = None, {}
        if told is None:  # no part of it is here
            return False
        bad, loss = bool(told[-2] > 0), bool(told[-1] > 0)
        if loss or (bad and model.scale is None):
            homes = ((name, model.trained[name].home) for name in self.names)
            return model.skips(losses, {name: spoilt.get(name) or (token(home),) for name, home in homes})
        if model.scale is not None:
            model.scale.after(overflow=bad)
            if bad:
                model.no_norm(self.names)
                if model.skipped is not None:
                    model.skipped.overflow()
        norm = self.norm(told)
        if norm is not None and not bad:
            model.norm = whole_everywhere(norm, model.trained[self.names[-1]].held.placement)
        return False

    def bad(self, known: Tensor) -> bool:
        return bool(known[-1] > 0 or known[-2] > 0)

    def clips(self, known: Tensor) -> bool:
        """Whether gradients are changed by what is known of their norm."""
        norm, limit = self.norm(known), self.model.limit
        return norm is not None and limit is not None and not bool(limit / (norm + 1e-6) >= 1.0)

    def norm(self, known: Tensor) -> Tensor | None:
        """The norm of all gradients, as `clip` works it out: of each placement, and then of these."""
        if self.model.limit is None:
            return None
        groups: dict[Placement, list[Tensor]] = {}
        for name, each in self.model.trained.items():
            if name in self.number:
                norm = known[self.number[name]].to("cpu", each.held.dtype)
                groups.setdefault(each.held.placement, []).append(norm)
        each_norm = [_joined(held) for held in groups.values()]
        return each_norm[0] if len(each_norm) == 1 else _joined(each_norm)

    def stepped(self, come: Sequence[tuple[Trained, Shards]], norm: Tensor | None) -> None:
        """A step of the optimizers on some parameters, with gradients clipped where there is a norm to clip by."""
        model, mine = self.model, {id(each.master) for each, _ in come}
        for each in model.pieces.values():
            each.idle = id(each.master) not in mine
        try:
            self.steps(come, norm)
        finally:
            for each in model.pieces.values():
                each.idle = False

    def steps(self, come: Sequence[tuple[Trained, Shards]], norm: Tensor | None) -> None:
        """The same, where parameters of others are idle."""
        model = self.model
        if model.offloaded:
            for each, _ in come:
                if each.host is not None:
                    each.host.arrive()
        steps = list(model.optimizers)
        if norm is None:
            grads = {id(each.master): shards for each, shards in come}
            steps = [each for each in steps if not step_on_shards(each, grads)]
        for each, shards in come if steps else ():
            each.take(shards)
        if norm is not None and model.limit is not None:
            groups: dict[Placement, list[Tensor]] = {}
            for each, _ in come:
                groups.setdefault(each.held.placement, []).append(each.master)
            for where, held in groups.items():
                nn.utils.clip_grads_with_norm_(held, model.limit, whole_everywhere(norm, where))
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _joined(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all, of the norm of each."""
    found: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
    return found
