"""A graph read from its text: names, ops and layouts are looked up, and an unknown one is shown at its place."""

import ast
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast, get_args

import torch
from lark import Token

from ....placement import Placement, placement
from ....placement.errors import SbpflowError, did_you_mean
from ....placement.structure import mapped
from ....sbp import B, Layout, P, S, Sbp, State, layout
from ....sbp.logical import OffloadPlace
from ....sbp.schema import named_op, suggest
from ....sbp.signature import Reduction
from ....sbp.state import Border, Window
from ...encoders.named import encoder_of
from ...encoding import Encoding, MoveEncoder
from ..encode import named
from ..physical import Back, Box, GraphStep, Op, Physical, Source, Value, Var
from .syntax import (
    BackLine,
    CallLine,
    Factor,
    GraphLine,
    Keyword,
    Misread,
    Note,
    Typed,
    WrittenLayout,
    name_of,
    read,
    whole,
)

__all__ = ["from_text"]

KINDS = ["input", "parameter", "buffer", "constant"]


def from_text(text: str) -> Physical:
    """The graph that a text says."""
    lines = read(text)
    try:
        return _Reader(lines).graph()
    except Misread as error:
        raise error.shown(text) from None


MOVES = {"again", "encoder"}  # what may be said of one


class _Reader:
    """All that is known at a line of the text: the placements and the values above it."""

    def __init__(self, lines: list[Any]) -> None:
        self.lines = lines
        self.places: dict[str, Placement] = {}
        self.values: dict[str, Value] = {}
        self.lies: dict[tuple[WrittenLayout, Layout | None], Layout] = {}

    def graph(self) -> Physical:
        name, sources, steps, backs = "", list[Source](), list[GraphStep](), list[Back]()
        result, losses, writes = None, list[tuple[str, str | None]](), dict[str, str]()
        for line in self.lines:
            match line:
                case CallLine():
                    steps.append(self.step(line))
                case BackLine():
                    backs.append(self.back(line))
                case GraphLine("source", (kind, typed, rests, once, step, offload)):
                    sources.append(self.source(kind, typed, rests, once, step, offload))
                case GraphLine("place", (short, grid)):
                    self.place(short, grid)
                case GraphLine("graph", (label,)):
                    name = name_of(label)
                case GraphLine("result", (value,)):
                    result = self.resolved(value)
                case GraphLine("loss", (loss, start)):
                    losses.append((self.known(loss).name, None if start is None else self.known(start).name))
                case GraphLine("write", (buffer, value)):
                    written = self.known(buffer).name
                    if written in writes:
                        raise Misread(buffer, f"{buffer} is written twice", "keep the line with its last value")
                    writes[written] = self.known(value).name
        return Physical(name, tuple(sources), tuple(steps), named(backs), result, tuple(losses), writes)

    def place(self, short: Token, grid: Token) -> None:
        if short in self.places:
            raise Misread(short, f"the placement {short} is defined twice", f"call it p{len(self.places)}")
        try:
            self.places[short] = placement(grid.strip())
        except SbpflowError as error:
            raise _misread(grid, error) from None

    def source(
        self,
        kind: Token,
        typed: Typed,
        rests: tuple[WrittenLayout | None, ...],
        once: bool,
        step: tuple[Token | None, Token | None],
        offload: Token | None,
    ) -> Source:
        if kind not in KINDS:
            raise Misread(kind, f"{str(kind)!r} is no kind of source", did_you_mean(kind, KINDS))
        value = self.defined(typed)
        grads, states = (None if lie is None else self.lie(lie, value.layout) for lie in rests)
        if offload is not None and offload not in get_args(OffloadPlace):
            raise Misread(offload, f"{str(offload)!r} is no place on the host", "write cpu or disk")
        there = cast(OffloadPlace | None, offload and str(offload))
        many, owner = (None if number is None else whole(number) for number in step)
        if owner is not None and owner not in value.layout.placement:
            assert step[1] is not None
            raise Misread(step[1], f"there is no rank {owner} on {value.layout.placement}", "write one that has a part")
        return Source(value, str(kind), grads, states, many, offload=there, owner=owner, once=once)

    def step(self, line: CallLine) -> GraphStep:
        args = [self.resolved(arg) for arg in line.args if not isinstance(arg, Keyword)]
        kwargs: dict[str, Any] = {}
        for at, arg in enumerate(line.args):
            if isinstance(arg, Keyword):
                if arg.name in kwargs:
                    raise Misread(arg.name, f"the argument {arg.name} is given twice", "keep one of them")
                if at < len(args):
                    fix = f"move {arg.name}=... to the end"
                    raise Misread(arg.name, "an argument without a name stands behind one with a name", fix)
                kwargs[str(arg.name)] = self.resolved(arg.value)
        if line.op == "box":
            return self.box(line, args, kwargs)
        op = self.op(line.op, len(line.outputs))
        outputs = tuple(map(self.defined, line.outputs))
        return Op(op, tuple(args), kwargs, outputs, line.grad, line.origin, line.round)

    def box(self, line: CallLine, args: list[Any], kwargs: Mapping[str, Any]) -> Box:
        if (
            len(line.outputs) != 1
            or len(args) != 1
            or not isinstance(args[0], Var)
            or not line.grad
            or kwargs.keys() - MOVES
            or kwargs.get("again", True) is not True
            or not isinstance(kwargs.get("encoder", ""), str)
        ):
            raise Misread(line.op, "a box moves one value to one other", "write it as %y: float32[8] B = box(%x)")
        source, output = self.values[args[0].name].layout, self.defined(line.outputs[0])
        if (source.shape, source.dtype) != (output.layout.shape, output.layout.dtype):
            at = line.outputs[0].lie.type
            assert at is not None  # or it would not have been defined
            raise Misread(at, "a box changes where a value lies, not its shape or dtype", f"it moves {source}")
        encoder = _encoder(line.op, kwargs["encoder"]) if "encoder" in kwargs else None
        return Box(args[0].name, output, line.origin, "again" in kwargs, encoder)

    def op(self, token: Token, outputs: int) -> torch._ops.OpOverload:
        try:
            op, least, most = _find(str(token))
        except LookupError:
            raise Misread(token, f"unknown op {token}", suggest(str(token))) from None
        if outputs < least or (most is not None and outputs > most):
            makes = str(least) if least == most else f"at least {least}" if most is None else f"{least} to {most}"
            raise Misread(
                token,
                f"{token} makes {makes} {'tensor' if makes == '1' else 'tensors'}, not {outputs}",
                f"its schema is {op._schema}",
            )
        return op

    def back(self, line: BackLine) -> Back:
        into, of = self.known(line.into), self.known(line.of)
        src, dst = self.lie(line.src, of.layout), self.lie(line.dst, into.layout)
        made = Back(of.name, into.name, src, dst, line.bucket)
        if line.by is None:
            return made
        text, over, axes = str(ast.literal_eval(line.by)).rpartition(" over ")
        encoder = _encoder(line.by, text if over else axes)
        if not over:
            return replace(made, encoder=encoder)
        return replace(made, encoding=Encoding(encoder, tuple(map(int, axes.split(",")))))

    def defined(self, typed: Typed) -> Value:
        """The value of this line, new to those above."""
        name = name_of(typed.name)
        if name in self.values:
            raise Misread(typed.name, f"the value {typed.name} is defined twice", "each line makes a value of its own")
        value = self.values[name] = Value(name, self.lie(typed.lie, None), typed.grad)
        return value

    def known(self, token: Token) -> Value:
        name = name_of(token)
        value = self.values.get(name)
        if value is None:
            made = (y.name for line in self.lines if isinstance(line, CallLine) for y in line.outputs)
            later = any(name_of(other) == name for other in made)
            meant = did_you_mean(f"%{name}", [f"%{known}" for known in self.values])
            fix = "it is made further down" if later else meant if self.values else "no value stands above"
            raise Misread(token, f"unknown value {token}", fix)
        return value

    def resolved(self, value: Any) -> Any:
        """A literal with its values looked up."""
        return mapped(value, Token, lambda token: Var(self.known(token).name))

    def lie(self, lie: WrittenLayout, base: Layout | None) -> Layout:
        """The layout; its dtype and shape are those of `base` where they are not said."""
        known = self.lies.get((lie, base))
        if known is None:
            known = self.lies[lie, base] = self.laid(lie, base)
        return known

    def laid(self, lie: WrittenLayout, base: Layout | None) -> Layout:
        name = lie.place or "p0"
        place = self.places.get(name)
        if place is None:
            fix = did_you_mean(name, list(self.places)) if self.places else "write p0 = cpu:[0-3] above"
            raise Misread(lie.place or lie.sbp[0], f"unknown placement {name}", fix)
        if lie.type is not None:
            dtype, shape = _typed(lie.type)
        elif base is not None:
            dtype, shape = base.dtype, base.shape
        else:
            raise Misread(lie.sbp[0], "a value needs a dtype and a shape", "write them as float32[8, 64]")
        read = [_entry(token, len(shape)) for token in lie.sbp]
        entries, partial = [entry for entry, _ in read], tuple(axis for axis, (_, p) in enumerate(read) if p)
        if len(entries) == 1 and entries[0] is B:
            entries *= place.ndim
        if partial and len(entries) != len(read):
            partial = tuple(range(place.ndim))
        try:
            plain = layout(place, entries, shape, dtype)
        except SbpflowError as error:
            raise _misread(lie.sbp[0], error) from None
        state, dims = plain.state, list(plain.state.dims)
        windows: list[Window | None] = [None] * len(shape)
        for note in lie.notes:
            said = str(note.about)
            axes = said not in ("reduction", "window")
            factors = tuple(_factor(f, place, holes=said == "dim") for f in note.factors if axes)
            match said:
                case "dim":
                    dims[_dim(note, len(shape))] = factors
                case "partial":
                    state = state._replace(partial=factors)
                case "reduction":
                    state = state._replace(reduction=_reduction(note))
                case "gradient":
                    partial = factors
                case "window":
                    windows[_dim(note, len(shape))] = _window(note)
                case other:
                    fix = did_you_mean(other, ["dim 0", "partial", "reduction", "gradient", "window 0"])
                    raise Misread(note.about, f"{other!r} says nothing of a layout", fix)
        held = State(tuple(dims), state.partial, state.reduction, tuple(windows) if any(windows) else ())
        return Layout(place, held, shape, dtype, partial, plain.sbp)


