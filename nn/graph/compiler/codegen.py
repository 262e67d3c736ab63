"""A schedule as one straight-line Python function: what is called is bound beforehand, and values are local names.

v0_0, v0_1 = shards["x"]                  every rank that this process owns has names of its own
v2_0, v3_0, = f0(v0_0, v1_0)              a segment: its outputs, and what it saved
m0 = start0((v2_0, v2_1,))                a move that goes on meanwhile
del v2_0, v2_1
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from ....boxing import box, box_async
from ....boxing.graph.physical import Physical
from ....placement.world import owned
from ..lower.order import Order
from ..lower.overlap import Do, Transfer
from ..lower.random import Drawer, Numbered
from ..lower.registers import LocalRegister
from ..lower.segments import Draw, Segment, Stage
from .backends import Compiled
from .generated_calls import Bucket, Shards, hold, no_shards, ones, own, to_holders

__all__ = ["Bundles", "Running", "Step", "straight", "task"]

Step: TypeAlias = Callable[[Mapping[str, Shards]], tuple[dict[str, Shards], dict[str, Shards]]]


def straight(
    graph: Physical,
    stages: Sequence[Stage],
    plan: Order,
    compiled: Mapping[tuple[int, int], Compiled],
    again: Mapping[int, Sequence[str]],
) -> tuple[Step, str]:
    """The function, from shards to values and gradients, and its text. `compiled` is by number of stage and rank."""
    writer = _SourceWriter(graph, stages, plan, compiled, again)
    text = writer.written()
    # Under this name records take a line of it for ours, and look further out for the user's.
    exec(compile(text, f"{__file__} (step)", "exec"), writer.bound)
    step: Step = writer.bound["step"]
    return step, text


class Bundles(NamedTuple):
    """What a task is handed and hands on: registers in the order in which their shards lie in a tuple."""

    takes: tuple[tuple[LocalRegister, ...], ...]
    gives: tuple[tuple[LocalRegister, ...], ...]


@dataclass(frozen=True, eq=False)
class Running:
    """A task as a function: of the sources' shards and the bundles it takes, to those it gives. `owns` says of all that
    it gives whether its memory is nobody else's."""

    run: Callable[..., tuple[Any, ...]]
    text: str
    owns: tuple[tuple[bool, ...], ...]


def task(
    graph: Physical,
    stages: Sequence[Stage],
    plan: Order,
    compiled: Mapping[tuple[int, int], Compiled],
    again: Mapping[int, Sequence[str]],
    halves: Mapping[int, tuple[Sequence[str], Sequence[str]]],
    bundles: Bundles,
    name: str,
) -> Running:
    """One task, generated as the step is."""
    writer = _SourceWriter(graph, stages, plan, compiled, again, halves)
    text = writer.written_task(bundles, name)
    exec(compile(text, f"{__file__} ({name})", "exec"), writer.bound)
    run: Callable[..., tuple[Any, ...]] = writer.bound[name]
    gives = [[n for register in bundle for n in writer.all_names(register)] for bundle in bundles.gives]
    return Running(run, text, tuple(tuple(n not in writer.borrowed for n in names) for names in gives))


