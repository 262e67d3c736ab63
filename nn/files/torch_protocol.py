"""torch's protocol of checkpoints: `dcp.save` and `dcp.load` ask a global tensor for its pieces, and move these.

    dcp.save({"model": model.state_dict()}, checkpoint_id="folder")      each process writes its share of every tensor
    dcp.load(state, checkpoint_id="folder")                              each shard is filled where it lies

torch asks first which pieces there are, and later for each by its place; so the tensor keeps what it answered last.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...placement.errors import SbpError
from ...placement.world import owned
from ...sbp import Layout
from ..tensors.tensor import GlobalTensor
from .held import part_in, part_of, written_here
from .pieces import boxes, sizes_of
from .values import Region

__all__ = ["install"]


class _Piece(NamedTuple):
    """Indices of the whole tensor, and the rank whose shard has them; of what is saved, any that does."""

    region: Region
    rank: int

    @property
    def offsets(self) -> torch.Size:
        return torch.Size(lo for lo, _ in self.region)


class _Answered(NamedTuple):
    """The pieces that torch was told of last, to write or to fill."""

    pieces: tuple[_Piece, ...]
    fills: bool


def _whole(x: GlobalTensor, asked: str) -> Layout:
    of = x._layout
    if of.state.partial:
        raise SbpError(
            f"{asked}: a global tensor {tuple(of.shape)} lies as {of.sbp}, addends of which no rank has the sum\n"
            "  add them up first: x.to_global(sbp=flow.B)"
        )
    return of


def _write_items(self: GlobalTensor, fqn: str, _object: Any) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    of = _whole(self, f"dcp.save of {fqn}")
    pieces = tuple(_Piece(region, -1) for region in written_here(of))
    vars(self)["_asked_for"] = _Answered(pieces, fills=False)
    properties = TensorProperties(dtype=of.dtype, requires_grad=self.requires_grad)
    return [
        WriteItem(
            index=MetadataIndex(fqn, piece.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(piece.offsets, torch.Size(sizes_of(piece.region))),
                properties=properties,
                size=self.shape,
            ),
        )
        for piece in pieces
    ]


def _chunk_list(self: GlobalTensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    of = _whole(self, "dcp.load")
    pieces = tuple(_Piece(region, rank) for rank in owned(of.placement) for region in boxes(of.spans(rank)))
    vars(self)["_asked_for"] = _Answered(pieces, fills=True)
    self._moved = None  # copies in other layouts have what was there before
    return [ChunkStorageMetadata(piece.offsets, torch.Size(sizes_of(piece.region))) for piece in pieces]


def _shard(self: GlobalTensor, index: Any) -> Tensor:
    asked: _Answered | None = vars(self).get("_asked_for")
    if asked is None:
        raise SbpError(
            f"torch asks for a piece of {index.fqn}, of which it did not ask where pieces are\n"
            "  call dcp.save or dcp.load with global tensors themselves"
        )
    at = _place(asked, index)
    piece = asked.pieces[at]
    if not asked.fills:
        return part_of(self._layout, self._shards, piece.region)
    places = owned(self.placement)
    found = part_in(self._layout, piece.rank, self._shards[places.index(piece.rank)], piece.region)
    assert found is not None
    return found


def _place(asked: _Answered, index: Any) -> int:
    """The number of the piece that torch means. Several ranks of one process may hold the same, and each is filled."""
    if asked.fills and index.index is not None:
        return int(index.index)
    return next(at for at, piece in enumerate(asked.pieces) if piece.offsets == index.offset)


def install() -> None:
    """Have global tensors answer as torch asks."""
    answers: Sequence[tuple[str, Any]] = (
        ("__create_write_items__", _write_items),
        ("__create_chunk_list__", _chunk_list),
        ("__get_tensor_shard__", _shard),
    )
    for name, answer in answers:
        setattr(GlobalTensor, name, answer)
