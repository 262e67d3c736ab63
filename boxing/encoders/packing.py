"""Payloads as one run of bytes, and back: all that the tensors of a bucket send in one exchange."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .course import Payload

__all__ = ["nbytes", "packed", "unpacked"]


def nbytes(payloads: Sequence[Payload]) -> int:
    return sum(x.nbytes for payload in payloads for x in payload)


def packed(payloads: Sequence[Payload]) -> Tensor:
    """The bytes of payloads behind each other."""
    return torch.cat([x.contiguous().reshape(-1).view(torch.uint8) for payload in payloads for x in payload])


def unpacked(run: Tensor, like: Sequence[Payload]) -> list[Payload]:
    """The payloads whose bytes are in a run; `like` are others of the same shapes and dtypes."""
    found, at = [], 0
    for payload in like:
        parts = []
        for x in payload:
            piece = run[at : at + x.nbytes]
            at += x.nbytes
            if piece.storage_offset() % x.itemsize or piece.data_ptr() % x.itemsize:  # no dtype begins anywhere
                piece = piece.clone()
            parts.append(piece.view(x.dtype).view(x.shape))
        found.append(tuple(parts))
    return found
