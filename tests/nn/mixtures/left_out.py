"""Choices that find no room, on one device: counted by hand, and taken out of what experts are called with."""

import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["limited"]


def kept(chosen: Tensor, count: int, factor: float, groups: int) -> Tensor:
    """The choices that find room, counted by hand: a group's first choices first, then its second ones."""
    flat = chosen.reshape(-1, chosen.shape[-1])
    room = max(1, math.ceil(round(factor * -(-len(flat) // groups) * flat.shape[1] / count, 9)))
    found = torch.zeros_like(flat, dtype=torch.bool)
    start = 0
    for part in flat.tensor_split(groups):
        lines: dict[int, int] = {}
        for choice in range(flat.shape[1]):
            for at in range(start, start + len(part)):
                expert = int(flat[at, choice])
                lines[expert] = lines.get(expert, 0) + 1
                found[at, choice] = lines[expert] <= room
        start += len(part)
    return found.view(chosen.shape)


def limited(model: nn.Module, count: int, factor: float, groups: int) -> list[int]:
    """Have a model on one device leave these out; tells how many it does."""
    left: list[int] = []

    def shorten(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 3:
            return None
        x, chosen, *share = args
        (share,) = share or kwargs.values()
        keep = kept(chosen, count, factor, groups)
        left.append(int((~keep).sum()))
        return ((x, chosen), dict.fromkeys(kwargs, share * keep)) if kwargs else ((x, chosen, share * keep), {})

    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "experts":
            module.register_forward_pre_hook(shorten, with_kwargs=True)
    return left
