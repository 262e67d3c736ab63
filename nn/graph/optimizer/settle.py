"""The way of changed pieces to where parameters lie, after a step of an optimizer: many in one exchange."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ....boxing import box
from ....boxing.graph.buckets import Packed, Pair, gathered, packed
from ....placement.world import owned
from .trained import Trained

__all__ = ["settle"]

WHAT = "optimizer pieces"


def settle(pieces: Sequence[Trained]) -> None:
    """Bring what an optimizer changed to the parameters. Idle ones were not in its step, and those of other ranks, such
    as other stages, are theirs."""
    going = [each for each in pieces if not each.idle and owned(each.rest.placement)]
    with torch.no_grad():
        for numbers in _together(tuple([each.goes for each in going])):
            members = [going[number] for number in numbers]
            there = _moved(members, [each.changed() for each in members])
            for each, shards in zip(members, there, strict=True):
                for mine, new in zip(each.parameter._shards, shards, strict=True):
                    mine.view(new.shape).copy_(new)
                each.settled()


@lru_cache(256)
def _together(pairs: tuple[Pair, ...]) -> list[list[int]]:
    return gathered(pairs)


@lru_cache(1024)
def _packed(pairs: tuple[Pair, ...]) -> Packed:
    return packed(pairs)


def _moved(members: Sequence[Trained], there: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    src, dst = members[0].goes
    if src.state == dst.state:
        return there
    if len(members) == 1:
        return [box(there[0], src, dst, op=WHAT)]
    one = _packed(tuple([each.goes for each in members]))
    come = box([one.pack(parts, None) for parts in zip(*there, strict=True)], one.src, one.dst, op=WHAT)
    return list(zip(*map(one.unpack, come), strict=True))