class _SourceWriter:
    def __init__(
        self,
        graph: Physical,
        stages: Sequence[Stage],
        plan: Order,
        compiled: Mapping[tuple[int, int], Compiled],
        again: Mapping[int, Sequence[str]],
        halves: Mapping[int, tuple[Sequence[str], Sequence[str]]] | None = None,
    ) -> None:
        self.graph, self.stages, self.plan, self.compiled, self.again = graph, stages, plan, compiled, again
        self.halves, self.handed = halves or {}, halves is not None
        self.bound: dict[str, Any] = {"add": torch.add, "add_": torch.Tensor.add_, "box": box, "own": own}
        self.numbers: dict[str, int] = {}
        self.known: dict[int, str] = {}  # what is bound already, by identity
        self.live: set[str] = set()
        self.borrowed: set[str] = set()  # gradients whose memory may be somebody else's too
        self.lines: list[str] = []

    def written(self) -> str:
        used = {name for do in self.plan.todo for name in do.reads} | set(self.plan.values)
        for source in self.graph.sources:
            name = source.value.name
            if name in used and owned(source.value.layout.placement):
                self.line(f"{self.targets(name)} = shards[{name!r}]")
        for do in self.plan.todo:
            getattr(self, f"do_{do.what}")(do)
        for name in sorted({n for y in self.plan.grads.values() for n in self.names(y)} & self.borrowed):
            self.line(f"{name} = own({name})")  # who gets it may change it in place
        values = ", ".join(f"{name!r}: {self.held(name)}" for name in self.plan.values)
        grads = ", ".join(f"{name!r}: {self.held(register)}" for name, register in self.plan.grads.items())
        self.line(f"return {{{values}}}, {{{grads}}}")
        return "\n    ".join(["def step(shards):", *self.lines]) + "\n"

    def written_task(self, bundles: Bundles, name: str) -> str:
        for source in self.sources(bundles):
            if owned(self.plan.layouts[source].placement):
                self.line(f"{self.targets(source)} = shards[{source!r}]")
        for at, registers in enumerate(bundles.takes):
            names = [n for register in registers for n in self.all_names(register)]
            self.borrowed.update(names)
            if names:
                self.line(f"{self.makes(names)} = in{at}")
        for do in self.plan.todo:
            getattr(self, f"do_{do.what}")(do)
        gives = [_tuple([n for register in given for n in self.all_names(register)]) for given in bundles.gives]
        takes = "".join(f", in{at}" for at in range(len(bundles.takes)))
        self.line(f"return {_tuple(gives)}")
        return "\n    ".join([f"def {name}(shards{takes}):", *self.lines]) + "\n"

    def sources(self, bundles: Bundles) -> list[str]:
        """What is read and neither made here nor handed in."""
        made = {register for bundle in bundles.takes for register in bundle}
        found: dict[str, None] = {}
        for do in self.plan.todo:
            found.update(dict.fromkeys(name for name in do.reads if name not in made))
            made.update(do.writes)
        for register in (register for bundle in bundles.gives for register in bundle):
            if register not in made:
                found[register] = None
        return list(found)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def bind(self, value: Any, hint: str) -> str:
        """The name under which the function knows an object."""
        name = self.known.get(id(value))
        if name is None:
            name = self.known[id(value)] = f"{hint}{len(self.known)}"
            self.bound[name] = value  # which also keeps its id from being used again
        return name

    def name(self, register: str, at: int) -> str:
        return f"v{self.numbers.setdefault(register, len(self.numbers))}_{at}"

    def names(self, register: str) -> list[str]:
        """The names of a register on the ranks owned here; those without a layout are the process's own."""
        layout = self.plan.layouts.get(register)
        return [self.name(register, at) for at in range(len(owned(layout.placement)) if layout else 1)]

    def makes(self, names: Iterable[str]) -> str:
        """Names on the left of an assignment, each with a comma behind."""
        listed = list(names)
        self.live.update(listed)
        return ", ".join(listed) + ","

    def targets(self, register: str) -> str:
        return self.makes(self.names(register) or ["_"])

    def held(self, register: str) -> str:
        """A register's shards as a tuple; a token where none is owned."""
        names = self.names(register)
        return _tuple(names) if names else self.bind(no_shards(self.plan.layouts[register]), "token")

    def do_run(self, do: Do) -> None:
        stage = self.stages[do.number]
        assert isinstance(stage, Segment)
        for at, rank in enumerate(owned(stage.placement)):
            run = self.bind(self.compiled[do.number, rank].forward, "f")
            makes = [self.name(y, at) for y in do.writes[: len(stage.outputs)]]
            kept = next((register for register in do.writes if register.kind == "saved"), None)
            saved = self.name(kept, at) if kept else "_"
            given = ", ".join(self.name(x, at) for x in do.reads)
            self.line(f"{self.makes([*makes, saved])} = {run}({given})")
            if stage.wants and not kept:
                self.line("del _")
            apart = self.compiled[do.number, rank].apart
            if do.writes and do.writes[-1].kind == "stash":
                assert apart is not None
                stash = self.makes([self.name(do.writes[-1], at)])[:-1]
                parts = [_tuple([f"{saved}[{n}]" for n in half]) for half in apart.saved]
                self.line(f"{saved}, {stash} = {parts[0]}, {parts[1]}")

    def do_grad(self, do: Do) -> None:
        stage = self.stages[do.number]
        assert isinstance(stage, Segment)
        names = self.again.get(do.number, ())
        registers = dict(zip(names, do.reads[1:], strict=False))
        for at, rank in enumerate(owned(stage.placement)):
            mine = self.compiled[do.number, rank]
            assert mine.backward is not None
            taken = [self.name(registers[stage.inputs[i]], at) for i in mine.again]
            cotangents = [self.name(register, at) for register in do.reads[len(do.reads) - len(stage.returns) :]]
            given = ", ".join([f"*{self.name(do.reads[0], at)}", *taken, *cotangents])
            made = [self.name(register, at) for register in do.writes]
            self.borrowed.update(name for name, owns in zip(made, mine.owns, strict=True) if not owns)
            makes = self.makes(made)
            self.line(f"{makes} = {self.bind(mine.backward, 'b')}({given})")

    def do_first(self, do: Do) -> None:
        self._half(do, 0)

    def do_second(self, do: Do) -> None:
        self._half(do, 1)

    def _half(self, do: Do, half: int) -> None:
        """One half of a segment's backward; the first hands on a rest, which the second is given."""
        stage = self.stages[do.number]
        assert isinstance(stage, Segment)
        many = len(stage.returns) if half == 0 else 1
        names = [*self.halves[do.number][half]]
        registers = dict(zip(names, do.reads[1 : len(do.reads) - many], strict=True))
        for at, rank in enumerate(owned(stage.placement)):
            mine = self.compiled[do.number, rank].apart
            assert mine is not None
            taken = [self.name(registers[stage.inputs[i]], at) for i in mine.again[half]]
            last = [self.name(register, at) for register in do.reads[len(do.reads) - many :]]
            given = ", ".join([f"*{self.name(do.reads[0], at)}", *taken, *(f"*{x}" if half else x for x in last)])
            made = [self.name(register, at) for register in do.writes]
            owns = mine.owns if half else (False,) * len(made)
            self.borrowed.update(name for name, owned in zip(made, owns, strict=True) if not owned)
            makes = self.makes(made)
            self.line(f"{makes} = {self.bind((mine.first, mine.second)[half], 'b')}({given})")

    def do_draw(self, do: Do) -> None:
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
        given = [self.name(x, 0) if x.kind == "chance" else _tuple(self.names(x)) for x in do.reads]
        call = f"{self.bind(drawn, 'draw')}({', '.join([*(['shards'] if self.handed else []), *given])})"
        if here:
            targets = [
                self.makes([self.name(y, 0)])[:-1] if y.kind == "chance" else f"({self.targets(y)})" for y in do.writes
            ]
            call = "".join(f"{target}, " for target in targets) + f"= {call}"
        self.line(call)

    def before(self, stage: int) -> int:
        """How many draws there are before one: the same whatever is moved in between."""
        return sum(isinstance(other, Draw) for other in self.stages[:stage])

    def do_seed(self, do: Do) -> None:
        if self.handed:
            self.line(f"{self.targets(do.writes[0])} = shards['seed {do.number}']")
            return
        for name, one in zip(self.names(do.writes[0]), ones(self.plan.layouts[do.writes[0]]), strict=False):
            self.line(f"{self.makes([name])[:-1]} = {self.bind(one, 'one')}")
            self.borrowed.add(name)

    def do_add(self, do: Do) -> None:
        # The first sum is a new tensor, for what it adds to may be somebody else's too.
        call = "add" if do.number == 2 else "add_"
        for into, part in zip(self.names(do.reads[0]), self.names(do.reads[1]), strict=True):
            self.line(f"{into} = {call}({into}, {part})")
            self.borrowed.discard(into)

    def do_free(self, do: Do) -> None:
        names = [n for register in do.reads for n in self.all_names(register) if n in self.live]
        if names:
            self.live.difference_update(names)
            self.line(f"del {', '.join(names)}")

    def all_names(self, register: LocalRegister) -> list[str]:
        if register in self.plan.layouts:
            return self.names(register)
        stage = self.stages[register.number] if register.kind in ("saved", "stash", "rest") else None
        if isinstance(stage, Segment):
            return [self.name(register, at) for at in range(len(owned(stage.placement)))]
        return [self.name(register, 0)]

    def do_box(self, do: Do) -> None:
        transfer = self.plan.transfers[do.number]
        if not _here(transfer):
            return
        if not transfer.sends:
            made = [name for register in do.writes for name in self.names(register)]
            self.borrowed.update(made if self.borrowed.intersection(self.names(do.reads[-1])) else ())
        if transfer.saves or transfer.saved:
            self._extremal(do, transfer)
        elif len(transfer.pairs) > 1:
            self._call(do, f"{self.bind(Bucket(transfer), 'bucket')}.now")
        elif not transfer.plans[0].moves and transfer.pairs[0][0].placement is transfer.pairs[0][1].placement:
            self.line(f"{self.targets(do.writes[0])} = {self.held(do.reads[0])}")
        else:
            src, dst = (self.bind(of, "at") for of in transfer.pairs[0])
            self.line(f"{self.targets(do.writes[0])} = box({self.held(do.reads[0])}, {src}, {dst}, op={do.reads[0]!r})")

    def do_start(self, do: Do) -> None:
        transfer = self.plan.transfers[do.number]
        if _here(transfer):
            given = ", ".join(map(self.held, do.reads))
            pending = self.makes([self.name(do.writes[0], 0)])[:-1]
            if len(transfer.pairs) > 1:
                self.line(f"{pending} = {self.bind(Bucket(transfer), 'bucket')}.start({given})")
            else:
                src, dst = (self.bind(of, "at") for of in transfer.pairs[0])
                self.line(f"{pending} = {self.bind(box_async, 'start')}({given}, {src}, {dst})")

    def do_wait(self, do: Do) -> None:
        transfer = self.plan.transfers[do.number]
        if not _here(transfer):
            return
        wait = f"{self.name(do.reads[0], 0)}.wait()"
        targets = [self.targets(register) for register in do.writes]
        self.line(f"{targets[0] if len(targets) == 1 else ''.join(f'({t}), ' for t in targets)} = {wait}")

    def _call(self, do: Do, function: str) -> None:
        given = ", ".join(map(self.held, do.reads))
        self.line("".join(f"({self.targets(y)}), " for y in do.writes) + f"= {function}({given})")

    def _extremal(self, do: Do, transfer: Transfer) -> None:
        src, dst = transfer.pairs[0]
        if transfer.saves:
            call = (
                f"{self.bind(hold, 'hold')}({self.held(do.reads[0])}, {self.bind(src, 'at')}, {self.bind(dst, 'at')})"
            )
            self.line(f"({self.targets(do.writes[0])}), {self.makes([self.name(do.writes[1], 0)])[:-1]} = {call}")
        else:
            call = f"{self.bind(to_holders, 'back')}({self.name(do.reads[0], 0)}, {self.held(do.reads[1])})"
            self.line(f"{self.targets(do.writes[0])} = {call}")


def _tuple(names: Sequence[str]) -> str:
    return "(" + "".join(f"{name}, " for name in names) + ")"


def _here(transfer: Transfer) -> bool:
    """Whether this process takes part in a move."""
    return any(owned(of.placement) for of in transfer.pairs[0])
