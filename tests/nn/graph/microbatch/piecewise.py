"""Runs a step piece by piece in one process, as it lies along time: the oracle of `along` and `peel`."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbpflow.nn.graph.capture.arguments import tensors_by_path
from sbpflow.nn.graph.microbatch import attention
from sbpflow.nn.graph.microbatch.along import along
from sbpflow.nn.graph.microbatch.batch import Batch, evaluated, weight_of
from sbpflow.nn.graph.microbatch.micro import Micro
from sbpflow.nn.graph.microbatch.peel import peeled
from sbpflow.placement.structure import mapped
from sbpflow.sbp.call import Ref, fill, refs_in, tensors_in
from sbpflow.sbp.state import State
from tests.nn.graph.interpret import Ran, named
from tests.nn.graph.same import traced


class Step(nn.Module):
    """A loss of a model as a module."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any) -> Any:
        return self.loss(self.model, *args)


def same_piecewise(
    model: nn.Module, args: Sequence[Any], micro_batches: int, slices: Any = None, tolerance: float = 1e-12
) -> list[Micro]:
    """Run a step piece by piece: its result and gradients are those of the step; returns what the pieces ran."""
    one = copy.deepcopy(model)
    ran, micros = run(model, args, micro_batches, slices)
    wanted = one(*args)
    if isinstance(wanted, Tensor) and wanted.requires_grad and wanted.dim() == 0:
        torch.autograd.backward(wanted)
    torch.testing.assert_close(ran.result, wanted, rtol=tolerance, atol=tolerance)
    grads = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
    torch.testing.assert_close(ran.grads, grads, rtol=tolerance, atol=tolerance)
    return micros


def run(model: nn.Module, args: Sequence[Any], micro_batches: int, slices: Any = None) -> tuple[Ran, list[Micro]]:
    """The step of a model, each piece forward, and then all backward from the last."""
    logical, constants = traced(model, *args)
    batch = Batch.of(args, {}, micro_batches, "step", slices)
    micros = peeled(along(logical, batch.runs, batch.inputs))
    given = tensors_by_path(args, {})
    held = {**named({"": model}), **{name: read() for name, read in constants.items()}, **given}
    leaves: dict[str, Tensor] = {}
    pieces = list(zip(micros, batch.pieces, arguments(batch, micros, held, given), strict=True))
    values = [forward(micro, {**held, **more}, leaves) for micro, _, more in pieces]
    for (micro, piece, _), mine in reversed(list(zip(pieces, values, strict=True))):
        for n in (loss.number for loss in micro.logical.losses):
            weight = weight_of(micro.states[n], batch.shares(piece), "loss")
            torch.autograd.backward(mine[n], torch.full_like(mine[n], weight), retain_graph=True)
    ends = [refs_in(micro.logical.result) for micro in micros]
    parts = [[mine[n].detach() for mine, n in zip(values, numbers, strict=True)] for numbers in zip(*ends, strict=True)]
    whole = iter([joined(each, micros[0].states[n], batch.slices) for each, n in zip(parts, ends[0], strict=True)])
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return Ran(logical.rebuild(mapped(logical.result, Ref, lambda _: next(whole))), grads, {}), micros


def arguments(
    batch: Batch, micros: Sequence[Micro], held: Mapping[str, Tensor], given: Mapping[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """The arguments of each piece."""
    first = attention.reserved()
    for k, (micro, piece, cut) in enumerate(zip(micros, batch.pieces, batch.cut(given), strict=True)):
        cut.update({known.name: batch.piece(evaluated(known.graph, held), known.dims, piece) for known in micro.known})
        shares = batch.shares(piece)
        cut.update({s.name: torch.tensor(prod(shares[a] for a in s.axes), dtype=s.dtype) for s in micro.shares})
        at = first + k // batch.slices * len(micro.pasts)
        cut.update({name: torch.tensor([at + n, piece.starts[-1]]) for n, name in enumerate(micro.pasts)})
        yield cut


def forward(micro: Micro, held: Mapping[str, Tensor], leaves: dict[str, Tensor]) -> dict[int, Tensor]:
    """All values of one piece."""
    values: dict[int, Tensor] = {}
    for number, source in enumerate(micro.logical.sources):
        value = held[source.name]
        if source.requires_grad:
            value = leaves.setdefault(source.name, value.detach().clone().requires_grad_())
        assert value.shape == source.fake.shape, source
        values[number] = value
    for op in micro.logical.ops:
        with torch.set_grad_enabled(op.grad):
            made = tensors_in(op.op(*fill(op.args, values), **fill(dict(op.kwargs), values)))
        assert [(y.shape, y.dtype) for y in made] == [(y.shape, y.dtype) for y in op.outputs], op
        assert values.keys().isdisjoint(op.numbers), op
        values.update(zip(op.numbers, made, strict=True))
    return values


def joined(values: Sequence[Tensor], state: State, slices: int) -> Tensor:
    """A value of the batch, of those of its pieces."""
    rows = [_along(values[at : at + slices], state, 1) for at in range(0, len(values), slices)]
    return _along(rows, state, 0)


def _along(values: Sequence[Tensor], state: State, axis: int) -> Tensor:
    if axis in state.partial:
        stacked = torch.stack(list(values))
        return stacked.sum(0) if state.reduction == "sum" else getattr(stacked, f"a{state.reduction}")(0)
    dim = next((d for d, factors in enumerate(state.dims) if axis in factors), None)
    assert dim is None or state.dims[dim][0] == axis
    return values[0] if dim is None else torch.cat(list(values), dim)


def layers(between: Callable[["Between", Tensor], Tensor]) -> nn.Module:
    """A step of two layers with something between, which sees 8 samples of 6 numbers."""
    return Step(Between(between), lambda m, x, y: F.cross_entropy(m(x), y))


class Between(nn.Module):
    def __init__(self, between: Callable[["Between", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.between = between
        self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        self.token, self.two = nn.Parameter(torch.randn(1, 1, 6).double()), nn.Parameter(torch.randn(2, 6).double())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self, self.first(x)))
        return out
