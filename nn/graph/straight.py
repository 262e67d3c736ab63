"""A schedule as one straight-line Python function: what is called is bound beforehand, and values are local names.

v0_0, v0_1 = shards["x"]                  every rank that this process owns has names of its own
v2_0, v3_0, = f0(v0_0, v1_0)              a segment: its outputs, and what it saved
m0 = start0((v2_0, v2_1,))                a move that goes on meanwhile
del v2_0, v2_1
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...boxing import Pending, box, box_async
from ...boxing.execute import token
from ...boxing.graph.buckets import packed
from ...boxing.graph.physical import Graph
from ...placement.world import device, owned
from ...sbp import Layout, State
from .backend import Compiled
from .draw import Drawer
from .overlap import Do, Transfer
from .schedule import Schedule
from .segments import Draw, Segment, Stage

__all__ = ["Shards", "Step", "straight"]

Shards: TypeAlias = tuple[Tensor, ...]
Step: TypeAlias = Callable[[Mapping[str, Shards]], tuple[dict[str, Shards], dict[str, Shards]]]


def straight(
    graph: Graph,
    stages: Sequence[Stage],
    plan: Schedule,
    compiled: Mapping[tuple[int, int], Compiled],
    again: Mapping[int, Sequence[str]],
) -> tuple[Step, str]:
    """The function, from shards to values and gradients, and its text. `compiled` is by number of stage and rank."""
    writer = _Writer(graph, stages, plan, compiled, again)
    text = writer.written()
    # Under this name records take a line of it for ours, and look further out for the user's.
    exec(compile(text, f"{__file__} (step)", "exec"), writer.bound)
    step: Step = writer.bound["step"]
    return step, text


class _Writer:
    def __init__(
        self,
        graph: Graph,
        stages: Sequence[Stage],
        plan: Schedule,
        compiled: Mapping[tuple[int, int], Compiled],
        again: Mapping[int, Sequence[str]],
    ) -> None:
        self.graph, self.stages, self.plan, self.compiled, self.again = graph, stages, plan, compiled, again
        self.bound: dict[str, Any] = {"add": torch.add, "add_": torch.Tensor.add_, "box": box, "own": _own}
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
        return _tuple(names) if names else self.bind(_token(self.plan.layouts[register]), "token")

    def do_run(self, do: Do) -> None:
        stage = self.stages[do.number]
        assert isinstance(stage, Segment)
        for at, rank in enumerate(owned(stage.placement)):
            run = self.bind(self.compiled[do.number, rank].forward, "f")
            makes = [self.name(y, at) for y in stage.outputs]
            saved = self.name(f"saved {do.number}", at) if stage.wants else "_"
            given = ", ".join(self.name(x, at) for x in stage.inputs)
            self.line(f"{self.makes([*makes, saved])} = {run}({given})")

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

    def do_draw(self, do: Do) -> None:
        stage = self.stages[do.number]
        assert isinstance(stage, Draw)
        drawer = Drawer(self.graph, stage)
        given = ", ".join(_tuple(self.names(x)) for x in do.reads)
        call = f"{self.bind(drawer, 'draw')}({given})"
        if owned(stage.op.outputs[0].layout.placement):
            call = "".join(f"({self.targets(y)}), " for y in do.writes) + f"= {call}"
        self.line(call)

    def do_seed(self, do: Do) -> None:
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

    def all_names(self, register: str) -> list[str]:
        if register in self.plan.layouts:
            return self.names(register)
        word, _, number = register.partition(" ")
        stage = self.stages[int(number)] if word == "saved" and number.isdigit() else None
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
            self.line(f"{self.targets(do.writes[0])} = box({self.held(do.reads[0])}, {src}, {dst})")

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
                f"{self.bind(_hold, 'hold')}({self.held(do.reads[0])}, {self.bind(src, 'at')}, {self.bind(dst, 'at')})"
            )
            self.line(f"({self.targets(do.writes[0])}), {self.makes([self.name(do.writes[1], 0)])[:-1]} = {call}")
        else:
            call = f"{self.bind(_to_holders, 'back')}({self.name(do.reads[0], 0)}, {self.held(do.reads[1])})"
            self.line(f"{self.targets(do.writes[0])} = {call}")


def _tuple(names: Sequence[str]) -> str:
    return "(" + "".join(f"{name}, " for name in names) + ")"


def _token(layout: Layout) -> Shards:
    known: Shards = layout.memo.setdefault("graph.token", (token(layout),))
    return known


def _here(transfer: Transfer) -> bool:
    """Whether this process takes part in a move."""
    return any(owned(of.placement) for of in transfer.pairs[0])


def ones(layout: Layout) -> Shards:
    """The shards of a one: whole, or as addends of which only the first is not zero."""
    where = layout.placement
    plain = Layout(where, State(((),) * len(layout.shape)), layout.shape, layout.dtype)
    whole = tuple(torch.ones(layout.shape, dtype=layout.dtype, device=device(where, r)) for r in owned(where))
    with torch.no_grad():
        return box(whole or _token(layout), plain, layout, op="seed")


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _hold(shards: Shards, src: Layout, dst: Layout) -> tuple[Shards, tuple[Shards, Shards]]:
    """A move of a maximum, with what it takes to bring the gradient back to who held it."""
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in shards)
        out = box(leaves, src, dst)
    return tuple(y.detach() for y in out), (leaves, out)


def _to_holders(saved: tuple[Shards, Shards], grads: Shards) -> Shards:
    leaves, out = saved
    return torch.autograd.grad(out, leaves, grads)


class Bucket:
    """The gradients of one bucket on their way, as one tensor, whose memory is kept from step to step: new memory of
    this size costs the system as much time as the copy into it."""

    def __init__(self, transfer: Transfer) -> None:
        self.packed = packed(transfer.pairs)
        self.memory: list[Tensor | None] = []

    def now(self, *members: Shards) -> list[Shards]:
        return self._out(box(self._in(members), self.packed.src, self.packed.dst, op="bucket"))

    def start(self, *members: Shards) -> "Flying":
        return Flying(self, box_async(self._in(members), self.packed.src, self.packed.dst))

    def _in(self, members: Sequence[Shards]) -> list[Tensor]:
        ranks = list(zip(*members, strict=True))
        self.memory = self.memory or [None] * len(ranks)
        packed = [self.packed.pack(parts, held) for parts, held in zip(ranks, self.memory, strict=True)]
        self.memory = list(packed)
        return packed

    def _out(self, shards: Shards) -> list[Shards]:
        return list(zip(*map(self.packed.unpack, shards), strict=True))


class Flying:
    """A bucket under way."""

    def __init__(self, bucket: Bucket, pending: Pending) -> None:
        self.bucket, self.pending = bucket, pending

    def wait(self) -> list[Shards]:
        return self.bucket._out(self.pending.wait())
