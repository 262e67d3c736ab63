"""Encoders put on the moves of a graph: gradients of parameters that are sums, and values that hop to other ranks."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ...placement import Placement
from ...placement.errors import SbpError
from ...sbp import Layout
from ..encoding import Encoding, MoveEncoder
from .physical import Back, Box, Physical

__all__ = ["SaidEncoder", "encoded", "named"]


class SaidEncoder(NamedTuple):
    """An encoder as it is said of a parameter, by a pattern and perhaps over some axes, or of a module's input."""

    encoder: MoveEncoder
    over: tuple[str, ...] | None = None
    pattern: str = ""

    def axes(self, place: Placement) -> tuple[int, ...]:
        """The axes of more than one rank that are meant."""
        names = place.names or ("",) * place.ndim
        return tuple(a for a, n in enumerate(place.shape) if n > 1 and (self.over is None or names[a] in self.over))

    def moves(self, src: Layout, dst: Layout) -> tuple[tuple[Layout, Layout], ...]:
        """The moves of a gradient under this encoder, which price it; none if it goes as it is, or is refused."""
        ends = _ends(src, dst, self)
        if not ends or not src.numel:
            return ()
        try:
            self.encoder.check_sum(src, dst, ends, "")
        except SbpError:  # a chosen one is checked again, and told by its name
            return ()
        return self.encoder.sums([(src, dst)], [Encoding(self.encoder, ends)]).ends


def encoded(
    graph: Physical, grads: Mapping[str, SaidEncoder], hops: Mapping[str, SaidEncoder] | None = None
) -> Physical:
    """The graph with the encoders that are said of its parameters' gradients, and of what hops to modules."""
    if not grads and not hops:
        return graph
    boxes = {box.output.name: box.encoder for box in graph.boxes}
    if hops:
        made = _coming(graph, hops)
        boxes = {box.output.name: made.get(box.output.name, box.encoder) for box in graph.boxes}
        steps = tuple(replace(s, encoder=boxes[s.output.name]) if isinstance(s, Box) else s for s in graph.steps)
        graph = replace(graph, steps=steps)
    backs = [_homeward(graph, back, grads) or replace(back, encoder=boxes.get(back.of)) for back in graph.backs]
    if graph.losses:
        _check_met(graph, backs, grads)
    return replace(graph, backs=named(backs))


def named(backs: Iterable[Back]) -> tuple[Back, ...]:
    """Moves with the names under which errors of those that are encoded are kept. A name is the parameter's, with a
    number where its gradient comes in several ways."""
    seen = Counter[str]()
    found = []
    for back in backs:
        if back.encoding is not None:
            seen[back.into] += 1
            many = seen[back.into]
            back = replace(back, encoding=replace(back.encoding, name=f"{back.into}{f' {many}' if many > 1 else ''}"))
        found.append(back)
    return tuple(found)


def _homeward(graph: Physical, back: Back, grads: Mapping[str, SaidEncoder]) -> Back | None:
    """A move of a parameter's gradient with its encoder, if it is one and adds up over an axis that is meant."""
    said = grads.get(back.into)
    if said is None or back.src.placement is not back.dst.placement or not back.src.numel:
        return None
    ends = _ends(back.src, back.dst, said)
    if not ends:
        return None
    said.encoder.check_sum(back.src, back.dst, ends, f"the gradient of {back.into}")
    return replace(back, encoding=Encoding(said.encoder, ends))


def _ends(src: Layout, dst: Layout, said: SaidEncoder) -> tuple[int, ...]:
    """The axes among those meant along which a move adds up a gradient."""
    meant = said.axes(src.placement)
    return tuple(a for a in src.state.partial if a not in dst.state.partial and a in meant)


def _check_met(graph: Physical, backs: Iterable[Back], grads: Mapping[str, SaidEncoder]) -> None:
    """Refuse a pattern no gradient of which is a sum over more than one rank of an axis that it means."""
    met = {grads[back.into].pattern for back in backs if back.encoding is not None and back.into in grads}
    for source in graph.sources:
        name, place = source.value.name, source.value.layout.placement
        said = grads.get(name)
        if said is None or not source.value.grad or said.pattern in met:
            continue
        wrong = [axis for axis in said.over or () if axis not in (place.names or ())]
        if wrong:
            raise SbpError(
                f"compress: {name} is on {place}, which has no axis {wrong[0]!r}\n"
                f"  say over= one of {', '.join(place.names or ()) or 'none: the placement has no names of axes'}"
            )
        axes = said.axes(place)
        if not axes:
            continue  # the same program on one rank
        way = "name parameters whose gradients are added up, such as those of data parallelism, or leave it out"
        if source.value.layout.state.split.issuperset(axes) and place.names:
            whole = ", ".join(f"{place.names[a]!r}: B" for a in axes)
            way += f"\n  it is a sum where the parameter is whole: flow.nn.shard(model, {{{name!r}: {{{whole}}}}})"
        raise SbpError(
            f"compress: no gradient that {said.pattern!r} means is a sum over "
            f"{' or '.join(said.over or ()) or 'ranks'}\n"
            f"  {name} {source.value.layout.lie} on {place}, and its gradient comes as {graph.gradient(name).lie}\n"
            f"  {way}"
        )


def _coming(graph: Physical, hops: Mapping[str, SaidEncoder]) -> dict[str, MoveEncoder]:
    """The encoders of moves by which values that are computed come to modules from other ranks."""
    sources = {s.value.name for s in graph.sources}
    given = set(sources)
    found: dict[str, MoveEncoder] = {}
    met: set[str] = set()
    for step in graph.steps:
        if given.issuperset(step.inputs) and isinstance(step, Box):
            given.add(step.output.name)  # an argument or a weight, which comes once
            continue
        if not isinstance(step, Box):
            continue
        src, dst = graph.layout(step.source), step.output.layout
        said = hops.get(step.origin.module)
        if said is None or not {*src.placement.flat}.isdisjoint(dst.placement.flat):
            continue
        if not src.dtype.is_floating_point:
            continue
        said.encoder.check_hop(src, dst, f"a value that comes to {step.origin.module}, {step.source},")
        met.add(said.pattern)
        found[step.output.name] = said.encoder
    unmet = {said.pattern for said in hops.values()} - met
    if unmet:
        raise SbpError(
            f"compress: nothing comes from other ranks to what {sorted(unmet)[0]!r} means\n"
            "  name the modules that a stage begins with, or leave it out"
        )
    return found
