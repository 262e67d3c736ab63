"""Hops: what tasks hand to other groups of ranks, carried inside a process or as messages between processes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....actors.runtime.channel import Carrier, UnderWay, tag_of
from ....boxing import box
from ....boxing.boxing import between
from ....boxing.exchange.buffer import finish, pack, plain
from ....boxing.exchange.slow_link import open_link
from ....boxing.record import note
from ....boxing.routes.program import PieceCut, RankProgram
from ....placement.world import device, owned
from ....sbp import Layout
from ..microbatch.batch import PieceKind
from .network import Bundle

__all__ = ["BundleLink", "carrier"]

ALIGNED = 64  # bytes; kernels may be made for memory that begins at a multiple


def carrier(bundle: Bundle) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None:
    """The function that carries a bundle to its reader in a process that owns the ranks of both; None: as it is."""
    if not bundle.hops:
        return None
    pairs = [(hop.pair, len(owned(hop.pair[0].placement))) for hop in bundle.hops]

    def carry(value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        out: list[Tensor] = []
        at = 0
        for (src, dst), many in pairs:
            out += box(value[at : at + many], src, dst, op="hop")
            at += many
        return tuple(out)

    return carry


class Transit:
    """One value on its way between two ranks' groups: this rank's part of the transfer."""

    def __init__(self, src: Layout, dst: Layout, rank: int) -> None:
        self.boxing = between(src, dst)
        ((program,),) = [one for one in self.boxing.programs(rank) if one] or [(RankProgram((), ()),)]
        self.program, self.rank = program, rank
        self.dtype = dst.dtype
        here = rank in dst.placement.flat
        self.like = torch.empty(0, dtype=dst.dtype, device=device(dst.placement, rank)) if here else None
        held = src.local_shape(rank) if program.sends else ()
        self.sends = {part.peer: None if _all(part.boxes, held, 0) else part.boxes for part in program.sends}
        self.sizes = {part.peer: part.numel for part in program.receives}
        parts = [part.boxes for part in program.receives]
        self.one = len(parts) == 1 and not program.terms and _all(parts[0], program.shape, 1)  # message: the value

    def sent(self, peer: int, shard: Tensor) -> Tensor:
        boxes = self.sends[peer]
        return plain(shard if boxes is None else pack(shard, boxes))

    def come(self, data: Mapping[int, Tensor]) -> Tensor:
        assert self.like is not None
        if self.one:
            (value,) = data.values()
            if value.data_ptr() % ALIGNED == 0:
                return value.view(self.program.shape)
        return finish(self.program, self.rank, self.like, data.__getitem__, "sum", None)


def _all(boxes: Sequence[PieceCut], shape: tuple[int, ...], side: int) -> bool:
    """Whether boxes are one that is all there is on a side: what is read (0) or written (1)."""
    return len(boxes) == 1 and all(
        entry[side] == 0 and entry[2] == size for entry, size in zip(boxes[0], shape, strict=True)
    )


class PeerMessage:
    """The message of one peer for a bundle: its parts of all ways that it shares in, in one run of memory."""

    def __init__(self, ways: Sequence[Transit], peer: int) -> None:
        self.ways, self.peer = ways, peer
        self.sends = [(at, way) for at, way in enumerate(ways) if peer in way.sends]
        comes = [(at, way, way.sizes[peer]) for at, way in enumerate(ways) if peer in way.sizes]
        self.comes = [(at, size, way.dtype) for at, way, size in comes]
        kinds = {way.dtype for _, way, _ in comes}
        self.bytes = len(kinds) > 1
        self.sizes = [_padded(size * way.dtype.itemsize) if self.bytes else size for _, way, size in comes]
        self.total = sum(self.sizes)
        self.dtype = torch.uint8 if self.bytes else next(iter(kinds), torch.uint8)
        self.device = next((way.like.device for _, way, _ in comes if way.like is not None), None)

    def packed(self, shards: Sequence[Tensor]) -> Tensor:
        pieces = [way.sent(self.peer, shards[at]) for at, way in self.sends]
        return pieces[0] if len(pieces) == 1 else _together([piece.reshape(-1) for piece in pieces])

    def empty(self) -> Tensor:
        return torch.empty(self.total, dtype=self.dtype, device=self.device)

    def parts(self, buffer: Tensor, data: Sequence[dict[int, Tensor]]) -> None:
        """Say of each way which part of the message is for it."""
        if len(self.comes) == 1:
            data[self.comes[0][0]][self.peer] = buffer
            return
        for (at, size, dtype), part in zip(self.comes, torch.split(buffer, self.sizes), strict=True):
            data[at][self.peer] = part[: size * dtype.itemsize].view(dtype) if self.bytes else part


class BundleLink:
    """A register between processes whose slots hold bundles; a message to each peer holds what it needs of all values.

    `kinds` are of the micro-batches by number, and `labels` are these numbers in the order of the slots.
    """

    def __init__(
        self, line: Carrier, number: int, bundles: Mapping[PieceKind, Bundle | None], kinds: Sequence[PieceKind],
        labels: Sequence[int], peers: Sequence[int], rank: int,
    ) -> None:  # fmt: skip
        self.line, self.number, self.kinds, self.labels, self.peers = line, number, kinds, labels, peers
        self.ways = {
            kind: [Transit(*hop.pair, rank) for hop in bundle.hops] if bundle else []
            for kind, bundle in bundles.items()
        }
        messages = {kind: [PeerMessage(ways, peer) for peer in peers] for kind, ways in self.ways.items()}
        self.out = {kind: [each for each in made if each.sends] for kind, made in messages.items()}
        self.come = {kind: [each for each in made if each.comes] for kind, made in messages.items()}

    @property
    def partners(self) -> set[int]:
        """The peers with whom any micro-batch exchanges messages."""
        if not all(self.ways.values()):
            return {*self.peers}  # all hear that there is nothing
        return {each.peer for made in (self.out, self.come) for messages in made.values() for each in messages}

    def send(self, label: int, value: Any) -> Sequence[UnderWay]:
        kind, tag, line = self.kinds[label], tag_of(self.number, label), self.line
        if not self.ways[kind]:
            return [line.send(peer, tag, torch.zeros(1, device=line.device)) for peer in self.peers]
        for way in self.ways[kind]:
            note("hop", way.boxing)
        return [line.send(message.peer, tag, message.packed(value)) for message in self.out[kind]]

    def receive(self, label: int) -> tuple[Sequence[UnderWay], Callable[[], Any]]:
        k = self.labels[label]
        kind, tag, line = self.kinds[k], tag_of(self.number, k), self.line
        ways, messages = self.ways[kind], self.come[kind]
        if not ways:
            return [line.receive(peer, tag, torch.zeros(1, device=line.device)) for peer in self.peers], tuple
        for way in ways:
            note("hop", way.boxing)
        buffers = [message.empty() for message in messages]

        def value() -> tuple[Tensor, ...]:
            data: list[dict[int, Tensor]] = [{} for _ in ways]
            link = open_link()
            if link is not None:
                link.until(link.takes(sum(buffer.nbytes for buffer in buffers)))
            for message, buffer in zip(messages, buffers, strict=True):
                message.parts(buffer, data)
            return tuple([way.come(held) for way, held in zip(ways, data, strict=True)])

        return [line.receive(m.peer, tag, buffer) for m, buffer in zip(messages, buffers, strict=True)], value


def _together(pieces: Sequence[Tensor]) -> Tensor:
    """Tensors as one run of memory."""
    if len({piece.dtype for piece in pieces}) == 1:
        return torch.cat(list(pieces))
    return torch.cat([pad(piece.view(torch.uint8), (0, _padded(piece.nbytes) - piece.nbytes)) for piece in pieces])


def _padded(nbytes: int) -> int:
    """Room in which any dtype can come next."""
    return -(-nbytes // ALIGNED) * ALIGNED
