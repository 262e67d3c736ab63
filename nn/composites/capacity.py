"""Experts with capacity: each has room for so many tokens of a rank; choices that find none are left out.

    tokens  S(tokens)  ->  rooms [experts, ranks x room, in] S(1)  ->  S(0)  ->  own experts
            S(tokens)  <-  rooms [experts, ranks x room, out] S(1) <-  S(0)  <-

All sizes are known before: both moves are all_to_alls of the buffer, whoever chooses whom. Also on one rank a choice
that finds no room is left out.
"""

from typing import Any

import torch

from ...sbp import B, S
from ..mixtures.expert_code import code_named
from ..mixtures.room_ops import from_rooms, room_numbers, room_size, rooms, rooms_part
from .axis import Axis, AxisValue
from .dropless import NOUN, OPS, layer_of
from .registry import composite

__all__ = ["capacity"]

aten = torch.ops.aten


@composite("capacity", of=OPS, noun=NOUN, takes=("factor",), alone=True)
def capacity(axis: Axis, *given: Any, factor: float) -> AxisValue:
    """A layer of experts S(expert), tokens S(tokens) in and out; `factor` times as many rooms as at equal load."""
    x, chosen, share, stacks, shared, code = layer_of(*given)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
        raise axis.refuse(
            f"its factor is {factor!r}", "give how many times the rooms of equal load, as in capacity(1.25)"
        )
    if not code_named(code).linear:
        raise axis.refuse(
            "its shares are no factors of what experts make, and would have to be sent along", "use dropless there"
        )
    (total, choices), count, tokens = chosen.shape, stacks[0].shape[0], S(0)
    room = room_size(factor, total, choices, count, axis.size)
    theirs = chosen.lying(tokens)
    number = axis.run(room_numbers, theirs, count, room, total, axis.size, theirs.indices(0), gives=tokens, grad=False)
    ones = axis.run(aten.new_ones.default, theirs, [axis.size], gives=B, grad=False)
    groups = axis.run(aten.cumsum.default, ones, 0, gives=B, grad=False).lying(tokens)
    leaving = axis.run(rooms, x.lying(tokens), number.lying(tokens), theirs, count, room, groups, gives=S(1))
    mine, common = [w.lying(S(0)) for w in stacks], [w.lying(B) for w in shared]
    made = axis.run(rooms_part, leaving.lying(S(0)), mine, common, code, gives=S(0), round=1)
    back = made.lying(S(1)), number.lying(tokens), theirs, share.lying(tokens)
    out: AxisValue = axis.run(from_rooms, *back, room, groups, gives=tokens, round=2)
    return out
