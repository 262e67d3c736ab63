"""Batches: the arguments of a step cut into micro-batches, or into slices of these; and results put together again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....boxing import box
from ....boxing.exchange.execute import token
from ....placement.errors import SbpError
from ....sbp import Layout
from ....sbp.call import fill, refs_in, tensors_in
from ....sbp.logical import Logical
from ....sbp.state import Factors, spans
from ...tensors.tensor import GlobalTensor, wrap
from ..capture.arguments import tensors_by_path
from ..compiler.generated_calls import Shards
from ..lower.localise import placed
from .parts import Part, Size

__all__ = ["Batch", "MicroBatch", "evaluated", "joined", "together", "weight_of"]


class MicroBatch(NamedTuple):
    """A micro-batch, or a slice of one: where it begins along the axes of samples and tokens, and how long it is."""

    starts: Size
    sizes: Size


@dataclass(frozen=True)
class Batch:
    """How many samples there are, and tokens of each where sequences are cut; by which axis each dim of an argument is
    cut; and the pieces, slices of one micro-batch behind each other."""

    sizes: Size
    inputs: Mapping[str, tuple[Factors, ...]]
    pieces: tuple[MicroBatch, ...]
    slices: int = 1

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
            for place in _places([len(each) for each in lengths])
        )  # fmt: skip
        return cls(sizes, inputs, pieces, prod(map(len, lengths[1:])))

    def piece(self, x: Tensor, dims: tuple[Factors, ...], piece: MicroBatch) -> Tensor:
        """The part of a value of the batch that a piece has."""
        for d, factors in enumerate(dims):
            wholes = [-f if f < 0 else self.sizes[f] for f in factors]
            several = wholes not in ([], [x.shape[d]])  # samples and tokens in one dim
            x = torch.unflatten(x, d, (*wholes, -1)) if several else x
            for at, axis in enumerate(factors):
                x = x if axis < 0 else x.narrow(d + at, piece.starts[axis], piece.sizes[axis])
            x = x.flatten(d, d + len(wholes)) if several else x
        return x

    def cut(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors of each piece; one without samples or tokens is the same in all."""
        return [{path: self.piece(x, self.inputs[path], piece) for path, x in tensors.items()} for piece in self.pieces]

    def shares(self, piece: MicroBatch, samples: int) -> tuple[float, ...]:
        """The share of so many samples, and of their tokens, that a piece is."""
        wholes = (samples, *self.sizes[1:])
        return tuple(size / whole for size, whole in zip(piece.sizes, wholes, strict=True))


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
    """By which axis each dim of an argument is cut: samples are along its first, tokens along its second, or along both
    of the last two of a mask."""
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
            dims[-2:] = [(1,), (1,)]
    return tuple(dims)


