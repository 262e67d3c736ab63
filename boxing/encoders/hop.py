"""Encoded hops: a value that goes from one group of ranks to another in fewer bytes, by itself: nothing is kept.

    src  ->  mid: no addends  ->  bytes of each shard  ->  the same bytes on the ranks opposite  ->  decoded  ->  dst

Each rank opposite gets the bytes of one shard, so both groups have as many ranks on every axis.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...placement.world import device, owned
from ...sbp import Layout, State
from ..box import box
from .course import Payload, TensorEncoder
from .packing import nbytes, packed, unpacked

__all__ = ["EncodedHop"]


class EncodedHop:
    """A hop from one layout to another; `code` is how its bytes lie before and behind it."""

    def __init__(self, src: Layout, dst: Layout, encoder: TensorEncoder) -> None:
        self.src, self.dst, self.encoder = src, dst, encoder
        self.left = src.with_state(State(src.state.dims))
        self.right = Layout(dst.placement, self.left.state, dst.shape, dst.dtype)

    @cached_property
    def likes(self) -> dict[int, list[Payload]]:
        """The payload of each rank of the source, without values."""
        shapes = {rank: self.left.local_shape(rank) for rank in self.left.placement.flat}
        made = {shape: self.like(shape) for shape in dict.fromkeys(shapes.values())}
        return {rank: made[shape] for rank, shape in shapes.items()}

    def like(self, shape: tuple[int, ...]) -> list[Payload]:
        empty = torch.empty(shape, dtype=self.src.dtype, device="meta")
        return [self.encoder.encode(empty)] if empty.numel() else []

    @cached_property
    def code(self) -> tuple[Layout, Layout]:
        """Rows of bytes, one for each shard; shorter shards of uneven ones have zeros behind."""
        most = max(map(nbytes, self.likes.values()))
        return self._rows(self.left, most), self._rows(self.right, most)

    @staticmethod
    def _rows(of: Layout, size: int) -> Layout:
        cut = tuple(sorted({a for dim in of.state.dims for a in dim if a >= 0}))
        rows = 1
        for a in cut:
            rows *= of.placement.shape[a]
        return Layout(of.placement, State((cut, ())), (rows, size), torch.uint8)

    def encode(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The bytes of the shards owned here."""
        plain = self.src.with_state(self.src.state)
        values = shards if plain.state == self.left.state else box(shards, plain, self.left, op="hop")
        if not owned(self.left.placement):
            return (torch.empty(0, dtype=torch.uint8, device="cpu"),)
        size = self.code[0].shape[1]
        found = []
        for value in values:
            run = packed([self.encoder.encode(value)]) if value.numel() else value.new_empty(0, dtype=torch.uint8)
            found.append(torch.nn.functional.pad(run, (0, size - run.numel())).view(1, -1))
        return tuple(found)

    def decode(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The shards that these bytes are, on the ranks owned here."""
        found: list[Tensor] = []
        there, opposite = self.right.placement, self.left.placement
        for rank, row in zip(owned(there), rows, strict=False):
            like = self.likes[opposite.flat[there.flat.index(rank)]]
            empty = torch.empty(self.right.local_shape(rank), dtype=self.dst.dtype, device=device(there, rank))
            found.append(self.encoder.decode(unpacked(row.view(-1), like)[0], empty) if like else empty)
        shards = tuple(found) or (torch.empty(0, dtype=self.dst.dtype, device="cpu"),)
        plain = self.dst.with_state(self.dst.state)
        return shards if plain.state == self.right.state else box(shards, self.right, plain, op="hop")
