"""The statements `limit` and `seek`: within how much memory a planner stays, and what it looks for."""

from dataclasses import dataclass
from typing import Self

from ..statement import Assigning, LineFault, LineForm, Statement
from ..terms import Columns, Token, bytes_text, column, once

__all__ = ["Limit", "Seek"]

MICRO_BATCHES = "micro-batches"


@dataclass(frozen=True)
class Limit(Statement):
    """Bytes of a rank within which the step has to stay."""

    memory: int

    form = LineForm(
        heads=("limit",),
        grammar="limit: _LIMIT MEMORY size",
        examples={"limit memory 70 GiB": (70 * 2**30,), "limit memory 12345 B": (12345,)},
        says="bytes of a rank, for the planner",
        subject=(),
    )

    @classmethod
    def read(cls, at: Columns, what: Token, size: tuple[Token, int]) -> Self:
        at |= {"what": column(what), "limit": column(size[0])}
        return cls(size[1])

    def __str__(self) -> str:
        return f"limit memory {bytes_text(self.memory)}"

    def assign(self, to: Assigning) -> None:
        to.made.options["memory"] = self.memory


@dataclass(frozen=True)
class Seek(Statement):
    """Degrees and other choices that the planner is to look for."""

    what: tuple[str, ...]

    form = LineForm(
        heads=("seek",),
        grammar=r"""
seek: _SEEK THING ("," THING)* ","?
THING: /[^\W\d][\w-]*/
""",
        words={"THING": "what to look for"},
        examples={"seek pipe, data, micro-batches": (("pipe", "data", MICRO_BATCHES),)},
        says="what the planner looks for",
        subject=(),
    )

    @classmethod
    def read(cls, at: Columns, *things: Token) -> Self:
        names = list[str]()
        for thing in things:
            name = MICRO_BATCHES if thing.lower().replace("_", "-") == MICRO_BATCHES else str(thing)
            once(at, f"what:{name}", thing, name)
            names.append(name)
        return cls(tuple(names))

    def __str__(self) -> str:
        return f"seek {', '.join(self.what)}"

    def assign(self, to: Assigning) -> None:
        raise LineFault(
            self,
            "what",
            "seek leaves degrees to the planner, and a step needs them\n"
            "  find them first, found = flow.find_plan(model, batch, plan=...), and give plan=found",
        )
