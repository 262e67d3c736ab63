"""An order as one straight-line Python function: what is called is bound beforehand, and values are local names.

v0_0, v0_1 = shards["x"]                  every rank that this process owns has names of its own
v2_0, v3_0, = f0(v0_0, v1_0)              a segment: its outputs, and what it saved
m0 = start0((v2_0, v2_1,))                a move that goes on meanwhile
del v2_0, v2_1
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ....placement.errors import SbpError
from ....placement.world import owned
from ....sbp.logical import OffloadPlace
from ..host.copies import Copies
from ..lower.instructions import Instruction, LocalRegister
from ..lower.offload import offload_of
from ..lower.order import Order
from ..lower.random import Drawer, Numbered
from ..lower.segments import Draw, Segment
from .compiled_segments import CompiledSegments
from .generated_calls import ones
from .move_source import MOVES, MoveWriter
from .source_text import SourceText, tuple_of

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
    writer = _SourceWriter(segments, plan, handed)
    text = writer.written(bundles, name)
    # Under this name records take a line of it for ours, and look further out for the user's.
    exec(compile(text, f"{__file__} ({name})", "exec"), writer.text.bound)
    gives = [
        [n for y in given for n in writer.text.all_names(y)] for given in bundles.gives if isinstance(given, tuple)
    ]
    return Running(
        writer.text.bound[name], text, tuple(tuple(n not in writer.text.borrowed for n in names) for names in gives)
    )


class _SourceWriter:
    def __init__(self, segments: CompiledSegments, plan: Order, handed: bool) -> None:
        self.graph, self.stages, self.plan, self.handed = segments.graph, segments.stages, plan, handed
        self.compiled, self.again, self.halves = segments.at, segments.again, segments.halves
        self.text = SourceText(plan, segments.stages)
        self.moves = MoveWriter(plan, self.text)
        self.copies: dict[OffloadPlace, Copies] = {}

    def written(self, bundles: Bundles, name: str) -> str:
        for source in self.sources(bundles):
            if owned(self.plan.layouts[source].placement):
                self.text.line(f"{self.text.targets(source)} = shards[{source!r}]")
        for at, registers in enumerate(bundles.takes):
            names = [n for register in registers for n in self.text.all_names(register)]
            self.text.borrowed.update(names)
            if names:
                self.text.line(f"{self.text.makes(names)} = in{at}")
        for do in self.plan.todo:
            getattr(self.moves if do.what in MOVES else self, f"do_{do.what}")(do)
        for mine in sorted({n for y in self.plan.grads.values() for n in self.text.names(y)} & self.text.borrowed):
            self.text.line(f"{mine} = own({mine})")  # who gets it may change it in place
        takes = "".join(f", in{at}" for at in range(len(bundles.takes)))
        self.text.line(f"return {tuple_of(map(self.given, bundles.gives))}")
        return "\n    ".join([f"def {name}(shards{takes}):", *self.text.lines]) + "\n"

    def given(self, registers: tuple[LocalRegister, ...] | Mapping[str, LocalRegister]) -> str:
        if isinstance(registers, tuple):
            return tuple_of(n for register in registers for n in self.text.all_names(register))
        return "{" + ", ".join(f"{name!r}: {self.text.held(register)}" for name, register in registers.items()) + "}"

    def sources(self, bundles: Bundles) -> list[LocalRegister]:
        """Registers that are read and neither made here nor handed in, in the order of the graph."""
        made = set(bundles.taken)
        found: dict[LocalRegister, None] = {}
        for do in self.plan.todo:
            found.update(dict.fromkeys(x for x in do.reads if x not in made))
            made.update(do.writes)
        found.update(dict.fromkeys(y for y in bundles.given if y not in made))
        order = {source.value.name: at for at, source in enumerate(self.graph.sources)}
        return sorted(found, key=lambda x: order.get(x, len(order)))

    def do_run(self, do: Instruction) -> None:
        stage = self.stages[do.number]
        assert isinstance(stage, Segment)
        for at, rank in enumerate(owned(stage.placement)):
            run = self.text.bind(self.compiled[do.number, rank].forward, "f")
            makes = [self.text.name(y, at) for y in do.writes[: len(stage.outputs)]]
            kept = next((register for register in do.writes if register.kind == "saved"), None)
            saved = self.text.name(kept, at) if kept else "_"
            given = ", ".join(self.text.on(x, rank, at) for x in do.reads)
            self.text.line(f"{self.text.makes([*makes, saved])} = {run}({given})")
            if stage.wants and not kept:
                self.text.line("del _")
            apart = self.compiled[do.number, rank].apart
            if do.writes and do.writes[-1].kind == "stash":
                assert apart is not None
                stash = self.text.makes([self.text.name(do.writes[-1], at)])[:-1]
                parts = [tuple_of([f"{saved}[{n}]" for n in half]) for half in apart.saved]
                self.text.line(f"{saved}, {stash} = {parts[0]}, {parts[1]}")

    def do_grad(self, do: Instruction) -> None:
        stage = self.stages[do.number]
        assert isinstance(stage, Segment)
        names = self.again.get(do.number, ())
        registers = dict(zip(names, do.reads[1:], strict=False))
        for at, rank in enumerate(owned(stage.placement)):
            mine = self.compiled[do.number, rank]
            assert mine.backward is not None
            taken = [self.text.on(registers[stage.inputs[i]], rank, at) for i in mine.again]
            cotangents = [self.cotangent(register, at) for register in do.reads[len(do.reads) - len(stage.returns) :]]
            given = ", ".join([f"*{self.text.name(do.reads[0], at)}", *taken, *cotangents])
            made = [self.text.on(register, rank, at) for register in do.writes]
            self.text.borrowed.update(name for name, owns in zip(made, mine.owns, strict=True) if not owns)
            makes = self.text.makes(made)
            self.text.line(f"{makes} = {self.text.bind(mine.backward, 'b')}({given})")
            self.cast(do.writes, at)

    def do_first(self, do: Instruction) -> None:
        self._half(do, 0)

    def do_second(self, do: Instruction) -> None:
        self._half(do, 1)

    def _half(self, do: Instruction, half: int) -> None:
        """One half of a segment's backward; the first hands on a rest, which the second is given."""
        stage = self.stages[do.number]
        assert isinstance(stage, Segment)
        many = len(stage.returns) if half == 0 else 1
        names = [*self.halves[do.number][half]]
        registers = dict(zip(names, do.reads[1 : len(do.reads) - many], strict=True))
        for at, rank in enumerate(owned(stage.placement)):
            mine = self.compiled[do.number, rank].apart
            assert mine is not None
            taken = [self.text.on(registers[stage.inputs[i]], rank, at) for i in mine.again[half]]
            last = [self.cotangent(register, at) for register in do.reads[len(do.reads) - many :]]
            given = ", ".join([f"*{self.text.name(do.reads[0], at)}", *taken, *(f"*{x}" if half else x for x in last)])
            made = [self.text.on(register, rank, at) for register in do.writes]
            owns = mine.owns if half else (False,) * len(made)
            self.text.borrowed.update(name for name, owned in zip(made, owns, strict=True) if not owned)
            makes = self.text.makes(made)
            self.text.line(f"{makes} = {self.text.bind((mine.first, mine.second)[half], 'b')}({given})")
            self.cast(do.writes, at)

    def apart(self, register: LocalRegister) -> tuple[torch.dtype, torch.dtype] | None:
        """The type of a gradient as it is brought together, and that of its value, where these differ."""
        if not register.is_gradient:
            return None
        kept, made = self.plan.layouts[register].dtype, self.graph.layout(register.of).dtype
        return None if kept is made else (kept, made)

    def cast(self, registers: Iterable[LocalRegister], at: int) -> None:
        """Gradients of weights in the type in which they are brought together."""
        for register in registers:
            types = self.apart(register)
            if types is not None:
                name = self.text.name(register, at)
                self.text.line(f"{name} = {name}.to({self.text.bind(types[0], 'dtype')})")
                self.text.borrowed.discard(name)

    def cotangent(self, register: LocalRegister, at: int) -> str:
        """A gradient as a segment takes it, in the type of its value."""
        name, types = self.text.name(register, at), self.apart(register)
        return name if types is None else f"{name}.to({self.text.bind(types[1], 'dtype')})"

    def do_draw(self, do: Instruction) -> None:
        stage = self.stages[do.number]
        assert isinstance(stage, Draw)
        drawer = Drawer(self.graph, stage)
        drawn: Any = Numbered(drawer, self.before(do.number)) if self.handed else drawer
        here = bool(owned(stage.op.outputs[0].layout.placement))
        if any(x.kind == "chance" for x in do.reads):  # what this process owns nothing of, it does not draw again
            if not here:
                return
            drawn = drawer.again
        elif any(y.kind == "chance" for y in do.writes):
            drawn = drawer.noted
        given = [self.text.name(x, 0) if x.kind == "chance" else tuple_of(self.text.names(x)) for x in do.reads]
        call = f"{self.text.bind(drawn, 'draw')}({', '.join([*(['shards'] if self.handed else []), *given])})"
        if here:
            targets = [
                self.text.makes([self.text.name(y, 0)])[:-1] if y.kind == "chance" else f"({self.text.targets(y)})"
                for y in do.writes
            ]
            call = "".join(f"{target}, " for target in targets) + f"= {call}"
        self.text.line(call)

    def before(self, stage: int) -> int:
        """How many draws there are before one: the same whatever is moved in between."""
        return sum(isinstance(other, Draw) for other in self.stages[:stage])

    def do_seed(self, do: Instruction) -> None:
        if self.handed:
            self.text.line(f"{self.text.targets(do.writes[0])} = shards['seed {do.number}']")
            return
        for name, one in zip(self.text.names(do.writes[0]), ones(self.plan.layouts[do.writes[0]]), strict=False):
            self.text.line(f"{self.text.makes([name])[:-1]} = {self.text.bind(one, 'one')}")
            self.text.borrowed.add(name)

    def do_add(self, do: Instruction) -> None:
        # The first sum is a new tensor, for what it adds to may be somebody else's too.
        call = "add" if do.number == 2 else "add_"
        for into, part in zip(self.text.names(do.reads[0]), self.text.names(do.reads[1]), strict=True):
            self.text.line(f"{into} = {call}({into}, {part})")
            self.text.borrowed.discard(into)

    def do_free(self, do: Instruction) -> None:
        names = [n for register in do.reads for n in self.text.all_names(register) if n in self.text.live]
        if names:
            self.text.live.difference_update(names)
            self.text.line(f"del {', '.join(names)}")

    def do_stow(self, do: Instruction) -> None:
        stage, x = self.stages[do.number], do.reads[0]
        said = offload_of(stage)
        assert said is not None
        value = x in self.plan.layouts
        if not value:
            self.check_saved(x.number)
        copies = self.text.bind(self.copies.setdefault(said.to, Copies(said.to, self.graph.name)), "host")
        for mine, away in zip(self.text.all_names(x), self.text.all_names(do.writes[0]), strict=True):
            self.text.line(f"{self.text.makes([away])[:-1]} = {copies}.stow({f'({mine},)' if value else mine})")

    def check_saved(self, number: int) -> None:
        """Refuse to offload what torch's autograd keeps to itself."""
        stage = self.stages[number]
        assert isinstance(stage, Segment)
        for rank in owned(stage.placement):
            made = self.compiled[number, rank]
            if made.backend == "autograd":
                module = stage.ops[0].origin.module
                raise SbpError(
                    f"what {module or self.graph.name} saves is to be offloaded, but autograd runs it and keeps that\n"
                    f"  {made.reason or 'this is the backend that was asked for'}\n"
                    f'  leave it on the device: flow.nn.offload(model, "{module or "*"}", "saved", to=None)'
                )

    def do_fetch(self, do: Instruction) -> None:
        for away, coming in zip(self.text.all_names(do.reads[0]), self.coming(do.writes[0], do.reads[0]), strict=True):
            self.text.line(f"{self.text.makes([coming])[:-1]} = {away}.fetch()")

    def do_land(self, do: Instruction) -> None:
        landed = self.text.all_names(do.writes[0])
        for coming, name in zip(self.coming(do.reads[0], do.writes[0]), landed, strict=True):
            made = self.text.makes([name])
            self.text.line(f"{made if do.writes[0] in self.plan.layouts else made[:-1]} = {coming}.wait()")

    def coming(self, register: LocalRegister, like: LocalRegister) -> list[str]:
        """The names of what is on its way back, on the ranks of what it is."""
        return [self.text.name(register, at) for at in range(len(self.text.all_names(like)))]
