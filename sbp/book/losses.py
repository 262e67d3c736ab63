"""Losses that reduce: each rank sums its own, and a mean divides by the number of all elements, not of a rank's.

So means of uneven pieces are exact. A mean over classes given by index divides by the weights of those that count,
which only all ranks together know: of that the book says nothing, and the call is taken apart into sum and weights.
"""

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..call import Call, Match, Piece
from ..rule import register
from .labels import Labels, aligned, broadcast, called_with, labelled, named, position

__all__: list[str] = []

NONE, MEAN, SUM = range(3)  # as ATen numbers reductions


@register(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "soft_margin_loss", "poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss",
)  # fmt: skip
def of_elements(call: Call) -> Match:
    """Losses of single elements; inputs broadcast."""
    whole = broadcast(*(x.shape for x in call.inputs))
    labels = range(len(whole))
    inputs = [aligned(x.shape, whole, labels) for x in call.inputs]
    return _reduces(call, inputs, labels, prod(whole), _in_weight(call))


VECTORS: dict[str, dict[str, list[Hashable]]] = {
    "cosine_embedding_loss": {"input1": ["batch", None], "input2": ["batch", None], "target": ["batch"]},
    "triplet_margin_loss": {name: ["batch", None] for name in ("anchor", "positive", "negative")},
    "multi_margin_loss": {"self": ["batch", None], "target": ["batch"], "weight": [None]},
    "multilabel_margin_loss": {"self": ["batch", None], "target": ["batch", None]},
}


@register(*VECTORS)
def of_vectors(call: Call) -> Match | None:
    """Losses of vectors, which stay whole; each vector of a batch is on its own, and without a batch there is one."""
    labels, first = VECTORS[call.name], call.inputs[0]
    if first.dim() < 2:
        labels = {name: own[own[0] == "batch" :] for name, own in labels.items()}
    inputs, batch = named(call, **labels), first.shape[: first.dim() - 1]
    for x, own in zip(call.inputs, inputs, strict=True):
        if x.dim() != len(own) or (own[:1] == ["batch"] and x.shape[:1] != batch):
            return None  # these broadcast
    # Of no vector at all multi_margin_loss returns whatever is in memory.
    return _reduces(call, inputs, ["batch"] * len(batch), prod(batch), _in_weight(call), hollow=False)


@register("nll_loss", "nll_loss_nd", "nll_loss2d", "cross_entropy_loss")
def of_classes(call: Call) -> Match | None:
    """Classes stay whole; each sample and place is on its own."""
    x, target = call.bound["self"], call.bound["target"]
    by_index = target.dtype in (torch.int64, torch.uint8)
    if call.bound["reduction"] == MEAN and by_index:
        return None
    places: list[Hashable] = [d for d in range(x.dim()) if d != min(1, x.dim() - 1)]
    samples = [*places[:1], None, *places[1:]]
    labels: dict[str, Labels] = {"self": samples, "target": places if by_index else samples, "weight": [None]}
    linear = _in_weight(call)
    if call.name != "cross_entropy_loss":
        linear.append((position(call, "self"),))
    elif not by_index and not call.bound["label_smoothing"]:
        linear.append((position(call, "target"),))
    count = x.numel() // max(1, x.shape[min(1, x.dim() - 1)])
    return _reduces(call, named(call, **labels), places, count, linear)


def _in_weight(call: Call) -> list[tuple[int, ...]]:
    return [(position(call, "weight"),)] if call.bound.get("weight") is not None else []


def _reduces(
    call: Call,
    inputs: Sequence[Labels],
    each: Labels,
    count: int,
    linear: Sequence[tuple[int, ...]],
    *,
    hollow: bool = True,
) -> Match:
    """The match of a loss whose results, before they are reduced, have these labels and are so many."""

    def local(piece: Piece, *args: Any, **kwargs: Any) -> Tensor:
        total: Tensor = called_with(call.op, args, kwargs, reduction=SUM)
        return total / count

    how = call.bound["reduction"]
    if how == NONE:
        return labelled(call, inputs, [each], linear=linear, hollow=hollow)
    reduced = dict.fromkeys(each, "sum")
    return labelled(
        call, inputs, [[]], reduced=reduced, linear=linear, hollow=hollow, local=local if how == MEAN else None
    )