def _encoder(at: Token, text: str) -> MoveEncoder:
    try:
        return encoder_of(text)
    except SbpflowError as error:
        raise _misread(at, error) from None


def _misread(at: Token, error: SbpflowError) -> Misread:
    """An error of a lower floor, shown at its place in the text."""
    first, *rest = str(error).split("\n")
    return Misread(at, first, rest[-1].strip() if rest else "")


def _typed(token: Token) -> tuple[torch.dtype, tuple[int, ...]]:
    name, _, sizes = token[:-1].partition("[")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        known = [word for word in dir(torch) if isinstance(getattr(torch, word), torch.dtype)]
        raise Misread(token, f"unknown dtype {name!r}", did_you_mean(name, known))
    parts = [part.strip() for part in sizes.split(",")] if sizes.strip() else []
    if not all(part.isdecimal() for part in parts):
        raise Misread(token, f"[{sizes}] is no shape", "sizes are whole numbers from 0", offset=len(name))
    return dtype, tuple(map(int, parts))


def _entry(token: Token, ndim: int) -> tuple[Sbp, bool]:
    """A signature of an axis, and whether the gradient of a B is P."""
    word, _, gradient = token.partition("/")
    kind, _, inner = word.removesuffix(")").partition("(")
    inner = inner.strip("\"' ")
    if kind == "S" and inner.lstrip("-").isdecimal() and not gradient:
        if not -ndim <= int(inner) < ndim:
            fix = f"dims are 0 to {ndim - 1}" if ndim else "a tensor without dims can be B or P"
            raise Misread(token, f"{token} is out of range for a tensor of {ndim} dims", fix)
        return S(int(inner)), False
    if kind == "P" and inner in ("", "sum", "max", "min") and not gradient:
        return P(cast(Reduction, inner or "sum")), False
    if word == "B" and gradient in ("", "P"):
        return B, bool(gradient)
    raise Misread(token, f"{token} is no signature of an axis", "write S(0), B, P, P(max), P(min), or B/P")


