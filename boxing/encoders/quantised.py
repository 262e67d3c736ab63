"""Quantised values: a few bits an element, and a scale for each run of so many."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...placement.errors import SbpError
from .course import Payload
from .encoder import Encoder

__all__ = ["Int4Encoder", "Int8Encoder"]


@dataclass(frozen=True)
class _InBlocks(Encoder):
    """Integers from -most to most, with the largest of each block of elements as its scale."""

    block: int = 128

    most: ClassVar[int] = 127

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 2 or self.block % 2:
            raise SbpError(f"{self.name}(block={self.block!r})\n  give it how many elements share a scale, as in 128")

    def levels(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The integers, a row for each block, and the scales."""
        size = min(self.block, value.numel() + value.numel() % 2)  # a small tensor is one block
        flat = torch.nn.functional.pad(value.reshape(-1).float(), (0, -value.numel() % size)).view(-1, size)
        scales = flat.abs().amax(1, keepdim=True) / self.most
        # The scale of zeros alone is zero. That of a block with numbers that are not finite is not finite, nor is the
        # block when it is decoded.
        return (flat / scales.where(scales != 0, 1.0)).round().nan_to_num(0.0).to(torch.int8), scales.view(-1)

    def values(self, levels: Tensor, scales: Tensor, like: Tensor) -> Tensor:
        flat = levels.float() * scales[:, None]
        return flat.view(-1)[: like.numel()].view(like.shape).to(like.dtype)


@dataclass(frozen=True)
class Int8Encoder(_InBlocks):
    """Eight bits an element.

    >>> encoder = Int8Encoder()
    >>> payload = encoder.encode(torch.tensor([1.27, -0.5]))
    >>> payload[0], encoder.decode(payload, torch.empty(2))
    (tensor([[127, -50]], dtype=torch.int8), tensor([ 1.2700, -0.5000]))
    """

    name: ClassVar[str] = "int8"

    def encode(self, value: Tensor) -> Payload:
        return self.levels(value)

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        levels, scales = payload
        return self.values(levels, scales, like)


@dataclass(frozen=True)
class Int4Encoder(_InBlocks):
    """Four bits an element, two of them a byte."""

    block: int = 32

    name: ClassVar[str] = "int4"
    most: ClassVar[int] = 7

    def encode(self, value: Tensor) -> Payload:
        levels, scales = self.levels(value)
        halves = (levels + 8).to(torch.uint8)
        return halves[:, ::2] + halves[:, 1::2] * 16, scales

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        pairs, scales = payload
        levels = torch.stack([pairs % 16, pairs // 16], 2).view(pairs.shape[0], -1).to(torch.int8) - 8
        return self.values(levels, scales, like)
