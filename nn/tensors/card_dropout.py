"""Dropout as a card's own kernel has it, which draws other numbers than `bernoulli` and multiplies before it rounds."""

import torch
from torch import Tensor

__all__ = ["drop_on_card", "kept_on_card"]

HALVES = (torch.float16, torch.bfloat16)


@torch.library.custom_op("sbpflow::kept_on_card", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def kept_on_card(x: Tensor, p: float) -> Tensor:
    """Which elements the kernel keeps of a tensor that lies like `x`, whatever is in it."""
    return torch.native_dropout(torch.ones_like(x), p, True)[1]


@kept_on_card.register_fake
def _(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def drop_on_card(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """The elements that are kept, divided by their share."""
    wide = x.float() if x.dtype in HALVES else x
    return (wide * kept * (1 / (1 - p))).to(x.dtype)
