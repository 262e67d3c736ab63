"""Additions to a planned step: actors that take part in it, and arguments that they bring a micro-batch at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeAlias

from torch import Tensor

from ...actors.added.addition import Added, opened
from ...actors.protocol.network import Network
from ...placement.errors import ScheduleError, ShapeError
from ...sbp.call import refs_in
from ..graph.compiler.generated_calls import Shards
from ..graph.graph import StepGraph
from ..graph.pieces import Pieces, Sized
from ..graph.run.network import task_actors
from ..graph.step import Step
from .added_actors import OpenStep

__all__ = ["Addition", "OpenGraph"]

Addition: TypeAlias = "Added | Callable[[Network], Added]"


class OpenGraph(StepGraph):
    """A graph whose steps in micro-batches take more actors."""

    def add(self, addition: Addition) -> Self:
        """Have more actors take part in the step that was planned last, which has not run; returns the graph.

        `addition` is a `flow.actors.Added` of `step.network`, or a function that makes one of a network: that is
        called for every step that is planned from now on. What is no function is of the network of this one: a step
        with another, as after `move`, refuses it.
        """
        if self._last is None and isinstance(addition, Added):
            _ = self.planned  # refuses
        network = None
        if self._last is not None:
            network = self._last.open_network if isinstance(addition, Added) else None
            self._last.add(partial(add_to, addition))
        self._additions.append(partial(add_again, addition, network))
        return self


def add_to(addition: Addition, pieces: Pieces, titles: Mapping[str, str]) -> dict[str, str]:
    """Open the network of a step that has not run; `titles` are the arguments by path, as the user calls them. Returns
    the registers that bring arguments, by the paths of these."""
    proved = pieces.proved
    added = addition if isinstance(addition, Added) else addition(proved.network)
    if not isinstance(added, Added):
        raise ScheduleError(
            f"{proved.name}: {type(added).__name__} was to be added\n"
            "  give it flow.actors.Added(network, work=..., ranks=...), or a function of the network that returns one"
        )
    before = proved.opening
    assert before is None or isinstance(before, OpenStep)
    paths = fed_paths(pieces, added, titles, {} if before is None else before.feeds)
    made = opened(proved.network, proved.proof, proved.places, added, before)
    each = [pieces.sized[key] for key in proved.keys]  # and not the pieces, whose program threads must not keep alive
    proved.open(OpenStep(**vars(made), fed=partial(_fed, proved.name, each, titles)))
    return paths


def add_again(addition: Addition, network: Network | None, step: Step) -> None:
    """Add to a step; what was made of a `network` to no other."""
    if network is not None:
        refuse_other(network, step.open_network, step.name)
    step.add(partial(add_to, addition))


def refuse_other(base: Network, network: Network, name: str) -> None:
    """Refuse an addition to the network of one step for another, whose own order and slots it would replace."""
    if _untimed(base) != _untimed(network):
        raise ScheduleError(
            f"{name}: what was added was made of the network of another step\n"
            "  compile it anew, and give a function, called for every step: add(lambda network: flow.actors.Added(...))"
        )


def _untimed(network: Network) -> tuple[object, ...]:
    """All of a network but how long things take."""
    actors = tuple(replace(actor, time=1.0, times=()) for actor in network.actors)
    return actors, network.registers


def fed_paths(pieces: Pieces, added: Added, titles: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """The registers that bring arguments, by the paths of these: who reads one has to take its register. `before` are
    the arguments of those that bring one already."""
    found: dict[str, str] = {}
    brought = {argument: register for register, argument in before.items()}
    for register, title in added.feeds.items():
        path = _path(title, titles)
        one = pieces.first
        if len(pieces.proved.firsts) > 1:  # whose tasks would take the first slots, all of them the same
            raise ScheduleError(
                f"{pieces.options.name}: {register} brings {title}, and under {pieces.proved.schedule.name} "
                "micro-batches go two routes by turns, where a task has but every other\n"
                f"  pass {title} to the step, or take a schedule of one route, such as '1f1b'"
            )
        if brought.setdefault(title, register) != register:
            raise ScheduleError(
                f"{pieces.options.name}: {title} is brought by {brought[title]} and by {register}\n"
                "  let one register bring it, and every actor that reads it take that"
            )
        if path not in one.taken.values() or path in one.micro.pasts:
            known = ", ".join(titles.get(each, each) for each in dict.fromkeys(one.taken.values()))
            raise ScheduleError(f"{pieces.options.name}: there is no argument {title}\n  there are {known}")
        for sized in pieces.sized.values():
            for known_ in sized.micro.known:
                graph = known_.graph
                used = {*refs_in(graph.result), *(n for op in graph.ops for n in op.inputs)}
                if any(n in used and s.kind == "input" and s.name == path for n, s in enumerate(graph.sources)):
                    raise ScheduleError(
                        f"{pieces.options.name}: {title} is brought by {register}, a micro-batch at a time, and "
                        f"something is computed of all of it before\n  pass {title} to the step, and no register of it"
                    )
        for actor in _readers(pieces, path):
            if all(take.register != register for take in added.network.actor(actor).takes):
                raise ScheduleError(
                    f"{pieces.options.name}: {actor} reads {title} and does not take {register}, which brings it\n"
                    f"  let it, as in network.reading({actor!r}, Take({register!r}))"
                )
        found[path] = register
    return found


def _path(title: str, titles: Mapping[str, str]) -> str:
    return next((path for path, called in titles.items() if called == title), title)


def _readers(pieces: Pieces, path: str) -> list[str]:
    """The actors that read an argument before any other in their process does."""
    found: dict[str, None] = {}
    of = task_actors(pieces.proved.network.actors)
    for (route, _), one in pieces.sized.items():
        names = {name for name, of_ in one.taken.items() if of_ == path}
        for task in one.variant.tasks.tasks.values():
            reads = {str(register) for do in task.todo for register in do.reads}
            if task.name.kind == "F" and names & reads:
                found[of[str(task.name.shifted(route * pieces.proved.count))]] = None
    return list(found)


def _fed(
    step: str, each: Sequence[Sized], titles: Mapping[str, str], k: int, title: str, value: Any
) -> dict[str, Shards]:
    """An argument of one of all micro-batches as it lies."""
    one, path = each[k], _path(title, titles)
    wanted = next(one.graph.layout(name) for name, of in one.taken.items() if of == path)
    if not isinstance(value, Tensor) or tuple(value.shape) != wanted.shape or value.dtype is not wanted.dtype:
        told = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ShapeError(
            f"{step}: micro-batch {k} of {title} is {told}\n"
            f"  the step was planned for {wanted.shape} {wanted.dtype}, one of {len(each)} micro-batches"
        )
    return {name: cut(value) for name, cut in one.cut.items() if one.taken[name] == path}
