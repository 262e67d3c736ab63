"""Signs: one bit an element, and a level or two for the sizes (1-bit SGD, 1-bit Adam)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .course import Payload
from .encoder import Encoder

__all__ = ["SignEncoder", "packed_bits", "unpacked_bits"]


@dataclass(frozen=True)
class SignEncoder(Encoder):
    """The sign of each element, and the mean size of all as one level.

    With `rows` each row of dim 0, all weights of one output, has two levels of its own: the means of its negative
    elements, and of all others.

    >>> encoder = SignEncoder()
    >>> payload = encoder.encode(torch.tensor([1.0, -3.0, 2.0]))
    >>> [x.nbytes for x in payload], encoder.decode(payload, torch.empty(3))
    ([1, 4], tensor([ 2., -2.,  2.]))
    """

    rows: bool = False

    name: ClassVar[str] = "sign"

    def encode(self, value: Tensor) -> Payload:
        positive = value >= 0
        bits = packed_bits(positive.reshape(-1))
        if not self.rows:
            return bits, value.abs().mean(dtype=torch.float32).reshape(1)
        flat, up = _rows(value).float(), _rows(positive)
        many = up.sum(1)
        above = torch.where(up, flat, 0.0).sum(1) / many.clamp(min=1)
        below = torch.where(up, 0.0, flat).sum(1) / (flat.shape[1] - many).clamp(min=1)
        return bits, torch.stack([above, below])

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        bits, levels = payload
        up = unpacked_bits(bits, like.numel()).view(like.shape)
        if not self.rows:
            return torch.where(up, levels[0], -levels[0]).to(like.dtype)
        above, below = levels[:, :, None]
        return torch.where(_rows(up), above, below).to(like.dtype).view(like.shape)


def _rows(value: Tensor) -> Tensor:
    return value.reshape(value.shape[0], -1) if value.ndim > 1 else value.reshape(1, -1)


def packed_bits(flags: Tensor) -> Tensor:
    """Flags as bits, eight a byte."""
    eights = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    return (eights * _powers(flags.device)).sum(1, dtype=torch.uint8)


def unpacked_bits(bits: Tensor, numel: int) -> Tensor:
    """The flags that `packed_bits` made bits of."""
    return (bits[:, None] & _powers(bits.device)).ne(0).view(-1)[:numel]


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
