"""Encoders: how the addends of a sum are written in fewer bytes, and what that leaves out comes with the next ones.

    value + error  ->  encode  ->  payload  ->  to all ranks of the axis  ->  decode, and add up in the order of ranks
                         |
                         +-> error: what was wanted, less what the payload says; it is added to the next value

An encoder says how one tensor is written and read, and knows nothing of ranks, messages and moves. One that needs more
than an exchange, or keeps more than an error, says so by a course: a generator that asks for exchanges, one after the
other, and is sent what came of each. The courses of a bucket's tensors on all ranks go on in step, since what they ask
for depends on shapes and counts alone. So all ranks decode the same bytes in the same order, and get the same bits.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..encoding import MoveEncoder
from ..kept import KeptTensors, share_bounds

__all__ = [
    "Dealt", "EncoderCourse", "GatheredPayloads", "Payload", "PieceCuts", "PlaceAmong", "PlacedCourse", "Request",
    "Summed", "SummedPieces", "TensorEncoder",
]  # fmt: skip

Payload: TypeAlias = tuple[Tensor, ...]


class Summed(NamedTuple):
    """Asks for the sum of a tensor over the ranks."""

    value: Tensor


class SummedPieces(NamedTuple):
    """Has a piece for each rank, and asks for the sum over the ranks of those for this one."""

    pieces: Sequence[Tensor]


class GatheredPayloads(NamedTuple):
    """Asks for the payloads of all ranks, in their order.

    Where they are not of one shape, `like` has one of each rank, whose values say nothing."""

    payload: Payload
    like: Sequence[Payload] = ()


class Dealt(NamedTuple):
    """Hands each rank a payload, and asks for those that all ranks have for this one."""

    payloads: Sequence[Payload]


class PlaceAmong(NamedTuple):
    """Asks for the place of this rank among those that add up, which is sent nowhere."""


class PieceCuts(NamedTuple):
    """The piece of a sum for each rank, in their order, and the place of this rank among them.

    Several ranks may have the same piece."""

    each: tuple[tuple[slice, ...], ...]
    here: int

    def of(self, value: Tensor) -> list[Tensor]:
        return [value[cut] for cut in self.each]


Request: TypeAlias = Summed | SummedPieces | GatheredPayloads | Dealt
EncoderCourse: TypeAlias = Generator[Request | PlaceAmong, Any, tuple[Tensor, KeptTensors]]
PlacedCourse: TypeAlias = Generator[Request, Any, tuple[Tensor, KeptTensors]]  # on a rank whose place is known

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True, kw_only=True)
class TensorEncoder(MoveEncoder):
    """A way to write a tensor in fewer bytes, and to make a sum of addends so written."""

    def encode(self, value: Tensor) -> Payload:
        """The tensor in fewer bytes, whose number depends on its shape and dtype alone."""
        raise NotImplementedError(f"{type(self).__name__} has no encode(self, value)")

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        """The tensor that a payload stands for, of the shape, dtype and device of `like`, whose values say nothing."""
        raise NotImplementedError(f"{type(self).__name__} has no decode(self, payload, like)")

    def course(self, value: Tensor, kept: KeptTensors, ranks: int) -> EncoderCourse:
        """The way of an addend to the sum over so many ranks, and what is kept for the next."""
        if self.twice:
            return (yield from self._in_shares(value, kept, ranks))
        wanted = value + kept["error"] if "error" in kept else value
        payload = self._payload(wanted)
        left = {"error": wanted - self._decoded(payload, wanted)} if self.feedback else {}
        everybody = yield GatheredPayloads(payload)
        return self._summed(everybody, wanted), left

    def course_in_pieces(self, value: Tensor, kept: KeptTensors, cuts: PieceCuts) -> EncoderCourse:
        """The way of an addend to this rank's piece of the sum, and what is kept for the next."""
        wanted = value + kept["error"] if "error" in kept else value
        pieces = cuts.of(wanted)
        payloads = [self._payload(x.contiguous()) for x in pieces]
        left = {}
        if self.feedback:
            error = wanted.clone()
            for piece, payload, rest in zip(pieces, payloads, cuts.of(error), strict=True):
                rest.copy_(piece - self._decoded(payload, piece))  # once for a piece that several ranks have
            left["error"] = error
        come = yield Dealt(payloads)
        return self._summed(come, pieces[cuts.here]), left

    @property
    def cuts(self) -> bool:
        """Whether pieces of a value can be encoded by themselves; else a sum in pieces is encoded whole, and cut."""
        return self.hops

    def summed(self, payloads: Sequence[Payload], like: Tensor) -> Tensor:
        """The sum of what payloads stand for, rounded once."""
        wide = like.new_empty(like.shape, dtype=WIDE.get(like.dtype, like.dtype))
        total = self.decode(payloads[0], wide)
        for payload in payloads[1:]:
            total = total + self.decode(payload, wide)
        return total.to(like.dtype)

    def _in_shares(self, value: Tensor, kept: KeptTensors, ranks: int) -> EncoderCourse:
        here = yield PlaceAmong()
        wanted = value + kept["error"] if "error" in kept else value
        shares = [wanted.reshape(-1)[a:b] for a, b in share_bounds(wanted.numel(), ranks)]
        payloads = [self._payload(x) for x in shares]
        mine = self._summed((yield Dealt(payloads)), shares[here])
        mine = mine + kept["share"] if "share" in kept else mine
        payload, left = self._payload(mine), {}
        if self.feedback:
            sent = self._behind_each_other(payloads, shares).view(value.shape)
            left = {"error": wanted - sent, "share": mine - self._decoded(payload, mine)}
        everybody = yield GatheredPayloads(payload, payloads)
        return self._behind_each_other(everybody, shares).view(value.shape), left

    def _behind_each_other(self, payloads: Sequence[Payload], shares: Sequence[Tensor]) -> Tensor:
        return torch.cat([self._decoded(payload, like) for payload, like in zip(payloads, shares, strict=True)])

    def _payload(self, value: Tensor) -> Payload:
        """An encoder is asked of something alone: a mean, a largest one or a scale of nothing is none."""
        return self.encode(value) if value.numel() else (value.new_empty(0, dtype=torch.uint8),)

    def _decoded(self, payload: Payload, like: Tensor) -> Tensor:
        return self.decode(payload, like) if like.numel() else like

    def _summed(self, payloads: Sequence[Payload], like: Tensor) -> Tensor:
        return self.summed(payloads, like) if like.numel() else like.clone()

    @property
    def steady(self) -> "TensorEncoder":
        """The encoder as it is in the long run, by which it is priced."""
        return self

    @property
    def hops(self) -> bool:
        return type(self).course is TensorEncoder.course