def _places(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """All pieces by number, slices of a micro-batch behind each other."""
    places: list[tuple[int, ...]] = [()]
    for many in counts:
        places = [(*place, at) for place in places for at in range(many)]
    return places


def evaluated(graph: Logical, tensors: Mapping[str, Tensor]) -> Tensor:
    """The results of a graph on plain values by the names of its sources."""
    known: dict[int, Any] = {}
    for number, source in enumerate(graph.sources):
        value = tensors.get(source.name)
        known[number] = value.full_tensor() if isinstance(value, GlobalTensor) else value
    where = next((x.device for x in known.values() if isinstance(x, Tensor)), torch.device("cpu"))
    with torch.no_grad():
        for op in graph.ops:
            kwargs = fill(op.kwargs, known) if op.inputs else placed(op.op, op.kwargs, where)
            made = tensors_in(op.op(*fill(op.args, known), **kwargs))
            known.update(zip(op.numbers, made, strict=True))
    (number,) = refs_in(graph.result)
    result: Tensor = known[number]
    return result


def together(values: Sequence[Tensor], how: Part, batch: Batch, pieces: Sequence[MicroBatch]) -> Tensor:
    """An addend of each piece as that of all of them."""
    samples = sum(piece.sizes[0] for piece in pieces[:: batch.slices])
    apart = [axis for axis in range(len(batch.sizes)) if axis not in how.state.partial]  # the same along these
    first = pieces[0].starts
    mine = [
        (x, prod(share for axis, share in enumerate(batch.shares(piece, samples)) if axis in how.avg))
        for x, piece in zip(values, pieces, strict=True)
        if all(piece.starts[axis] == first[axis] for axis in apart)
    ]
    stacked = torch.stack([x for x, _ in mine])
    if how.state.reduction != "sum":
        return stacked.amax(0) if how.state.reduction == "max" else stacked.amin(0)
    if not how.avg:
        return stacked.sum(0)
    shares = torch.tensor([share for _, share in mine], dtype=stacked.dtype, device=stacked.device)
    mixed: Tensor = torch.tensordot(shares, stacked, 1)
    return mixed


def weight_of(part: Part, shares: Sequence[float], name: str) -> float:
    """The weight of a piece's loss in that of the batch."""
    weight = 1.0
    for axis, share in enumerate(shares):
        word = "odd" if part.odd else part.on(axis)
        if word in ("avg", "whole"):
            weight *= share
        elif word != "sum":
            raise SbpError(
                f"the loss {name} of a micro-batch is {part} of the batch\n"
                "  backward() in micro-batches starts from a sum or a mean over samples"
            )
    return weight


def joined(
    parts: Sequence[Shards | None], layouts: Sequence[Layout], how: Part, batch: Batch, scale: float = 1.0
) -> GlobalTensor:
    """A result of the batch, of what it is in each piece; None where no rank of it is owned here.

    A sum is `scale` of that of all micro-batches, where totals were not of all of them.
    """
    given = [mine if mine is not None else (token(of),) for mine, of in zip(parts, layouts, strict=True)]
    if any(of.placement is not layouts[0].placement for of in layouts):  # of two routes: all to where the first is
        there = [Layout(layouts[0].placement, of.state, of.shape, of.dtype) for of in layouts]
        given = [
            box(mine, *pair, op="result") for mine, pair in zip(given, zip(layouts, there, strict=True), strict=True)
        ]
        layouts = there
    values: list[GlobalTensor] = [wrap(mine, of) for mine, of in zip(given, layouts, strict=True)]
    sizes = [piece.sizes for piece in batch.pieces]
    if batch.slices > 1:
        starts = range(0, len(values), batch.slices)
        rows = [(values[at : at + batch.slices], sizes[at : at + batch.slices]) for at in starts]
        values = [_along(1, row, how, of) for row, of in rows]
        sizes = [(of[0][0], batch.sizes[1]) for _, of in rows]
    return _along(0, values, how, sizes, scale)


def _along(
    axis: int, values: Sequence[GlobalTensor], how: Part, sizes: Sequence[Size], scale: float = 1.0
) -> GlobalTensor:
    """Values that differ along one axis as one."""
    first, dim = values[0], how.dim(axis)
    if len(values) == 1 or (dim is None and axis not in how.state.partial):
        return first
    if dim is not None:
        before = how.state.dims[dim][: how.state.dims[dim].index(axis)]
        if not before:
            return torch.cat(list(values), dim)  # type: ignore[return-value]
        rows = [
            torch.unflatten(x, dim, (prod(-f if f < 0 else size[f] for f in before), -1))
            for x, size in zip(values, sizes, strict=True)
        ]
        return torch.cat(rows, dim + 1).flatten(dim, dim + 1)  # type: ignore[return-value]
    if how.state.reduction == "sum":
        total = sum(size[axis] for size in sizes)
        weights = [size[axis] / total if axis in how.avg else scale for size in sizes]
        shards = [x._shards for x in values]
        if any(weight != 1 for weight in weights):  # counts stay whole numbers
            shards = [tuple([w * x for x in mine]) for w, mine in zip(weights, shards, strict=True)]
        return wrap(tuple([torch.stack(column).sum(0) for column in zip(*shards, strict=True)]), first._layout)
    best: Any = first
    for value in values[1:]:
        best = torch.maximum(best, value) if how.state.reduction == "max" else torch.minimum(best, value)
    return best  # type: ignore[no-any-return]
