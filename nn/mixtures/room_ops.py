"""Rooms: a buffer with so many places for each expert, in which the tokens of a group go to it, and out of it again.

    numbers     chosen [tokens, k]        ->  the room of each choice in its expert's line, -1 where it finds none
    rooms       tokens [tokens, in]       ->  [experts, groups x room, in]: a token in each of its rooms, zero elsewhere
    rooms_part  rooms of some experts     ->  what these make of them
    from_rooms  what experts made         ->  [tokens, out]: the sum over choices, times shares

The tokens of a rank are a group, and have rooms of their own. First choices find rooms first, in the order of tokens,
then second ones, and so on.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ...sbp.state import nth_part
from .expert_ops import through_own

__all__ = ["from_rooms", "room_numbers", "room_size", "rooms", "rooms_part"]


def room_size(factor: float, tokens: int, choices: int, experts: int, groups: int) -> int:
    """The rooms of an expert for a group, where the largest group has so many tokens.

    >>> room_size(1.25, tokens=32, choices=2, experts=8, groups=4)
    3
    """
    largest = -(-tokens // groups)
    return max(1, ceil(Fraction(str(factor)) * largest * choices / experts))


def _numbers(chosen: Tensor, count: int, room: int, total: int, groups: int, held: Sequence[int]) -> Tensor:
    """Rooms are numbered through all groups; `held` are the places, of `total` tokens, of those here."""
    first, end = (held[0], held[-1]) if held else (0, 0)
    parts = []
    for group in range(groups):
        start, stop = nth_part(0, total, group, groups)
        if first <= start < stop <= end:
            line = _line(chosen[start - first : stop - first], count)
            parts.append(torch.where((line >= 0) & (line < room), line + group * room, -1))
    return torch.cat(parts) if parts else torch.full_like(chosen, -1)


def _line(chosen: Tensor, count: int) -> Tensor:
    """The place of each choice in the line before its expert; -1 where it is no expert's number."""
    flat = chosen.T.reshape(-1)
    ordered, order = flat.sort(stable=True)
    place = torch.arange(len(flat), device=flat.device) - torch.searchsorted(ordered, ordered)
    place = torch.empty_like(place).scatter(0, order, place)
    place = torch.where((flat >= 0) & (flat < count), place, -1)
    return place.to(chosen.dtype).view(chosen.shape[::-1]).T


def _slots(number: Tensor, chosen: Tensor, count: int, room: int, groups: Tensor) -> Tensor:
    """The place of each choice in a buffer [experts x rooms] of these groups, numbered from 1; behind its end where it
    has no room."""
    size = len(groups) * room
    inside = number - (groups[0] - 1) * room
    return torch.where(number >= 0, chosen * size + inside, count * size).long()


def _rooms(x: Tensor, number: Tensor, chosen: Tensor, count: int, room: int, groups: Tensor) -> Tensor:
    size = len(groups) * room
    tokens = torch.arange(len(x), device=x.device).repeat_interleave(chosen.shape[1])
    whose = torch.full((count * size + 1,), len(x), dtype=tokens.dtype, device=x.device)
    whose = whose.scatter(0, _slots(number, chosen, count, room, groups).reshape(-1), tokens)[:-1]
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return padded.index_select(0, whose).view(count, size, x.shape[1])


def _from_rooms(made: Tensor, number: Tensor, chosen: Tensor, share: Tensor, room: int, groups: Tensor) -> Tensor:
    flat = torch.cat([made.flatten(0, 1), made.new_zeros(1, made.shape[2])])
    at = _slots(number, chosen, len(made), room, groups).reshape(-1)
    each = flat.index_select(0, at).view(*chosen.shape, made.shape[2])
    return (each * share[..., None]).to(made.dtype).sum(1)


_library: Any = torch.library.Library("sbpflow", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _takes, _run in (
    ("room_numbers", "Tensor chosen, int count, int room, int total, int groups, int[] held", _numbers),
    ("rooms", "Tensor x, Tensor number, Tensor chosen, int count, int room, Tensor groups", _rooms),
    ("rooms_part", "Tensor rooms, Tensor[] stacks, Tensor[] shared, str code", through_own),
    ("from_rooms", "Tensor made, Tensor number, Tensor chosen, Tensor share, int room, Tensor groups", _from_rooms),
):
    _library.define(f"{_name}({_takes}) -> Tensor")
    _library.impl(_name, _run, "CompositeImplicitAutograd")
room_numbers: torch._ops.OpOverload = torch.ops.sbpflow.room_numbers.default
rooms: torch._ops.OpOverload = torch.ops.sbpflow.rooms.default
rooms_part: torch._ops.OpOverload = torch.ops.sbpflow.rooms_part.default
from_rooms: torch._ops.OpOverload = torch.ops.sbpflow.from_rooms.default
