"""Entries: the tensors of a checkpoint by their names, with the layouts by which processes share the writing."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.errors import DtypeError, SbpError
from ...placement.world import owned, world
from ...sbp import Layout
from ...sbp.state import State
from ..files.headers import NAMES
from ..files.held import added_up, me, part_of, shares
from ..files.pieces import Shares
from ..files.values import Region
from ..tensors.tensor import GlobalTensor

__all__ = ["NamedTensor", "everybody", "pieces_of", "processes"]


def processes() -> int:
    return world().size or 1


def everybody(kind: str = "cpu") -> Placement:
    """All processes in a line, as those that have what is plain."""
    return Placement(kind, tuple(range(processes())), (processes(),), None)


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensor:
    """A tensor to be written, under its name: its layout, and the shards that are here."""

    name: str
    layout: Layout
    shards: tuple[Tensor, ...]

    @classmethod
    def of(cls, name: str, value: Tensor, where: Placement | None = None) -> "NamedTensor":
        """That of a global tensor, or of a plain one that all ranks of a placement have alike."""
        if value.dtype not in NAMES:
            raise DtypeError(
                f"flow.save: {name} is {value.dtype}, which safetensors has no name for\n"
                f"  it has {', '.join(NAMES.values())}\n  convert it, or leave it out"
            )
        if value.is_meta:
            raise SbpError(
                f"flow.save: {name} is on meta, and has no numbers\n"
                "  save what was trained; a model that was loaded on meta gets its values by the step's first run"
            )
        if isinstance(value, GlobalTensor):
            return cls(name, *added_up(value, "save"))
        if value.layout is not torch.strided or value.is_nested or type(value).__torch_dispatch__ is not DISABLED:
            raise SbpError(
                f"flow.save: {name} is a {type(value).__name__} of layout {value.layout}, and plain or global tensors "
                "are saved\n  save a DTensor as flow.from_dtensor(x), a sparse tensor as x.to_dense()"
            )
        where = where or everybody()
        lies = Layout(where, State(((),) * value.ndim), tuple(value.shape), value.dtype)
        here = len(owned(where)) if world().rank is None else 1
        return cls(name, lies, (value.detach(),) * here)

    def mine(self, shared: Shares) -> list[tuple[Region, Tensor]]:
        """The boxes that this process writes of it, and the numbers in them."""
        return [(region, self.part(region)) for region in shared.of(self.layout).get(me(), [])]

    def part(self, region: Region) -> Tensor:
        """The numbers in a box of which this process has all."""
        return part_of(self.layout, self.shards, region)


DISABLED = Tensor.__torch_dispatch__


def pieces_of(entries: list[NamedTensor]) -> Iterator[tuple[NamedTensor, Region, Tensor]]:
    """All that this process writes."""
    shared = shares()
    for entry in sorted(entries, key=lambda each: each.name):
        for region, part in entry.mine(shared):
            yield entry, region, part
