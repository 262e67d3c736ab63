"""Words that have moved: where each is now, for those who know the old one.

A word is its full name, as it was; a module or class that had it says in an AttributeError where to look.
"""

from collections.abc import Callable, Mapping
from typing import NoReturn

__all__ = ["MOVED", "MovedName", "missing_of"]

MOVED: Mapping[str, str] = {
    **{
        f"sbpflow.{name}": f"flow.boxing.{name}"
        for name in ("box_async", "close", "gather", "layout_of", "lower_bound", "owned", "scatter")
    },
    "sbpflow.Graph": "flow.nn.Graph",
    "sbpflow.Schedule": "flow.actors.Schedule",
    **{
        f"sbpflow.nn.{name}": f"flow.{name}"
        for name in (
            *("GlobalTensor", "check_rule", "explain", "explicit", "rule", "from_dtensor", "to_dtensor", "from_local"),
            *("arange", "empty", "empty_like", "eye", "full", "full_like", "hann_window", "linspace", "logspace"),
            *("normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
            *("randperm", "tensor", "zeros", "zeros_like"),
        )
    },
    "sbpflow.plan": "flow.find_plan",
    "sbpflow.nn.Graph.step": "planned",
    "sbpflow.nn.Graph.plan": "plan_for(*arguments)",
    "sbpflow.nn.ParameterServer.plan": "course_of(rounds)",
    "sbpflow.boxing.record.Moved.plan": "boxing",
    "sbpflow.boxing.graph.move_table.MoveRow.plan": "boxing",
    "sbpflow.boxing.Plan": "flow.boxing.Boxing",
    "sbpflow.boxing.BoxingPlan": "flow.boxing.Boxing",
    "sbpflow.boxing.plan": "flow.boxing.between",
    "sbpflow.actors.pipeline": "flow.actors.network_of",
    "sbpflow.actors.Run": "flow.actors.Simulation",
    "sbpflow.actors.Preview.write": "draw(path)",
    "sbpflow.actors.timeline.timeline.Timeline.write": "draw(path) or save(path)",
}


def missing_of(module: str) -> Callable[[str], NoReturn]:
    """The answer of a module of this name for one that it lacks.

    >>> missing_of("sbpflow.boxing")("Plan")
    Traceback (most recent call last):
    AttributeError: module 'sbpflow.boxing' has no attribute 'Plan': it is flow.boxing.Boxing now
    """

    def missing(name: str) -> NoReturn:
        now = MOVED.get(f"{module}.{name}")
        where = "" if now is None else f": it is {now} now"
        raise AttributeError(f"module {module!r} has no attribute {name!r}{where}", name=name)

    return missing


class MovedName:
    """A method's old name in its class, from which it is looked up."""

    def __init__(self, old: str) -> None:
        self.old = old

    def __get__(self, made: object, owner: type) -> NoReturn:
        name = self.old.rpartition(".")[2]
        raise AttributeError(f"{owner.__name__!r} has no attribute {name!r}: it is {MOVED[self.old]} now", name=name)
