"""Opened calls: an op as a piece runs it, by ops that write nowhere; those of equal layers are opened once."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from ....sbp.call import Piece, Rewritten, Way, frozen
from ....sbp.logical import Logical, LogicalOp
from ....sbp.state import Spans
from ..choose.decompose import in_line, looks, opened

__all__ = ["OpenedCalls", "SeenPiece"]

Looked = dict[tuple[bool, int, int], Spans]  # by whether it is of an output, its place, and the dim


@dataclass(frozen=True)
class SeenPiece(Piece):
    """A piece that notes which places a local function looked at."""

    looked: Looked = field(default_factory=dict)

    def spans(self, at: int, dim: int) -> Spans:
        return self.looked.setdefault((False, at, dim), super().spans(at, dim))

    def out_spans(self, at: int, dim: int) -> Spans:
        return self.looked.setdefault((True, at, dim), super().out_spans(at, dim))


class OpenedCalls:
    """The calls of a step's pieces; `mine` has the values of a piece."""

    def __init__(self, mine: Mapping[int, Tensor]) -> None:
        self.mine = mine
        self.calls: dict[Hashable, Logical] = {}
        self.local: dict[Hashable, tuple[Logical, Looked]] = {}  # of local functions, with where they looked

    def of(self, op: LogicalOp, way: Way, piece: SeenPiece) -> Logical:
        """An op as a piece runs it."""
        if way.local is None:
            args, kwargs = in_line(op)
            return self._opened(op.op, args, kwargs, op)
        key = self.key(op, way, piece)
        if key not in self.local:
            args, kwargs = in_line(op)
            function: Callable[..., Any] = partial(way.local, piece)
            if isinstance(way.local, Rewritten):
                function, args = way.local.rewrite(piece, *args, **kwargs)
                kwargs = {}
            self.local[key] = self._opened(function, args, kwargs, op), piece.looked
        made, looked = self.local[key]
        piece.looked.update(looked)
        return made

    def key(self, op: LogicalOp, way: Way, piece: SeenPiece) -> Hashable:
        """All that the calls of a local function depend on: equal for equal layers."""
        laid = tuple((of.shape, of.dtype) for of in (*piece.inputs, *piece.outputs))
        return way, op.op, piece.rank, laid, tuple(looks(self.mine[n]) for n in op.inputs), frozen(in_line(op))

    def _opened(self, function: Callable[..., Any], args: Any, kwargs: Any, op: LogicalOp) -> Logical:
        inputs = [self.mine[n] for n in op.inputs]
        key = function, frozen((args, kwargs)), tuple(map(looks, inputs))
        known = self.calls.get(key)
        return known or self.calls.setdefault(key, opened(function, args, kwargs, inputs))
