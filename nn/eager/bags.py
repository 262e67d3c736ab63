"""Bags of words as rows: EmbeddingBag of a matrix, whose every row is a sample, by ops that keep samples apart.

torch's own op takes all words in a line and where bags begin, so that no rule can tell samples in it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["bag_of_rows"]


def bag_of_rows(
    words: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """`F.embedding_bag` of rows, with its arguments; NotImplemented of all else, and of what changes the weight."""
    odd = offsets is not None or max_norm is not None or scale_grad_by_freq or sparse or include_last_offset
    if (
        words.dim() != 2
        or odd
        or mode not in ("sum", "mean", "max")
        or (per_sample_weights is not None) > (mode == "sum")
    ):
        return NotImplemented
    found = F.embedding(words, weight)
    if padding_idx is None:
        if per_sample_weights is not None:
            return (found * per_sample_weights[..., None]).sum(1)
        return found.max(1).values if mode == "max" else found.sum(1) if mode == "sum" else found.mean(1)
    counts = (words != padding_idx % len(weight))[..., None]
    if mode == "max":
        most = found.masked_fill(~counts, -torch.inf).max(1).values
        return most.masked_fill(~counts.any(1), 0.0)
    kept = found.masked_fill(~counts, 0.0)
    if per_sample_weights is not None:
        kept = kept * per_sample_weights[..., None]
    return kept.sum(1) if mode == "sum" else kept.sum(1) / counts.sum(1).clamp(min=1)
