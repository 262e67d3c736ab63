"""Reports of calls: the calls that a function makes, the signatures each could have, and which one it gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from string import ascii_lowercase
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from ...boxing import between
from ...boxing.boxing import Boxing
from ...boxing.explanation import Explanation
from ...placement.errors import SbpError
from ...sbp import Layout
from ...sbp.call import Call, tensors_in
from ...sbp.rule import parse
from ...sbp.schema import operands
from ..tensors.tensor import GlobalTensor

__all__ = ["Answered", "CallChoice", "CallReport", "ExplainedCall", "input_names", "suggested"]

# By a rule, by a formula of ours, as several calls, on gathered tensors, as to_global says, or drawn at random.
Answered: TypeAlias = Literal["rule", "formula", "parts", "gathered", "moved", "drawn"]
MOST_SHOWN = 8


@dataclass(frozen=True)
class CallChoice:
    """One signature of a call: how its inputs must lie, how its outputs then lie, and what it takes to get there.

    `seconds` are those that the choice goes by, of moves and of those of the gradients; on several axes of a grid they
    are an estimate. `bytes` and `bytes_back` are exact: those that the busiest rank receives.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    moves: tuple[tuple[int, Boxing], ...]  # of which input, and how
    moves_back: tuple[tuple[int, Boxing], ...]  # of whose gradient
    seconds: float

    @classmethod
    def of(
        cls,
        tensors: Sequence[GlobalTensor],
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        seconds: float | None = None,
    ) -> "CallChoice":
        """The choice to bring these tensors into these layouts."""
        moves, back = [], []
        for i, (x, to) in enumerate(zip(tensors, inputs, strict=True)):
            if to is x._layout:
                continue
            moves.append((i, between(x._layout, to)))
            if x.requires_grad and torch.is_grad_enabled():
                back.append((i, between(to.dual, x._layout.dual)))
        if seconds is None:
            seconds = sum(way.price.time for _, way in (*moves, *back))
        kept, kept_back = (tuple(one for one in found if one[1].moves) for found in (moves, back))
        return cls(tuple(inputs), tuple(outputs), kept, kept_back, seconds)

    @property
    def bytes(self) -> int:
        return sum(way.bytes for _, way in self.moves)

    @property
    def bytes_back(self) -> int:
        return sum(way.bytes for _, way in self.moves_back)

    def __str__(self) -> str:
        return " -> ".join(", ".join(map(lie, side)) for side in (self.inputs, self.outputs))

    def dict(self) -> dict[str, Any]:
        routes = {"moves": self.moves, "moves_back": self.moves_back}
        told = {name: {str(i): way.route for i, way in ways} for name, ways in routes.items()}
        costs = {"seconds": self.seconds, "bytes": self.bytes, "bytes_back": self.bytes_back}
        return {"signature": str(self), **costs, **told}


class ExplainedCall(NamedTuple):
    """One call; `choices` in the order in which they were looked at, `level` says inside how many others it is made."""

    op: str
    how: Answered
    inputs: tuple[Layout, ...]
    names: tuple[str, ...]  # of the inputs
    choices: tuple[CallChoice, ...] = ()
    chosen: CallChoice | None = None
    why: str = ""
    rule: str = ""  # the line that would serve, where it has none
    level: int = 0

    def __str__(self) -> str:
        return "\n".join("  " * self.level + line for line in self._lines())

    def dict(self) -> dict[str, Any]:
        choices = [choice.dict() for choice in self.choices]
        chosen = self.chosen and self.chosen.dict()
        said = {"op": self.op, "how": self.how, "why": self.why, "rule": self.rule, "level": self.level}
        return {**said, "inputs": list(map(str, self.inputs)), "choices": choices, "chosen": chosen}

    def _lines(self) -> list[str]:
        given = ", ".join(f"{of.shape} {lie(of)}" for of in self.inputs)
        lines = [f"{self.op} of {given} on {self.inputs[0].placement}"]
        said = {
            "formula": f"by {self.why}:",
            "parts": f"{self.why}, so taken apart:" if self.why else "several calls:",
            "gathered": f"runs gathered: {self.why}",
            "drawn": self.why,
        }.get(self.how)
        lines += [f"  {said}"] if said else []
        if self.rule:
            lines += [
                f"  a rule would serve: {self.rule}",
                "  if it holds: flow.check_rule tries it on split arguments",
            ]
        lines += _table(self.choices, self.chosen)
        if self.chosen is not None:
            lines += [f"  {self.names[i]}: {_route(way)}" for i, way in self.chosen.moves]
            lines += [f"  gradient of {self.names[i]}: {_route(way)}" for i, way in self.chosen.moves_back if way.total]
        return lines


