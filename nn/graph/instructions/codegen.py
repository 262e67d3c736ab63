"""An order as one straight-line Python function: functions are bound beforehand, and values are local names.

v0_0, v0_1 = shards["x"]                  every rank that this process owns has names of its own
v2_0, v3_0, = f0(v0_0, v1_0)              a segment: its outputs, and what it saved
m0 = start0((v2_0, v2_1,))                a move that goes on meanwhile
del v2_0, v2_1

While torch's profiler records, the same lines run with a span around each segment and move, so that a trace names them:

with span("forward blocks.0: norm, up"):
    v2_0, v3_0, = f0(v0_0, v1_0)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from ....boxing.graph.physical import Physical
from ....placement.world import owned
from ..compiler.compiled_segments import CompiledSegments
from ..compiler.source_text import SourceText, tuple_of
from ..lower.registers import LocalRegister
from .instruction import Instruction
from .order import Order

__all__ = ["Bundles", "Running", "function"]


class Bundles(NamedTuple):
    """Bundles that a function is handed and hands on: registers in the order of their shards in a tuple, or these by
    name."""

    takes: tuple[tuple[LocalRegister, ...], ...]
    gives: tuple[tuple[LocalRegister, ...] | Mapping[str, LocalRegister], ...]

    @property
    def given(self) -> list[LocalRegister]:
        return [y for given in self.gives for y in (given if isinstance(given, tuple) else given.values())]

    @property
    def taken(self) -> list[LocalRegister]:
        return [x for taken in self.takes for x in taken]


@dataclass(frozen=True, eq=False)
class Running:
    """A function of the sources' shards and the bundles it takes, to those it gives. `owns` says of all that it gives
    in tuples whether its memory is nobody else's; `spanned` makes the function that tells a profiler what it is at."""

    plain: Callable[..., tuple[Any, ...]]
    text: str
    owns: tuple[tuple[bool, ...], ...]
    spanned: Callable[[], Callable[..., tuple[Any, ...]]]

    @property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """The function to call now."""
        return self.traced if torch.autograd.profiler._is_profiler_enabled else self.plain

    @cached_property
    def traced(self) -> Callable[..., tuple[Any, ...]]:
        """The same with spans, made when a profiler first records it."""
        return self.spanned()


def function(segments: CompiledSegments, plan: Order, bundles: Bundles, name: str, *, handed: bool = False) -> Running:
    """An order as a function. `handed`: the seeds of gradients and random numbers are handed in with the sources."""
    text = SourceText(segments, plan.layouts, plan.transfers, handed)
    body = _body(text, plan, bundles)
    written, plain = _made(name, bundles, [line for lines in body for line in lines.lines], text.bound)
    gives = [[n for y in given for n in text.all_names(y)] for given in bundles.gives if isinstance(given, tuple)]
    owns = tuple(tuple(n not in text.borrowed for n in names) for names in gives)

    def spanned() -> Callable[..., tuple[Any, ...]]:
        known = {**text.bound, "span": record_function}
        return _made(name, bundles, [line for lines in body for line in lines.spanned(text)], known)[1]

    return Running(plain, written, owns, spanned)


class _Lines(NamedTuple):
    """Lines of a function, and the instruction that they are of."""

    lines: list[str]
    do: Instruction | None = None

    def spanned(self, text: SourceText) -> list[str]:
        """The same in a span, where a trace shows them."""
        title = self.do.title(text) if self.do is not None and self.lines else ""
        return [f"with span({title!r}):", *(f"    {line}" for line in self.lines)] if title else self.lines


def _made(
    name: str, bundles: Bundles, lines: Sequence[str], known: dict[str, Any]
) -> tuple[str, Callable[..., tuple[Any, ...]]]:
    """A function of these lines: its text, and itself."""
    takes = "".join(f", in{at}" for at in range(len(bundles.takes)))
    written = "\n    ".join([f"def {name}(shards{takes}):", *lines]) + "\n"
    # Under this name records take a line of it for ours, and look further out for the user's.
    exec(compile(written, f"{__file__} ({name})", "exec"), known)
    made: Callable[..., tuple[Any, ...]] = known[name]
    return written, made


def _body(text: SourceText, plan: Order, bundles: Bundles) -> list[_Lines]:
    for source in _sources(text.graph, plan, bundles):
        if owned(plan.layouts[source].placement):
            text.line(f"{text.targets(source)} = shards[{source!r}]")
    for at, registers in enumerate(bundles.takes):
        names = [n for register in registers for n in text.all_names(register)]
        text.borrowed.update(names)
        if names:
            text.line(f"{text.makes(names)} = in{at}")
    body = [_Lines(text.taken())]
    for do in plan.todo:
        do.source(text)
        body.append(_Lines(text.taken(), do))
    for mine in sorted({n for y in plan.grads.values() for n in text.names(y)} & text.borrowed):
        text.line(f"{mine} = own({mine})")  # the caller may change it in place
    text.line(f"return {tuple_of(_given(text, each) for each in bundles.gives)}")
    return [*body, _Lines(text.taken())]


def _given(text: SourceText, registers: tuple[LocalRegister, ...] | Mapping[str, LocalRegister]) -> str:
    if isinstance(registers, tuple):
        return tuple_of(n for register in registers for n in text.all_names(register))
    return "{" + ", ".join(f"{name!r}: {text.held(register)}" for name, register in registers.items()) + "}"


def _sources(graph: Physical, plan: Order, bundles: Bundles) -> list[LocalRegister]:
    """Registers that are read and neither made here nor handed in, in the order of the graph."""
    made = set(bundles.taken)
    found: dict[LocalRegister, None] = {}
    for do in plan.todo:
        found.update(dict.fromkeys(x for x in do.reads if x not in made))
        made.update(do.writes)
    found.update(dict.fromkeys(y for y in bundles.given if y not in made))
    order = {source.value.name: at for at, source in enumerate(graph.sources)}
    return sorted(found, key=lambda x: order.get(x, len(order)))
