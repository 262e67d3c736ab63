"""Hosts of a run: which process is on which, and what each has to write where hosts keep folders of their own.

    host   0        1        2          what a host's ranks hold, its processes write, and share no further
           0 1      2 3      4 5        its neighbours take of it what they do not hold themselves
             `------>`------>  and on to host 0

All that hold a box of a tensor cut it alike, so that what one host has lost is, piece by piece, on another.
"""

import json
from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor

from ...placement.network.hosts import Hosts
from ...placement.network.this_host import this_host
from ...placement.world import world
from ...sbp import Layout
from ..files.held import me
from ..files.pieces import SMALL, boxes, cut, sizes_of
from ..files.values import Region
from .entries import NamedTensor
from .meeting import Meeting

__all__ = ["Hosts", "agreed_hosts", "pieces_by_host"]


def pieces_by_host(
    entries: Sequence[NamedTensor], hosts: Hosts, copies: int
) -> Iterator[tuple[tuple[int, ...], NamedTensor, Region, Tensor]]:
    """All that this process writes for its host, and which hosts behind it in the ring, 1 the next, lack it."""
    had: dict[tuple[int, ...], dict[int, int]] = {}  # bytes of each process, by who shares
    here = hosts.numbers[me()]
    for entry in sorted(entries, key=lambda each: each.name):
        for cell, held in _cells(entry.layout, hosts):
            members = tuple(sorted(held.get(here, ())))
            if not members:
                continue
            lack = tuple(by for by in range(1, copies + 1) if hosts.taken(here, by=by) not in held)
            mine = had.setdefault(members, dict.fromkeys(members, 0))
            for region in _parts(cell, held, entry.layout):
                least = min(members, key=lambda process: (mine[process], process))
                mine[least] += prod(sizes_of(region)) * entry.layout.dtype.itemsize
                if least == me():
                    yield lack, entry, region, entry.part(region)


def _cells(layout: Layout, hosts: Hosts) -> Iterator[tuple[Region, dict[int, set[int]]]]:
    """The boxes that ranks hold, and by hosts the processes that hold each. Two boxes are the same, or have nothing in
    common, as all are of one layout."""
    found: dict[Region, dict[int, set[int]]] = {}
    alone = world().rank is None
    for rank in layout.placement.flat:
        process = 0 if alone else rank
        whole = [tuple((0, size) for size in layout.shape)]
        for box in boxes(layout.spans(rank)) if layout.numel else whole:
            found.setdefault(box, {}).setdefault(hosts.numbers[process], set()).add(process)
    yield from found.items()


def _parts(cell: Region, held: dict[int, set[int]], layout: Layout) -> list[Region]:
    """A box as every host cuts it: into as many parts as the host with most processes has for it."""
    small = prod(sizes_of(cell)) * layout.dtype.itemsize < SMALL
    return cut(cell, 1 if small else max(map(len, held.values())))


def agreed_hosts(meeting: Meeting) -> Hosts:
    """The hosts of all processes, as each of them has said."""
    return Hosts.of(json.loads(meeting.agree(this_host(), decide=json.dumps) or json.dumps([this_host()])))
