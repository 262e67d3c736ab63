"""A parameter server: weights and their optimizer on some ranks; workers pull them and push gradients, some ahead."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...actors.protocol.state import Firing
from ...actors.runtime.bus import Bus, bus
from ...actors.runtime.runtime import Runtime
from ...boxing.bundle import refilling
from ...boxing.exchange.refill import Filling, refill
from ...placement import Placement
from ...placement.errors import SbpError
from ...placement.moved import MovedName
from ...placement.world import device, owned, world
from ...sbp import Layout
from ..graph.compiled import CompiledGraph
from ..graph.run.program import Program
from ..model.to_global import to_global
from ..tensors.tensor import GlobalTensor, wrap
from .bounded_delay import BoundedDelay, bounded_delay

__all__ = ["ParameterServer"]

LIMIT = 25 * 2**20  # bytes of a rank on their way at a time

Pushed = dict[str, tuple[Tensor, ...]]  # gradients of one worker, as they came to the servers
Seconds = Sequence[float] | Callable[[int, int], float]


class ParameterServer:
    """A model on servers, and workers that train it: `run(batches)` has a row for each round, a batch for each worker.

    `model` is global, on the servers: in pieces, each parameter on one (`flow.nn.to_servers`), or as it likes;
    `optimizer` is of its parameters. A worker pulls the newest weights, computes the gradient of its batch and pushes
    it; when those of a round are there, the optimizer steps by their mean. Nobody begins round t before t - delay
    updates: with `delay=0` that is data parallel training.

    `seconds` are what a round takes each worker, or a function of worker and round; they say who is ahead, also where
    processes run it, so that a run is the same each time. Behind a run nothing is under way: the model and its
    optimizer are all there is to save.
    """

    if not TYPE_CHECKING:
        plan = MovedName("sbpflow.nn.ParameterServer.plan")

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: Optimizer,
        *,
        workers: Sequence[Placement],
        delay: int = 0,
        seconds: Seconds | None = None,
    ) -> None:
        if type(delay) is not int or delay < 0:
            raise SbpError(f"ParameterServer: delay={delay!r}\n  say how many updates late weights may be: 0 or more")
        self.workers, self.delay = list(workers), delay
        self.seconds = _checked_seconds(seconds, _checked(self.workers))
        self.model, self.optimizer = model, optimizer
        self.parameters: dict[str, GlobalTensor] = _parameters(model, optimizer)
        self.models = [to_global(copy.deepcopy(model), where) for where in self.workers]
        self.steps: list[CompiledGraph[Any, ..., Tensor]] = [
            CompiledGraph(one, loss_fn, None, {"placement": where})
            for one, where in zip(self.models, self.workers, strict=True)
        ]
        self.copies: list[dict[str, GlobalTensor]] = [_global(one) for one in self.models]
        self.course: BoundedDelay | None = None  # of the last run
        self._courses: dict[int, BoundedDelay] = {}  # by number of rounds
        self._runtimes: dict[int, Runtime] = {}
        self._batches: Sequence[Sequence[Any]] = ()
        self._losses: list[list[Tensor]] = []

    def course_of(self, rounds: int) -> BoundedDelay:
        """The course of a run of so many rounds, before it: print it, or look at its `delays`."""
        if rounds not in self._courses:
            name = f"{type(self.model).__name__}, {len(self.workers)} workers, delay {self.delay}"
            self._courses[rounds] = bounded_delay(len(self.workers), rounds, self.delay, self.seconds, name)
        return self._courses[rounds]

    @property
    def delays(self) -> Counter[int]:
        """The number of gradients of the last run by how many updates late they were."""
        if self.course is None:
            raise SbpError(
                "ParameterServer: nothing ran yet\n  call run(batches), or course_of(rounds) to see it before"
            )
        return self.course.delays

    def run(self, batches: Sequence[Sequence[Any]]) -> list[list[Tensor]]:
        """Train on these, a row for each round and in it the arguments of each worker's loss; the losses likewise."""
        for at, row in enumerate(batches):
            if len(row) != len(self.workers):
                raise SbpError(
                    f"ParameterServer: round {at} has {len(row)} batches for {len(self.workers)} workers\n"
                    "  give a row for each round, and in it a tuple of arguments for each worker"
                )
        if not batches:
            return []
        self._follow()
        self.course, runtime = self.course_of(len(batches)), self._runtime(len(batches))
        self._batches, self._losses = batches, [[] for _ in batches]
        try:
            runtime.run()
            return self._losses
        finally:
            self._batches, self._losses = (), []

    def _follow(self) -> None:
        """Bring the workers' models up to the one on the servers, which may have changed between runs. That goes for
        its modes, for what it trains, and for the values of its buffers."""
        for one, copies in zip(self.models, self.copies, strict=True):
            for copied, module in zip(one.modules(), self.model.modules(), strict=True):
                copied.training = module.training
            for name, x in copies.items():
                x.requires_grad_(self.parameters[name].requires_grad)
                x.grad = None  # of a run that an error has ended
            buffers = dict(one.named_buffers())
            pairs = [(x, buffers[name]) for name, x in self.model.named_buffers()]
            refill(
                [_filling(x, y) for x, y in pairs if isinstance(x, GlobalTensor) and isinstance(y, GlobalTensor)],
                LIMIT,
                "pull",
            )

    def _runtime(self, rounds: int) -> Runtime:
        """The runtime of a run, in each process all of it: who fails tells the others, that wait for what it moves."""
        if rounds not in self._runtimes:
            course = self.course_of(rounds)
            line = course.line
            work: dict[str, Callable[[Firing], Sequence[Any]]] = {"update": self._update}
            for i in range(len(self.workers)):
                work |= {f"pull {i}": partial(self._pull, i), f"gradient {i}": partial(self._gradient, i)}
            order = {"here": course.order}
            self._runtimes[rounds] = Runtime(line, work, order=order, guard=self._guard(), name=line.name)
        return self._runtimes[rounds]

    def _guard(self) -> Bus | None:
        places = [*self.workers, *(x.placement for x in self.parameters.values())]
        ranks = {rank for where in places for rank in where.flat}
        return bus(sorted(ranks)) if world().rank in ranks else None

    def _pull(self, worker: int, firing: Firing) -> Sequence[Any]:
        """The weights of this time to a worker."""
        copies = self.copies[worker]
        refill([_filling(x, copies[name]) for name, x in self.parameters.items()], LIMIT, "pull")
        for x in copies.values():
            x._moved = None
        return (None,)

    def _gradient(self, worker: int, firing: Firing) -> Sequence[Any]:
        """A worker's step, and its gradients to the servers."""
        self._losses[firing.turn].append(self.steps[worker](*self._batches[firing.turn][worker]))
        step = self.steps[worker].planned
        if step.graph.writes:
            raise SbpError(
                f"ParameterServer: the buffer {next(iter(step.graph.writes))} is changed by each worker apart\n"
                "  servers would never have it: take a norm without running statistics, such as LayerNorm"
            )
        assert isinstance(step.program, Program)
        fillings: list[Filling] = []
        pushed: Pushed = {}
        for name in filter(self.copies[worker].__contains__, step.program.schedule.grads):
            x, of = self.copies[worker][name], _lies(self.parameters[name])
            grad, x.grad = x.grad, None
            assert isinstance(grad, GlobalTensor)
            grad = grad.to_global(sbp=x.sbp)
            pushed[name] = _empty(of)
            source = dict(zip(owned(x.placement), (s.detach() for s in grad._shards), strict=False))
            target = dict(zip(owned(of.placement), pushed[name], strict=True))
            fillings.append(Filling(refilling(_lies(x), of), source, target))
        refill(fillings, LIMIT, "push")
        return (pushed,)

    def _update(self, firing: Firing) -> Sequence[Any]:
        """The optimizer's step by the mean of what the workers have pushed."""
        parts: list[Pushed] = [slots[0].value for slots in firing.held]
        with torch.no_grad():
            for name in parts[0]:
                x = self.parameters[name]
                means = [sum(each[1:], each[0]) / len(parts) for each in zip(*(p[name] for p in parts), strict=True)]
                x.grad = wrap(tuple(means), _lies(x)) if means else None
            if any(owned(x.placement) for x in self.parameters.values()):
                self.optimizer.step()
            self.optimizer.zero_grad()
        return (None,) * len(self.workers)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SbpError(
            "a ParameterServer cannot be pickled, copied or saved, as it belongs to the ranks that made it\n"
            "  save the model and the optimizer that it was given, as by flow.save(path, model, optimizer=optimizer); "
            "between runs they are all there is, and a new one is made of them"
        )


