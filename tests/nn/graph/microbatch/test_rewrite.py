"""Micro-batches by the rule book: what each value is of the batch's, and what has to be known of all before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbpflow.nn.graph.microbatch.batch import Batch, weight_of
from sbpflow.nn.graph.microbatch.parts import Axes
from sbpflow.nn.graph.microbatch.rewrite import Micro, separated
from sbpflow.placement.errors import SbpError
from sbpflow.sbp.call import refs_in

from ..same import traced

ROWS, BATCH = 2, 8


def micro(function: Callable[..., Any], rows: int = ROWS) -> Micro:
    """A function of a linear layer, samples and labels, for a micro-batch of a batch of 8."""
    model = Called(function)
    logical, like = (traced(model, torch.ones(n, 4), torch.zeros(n, dtype=torch.long))[0] for n in (rows, BATCH))
    return separated(logical, like, Axes((BATCH,), (rows,), {"0": ((0,), ()), "1": ((0,),)}))


class Called(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("weights", torch.ones(4))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self, x, y)


def results(found: Micro) -> list[str]:
    return [str(found.parts[n]) for n in refs_in(found.logical.result)]


PARTS: dict[str, tuple[Callable[..., Any], str]] = {
    "logits": (lambda m, x, y: m.layer(x), "split along 0"),
    "turned": (lambda m, x, y: m.layer(x).t(), "split along 1"),
    "mean": (lambda m, x, y: m.layer(x).mean(), "avg"),
    "sum": (lambda m, x, y: m.layer(x).sum(), "sum"),
    "mean of columns": (lambda m, x, y: m.layer(x).mean(0), "avg"),
    "mean of rows": (lambda m, x, y: m.layer(x).mean(1), "split along 0"),
    "highest": (lambda m, x, y: m.layer(x).amax(), "max"),
    "lowest": (lambda m, x, y: m.layer(x).amin(0), "min"),
    "weights": (lambda m, x, y: m.layer.weight.square().sum(), "whole"),
    "loss": (lambda m, x, y: F.cross_entropy(m.layer(x), y, reduction="sum"), "sum"),
    "mean loss": (lambda m, x, y: F.mse_loss(m.layer(x), x), "avg"),
    "with a penalty": (lambda m, x, y: F.mse_loss(m.layer(x), x) + m.layer.weight.square().sum(), "avg"),
    "one less": (lambda m, x, y: 1 - m.layer(x).mean(), "avg"),
    "of those that count": (lambda m, x, y: F.cross_entropy(m.layer(x), y, ignore_index=0), "sum"),
}


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("name", PARTS)
def test_a_value_is_a_part_of_the_batch(name: str, rows: int) -> None:
    function, part = PARTS[name]
    assert results(micro(function, rows)) == [part]


TOTALS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "none": (lambda m, x, y: F.mse_loss(m.layer(x), x), []),
    "labels": (lambda m, x, y: F.cross_entropy(m.layer(x), y), ["sum"]),
    "mean": (lambda m, x, y: m.layer(x - x.mean(0)).sum(), ["avg"]),
    "highest": (lambda m, x, y: m.layer(x / x.amax(0)).sum(), ["max"]),
    "one of another": (lambda m, x, y: m.layer((z := x - x.mean(0)) / z.abs().mean(0)).sum(), ["avg", "avg"]),
    "weights of labels": (lambda m, x, y: F.cross_entropy(m.layer(x), y, weight=m.weights), ["sum"]),
}


@pytest.mark.parametrize("name", TOTALS)
def test_what_depends_on_inputs_alone_is_known_of_all_before(name: str) -> None:
    function, parts = TOTALS[name]
    assert [str(total.how) for total in micro(function).totals] == parts


def test_numbers_that_are_computed_with_are_those_of_the_batch() -> None:
    (op,) = [op for op in micro(lambda m, x, y: m.layer(x).sum() / len(x)).logical.ops if "div" in str(op.op)]
    assert BATCH in op.args


def test_sizes_are_those_of_the_micro_batch() -> None:
    (op,) = [op for op in micro(lambda m, x, y: m.layer(x).view(len(x), 2, 2)).logical.ops if "view" in str(op.op)]
    assert op.outputs[0].shape == (ROWS, 2, 2)


def test_a_loss_counts_as_much_as_it_has_samples() -> None:
    found = micro(lambda m, x, y: (m.layer(x).mean(), m.layer(x).sum(), m.layer.weight.sum()))
    parts = [found.parts[n] for n in refs_in(found.logical.result)]
    assert [weight_of(part, (3 / 8,), "loss") for part in parts] == [3 / 8, 1, 3 / 8]


def test_a_maximum_is_no_loss() -> None:
    found = micro(lambda m, x, y: m.layer(x).amax())
    (part,) = (found.parts[n] for n in refs_in(found.logical.result))
    with pytest.raises(SbpError, match="is max of the batch"):
        weight_of(part, (0.5,), "loss")


@pytest.mark.parametrize(("samples", "sizes"), [(8, (2, 2, 2, 2)), (9, (3, 2, 2, 2)), (4, (1, 1, 1, 1))])
def test_early_micro_batches_take_the_remainder(samples: int, sizes: tuple[int, ...]) -> None:
    batch = Batch.of([torch.arange(samples)], {"mask": torch.ones(6, samples), "x": torch.ones(samples, 2)}, 4, "step")
    assert tuple(piece.sizes[0] for piece in batch.pieces) == sizes
    assert batch.inputs == {"0": ((0,),), "mask": ((), ()), "x": ((0,), ())}
    pieces = batch.cut({"0": torch.arange(samples), "mask": torch.ones(6, samples)})
    assert torch.equal(torch.cat([piece["0"] for piece in pieces]), torch.arange(samples))
    assert all(piece["mask"].shape == (6, samples) for piece in pieces)
