"""Encoder: the class of all encoders, shipped and users' own, which moves call."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...sbp import Layout
from ..encoding import Encoding
from .course import TensorEncoder
from .encoded_move import EncodedMove
from .encoded_sum import kept_bytes, payload_bytes
from .hop import EncodedHop

__all__ = ["Encoder"]


@dataclass(frozen=True, kw_only=True)
class Encoder(TensorEncoder):
    """A way to write a tensor in fewer bytes. Subclasses are frozen dataclasses with `encode` and `decode`, both pure.

    With `feedback` what a payload leaves out is kept on its rank and added to the next value. With `twice` each rank
    adds up a share of the tensor, encodes it again, and hands it to all: two exchanges whose bytes do not grow with the
    number of ranks, in the place of one whose do. A sum of which each rank is to have a piece is encoded by pieces, and
    never twice.
    """

    def sums(self, pairs: Sequence[tuple[Layout, Layout]], encodings: Sequence[Encoding]) -> EncodedMove:
        return EncodedMove(pairs, encodings, self)

    def hop(self, src: Layout, dst: Layout) -> EncodedHop:
        return _hop(src, dst, self)

    def payload_bytes(self, src: Layout, dst: Layout, axes: tuple[int, ...]) -> int:
        return payload_bytes(src, dst, self, axes)

    def kept_bytes(self, src: Layout, dst: Layout, axes: tuple[int, ...], rank: int) -> int:
        return kept_bytes(src, dst, self, axes) if rank in src.placement else 0


@lru_cache(4096)
def _hop(src: Layout, dst: Layout, encoder: Encoder) -> EncodedHop:
    return EncodedHop(src, dst, encoder)