@dataclass(frozen=True)
class CallReport(Explanation):
    """The calls of a function, in order. `ends` says why there are no more, where a value would have been needed."""

    steps: tuple[ExplainedCall, ...]
    ends: str = ""

    @property
    def bytes(self) -> int:
        """Bytes that the busiest ranks receive, all forward moves together; what several calls share counts in each."""
        return sum(step.chosen.bytes for step in self.steps if step.chosen is not None)

    @property
    def bytes_back(self) -> int:
        """The same of the gradients, without what brings those of leaves together in the end."""
        return sum(step.chosen.bytes_back for step in self.steps if step.chosen is not None)

    @property
    def seconds(self) -> float:
        return sum(step.chosen.seconds for step in self.steps if step.chosen is not None)

    def __str__(self) -> str:
        lines = list(map(str, self.steps))
        if self.ends:
            lines.append(f"here it ends: {self.ends}")
        calls = [step for step in self.steps if step.chosen is not None]
        if len(calls) > 1:
            back = f", {self.bytes_back} back" if self.bytes_back else ""
            lines.append(f"{len(calls)} calls: {_micro(self.seconds)}, {self.bytes} bytes a rank{back}")
        return "\n".join(lines)

    __repr__ = __str__

    def full(self) -> str:
        return str(self)

    def dict(self) -> dict[str, Any]:
        totals = {"bytes": self.bytes, "bytes_back": self.bytes_back, "seconds": self.seconds}
        return {"calls": [step.dict() for step in self.steps], "ends": self.ends, **totals}


def lie(of: Layout) -> str:
    """The signature of a tensor without its gradient's; on one axis without brackets."""
    text = of.with_state(of.state).lie
    return repr(of.sbp[0]) if len(of.sbp) == 1 and "[" not in text else text


def _table(choices: Sequence[CallChoice], chosen: CallChoice | None) -> list[str]:
    """A line a choice: the mark, the signature, its price; the dearest are left out where there are many."""
    listed = sorted(choices, key=lambda choice: (choice is not chosen, choice.seconds))
    rows = []
    for choice in listed[:MOST_SHOWN]:
        back = f", {choice.bytes_back} back" if choice.bytes_back else ""
        rows.append((str(choice), _micro(choice.seconds), f"{choice.bytes} bytes{back}"))
    wide = [max((len(row[c]) for row in rows), default=0) for c in range(2)]
    lines = [
        f"  {'*' if i == 0 and chosen is not None else ' '} {row[0].ljust(wide[0])}  {row[1].rjust(wide[1])}  {row[2]}"
        for i, row in enumerate(rows)
    ]
    return lines + ([f"    and {len(listed) - MOST_SHOWN} more"] if len(listed) > MOST_SHOWN else [])


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def _route(way: Boxing) -> str:
    return f"{lie(way.src)} -> {lie(way.dst)} by {way.route}, {way.bytes} bytes a rank"


def input_names(call: Call) -> tuple[str, ...]:
    """The schema's name of each tensor input, those of a list by their place in it."""
    names = []
    for name, value in call.bound.items():
        here = tensors_in(value)
        names += [name] if isinstance(value, torch.Tensor) else [f"{name}[{i}]" for i in range(len(here))]
    return tuple(names)


def suggested(call: Call) -> str:
    """A rule that splits dims of inputs which come out again in their place, and no others; "" if unknown.

    Whether the op treats what lies along such a dim alike is for its author to know, or for `check_rule` to try.
    """
    shape = operands(call.op)
    if shape is None:
        return ""
    fresh = (ascii_lowercase[i] for i in count())
    outputs = [list(map(int, y.shape)) for y in call.outputs]
    named: dict[tuple[int, int], str] = {}  # size, and place from the right

    def pattern(sizes: Sequence[int]) -> str:
        dims = []
        for at, n in enumerate(sizes):
            place = n, len(sizes) - at
            kept = n > 1 and outputs and all(len(y) >= place[1] and y[-place[1]] == n for y in outputs)
            if kept:
                named.setdefault(place, next(fresh))
            dims.append(named[place] if kept else "1" if n == 1 else f"{next(fresh)}!")
        return " ".join(dims) or "()"

    try:
        ins = []
        for name, many in shape.inputs.items():
            here = tensors_in(call.bound[name])
            text = pattern(here[0].shape) if here else "_"
            ins.append(f"{{{text}}}" if many and here else text)
        outs = [pattern(y) for y in outputs[: len(shape.outputs)]]
        text = f"{', '.join(ins)} -> {', '.join(outs)}"
        parse(call.name, text)
    except (SbpError, StopIteration, IndexError, KeyError):
        return ""
    return f'flow.rule("{call.name}", "{text}")'
