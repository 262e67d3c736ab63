"""Steps of a graph that a picture shows, and the modules that have a frame there."""

from collections.abc import Callable, Iterable

from ....placement.errors import SbpError
from ..physical import Box, GraphStep, Physical
from .scene import tokens

__all__ = ["framed", "shown_steps"]


def shown_steps(graph: Physical, focus: str | None, shown: Callable[[GraphStep], bool]) -> list[GraphStep]:
    """The steps to draw: without those that others stand for; with a focus those inside, and moves at its border."""
    steps = [step for step in graph.steps if shown(step)]
    if focus is None:
        return steps
    inside = [s for s in steps if s.origin.module == focus or s.origin.module.startswith(focus + ".")]
    if not inside:
        known = dict.fromkeys(tokens(s.origin.module)[0] for s in graph.steps if s.origin.module)
        raise SbpError(
            f"focus={focus!r}: the graph {graph.name!r} has no op in a module of this path\n"
            f"  its outermost modules are {', '.join(known) or 'none'}\n"
            f"  name one of them, or what is inside it, as in focus={next(iter(known), '')!r}"
        )
    made = {y.name for step in inside for y in step.outputs}
    used = {name for step in inside for name in step.inputs}
    kept = {id(step) for step in inside}
    return [s for s in steps if id(s) in kept or (isinstance(s, Box) and (s.source in made or s.output.name in used))]


def framed(modules: Iterable[tuple[str, bool]]) -> set[str]:
    """The modules that are worth a frame: those with parts, or moves between their ops."""
    counts: dict[str, int] = {}
    inner: set[str] = set()  # with parts or moves
    for module, op in modules:
        levels = tokens(module)
        for k in range(len(levels)):
            path = ".".join(levels[: k + 1])
            counts[path] = counts.get(path, 0) + op
            if k + 1 < len(levels) or not op:
                inner.add(path)
    return {path for path, n in counts.items() if n > 1 and path in inner}