def _checked(workers: Sequence[Placement]) -> int:
    if not workers:
        raise SbpError("ParameterServer: workers=[]\n  give the ranks of each, as in [flow.placement('cpu', [1]), ...]")
    seen: dict[int, int] = {}
    for at, where in enumerate(workers):
        for rank in where.flat:
            if seen.setdefault(rank, at) != at:
                raise SbpError(
                    f"ParameterServer: workers {seen[rank]} and {at} are both on rank {rank}\n"
                    "  give each ranks of its own"
                )
    return len(workers)


def _checked_seconds(seconds: Seconds | None, workers: int) -> Callable[[int, int], float]:
    if seconds is None:
        return lambda worker, at: 1.0
    if callable(seconds):
        return seconds
    each = list(seconds)
    if len(each) != workers or not all(isfinite(x) and x > 0 for x in each):
        raise SbpError(
            f"ParameterServer: seconds={each}\n  give {workers} numbers above 0, one for each worker; or a function"
        )
    return lambda worker, at: each[worker]


def _global(model: nn.Module) -> dict[str, GlobalTensor]:
    return {name: x for name, x in model.named_parameters() if isinstance(x, GlobalTensor)}


def _parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, GlobalTensor]:
    """The parameters of a model on servers, of which the optimizer is."""
    named, made = dict(model.named_parameters()), _global(model)
    plain = next((name for name in named if name not in made), None)
    if plain is not None or not named:
        raise SbpError(
            f"ParameterServer: {plain or 'the model'} is on no servers yet\n"
            "  say which: flow.nn.to_global(model, servers, S(0)), and make the optimizer behind that"
        )
    known = {id(x) for x in made.values()}
    if any(id(x) not in known for group in optimizer.param_groups for x in group["params"]):
        raise SbpError(
            "ParameterServer: the optimizer has a parameter that the model has not\n"
            "  make it of the parameters that are on the servers, behind flow.nn.to_global"
        )
    return made


def _lies(x: GlobalTensor) -> Layout:
    of = x._layout
    return Layout(of.placement, of.state, of.shape, of.dtype)


def _filling(source: GlobalTensor, target: GlobalTensor) -> Filling:
    ends = [dict(zip(owned(x.placement), (s.detach() for s in x._shards), strict=False)) for x in (source, target)]
    return Filling(refilling(_lies(source), _lies(target)), *ends)


def _empty(of: Layout) -> tuple[Tensor, ...]:
    ranks = owned(of.placement)
    return tuple([torch.empty(of.local_shape(r), dtype=of.dtype, device=device(of.placement, r)) for r in ranks])
