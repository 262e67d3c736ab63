"""Sparse gradients: the largest elements and where they are; all others wait (Aji and Heafield)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from ...placement.errors import SbpError
from .course import WIDE, Payload
from .encoder import Encoder

__all__ = ["TopKEncoder"]


@dataclass(frozen=True)
class TopKEncoder(Encoder):
    """A fraction of the elements, those of the largest size, with an index each.

    They are sent with their very values, so that those sent and those kept are the tensor, to the bit.

    >>> encoder = TopKEncoder(fraction=0.5)
    >>> encoder.decode(encoder.encode(torch.tensor([1.0, -3.0, 2.0, 0.5])), torch.empty(4))
    tensor([ 0., -3.,  2.,  0.])
    """

    fraction: float = 0.01

    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise SbpError(
                f"topk(fraction={self.fraction!r})\n  give it a part of the elements, as in topk(fraction=0.01)"
            )

    def encode(self, value: Tensor) -> Payload:
        flat = value.reshape(-1)
        wide = torch.int32 if flat.numel() < 2**31 else torch.int64
        _, largest = flat.abs().topk(ceil(self.fraction * flat.numel()), sorted=False)
        at = largest.sort().values  # neighbours in memory are read and written together
        return at.to(wide), flat[at]

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        return self.summed([payload], like)

    def summed(self, payloads: Sequence[Payload], like: Tensor) -> Tensor:
        total = torch.zeros(like.numel(), dtype=WIDE.get(like.dtype, like.dtype), device=like.device)
        for at, values in payloads:
            places = at.long()
            total[places] += values.to(total.dtype)  # no place twice
        return total.view(like.shape).to(like.dtype)
