"""Hops: what tasks hand to other groups of ranks, carried inside a process or as messages between processes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...actors.link import Line, Waits
from ...actors.simulate import Run
from ...boxing import box
from ...boxing.buffer import finish, pack, plain
from ...boxing.plan import plan
from ...boxing.program import Program
from ...placement.world import device, owned
from ...sbp import Layout
from .lower import Bundle

__all__ = ["BundleLink", "carrier", "labels_of"]

LABELS = 1 << 16


def carrier(bundle: Bundle) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None:
    """How a bundle gets to its reader in a process that owns the ranks of both; None: as it is."""
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


def labels_of(run: Run) -> dict[str, tuple[int, ...]]:
    """For each register the micro-batches in the order in which its slots are filled."""
    gives = {actor.name: actor.gives for actor in run.network.actors}
    found: dict[str, list[int]] = {}
    for ran in sorted(run.firings, key=lambda ran: ran.end):
        for give in gives[ran.actor]:
            if not give.case or give.case == ran.case:
                found.setdefault(give.register, []).append(ran.label)
    return {register: tuple(labels) for register, labels in found.items()}


class Way:
    """One value on its way between two ranks' groups: this rank's part of the transfer."""

    def __init__(self, src: Layout, dst: Layout, rank: int) -> None:
        ((program,),) = [one for one in plan(src, dst).programs(rank) if one] or [(Program((), ()),)]
        self.program, self.rank = program, rank
        self.dtype = dst.dtype
        self.like = torch.empty(0, dtype=dst.dtype, device=device(dst.placement, rank)) if program.receives else None

    def sent(self, peer: int, shard: Tensor) -> Tensor | None:
        boxes = next((part.boxes for part in self.program.sends if part.peer == peer), None)
        return None if boxes is None else plain(pack(shard, boxes)).reshape(-1)

    def size(self, peer: int) -> int:
        return sum(part.numel for part in self.program.receives if part.peer == peer)

    def come(self, data: Mapping[int, Tensor]) -> Tensor:
        assert self.like is not None
        return finish(self.program, self.rank, self.like, data.__getitem__, "sum", None)


class BundleLink:
    """A register between processes whose slots hold bundles; a message to each peer holds what it needs of all values.

    `sizes` are of the micro-batches by number, and `labels` are these numbers in the order of the slots.
    """

    def __init__(
        self, line: Line, number: int, bundles: Mapping[int, Bundle | None], sizes: Sequence[int],
        labels: Sequence[int], peers: Sequence[int], rank: int,
    ) -> None:  # fmt: skip
        self.line, self.number, self.sizes, self.labels, self.peers = line, number, sizes, labels, peers
        self.ways = {
            size: [Way(*hop.pair, rank) for hop in bundle.hops] if bundle else [] for size, bundle in bundles.items()
        }

    def tag(self, k: int) -> int:
        return self.number * LABELS + k % LABELS

    def send(self, label: int, value: Any) -> Sequence[Waits]:
        ways, tag = self.ways[self.sizes[label]], self.tag(label)
        works = []
        for peer in self.peers:
            pieces = [way.sent(peer, shard) for way, shard in zip(ways, value or (), strict=True)]
            data = _together([piece for piece in pieces if piece is not None])
            if data is not None or not ways:
                works.append(self.line.send(peer, tag, torch.zeros(1) if data is None else data))
        return works

    def receive(self, label: int) -> tuple[Sequence[Waits], Callable[[], Any]]:
        k = self.labels[label]
        ways, tag = self.ways[self.sizes[k]], self.tag(k)
        works: list[Waits] = []
        data: list[dict[int, Tensor]] = [{} for _ in ways]
        for peer in self.peers:
            sizes = [way.size(peer) for way in ways]
            if ways and not any(sizes):
                continue
            buffer, views = _apart(ways, sizes)
            works.append(self.line.receive(peer, tag, buffer))
            for held, view in zip(data, views, strict=True):
                held[peer] = view
        return works, lambda: tuple(way.come(held) for way, held in zip(ways, data, strict=True))


def _together(pieces: Sequence[Tensor]) -> Tensor | None:
    """Tensors as one run of memory."""
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    if len({piece.dtype for piece in pieces}) == 1:
        return torch.cat(list(pieces))
    return torch.cat([piece.view(torch.uint8) for piece in pieces])


def _apart(ways: Sequence[Way], sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Memory for what `_together` made, and the parts of it."""
    if not ways:
        return torch.zeros(1), []
    some = [way for way, size in zip(ways, sizes, strict=True) if size]
    likes = [way.like for way in ways if way.like is not None]
    if len({way.dtype for way in some}) == 1:
        buffer = likes[0].new_empty(sum(sizes), dtype=some[0].dtype)
        return buffer, list(torch.split(buffer, list(sizes)))
    widths = [size * way.dtype.itemsize for way, size in zip(ways, sizes, strict=True)]
    buffer = likes[0].new_empty(sum(widths), dtype=torch.uint8)
    parts = torch.split(buffer, widths)
    return buffer, [part.view(way.dtype) for way, part in zip(ways, parts, strict=True)]
