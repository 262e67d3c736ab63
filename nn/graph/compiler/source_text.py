"""The text of a function in the making: its lines, the names of registers in them, and the objects that it knows."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ....boxing import box
from ....placement.world import owned
from ..lower.instructions import LocalRegister
from ..lower.order import Order
from ..lower.segments import Segment, Stage
from .generated_calls import no_shards, own

__all__ = ["SourceText", "tuple_of"]

OF_STAGES = ("saved", "stash", "rest", "away", "landed", "coming")  # registers on the ranks of a stage


class SourceText:
    """Lines and names. Every rank that this process owns has names of its own for a register."""

    def __init__(self, plan: Order, stages: Sequence[Stage]) -> None:
        self.plan, self.stages = plan, stages
        self.bound: dict[str, Any] = {"add": torch.add, "add_": torch.Tensor.add_, "box": box, "own": own}
        self.numbers: dict[str, int] = {}
        self.known: dict[int, str] = {}  # what is bound already, by identity
        self.live: set[str] = set()
        self.borrowed: set[str] = set()  # gradients whose memory may be somebody else's too
        self.lines: list[str] = []

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

    def on(self, register: str, rank: int, at: int) -> str:
        """The name of a register on a rank, which is the so manyth owned here of its segment's placement; of what went
        round an axis the same ranks stand in another order."""
        layout = self.plan.layouts.get(register)
        ranks = owned(layout.placement) if layout else ()
        return self.name(register, ranks.index(rank) if rank in ranks else at)

    def names(self, register: str) -> list[str]:
        """The names of a register on the ranks owned here; those without a layout are the process's own."""
        layout = self.plan.layouts.get(register)
        return [self.name(register, at) for at in range(len(owned(layout.placement)) if layout else 1)]

    def all_names(self, register: LocalRegister) -> list[str]:
        """The same, also of what a stage keeps on its ranks."""
        if register in self.plan.layouts:
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

    def targets(self, register: str) -> str:
        return self.makes(self.names(register) or ["_"])

    def held(self, register: str) -> str:
        """A register's shards as a tuple; a token where none is owned."""
        names = self.names(register)
        return tuple_of(names) if names else self.bind(no_shards(self.plan.layouts[register]), "token")


def tuple_of(names: Iterable[str]) -> str:
    return "(" + "".join(f"{name}, " for name in names) + ")"
