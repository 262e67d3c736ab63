"""Graphs: a training step or an inference, captured once for each shape of its inputs, planned as a whole, and run."""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self, Unpack

from torch import nn
from torch.optim import Optimizer

from ...boxing.kept import KeptErrors
from ...boxing.record import user_line
from ...placement.errors import PlacementError, SbpError
from ...placement.moved import MovedName
from ..eager.refusals import run_untraced
from ..model.slots import slots
from ..tensors.tensor import GlobalTensor
from .capture.arguments import StepCall, key_of, own_parameters, parameter_names
from .capture.caches import are_plain, opened
from .capture.packed import padded
from .captures import Captures
from .launches import landed
from .optimizer.adopt import owner_of
from .optimizer.loss_scale import LossScale
from .optimizer.nonfinite import SkippedSteps
from .optimizer.relocation import ModelMove
from .options import GivenOptions, Options
from .plan import Planned, plan_step
from .reads.modes import Modes
from .reads.recaptures import KEPT, ArgumentKinds, Recaptures
from .reads.watch import building
from .step import Step
from .views import PlannedViews

__all__ = ["StepGraph", "held_by_wrapper", "refuse_wrapper"]


class StepGraph(PlannedViews):
    """A graph as it is planned and run: `sbpflow.nn.Graph` and what `compile` makes are such, and tell of it too."""

    if not TYPE_CHECKING:  # an attribute of the user's own may be called so, of whatever type
        step, plan = MovedName("sbpflow.nn.Graph.step"), MovedName("sbpflow.nn.Graph.plan")

    def __init__(self, **options: Unpack[GivenOptions]) -> None:
        self._options = Options.of(options, type(self).__name__)
        self._steps: dict[Any, list[Step]] = {}  # by arguments and modes; of several one fits what modules hold
        self._last: Step | None = None
        self._scale = LossScale(self._options.loss_scale)
        self._skipped = SkippedSteps() if self._options.skip_nonfinite else None
        self._kept = KeptErrors()  # of gradients that are compressed
        self._recaptures = Recaptures(str(self._options.name))
        self._kinds = ArgumentKinds(str(self._options.name))
        self._captures: Captures | None = None  # of other graphs that differ in notes alone
        self._additions: list[Callable[[Step], None]] = []  # of actors, to every step that is planned
        self._move: ModelMove | None = None  # of the model, when it is run next
        self._runs = 0
        self._starts = False  # whether a step goes by where arguments start in their memory
        self._machinery = frozenset(vars(self))  # its own attributes, which no capture goes by

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The computation of a step; every subclass has its own."""
        raise NotImplementedError(
            f"{type(self).__name__} has no build(self, ...)\n  write what one step computes there"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._taken(args, kwargs)
        step = self.step_for(*args, **kwargs)
        self._runs += 1
        try:
            return step.run(args, kwargs)
        finally:
            self._runs -= 1

    def step_for(self, *args: Any, **kwargs: Any) -> Step:
        """The step for arguments like these; planned if there is none, and nothing is run."""
        if "_steps" not in vars(self):
            raise SbpError(
                f"{type(self).__name__} was not initialised\n  call super().__init__() first in its __init__"
            )
        landed()
        if building():
            raise SbpError(
                f"the graph {self._options.name} is called at {user_line()}, while another is captured\n"
                "  give that one the modules themselves, and call these"
            )
        kind, last = key_of(args, kwargs, starts=self._starts), self._last
        if last is None or last.kind != kind or not (last.modes.same() and last.stands()):
            last = self._last = self._step_of(kind, args, kwargs)
        return last

    def _step_of(self, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """A step for arguments of a kind that fits what modules are now; planned if there is none."""
        modules = self._modules()
        modes = Modes(modules)
        known = self._steps.setdefault((kind, modes.key), [])
        step = next((step for step in known if step.stands()), None)
        number, gone = self._kinds.used(kind, modes.key, self._names)
        for each in gone:
            self._steps.pop(each, None)
        if step is None:
            self._recaptures.note([number, *(step.plan.passes.reads.change() for step in known)])
            known[:] = [step for step in known if step.in_place()][: KEPT - 1]
            optimizers = list(self._optimizers())
            move = None if self._move is None or self._move.done else self._move
            call = StepCall(self.build, args, kwargs, self._names())
            plan = plan_step(call, modules, optimizers, self._options, self._scale, self._captures, move)
            _refuse_lost(plan, move)
            if not self._starts and any(s.starts for s in plan.logical.sources):
                self._starts, kind = True, key_of(args, kwargs, starts=True)
                known = self._steps.setdefault((kind, modes.key), [])
            step = Step(plan, optimizers, kind, modes, self._skipped, self._kept)
            for add in self._additions:
                add(step)
            known.insert(0, step)
        return step

    def _taken(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments as a step takes them."""
        if are_plain(args, kwargs):
            return opened(args, kwargs)
        args, kwargs = opened(padded(args), padded(kwargs))
        return own_parameters(args, kwargs, self._modules, owner_of)

    def plan_for(self, *args: Any, **kwargs: Any) -> Self:
        """Plan for arguments like these: capture and choose (they may be on meta); returns the graph.

        Nothing is run, compiled or made: the model stays as it is, and its parameters may be on meta too. Should it, or
        what is said of it, change before the first run, that one plans anew.
        """
        args, kwargs = self._taken(args, kwargs)
        self.step_for(*args, **kwargs)
        return self

    def move(self, *, lost: Iterable[int] = (), **options: Unpack[GivenOptions]) -> Self:
        """Have the next call plan anew and bring there what the model and its optimizers hold; returns the graph.

        Between two steps: change what is said of modules (`flow.nn.place`, `pipeline`, `shard`), or give other options,
        which replace those of before. Weights, buffers, masters and states of optimizers then go from the shards there
        are straight to those that the new plan wants: each rank gets what it needs and does not hold. Modules,
        parameters and optimizers stay the objects that they are, and training goes on. Tensors that share memory with a
        parameter, such as `weight.detach()` or `weight.to_local()`, keep the values of before. Nothing is read on ranks
        that are `lost`, where others have copies of what they held. What other graphs of the model had planned is
        planned anew.
        """
        self._refuse_move()
        now = {field.name: getattr(self._options, field.name) for field in fields(self._options)}
        self._moved_to(Options.of({**now, **options}, str(self._options.name)), lost)
        return self

    def _moved_to(self, options: Options, lost: Iterable[int]) -> None:
        before = frozenset[int]() if self._move is None or self._move.done else self._move.lost
        self._options, self._move = options, ModelMove(before.union(lost))
        self._steps, self._last, self._captures = {}, None, None

    @property
    def launch_name(self) -> str:
        """The name by which errors of a launch call it."""
        return str(self._options.name)

    def is_global(self) -> bool:
        """Whether the first run has made all of the model global."""
        return all(isinstance(slot.value, GlobalTensor) for slot in slots(self._modules(), once=True))

    def watched(self) -> tuple[Any, ...]:
        """All that a step goes by besides its arguments and what tensors hold: rates, and what trains."""
        rates = [float(group["lr"]) for each in self._optimizers() for group in each.param_groups]
        return Modes(self._modules()).of_modules, *rates

    def _refuse_move(self) -> None:
        landed()
        if self._runs:
            raise SbpError(
                f"{self._options.name} is to move while it runs, at {user_line()}\n"
                "  move it between two steps, from the thread that calls it"
            )

    def _names(self) -> tuple[str, ...]:
        """Names of the arguments, as the user calls them."""
        return parameter_names(self.build)

    def _modules(self) -> dict[str, nn.Module]:
        found = {}
        for name, value in vars(self).items():
            if isinstance(value, nn.Module):
                found[name] = value
            elif isinstance(value, list | tuple):
                found.update({f"{name}.{at}": each for at, each in enumerate(value) if isinstance(each, nn.Module)})
        return {"": next(iter(found.values()))} if len(found) == 1 else found

    def _optimizers(self) -> Iterator[Optimizer]:
        for value in vars(self).values():
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, Optimizer):
                    refuse_wrapper(each, self._options.name or type(self).__name__)
                    yield each

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A graph of copies of the modules and optimizers, that was not called yet."""
        made = memo[id(self)] = object.__new__(type(self))
        fresh: dict[str, Any] = {
            "_steps": {},
            "_last": None,
            "_options": self._options,
            "_captures": None,
            "_starts": False,
            "_recaptures": Recaptures(str(self._options.name)),
            "_kinds": ArgumentKinds(str(self._options.name)),
            "_additions": list(self._additions),
            "_kept": KeptErrors(),
            "_runs": 0,
        }
        made.__dict__.update(copy.deepcopy({**vars(self), **fresh}, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SbpError(
            f"{self._options.name}: a graph cannot be pickled, as it belongs to the ranks that made it\n"
            "  save model.state_dict() and optimizer.state_dict(), and make the graph anew"
        )

    def __repr__(self) -> str:
        if self._last is None:
            return f"{self._options.name}: not called yet"
        return repr(self._last)


def held_by_wrapper(optimizer: Any) -> Optimizer | None:
    """The optimizer that a trainer's wrapper of one holds, such as `accelerate.prepare` returns; None of another."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return inner
    return None


def refuse_wrapper(optimizer: Any, name: str) -> None:
    """Refuse an optimizer that holds another and was not made as one itself. A graph steps what it knows, and whether
    such a one would step at a call is up to somebody else."""
    inner, kind = held_by_wrapper(optimizer), type(optimizer)
    if inner is not None:
        raise SbpError(
            f"{name}: {kind.__module__}.{kind.__qualname__} is no optimizer itself, it holds {type(inner).__name__}\n"
            "  have it step, which accumulates and clips as ever: flow.compile(model, loss_fn, optimizer, "
            "leave_gradients=True); or give the graph the one that it holds, optimizer.optimizer, to step by itself"
        )


def _refuse_lost(plan: Planned, move: ModelMove | None) -> None:
    """A plan must leave out the ranks that have nothing any more."""
    there = [rank for rank in plan.graph.ranks.flat if move is not None and rank in move.lost]
    if there:
        raise PlacementError(
            f"{plan.options.name} is to go on without rank {there[0]}, and its plan has work for that\n"
            "  give the ranks that are left, as in move(plan='grid cpu:[0-2] as (data=3)', lost=[3])"
        )


run_untraced(StepGraph.__call__)
