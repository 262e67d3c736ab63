"""An order as one straight-line Python function: functions are bound beforehand, and values are local names.

v0_0, v0_1 = shards["x"]                  every rank that this process owns has names of its own
v2_0, v3_0, = f0(v0_0, v1_0)              a segment: its outputs, and what it saved
m0 = start0((v2_0, v2_1,))                a move that goes on meanwhile
del v2_0, v2_1
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....boxing.graph.physical import Physical
from ....placement.world import owned
from ..compiler.compiled_segments import CompiledSegments
from ..compiler.source_text import SourceText, tuple_of
from ..lower.registers import LocalRegister
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
    in tuples whether its memory is nobody else's."""

    run: Callable[..., tuple[Any, ...]]
    text: str
    owns: tuple[tuple[bool, ...], ...]


def function(segments: CompiledSegments, plan: Order, bundles: Bundles, name: str, *, handed: bool = False) -> Running:
    """An order as a function. `handed`: the seeds of gradients and random numbers are handed in with the sources."""
    text = SourceText(segments, plan.layouts, plan.transfers, handed)
    written = _written(text, plan, bundles, name)
    # Under this name records take a line of it for ours, and look further out for the user's.
    exec(compile(written, f"{__file__} ({name})", "exec"), text.bound)
    gives = [[n for y in given for n in text.all_names(y)] for given in bundles.gives if isinstance(given, tuple)]
    owns = tuple(tuple(n not in text.borrowed for n in names) for names in gives)
    return Running(text.bound[name], written, owns)


def _written(text: SourceText, plan: Order, bundles: Bundles, name: str) -> str:
    for source in _sources(text.graph, plan, bundles):
        if owned(plan.layouts[source].placement):
            text.line(f"{text.targets(source)} = shards[{source!r}]")
    for at, registers in enumerate(bundles.takes):
        names = [n for register in registers for n in text.all_names(register)]
        text.borrowed.update(names)
        if names:
            text.line(f"{text.makes(names)} = in{at}")
    for do in plan.todo:
        do.source(text)
    for mine in sorted({n for y in plan.grads.values() for n in text.names(y)} & text.borrowed):
        text.line(f"{mine} = own({mine})")  # the caller may change it in place
    takes = "".join(f", in{at}" for at in range(len(bundles.takes)))
    text.line(f"return {tuple_of(_given(text, each) for each in bundles.gives)}")
    return "\n    ".join([f"def {name}(shards{takes}):", *text.lines]) + "\n"


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