def _factor(factor: Factor, place: Placement, *, holes: bool) -> int:
    first, number = factor
    if number is not None:
        if not holes or first != "all" or whole(number) < 1:
            fix = "write an axis, or `all 2` for a hole" if holes else "write the axes"
            raise Misread(first, f"{first} {number} cannot stand here", fix)
        return -whole(number)
    axis = whole(first) if first.type == "NUMBER" else str(first)
    names = list(place.names or map(str, range(place.ndim)))
    if isinstance(axis, int) and 0 <= axis < place.ndim:
        return axis
    if place.names is None or axis not in place.names:
        raise Misread(first, f"{place} has no axis {first}", did_you_mean(str(axis), names))
    return names.index(str(axis))


def _window(note: Note) -> Window:
    """`window 2: 16, -1, 1, 1, 1`: the size of the dim that sees this one, first and last, step, and per."""
    words = [str(factor.first) for factor in note.factors]
    beyond = words.pop() if words and words[-1] in get_args(Border) else "ends"
    adds = words[-1:] == ["adds"]
    numbers = [int(word) for word in words[: len(words) - adds] if word.lstrip("-").isdecimal()]
    if len(numbers) != 5 or len(words) != 5 + adds or min(numbers[0], numbers[3] - 1, numbers[4] - 1) < 0:
        fix = (
            "write five whole numbers: size, first, last, step, per; `adds` for addends; and wraps, mirrors or repeats"
        )
        raise Misread(note.about, "a window cannot be read", fix)
    size, first, last, step, per = numbers
    return Window(size, first, last, step, per, adds, cast(Border, beyond))


