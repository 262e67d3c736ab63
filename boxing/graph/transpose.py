"""The moves of gradients: each box backwards, and for each parameter what brings its gradient together."""

from collections.abc import Iterator
from dataclasses import replace

from ...sbp import Layout
from .physical import Back, Box, Op, Physical, Source

__all__ = ["with_backs"]


def with_backs(graph: Physical) -> Physical:
    """The graph with the gradient moves that its boxes ask for, in the order in which a backward pass reaches them.

    A box of a parameter goes back to where the optimizer wants the gradient, at once. Where no gradient comes back,
    such as to a value that only statistics are made of, nothing is moved.
    """
    if not graph.losses:
        return replace(graph, backs=())
    return replace(graph, backs=tuple(_backs(graph)))


def _backs(graph: Physical) -> Iterator[Back]:
    sources = {s.value.name: s for s in graph.sources}
    reached = {name for name, _ in graph.losses}  # by gradients
    direct: set[str] = set()  # what ops take as it is, and have a gradient for
    first_use = {name: at for at, step in reversed(list(enumerate(graph.steps))) for name in step.inputs}
    ends: dict[int, list[Source]] = {}
    for source in graph.sources:
        if source.value.name in first_use:
            ends.setdefault(first_use[source.value.name], []).append(source)
    for at, step in reversed(list(enumerate(graph.steps))):
        if any(y.name in reached for y in step.outputs) and (isinstance(step, Box) or step.grad):
            wanting = [name for name in step.inputs if graph.values[name].grad]
            reached.update(wanting)
            if isinstance(step, Op):
                direct.update(wanting)
            elif wanting:
                src = graph.gradient(step.output.name)
                target = _target(graph, sources, step.source)
                yield Back(step.output.name, step.source, src, target, encoder=step.encoder)
        for source in ends.get(at, ()):
            of = source.value
            if source.kind == "parameter" and of.name in direct and graph.gradient(of.name) != source.home:
                yield Back(of.name, of.name, graph.gradient(of.name), source.home)


def _target(graph: Physical, sources: dict[str, Source], name: str) -> Layout:
    source = sources.get(name)
    if source is not None and source.kind == "parameter":
        return source.home
    return graph.gradient(name)
