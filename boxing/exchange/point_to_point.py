"""An exchange as sends and receives, all posted at once: everybody to everybody concerned, without a collective."""

from typing import TYPE_CHECKING, Any
from zlib import crc32

from torch import Tensor

from .buffer import finish, keep, landing, pack, plain
from .transport import Exchange, Posting, Sent

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["post"]


def post(pg: "ProcessGroup", sent: Sent, exchange: Exchange) -> Posting:
    """Send and receive by global rank, under a tag that only the same turn of the same plan carries.

    What lies in one run of the result is received in place; what the rank keeps is copied while the wire is busy.
    """
    rank, program, buffer, reduction, turn = exchange
    tag = crc32(b"%d %d %d" % (turn.fingerprint, turn.number, turn.key)) & 0x7FFFFFFF
    data: dict[int, Tensor] = {}
    works: list[Any] = []
    for peer, boxes, _ in program.sends:  # first, so that the peers have it while this rank makes room
        piece = plain(pack(buffer, boxes))
        sent.add(rank, piece.nbytes)
        works.append(pg.send([piece], peer, tag))
    out = None if program.terms or program.adds else buffer.new_empty(program.shape)
    for coming in program.receives:
        data[coming.peer] = target = landing(coming, out, buffer)
        works.append(pg.recv([target], coming.peer, tag))
    if out is not None:
        keep(program, buffer, out)
    return works, lambda: finish(program, rank, buffer, data.__getitem__, reduction, out, data)