def _dim(note: Note, ndim: int) -> int:
    if note.number is None:
        raise Misread(note.about, "which dim?", "write it as dim 0: 1, 0")
    dim = whole(note.number)
    if not 0 <= dim < ndim:
        raise Misread(
            note.number, f"dim {dim} is out of range for a tensor of {ndim} dims", f"dims are 0 to {ndim - 1}"
        )
    return dim


def _reduction(note: Note) -> Reduction:
    said = [str(factor.first) for factor in note.factors]
    if said not in (["sum"], ["max"], ["min"]):
        raise Misread(note.about, f"{', '.join(said)} is no reduction", "write sum, max or min")
    return cast(Reduction, said[0])


@lru_cache(maxsize=1 << 12)
def _find(name: str) -> tuple[torch._ops.OpOverload, int, int | None]:
    """The op of this name, and the least and the most tensors it makes (None: a list, of any length)."""
    op = named_op(name)
    kinds = [str(made.type) for made in op._schema.returns]
    tensors = [kind for kind in kinds if "Tensor" in kind]
    # Gradients that the backward of a convolution is told to leave out are None.
    optional = any(p.name == "output_mask" for p in op._schema.arguments)
    least = 0 if optional else sum(kind == "Tensor" for kind in tensors)
    return op, least, None if any("List" in kind for kind in tensors) else len(tensors)
