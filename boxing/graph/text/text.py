"""The physical graph as text, one value a line: it parses back exactly and differs where the graph does.

    graph step
    p0 = cpu:[0-3] as (data=2, tensor=2)

    input     %x: float32[8, 64] (S(0), B)
    parameter %w: float32[64, 64] (B/P, S(0)) grad, states (S(1), S(0))

    forward
      %h: float32[8, 64] (S(0), S(1)) grad = linear(%x, %w)  # in mlp.fc at model.py:12
      %y: float32[8, 64] (S(0), B) grad = box(%h)  # all_gather over tensor, 512 B a rank

    backward
      %h <- %y: (S(0), B) -> (S(0), S(1))  # slice, nothing is sent

    return %y

A value is dtype[shape], a signature, and `grad` if a gradient comes back; it is on p0 where no `on p1` follows.
`grads` and `states` are said where a parameter's gradient, or the states of its optimizer, lie otherwise than itself;
`whole 2` where the optimizer steps on whole tensors, with two whole states; `owner 3` where rank 3 has it whole and
keeps its states; `offload` where the optimizer has them on the host.
`B/P` is B with a gradient that is P. Brackets have what a signature leaves open, where it is not the usual:

    [dim 0: tensor, data]     the order of nested splits
    [dim 0: all 2, data]      a hole: cut in 2, and every rank holds both
    [partial: tensor, data]   [reduction: max]   [gradient: data]

`by 'sign() over 0'` behind a gradient's move says that it is encoded over axis 0, `by 'int8()'` that it hops encoded.

`round 0 2` behind a call says that it belongs to round 2 of a composite over axis 0, and `indices(1, 0)` in its
arguments is the index ranges of dim 0 that a rank holds of its second tensor.

Comments are for the reader, but `in`, `of`, `at`, `recompute` and `offload` in one (module, repeated block, line,
region that the backward runs again, where what it saves lies meanwhile) are read back as the origin.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch

from ....placement import Placement
from ....placement.errors import SbpError, SbpflowError
from ....sbp import B, Layout
from ....sbp.call import Call, Indices
from ....sbp.logical import Origin
from ....sbp.state import State, state_of
from ...boxing import Boxing, between
from ...figures import volume
from ..physical import Back, Box, GraphStep, Op, Physical, Source, Value, Var

__all__ = ["difference", "fingerprint", "to_text"]

_PLAIN = re.compile(r"[\w./@]+(-[\w./@]+)*")
_BARE = re.compile(r"[^\s'\"]+")


def to_text(graph: Physical) -> str:
    """The graph as text; `from_text` in parse.py makes an equal one of it."""
    return "\n".join(_Writer(graph, comments=True).lines()) + "\n"


def fingerprint(graph: Physical) -> int:
    """A number that two graphs share only if they have the same text but for comments, the same regions and
    offloads."""
    origins = [(at, step.origin) for at, step in enumerate(graph.steps) if isinstance(step, Op)]
    regions = [str(at) for at, origin in origins if origin.recompute]
    offloads = [f"{at} {origin.offload}" for at, origin in origins if origin.offload]
    return crc32("\n".join([*_Writer(graph, comments=False).lines(), *regions, *offloads]).encode())


def difference(a: Physical, b: Physical) -> str:
    """The first line in which the texts of two graphs differ, comments left out; empty if there is none."""
    ours, theirs = (list(_Writer(graph, comments=False).lines()) for graph in (a, b))
    for number, (left, right) in enumerate(zip_longest(ours, theirs), 1):
        if left != right:
            said = [side if side is not None else "(the text ends)" for side in (left, right)]
            return f"line {number}\n- {said[0]}\n+ {said[1]}"
    return ""


class _Writer:
    """Writes one graph; remembers how its layouts and placements are written."""

    def __init__(self, graph: Physical, *, comments: bool) -> None:
        self.graph, self.comments = graph, comments
        self.places = {p: f"p{i}" for i, p in enumerate(dict.fromkeys(lie.placement for lie in _layouts(graph)))}
        self.lies: dict[Layout, str] = {}
        self.ways: dict[tuple[Layout, Layout], str] = {}

    def lines(self) -> Iterator[str]:
        graph = self.graph
        yield f"graph {_name(graph.name)}"
        yield from (f"{name} = {place}" for place, name in self.places.items())
        yield from self.section("", map(self.source, graph.sources))
        yield from self.section("forward", (line for step in graph.steps for line in self.step(step)))
        yield from self.section("backward", map(self.back, graph.backs))
        yield from self.section("", self.ends())

    def section(self, title: str, lines: Iterable[str]) -> Iterator[str]:
        """A blank line, the title, and what belongs to it; nothing if that is empty."""
        for at, line in enumerate(lines):
            if not at:
                yield from ("", title) if title else ("",)
            yield f"  {line}" if title else line

    def ends(self) -> Iterator[str]:
        graph = self.graph
        if graph.result is not None:
            yield f"return {_literal(graph.result, 'the result')}"
        for loss, start in graph.losses:
            yield f"loss %{_name(loss)}" + (f" from %{_name(start)}" if start is not None else "")
        yield from (f"write %{_name(name)} = %{_name(value)}" for name, value in sorted(graph.writes.items()))

    def source(self, source: Source) -> str:
        apart = {"grads": source.grads, "states": source.states}
        said = [f", {kind} {self.near(of, source.value.name)}" for kind, of in apart.items() if of is not None]
        said += [", once"] * source.once
        said += [f", whole {source.whole}"] * (source.whole is not None)
        said += [f", owner {source.owner}"] * (source.owner is not None)
        said += [f", offload {source.offload}"] if source.offload else []
        return f"{source.kind:<9} {self.value(source.value)}{''.join(said)}"

    def step(self, step: GraphStep) -> Iterator[str]:
        """A line for each value that comes out, the call behind the last."""
        *first, last = map(self.value, step.outputs) if step.outputs else [""]
        yield from (f"{value}," for value in first)
        if isinstance(step, Box):
            known = self.graph.values.get(step.source)
            coded = f", encoder={str(step.encoder)!r}" if step.encoder else ""
            call = f"box(%{_name(step.source)}{', again=True' if step.again else ''}{coded})"
            notes = [self.way(known.layout, step.output.layout)] if known and self.comments and not coded else []
        else:
            call, notes = _call(step), []
        text = f"{last} = {call}" if last else call
        yield text + self.comment(*notes, _origin(step.origin))

    def back(self, back: Back) -> str:
        src, dst = self.near(back.src, back.of), self.near(back.dst, back.into)
        bucket = f" bucket {back.bucket}" if back.bucket is not None else ""
        said = "" if back.encoder is None else f" by {str(back.encoder)!r}"
        if back.encoding is not None:
            said = f" by {f'{back.encoding.encoder} over {_axes(back.encoding.axes)}'!r}"
        way = self.comment(_told([back.boxing]) if said else self.way(back.src, back.dst)) if self.comments else ""
        return f"%{_name(back.into)} <- %{_name(back.of)}: {src} -> {dst}{bucket}{said}{way}"

    def value(self, value: Value) -> str:
        where = value.layout
        return f"%{_name(value.name)}: {_type(where)} {self.lie(where)}" + (" grad" if value.grad else "")

    def near(self, where: Layout, name: str) -> str:
        """A layout of a value that is known: its dtype and shape are said only if they are others."""
        known = self.graph.values.get(name)
        same = known is not None and (known.layout.shape, known.layout.dtype) == (where.shape, where.dtype)
        return self.lie(where) if same else f"{_type(where)} {self.lie(where)}"

    def lie(self, where: Layout) -> str:
        known = self.lies.get(where)
        if known is None:
            place = self.places[where.placement]
            known = self.lies[where] = _signature(where) + (f" on {place}" if place != "p0" else "")
        return known

    def way(self, src: Layout, dst: Layout) -> str:
        known = self.ways.get((src, dst))
        if known is None:
            known = self.ways[src, dst] = _way(src, dst)
        return known

    def comment(self, *notes: str) -> str:
        said = "; ".join(note for note in notes if note)
        return f"  # {said}" if said and self.comments else ""


def _layouts(graph: Physical) -> Iterator[Layout]:
    """Every layout, in the order of the text."""
    for source in graph.sources:
        yield source.value.layout
        yield from (of for of in (source.grads, source.states) if of is not None)
    for step in graph.steps:
        yield from (value.layout for value in step.outputs)
    for back in graph.backs:
        yield from (back.src, back.dst)


def _way(src: Layout, dst: Layout) -> str:
    """The collectives of a move, for the reader; one that is refused says so when the graph runs, not in print."""
    try:
        how = between(src, dst)
    except SbpflowError:
        return ""
    return _told([how])


def _told(boxings: Sequence[Boxing]) -> str:
    route = " then ".join(str(move).partition(" -> ")[0] for how in boxings for move in how.moves)
    most = sum(how.bytes for how in boxings)
    return ", ".join(filter(None, [route, f"{volume(most)} a rank" if most else "nothing is sent"]))


def _axes(axes: Iterable[int]) -> str:
    return ", ".join(map(str, axes))


def _origin(origin: Origin) -> str:
    parts = {"in": origin.module, "of": origin.block, "at": origin.line, "recompute": origin.recompute}
    said = [f"{word} {at if _BARE.fullmatch(at) else repr(at)}" for word, at in parts.items() if at]
    return " ".join([*said, *([f"offload {origin.offload.to} {origin.offload.ahead}"] if origin.offload else [])])


def _type(where: Layout) -> str:
    return f"{str(where.dtype).removeprefix('torch.')}{list(where.shape)}"


def _signature(where: Layout) -> str:
    """The signature, and in brackets what of the state does not follow from it."""
    state, place = where.state, where.placement
    usual = state_of(where.sbp, len(where.shape), place.shape)
    inline = where.grad_partial == tuple(sorted({a for a in where.grad_partial if where.sbp[a] is B}))
    partial = where.grad_partial if inline else ()
    entries = [repr(e).replace('"', "") + ("/P" if a in partial else "") for a, e in enumerate(where.sbp)]
    text = f"({', '.join(entries)})" if len(entries) > 1 else entries[0]
    notes = list(_notes(state, usual, place))
    if not inline:
        notes.append(f"gradient: {_factors(where.grad_partial, place)}")
    return text + (f" [{'; '.join(notes)}]" if notes else "")


def _notes(state: State, usual: State, place: Placement) -> Iterator[str]:
    for dim, factors in enumerate(state.dims):
        if factors != usual.dims[dim]:
            yield f"dim {dim}: {_factors(factors, place)}".rstrip()
    if state.partial != usual.partial:
        yield f"partial: {_factors(state.partial, place)}".rstrip()
    if state.reduction != usual.reduction:
        yield f"reduction: {state.reduction}"
    for dim, window in enumerate(state.windows):
        if window is not None:
            said = [*map(str, window[:5]), *(["adds"] if window.adds else []), window.beyond]
            yield f"window {dim}: {', '.join(said)}".removesuffix(", ends")


def _factors(factors: tuple[int, ...], place: Placement) -> str:
    return ", ".join(f"all {-f}" if f < 0 else place.names[f] if place.names else str(f) for f in factors)


def _call(step: Op) -> str:
    name = Call(step.op, (), {}, ()).name
    at = {p.name: i for i, p in enumerate(step.op._schema.arguments)}
    args = [_literal(arg, name) for arg in step.args]
    # In the order of the schema: equal graphs have equal texts.
    for key in sorted(step.kwargs, key=lambda key: at.get(key, len(at))):
        args.append(f"{key}={_literal(step.kwargs[key], name)}")
    turn = (
        " round " + " ".join(filter(None, (", ".join(map(str, of.axes)), str(of.number)))) if (of := step.round) else ""
    )
    return f"{name}({', '.join(args)})" + ("" if step.grad else " no_grad") + turn


def _name(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else repr(name)


def _literal(value: Any, of: str) -> str:
    """An argument or a part of the result, as it is read back."""
    match value:
        case Var(name):
            return f"%{_name(name)}"
        case None | bool():
            return repr(value)
        case int() | float() | str():
            plain = next(kind for kind in (int, float, str) if isinstance(value, kind))
            return plain.__repr__(value)  # an enum's own would not be read back
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value).removeprefix("torch.")
        case torch.device():
            return f"device({str(value)!r})"
        case Indices(slot, dim):
            return f"indices({slot}, {dim})"
        case slice():
            return f"slice({', '.join(_literal(part, of) for part in (value.start, value.stop, value.step))})"
        case list():
            return f"[{', '.join([_literal(part, of) for part in value])}]"
        case tuple():
            return f"({', '.join([_literal(part, of) for part in value])}{',' if len(value) == 1 else ''})"
        case dict():
            return "{" + ", ".join([f"{_literal(k, of)}: {_literal(v, of)}" for k, v in value.items()]) + "}"
    raise SbpError(
        f"{of} holds a {type(value).__name__}, which has no text in a graph\n  found {value!r}\n"
        "  tensors stand as values; numbers, texts, dtypes, devices, lists, tuples and dicts of them can be written"
    )
