"""Reading and writing boxes of a rank's buffer: views where a box is in one piece, copies where it is not."""

from collections.abc import Callable, Container

import torch
from torch import Tensor

from ...sbp.signature import Reduction
from ..reductions import combine
from ..routes.program import PeerBoxes, PieceCut, RankProgram

__all__ = ["finish", "keep", "landing", "pack", "part", "place", "plain", "unpack"]


def part(buffer: Tensor, box: PieceCut, side: int) -> Tensor:
    """The box of a buffer as a view; `side` 0 takes the offsets read from, 1 those written to."""
    for dim, entry in enumerate(box):
        if entry[2] != buffer.shape[dim]:
            buffer = buffer.narrow(dim, entry[side], entry[2])
    return buffer


def pack(buffer: Tensor, boxes: tuple[PieceCut, ...]) -> Tensor:
    """The boxes to be sent: a view if there is one, else all one after the other in a new flat buffer."""
    if len(boxes) == 1:
        return part(buffer, boxes[0], 0)
    return torch.cat([part(buffer, box, 0).reshape(-1) for box in boxes])


def unpack(buffer: Tensor, boxes: tuple[PieceCut, ...], data: Tensor) -> None:
    """Write what `pack` made, in any shape, to where it belongs."""
    at = 0
    for box in boxes:
        target = part(buffer, box, 1)
        source = data if len(boxes) == 1 else data.narrow(0, at, target.numel())
        target.copy_(source.reshape(target.shape))
        at += target.numel()


def finish(
    program: RankProgram,
    rank: int,
    buffer: Tensor,
    received: Callable[[int], Tensor],
    reduction: Reduction,
    out: Tensor | None,
    fresh: Container[int] = (),
) -> Tensor:
    """The rank's result, from its own buffer and what came from its peers.

    `out` is given where it holds already what the rank keeps, and perhaps what its peers sent. The buffers received
    from the `fresh` peers are nobody else's and may be written to.
    """
    if program.terms:
        return _combined(program, rank, buffer, received, reduction, fresh)
    if program.adds:
        return _overlapping(program, rank, buffer, received)
    if out is None:
        out = buffer.new_empty(program.shape)
        keep(program, buffer, out)
    for peer, boxes, _ in program.receives:
        data = received(peer)
        if not in_place(out, boxes, data):
            unpack(out, boxes, data)
    return out


def landing(piece: PeerBoxes, out: Tensor | None, like: Tensor) -> Tensor:
    """The buffer for a peer's message: its place in the result if that is one run, else a new flat one."""
    if out is not None and len(piece.boxes) == 1:
        place = part(out, piece.boxes[0], 1)
        if place.is_contiguous():
            return place
    return like.new_empty(piece.numel)


def keep(program: RankProgram, buffer: Tensor, out: Tensor) -> None:
    """Copy what the rank holds of its own result."""
    for box in program.keep:
        part(out, box, 1).copy_(part(buffer, box, 0))


def place(program: RankProgram, data: Tensor) -> Tensor:
    """A result that came in the order of the boxes read, put where they are written."""
    if len(program.keep) == 1:
        return data.reshape(program.shape)
    out = data.new_empty(program.shape)
    unpack(out, program.keep, data)
    return out


def plain(piece: Tensor) -> Tensor:
    """One run of memory with the very values; conjugation and negation that torch has put off are done now."""
    return piece.resolve_conj().resolve_neg().contiguous()


def _combined(
    program: RankProgram,
    rank: int,
    buffer: Tensor,
    received: Callable[[int], Tensor],
    reduction: Reduction,
    fresh: Container[int],
) -> Tensor:
    if not program.keep:
        return buffer.new_empty(program.shape)
    own = pack(buffer, program.keep)
    terms = [own if r == rank else received(r).reshape(own.shape) for r in program.terms]
    # The sum is made in one of the first two terms where that is ours to overwrite; fresh memory costs page faults.
    spare = next((t for r, t in zip(program.terms[:2], terms, strict=False) if r in fresh), None)
    return place(program, combine(terms, reduction, spare))


def _overlapping(program: RankProgram, rank: int, buffer: Tensor, received: Callable[[int], Tensor]) -> Tensor:
    """Boxes added to where they belong, in the order of the group, so that all ranks add alike."""
    out = buffer.new_zeros(program.shape)
    coming = {peer: boxes for peer, boxes, _ in program.receives}
    for member in program.group:
        boxes, at = program.keep if member == rank else coming.get(member, ()), 0
        data = pack(buffer, boxes) if member == rank and boxes else received(member) if boxes else out
        for box in boxes:
            target = part(out, box, 1)
            source = data if len(boxes) == 1 else data.narrow(0, at, target.numel())
            target.add_(source.reshape(target.shape))
            at += target.numel()
    return out


def in_place(out: Tensor, boxes: tuple[PieceCut, ...], data: Tensor) -> bool:
    """Whether the data was received straight into its place in `out`."""
    return len(boxes) == 1 and data.data_ptr() == part(out, boxes[0], 1).data_ptr() and data.numel() > 0
