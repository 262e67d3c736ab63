"""Refilling: many tensors written into the shards of others, wherever these lie, a bundle at a time.

Pieces are cast on their way into a message where they travel in a narrower dtype, and on their way out of it where the
filled tensor is of a wider one.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.device import family
from ...placement.world import device, owned
from ..boxing import Boxing
from ..bundle import TensorBundle, TensorPiece, bundled
from ..record import note
from ..routes.program import PeerBoxes, RankProgram
from .buffer import part
from .execute import transport
from .transport import Errand

__all__ = ["Filling", "refill"]


class Filling(NamedTuple):
    """A tensor to be filled: the way, the shards that this process has of the source, and those to be written to."""

    boxing: Boxing
    source: Mapping[int, Tensor]
    target: Mapping[int, Tensor]


def refill(fillings: Sequence[Filling], limit: int, op: str) -> int:
    """Fill them, with at most `limit` bytes a rank on their way at once; the number of bundles."""
    bundles = bundled([one.boxing for one in fillings], limit)
    for one in fillings:
        note(op, one.boxing)
    with torch.no_grad():
        for bundle in bundles:
            _keep(bundle, fillings)
            _carry(bundle, 0, fillings)
        # A gathered share may have other elements than the same share as it was fetched, so all fetches come first.
        for bundle in bundles:
            _carry(bundle, 1, fillings)
    return len(bundles)


def _keep(bundle: TensorBundle, fillings: Sequence[Filling]) -> None:
    """Copy what ranks have of their own for what they are to fill."""
    for rank in _here(bundle):
        for number, box in bundle.kept(rank):
            part(fillings[number].target[rank], box, 1).copy_(part(fillings[number].source[rank], box, 0))


def _carry(bundle: TensorBundle, stage: int, fillings: Sequence[Filling]) -> None:
    """An exchange of a bundle, if it has that one."""
    if not bundle.sends or stage >= len(bundle.groups):
        return
    ranks = [rank for rank in _here(bundle) if rank in bundle.groups[stage]]
    if not ranks:
        return
    jobs = [_errand(bundle, rank, stage, fillings) for rank in ranks]
    for rank, arrived in zip(ranks, transport().start(bundle, stage, jobs, "sum").wait(), strict=True):
        _unpack(bundle.messages(rank, stage, out=False), arrived, rank, fillings)


def _here(bundle: TensorBundle) -> Sequence[int]:
    """The ranks of this process that have a part in a bundle."""
    first = bundle.first
    return tuple(dict.fromkeys((*owned(first.src.placement), *owned(first.dst.placement))))


def _errand(bundle: TensorBundle, rank: int, stage: int, fillings: Sequence[Filling]) -> Errand:
    """A rank's part of an exchange: one flat buffer, in which the message to each peer is one run."""
    sends, receives = (bundle.messages(rank, stage, out=out) for out in (True, False))
    flat = torch.empty(_numel(sends), dtype=bundle.dtype, device=_device(bundle, rank))
    at = 0
    for number, box in (piece for pieces in sends.values() for piece in pieces):
        one = fillings[number]
        piece = part((one.target if stage else one.source)[rank], box, 0)
        flat.narrow(0, at, piece.numel()).view(piece.shape).copy_(piece)
        at += piece.numel()
    program = RankProgram(
        (_numel(receives),), (), _runs(sends, 0), _runs(receives, 1), group=bundle.groups[stage]
    )  # fmt: skip
    return Errand(rank, program, flat)


def _unpack(messages: dict[int, list[TensorPiece]], arrived: Tensor, rank: int, fillings: Sequence[Filling]) -> None:
    at = 0
    for number, box in (piece for pieces in messages.values() for piece in pieces):
        place = part(fillings[number].target[rank], box, 1)
        place.copy_(arrived.narrow(0, at, place.numel()).view(place.shape))
        at += place.numel()


def _runs(messages: dict[int, list[TensorPiece]], side: int) -> tuple[PeerBoxes, ...]:
    found, at = [], 0
    for peer, pieces in messages.items():
        numel = sum(piece.numel for piece in pieces)
        found.append(PeerBoxes(peer, (((0, at, numel) if side else (at, 0, numel),),), numel))
        at += numel
    return tuple(found)


def _numel(messages: dict[int, list[TensorPiece]]) -> int:
    return sum(prod(n for _, _, n in piece.box) for pieces in messages.values() for piece in pieces)


def _device(bundle: TensorBundle, rank: int) -> torch.device:
    """The network carries what cards hold, if either end does."""
    src, dst = bundle.first.src.placement, bundle.first.dst.placement
    kind = dst.type if family(dst.type).card else src.type
    return device(Placement(kind, (rank,), (1,), None), rank)
