"""Batches: the arguments of a step cut into micro-batches, and results of these put together again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...boxing import box
from ...boxing.execute import token
from ...placement.errors import SbpError
from ...sbp import Layout
from ...sbp.call import fill, refs_in, tensors_in
from ...sbp.logical import Logical
from ..tensor import GlobalTensor, wrap
from .called import Shards
from .inputs import tensors_by_path
from .local import placed
from .micro import Part

__all__ = ["Batch", "evaluated", "joined", "together", "weight_of"]


@dataclass(frozen=True)
class Batch:
    """Which arguments have samples along their first dim, and how many each micro-batch gets: early ones one more."""

    inputs: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], micro_batches: int, name: str) -> "Batch":
        """The batch that arguments are: as long as the first tensor that has dims is."""
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
        base, more = divmod(samples, micro_batches)
        inputs = tuple(path for path, x in given.items() if x.ndim and x.shape[0] == samples)
        return cls(inputs, tuple(base + (k < more) for k in range(micro_batches)))

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    def cut(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors of each micro-batch; one without samples is the same in all."""
        parts: list[dict[str, Tensor]] = []
        at = 0
        for size in self.sizes:
            parts.append({path: x[at : at + size] if path in self.inputs else x for path, x in tensors.items()})
            at += size
        return parts


def evaluated(graph: Logical, tensors: Mapping[str, Tensor]) -> Tensor:
    """What a graph makes of plain values by the names of its sources."""
    known: dict[int, Any] = {}
    for number, source in enumerate(graph.sources):
        value = tensors.get(source.name)
        known[number] = value.full_tensor() if isinstance(value, GlobalTensor) else value
    where = next((x.device for x in known.values() if isinstance(x, Tensor)), torch.device("cpu"))
    with torch.no_grad():
        for op in graph.ops:
            kwargs = fill(dict(op.kwargs), known) if op.inputs else placed(op.op, op.kwargs, where)
            made = tensors_in(op.op(*fill(op.args, known), **kwargs))
            known.update(zip(op.numbers, made, strict=True))
    (number,) = refs_in(graph.result)
    result: Tensor = known[number]
    return result


def together(values: Sequence[Tensor], how: Part, sizes: Sequence[int]) -> Tensor:
    """An addend of each micro-batch as that of all of them."""
    stacked = torch.stack([*values])
    if how.state.reduction != "sum":
        return stacked.amax(0) if how.state.reduction == "max" else stacked.amin(0)
    if not how.avg:
        return stacked.sum(0)
    shares = torch.tensor([size / sum(sizes) for size in sizes], dtype=stacked.dtype, device=stacked.device)
    mixed: Tensor = torch.tensordot(shares, stacked, 1)
    return mixed


def weight_of(part: Part, size: int, samples: int, name: str) -> float:
    """What a loss of a micro-batch counts in that of the batch."""
    if part.state.partial and part.state.reduction == "sum" and not part.avg:
        return 1.0
    if part.whole or part.avg:
        return size / samples
    raise SbpError(
        f"the loss {name} of a micro-batch is {part} of the batch\n"
        "  backward() in micro-batches starts from a sum or a mean over samples"
    )


def joined(
    parts: Sequence[Shards | None], layouts: Sequence[Layout], how: Part, sizes: Sequence[int], scale: float = 1.0
) -> GlobalTensor:
    """A result of the batch, of what it is in each micro-batch; None where no rank of it is owned here.

    A sum is `scale` of that of all micro-batches, where totals were not of all of them.
    """
    given = [mine if mine is not None else (token(of),) for mine, of in zip(parts, layouts, strict=True)]
    if any(of.placement is not layouts[0].placement for of in layouts):  # of two routes: all to where the first is
        there = [Layout(layouts[0].placement, of.state, of.shape, of.dtype) for of in layouts]
        given = [
            box(mine, *pair, op="result") for mine, pair in zip(given, zip(layouts, there, strict=True), strict=True)
        ]
        layouts = there
    values: list[Any] = [wrap(mine, of) for mine, of in zip(given, layouts, strict=True)]
    if how.whole or len(values) == 1:
        return values[0]  # type: ignore[no-any-return]
    if how.dim is not None:
        return torch.cat(values, how.dim)  # type: ignore[return-value]
    if how.state.reduction == "sum":
        total = sum(sizes)
        weights = [size / total if how.avg else scale for size in sizes]
        if any(weight != 1 for weight in weights):  # counts stay whole numbers
            given = [tuple([w * x for x in mine]) for w, mine in zip(weights, given, strict=True)]
        return wrap(tuple([torch.stack(column).sum(0) for column in zip(*given, strict=True)]), layouts[0])
    best: Any = values[0]
    for value in values[1:]:
        best = torch.maximum(best, value) if how.state.reduction == "max" else torch.minimum(best, value)
    return best  # type: ignore[no-any-return]
