"""Batches: the arguments of a step cut into micro-batches, or into slices of these; and results put together again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ....boxing import box
from ....boxing.exchange.execute import token
from ....placement.errors import SbpError
from ....sbp import Layout
from ....sbp.call import fill, refs_in, tensors_in
from ....sbp.logical import Logical
from ....sbp.state import Factors, Runs, State, spans
from ...tensors.memory_formats import in_order
from ...tensors.tensor import GlobalTensor, wrap
from ..capture.arguments import tensors_by_path
from ..compiler.generated_calls import Shards
from ..lower.localise import placed
from .global_rows import held_rows, in_runs
from .needs_all import said

__all__ = ["Batch", "PieceKind", "MicroBatch", "Size", "evaluated", "joined", "weight_of"]

Size: TypeAlias = tuple[int, ...]  # so many samples, and tokens of each where sequences are cut


class PieceKind(NamedTuple):
    """Micro-batches that run the same: how long they are, and which of the programs for that length they run."""

    sizes: Size
    program: int = 0


class MicroBatch(NamedTuple):
    """A micro-batch, or a slice of one: where it begins along the axes of samples and tokens, and how long it is."""

    starts: Size
    sizes: Size


@dataclass(frozen=True)
class Batch:
    """A batch: its samples, tokens of each where sequences are cut, and its pieces, slices of one micro-batch behind
    each other. `inputs` has the axes that cut each dim of an argument."""

    sizes: Size
    inputs: Mapping[str, tuple[Factors, ...]]
    pieces: tuple[MicroBatch, ...]
    runs: Runs

    @property
    def slices(self) -> int:
        """The number of slices of each micro-batch."""
        return prod(map(len, self.runs.lengths[1:]))

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        micro_batches: int,
        name: str,
        slices: int | Sequence[int] | None = None,
    ) -> "Batch":
        """The batch that arguments are: as long as the first tensor that has dims is, with as many tokens."""
        given = tensors_by_path(args, kwargs)
        samples = next((x.shape[0] for x in given.values() if x.ndim), None)
        if micro_batches == 1:
            samples = samples or 1  # of which none is cut
        if samples is None:
            raise SbpError(
                f"{name} runs in {micro_batches} micro-batches, and was given no tensor to cut\n"
                "  pass a batch, with the samples along the first dim"
            )
        if samples < micro_batches:
            raise SbpError(
                f"{name} runs in {micro_batches} micro-batches, and was given a batch of {samples}\n"
                f"  pass {micro_batches} samples or more, or make it with micro_batches={max(samples, 1)}"
            )
        lengths = [_shared(samples, micro_batches)]
        if slices is not None:
            lengths.append(_lengths(given, slices, name))
        sizes = tuple(map(sum, lengths))
        axes = {axis for axis, each in enumerate(lengths) if len(each) > 1}
        inputs = {path: _dims(x, sizes, axes) for path, x in given.items()}
        starts = [list(accumulate([0, *each])) for each in lengths]
        pieces = tuple(
            MicroBatch(tuple(begin[at] for begin, at in zip(starts, place, strict=True)),
                  tuple(each[at] for each, at in zip(lengths, place, strict=True)))
            for place in product(*(range(len(each)) for each in lengths))  # slices of a micro-batch behind each other
        )  # fmt: skip
        return cls(sizes, inputs, pieces, Runs(tuple(map(tuple, lengths))))

    def piece(self, x: Tensor, dims: tuple[Factors, ...], piece: MicroBatch) -> Tensor:
        """The part of a value of the batch that a piece has, without gaps in its memory."""
        run = in_runs(x, piece.sizes[0]) if dims and dims[0] == (0,) and not any(dims[1:]) else None
        if run is not None:
            return held_rows(x, run, piece.starts[0])  # type: ignore[arg-type]
        for d, factors in enumerate(dims):
            wholes = [-f if f < 0 else self.sizes[f] for f in factors]
            several = wholes not in ([], [x.shape[d]])  # samples and tokens in one dim
            x = torch.unflatten(x, d, (*wholes, -1)) if several else x
            for at, axis in enumerate(factors):
                x = x if axis < 0 else x.narrow(d + at, piece.starts[axis], piece.sizes[axis])
            x = x.flatten(d, d + len(wholes)) if several else x
        apart = any(dims) and not isinstance(x, GlobalTensor) and not torch.ops.aten.is_non_overlapping_and_dense(x)
        return x.clone() if apart else x  # as the step was planned for: views of it would not be possible

    def cut(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors of each piece; one without samples or tokens is the same in all."""
        return [{path: self.piece(x, self.inputs[path], piece) for path, x in tensors.items()} for piece in self.pieces]

    def lying(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The arguments as steps of pieces get them, as far as they lie in another way than those of the batch."""
        found = dict(tensors)
        for path, x in tensors.items():
            if self.inputs[path][:1] == ((0,),) and in_runs(x, self.pieces[0].sizes[0]) is not None:
                found[path] = self.piece(x, self.inputs[path], self.pieces[0])
        return found

    def shares(self, piece: MicroBatch) -> tuple[float, ...]:
        """The share of the samples, and of their tokens, that a piece is."""
        return tuple(size / whole for size, whole in zip(piece.sizes, self.sizes, strict=True))

    def update(self, group: Sequence[int]) -> "Batch":
        """The micro-batches of one update of the weights, as a batch of their own."""
        if len(group) == len(self.pieces):
            return self
        mine = [self.pieces[k] for k in group]
        (first, *_), lengths = mine[0].starts, tuple(piece.sizes[0] for piece in mine)
        pieces = tuple(piece._replace(starts=(piece.starts[0] - first, *piece.starts[1:])) for piece in mine)
        return Batch((sum(lengths), *self.sizes[1:]), self.inputs, pieces, Runs((lengths, *self.runs.lengths[1:])))

    def rows(self, group: Sequence[int]) -> MicroBatch:
        """The samples of one update as one piece."""
        starts, samples = self.pieces[group[0]].starts, sum(self.pieces[k].sizes[0] for k in group[:: self.slices])
        return MicroBatch(starts, (samples, *self.sizes[1:]))


def _shared(whole: int, many: int) -> list[int]:
    """In so many parts: early ones get one more."""
    return [hi - lo for k in range(many) for lo, hi in spans(whole, (0,), (k,), (many,))]


def _lengths(given: Mapping[str, Tensor], slices: int | Sequence[int], name: str) -> list[int]:
    tokens = next((x.shape[1] for x in given.values() if x.ndim > 1), 0)
    many = slices if isinstance(slices, int) else len(slices)
    if tokens < many:
        raise SbpError(
            f"{name} cuts sequences into {many} slices, and was given sequences of {tokens}\n"
            "  pass sequences along the second dim, of one token for each slice or more"
        )
    if isinstance(slices, int):
        return _shared(tokens, slices)
    if sum(slices) != tokens:
        raise SbpError(
            f"{name} cuts sequences into slices of {', '.join(map(str, slices))} tokens, and was given {tokens}\n"
            f"  pass sequences of {sum(slices)}, or say only how many slices there are, as in slices={many}"
        )
    return list(slices)


def _dims(x: Tensor, sizes: Size, axes: set[int]) -> tuple[Factors, ...]:
    """The axes that cut each dim of an argument. Samples are along its first, tokens along its second; a mask of all
    tokens for all has them whole."""
    dims: list[Factors] = [()] * x.ndim
    if 0 in axes and x.ndim and x.shape[0] == sizes[0]:
        dims[0] = (0,)
    if 1 in axes:
        tokens = sizes[1]
        if x.ndim > 1 and x.shape[1] == tokens:
            dims[1] = (1,)
        elif x.ndim == 1 and dims == [()] and x.shape[0] == tokens:
            dims[0] = (1,)
        square = x.ndim > 1 and x.shape[-1] == x.shape[-2] == tokens
        others = x.ndim == 4 or x.shape[:1] != sizes[:1] or (x.ndim == 3 and x.dtype == torch.bool)
        if square and others:
            dims[-2:] = [(), ()]
    return tuple(dims)


def evaluated(graph: Logical, tensors: Mapping[str, Tensor], where: torch.device | None = None) -> Tensor:
    """The results of a graph on plain values by the names of its sources; `where`, if none of them tells a device."""
    known: dict[int, Any] = {}
    used = {*refs_in(graph.result), *(n for op in graph.ops for n in op.inputs)}
    for number, source in enumerate(graph.sources):
        value = tensors.get(source.name) if number in used else None  # else what is global would be gathered
        known[number] = value.full_tensor() if isinstance(value, GlobalTensor) else value
    where = next((x.device for x in known.values() if isinstance(x, Tensor)), where or torch.device("cpu"))
    with torch.no_grad():
        for op in graph.ops:
            kwargs = fill(op.kwargs, known) if op.inputs else placed(op.op, op.kwargs, where)
            made = tensors_in(op.op(*fill(op.args, known), **kwargs))
            known.update(zip(op.numbers, made, strict=True))
    (number,) = refs_in(graph.result)
    result: Tensor = known[number]
    return result


def weight_of(state: State, shares: Sequence[float], name: str) -> float:
    """The weight of a piece's loss in that of the batch."""
    if state.split or state.reduction != "sum":
        raise SbpError(
            f"the loss {name} of one micro-batch is no sum or mean over samples: along time it is "
            f"{said(state, len(shares))}\n"
            "  backward() in micro-batches starts from a sum or a mean over samples"
        )
    return prod(share for axis, share in enumerate(shares) if axis not in state.partial)


def joined(
    parts: Sequence[Shards | None], layouts: Sequence[Layout], how: State, batch: Batch, weights: Sequence[float]
) -> GlobalTensor:
    """A result of the batch, put together from those of its pieces; None where no rank of it is owned here.

    A number that adds up over the pieces of one update is a mean over updates, of which each piece has the weight.
    """
    given = [mine if mine is not None else (token(of),) for mine, of in zip(parts, layouts, strict=True)]
    first = layouts[0]
    # Two routes: all go to the first one's ranks. Addends of micro-batches that run other programs may lie otherwise.
    there = [Layout(first.placement, first.state if how.partial else of.state, of.shape, of.dtype) for of in layouts]
    if any(to != of for to, of in zip(there, layouts, strict=True)):
        pairs = zip(given, layouts, there, strict=True)
        given = [box(mine, of, to, op="result") if to != of else mine for mine, of, to in pairs]
        layouts = there
    if set(weights) != {1.0} and layouts[0].dtype.is_floating_point:  # counts stay whole numbers
        given = [tuple([w * x for x in mine]) for w, mine in zip(weights, given, strict=True)] if how.partial else given
    rows = [tuple([in_order(x, of) for x in mine]) for mine, of in zip(given, layouts, strict=True)]
    values: list[GlobalTensor] = [wrap(mine, of) for mine, of in zip(rows, layouts, strict=True)]
    sizes = [piece.sizes for piece in batch.pieces]
    if batch.slices > 1:
        starts = range(0, len(values), batch.slices)
        lines = [(values[at : at + batch.slices], sizes[at : at + batch.slices]) for at in starts]
        values = [_along(1, line, how, of) for line, of in lines]
        sizes = [(of[0][0], batch.sizes[1]) for _, of in lines]
    whole = _along(0, values, how, sizes)
    return whole.to_global(sbp=values[0].sbp) if layouts[0].state.partial else whole  # the largest of pieces is chosen


def _along(axis: int, values: Sequence[GlobalTensor], how: State, sizes: Sequence[Size]) -> GlobalTensor:
    """Values that differ along one axis as one."""
    first, dim = values[0], next((d for d, factors in enumerate(how.dims) if axis in factors), None)
    if len(values) == 1 or (dim is None and axis not in how.partial):
        return first
    if dim is not None:
        before = how.dims[dim][: how.dims[dim].index(axis)]
        if not before:
            return torch.cat(list(values), dim)  # type: ignore[return-value]
        rows = [
            torch.unflatten(x, dim, (prod(-f if f < 0 else size[f] for f in before), -1))
            for x, size in zip(values, sizes, strict=True)
        ]
        return torch.cat(rows, dim + 1).flatten(dim, dim + 1)  # type: ignore[return-value]
    if how.reduction == "sum":
        shards = [x._shards for x in values]
        return wrap(tuple([torch.stack(column).sum(0) for column in zip(*shards, strict=True)]), first._layout)
    best: Any = first
    for value in values[1:]:
        best = torch.maximum(best, value) if how.reduction == "max" else torch.minimum(best, value)
    return best  # type: ignore[no-any-return]
