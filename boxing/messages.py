"""An exchange as sends and receives, all posted at once: everybody to everybody concerned, without a collective."""

from typing import TYPE_CHECKING, Any
from zlib import crc32

from torch import Tensor

from .buffer import finish, keep, pack, part, plain
from .transport import Exchange, Posted, Sent

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["post"]


def post(pg: "ProcessGroup", sent: Sent, exchange: Exchange) -> Posted:
    """Send and receive by global rank, under a tag that only the same turn of the same plan carries.

    What lies in one run of the result is received in place; what the rank keeps is copied while the wire is busy.
    """
    rank, program, buffer, reduction, turn = exchange
    tag = crc32(b"%d %d" % (turn.fingerprint, turn.number)) & 0x7FFFFFFF
    out = None if program.terms else buffer.new_empty(program.shape)
    data: dict[int, Tensor] = {}
    works: list[Any] = []
    for peer, boxes, numel in program.receives:
        place = part(out, boxes[0], 1) if out is not None and len(boxes) == 1 else None
        target = place if place is not None and place.is_contiguous() else buffer.new_empty(numel)
        data[peer] = target
        works.append(pg.recv([target], peer, tag))
    for peer, boxes, _ in program.sends:
        piece = plain(pack(buffer, boxes))
        sent.add(rank, piece.nbytes)
        works.append(pg.send([piece], peer, tag))
    if out is not None:
        keep(program, buffer, out)
    return works, lambda: finish(program, rank, buffer, data.__getitem__, reduction, out)
