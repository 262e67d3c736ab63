"""The text of a function in the making: its lines, the names of registers in them, and the objects that it knows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ....boxing import box
from ....placement.world import owned
from ....sbp import Layout
from ....sbp.logical import OffloadPlace
from ..host.copies import Copies
from ..lower.registers import LocalRegister, Transfer
from ..lower.segments import Segment
from .compiled_segments import CompiledSegments
from .generated_calls import no_shards, own
from .split_backward import Apart

__all__ = ["SourceText", "tuple_of"]

OF_STAGES = ("saved", "stash", "rest", "away", "landed", "coming")  # registers on the ranks of a stage


class SourceText:
    """Lines and names. Every rank that this process owns has names of its own for a register. `handed`: the seeds of
    gradients and random numbers are handed in with the sources."""

    def __init__(
        self,
        segments: CompiledSegments,
        layouts: Mapping[str, Layout],
        transfers: Sequence[Transfer],
        handed: bool = False,
    ) -> None:
        self.graph, self.stages, self.compiled = segments.graph, segments.stages, segments.at
        self.again, self.halves = segments.again, segments.halves
        self.layouts, self.transfers, self.handed = layouts, transfers, handed
        self.copies: dict[OffloadPlace, Copies] = {}
        self.bound: dict[str, Any] = {"add": torch.add, "add_": torch.Tensor.add_, "box": box, "own": own}
        self.numbers: dict[str, int] = {}
        self.known: dict[int, str] = {}  # what is bound already, by identity
        self.live: set[str] = set()
        self.borrowed: set[str] = set()  # gradients whose memory may be somebody else's too
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def taken(self) -> list[str]:
        """The lines since it was asked last."""
        lines, self.lines = self.lines, []
        return lines

    def bind(self, value: Any, hint: str) -> str:
        """The name under which the function knows an object."""
        name = self.known.get(id(value))
        if name is None:
            name = self.known[id(value)] = f"{hint}{len(self.known)}"
            self.bound[name] = value  # while it is bound, its id is not used again
        return name

    def name(self, register: str, at: int) -> str:
        return f"v{self.numbers.setdefault(register, len(self.numbers))}_{at}"

    def on(self, register: str, rank: int, at: int) -> str:
        """The name of a register on a rank, which is the so manyth owned here of its segment's placement.

        A value that went round an axis is on the same ranks in another order, so its own layout is asked."""
        layout = self.layouts.get(register)
        ranks = owned(layout.placement) if layout else ()
        return self.name(register, ranks.index(rank) if rank in ranks else at)

    def names(self, register: str) -> list[str]:
        """The names of a register on the ranks owned here; those without a layout are the process's own."""
        layout = self.layouts.get(register)
        return [self.name(register, at) for at in range(len(owned(layout.placement)) if layout else 1)]

    def all_names(self, register: LocalRegister) -> list[str]:
        """The same, also of what a stage keeps on its ranks."""
        if register in self.layouts:
            return self.names(register)
        stage = self.stages[register.number] if register.kind in OF_STAGES else None
        if isinstance(stage, Segment):
            return [self.name(register, at) for at in range(len(owned(stage.placement)))]
        return [self.name(register, 0)]

    def makes(self, names: Iterable[str]) -> str:
        """Names on the left of an assignment, each with a comma behind."""
        listed = list(names)
        self.live.update(listed)
        return ", ".join(listed) + ","

    def target(self, name: str) -> str:
        """One name on the left of an assignment, which takes all that is on the right."""
        self.live.add(name)
        return name

    def targets(self, register: str) -> str:
        return self.makes(self.names(register) or ["_"])

    def held(self, register: str) -> str:
        """A register's shards as a tuple; a token where none is owned."""
        names = self.names(register)
        return tuple_of(names) if names else self.bind(no_shards(self.layouts[register]), "token")

    def apart(self, number: int, rank: int) -> Apart:
        """The halves of the backward of a segment that has them."""
        made = self.compiled[number, rank].apart
        assert made is not None
        return made

    def types(self, register: LocalRegister) -> tuple[torch.dtype, torch.dtype] | None:
        """The type of a gradient as it is brought together, and that of its value, where these differ."""
        if not register.is_gradient:
            return None
        kept, made = self.layouts[register].dtype, self.graph.layout(register.of).dtype
        return None if kept is made else (kept, made)

    def cast(self, registers: Iterable[LocalRegister], at: int) -> None:
        """Gradients of weights in the type in which they are brought together."""
        for register in registers:
            types = self.types(register)
            if types is not None:
                name = self.name(register, at)
                self.line(f"{name} = {name}.to({self.bind(types[0], 'dtype')})")
                self.borrowed.discard(name)

    def cotangent(self, register: LocalRegister, at: int) -> str:
        """A gradient as a segment takes it, in the type of its value."""
        name, types = self.name(register, at), self.types(register)
        return name if types is None else f"{name}.to({self.bind(types[1], 'dtype')})"


def tuple_of(names: Iterable[str]) -> str:
    return "(" + "".join(f"{name}, " for name in names) + ")"
