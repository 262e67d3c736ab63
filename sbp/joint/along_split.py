"""Ops along a split dim: taken apart into a formula, each op of which takes the option that is cheapest there.

A softmax over split classes is a maximum and a sum of one number a row, which move, and the rest, which does not. The
group norm of an image in pieces is two sums of one number a group. What else a formula takes, such as a norm's weight,
comes whole.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from ...placement.hardware import Device
from ...placement.links import Links
from ..call import Call, refs_in
from ..kernels.kernels import kernels_of
from ..logical import Logical
from ..state import Lie, State
from .move_cost import moved
from .op_cost import dtype_of, on_rank, seconds
from .options import Option, Reach, options

__all__ = ["Spread", "cheapest", "spreads"]


class Spread(NamedTuple):
    """The cheapest run of a formula: how its tensors come in, the option of each op, its seconds, those `moving`
    tensors, and those that are spent in the `backward`."""

    inside: Logical
    lies: tuple[Lie, ...]
    chosen: tuple[Option, ...]
    seconds: float
    moving: float
    backward: float


def spreads(
    call: Call, inside: Logical, known: Collection[State], reach: Sequence[Reach], links: Links, device: Device
) -> Iterator[tuple[Option, Spread]]:
    """The options of a call in which its first tensor comes in states that the op's own rule does not take."""
    axes = [a for a, n in enumerate(call.sizes) if n > 1]
    for state in reach[0].states:
        plain = all(f >= 0 for factors in state.dims for f in factors)
        if state in known or not plain or not state.split:
            continue
        free = [a for a in axes if a not in state.split]
        cut = tuple(sorted(state.split))  # each rank has the addend of its piece to the gradient of what is whole
        whole = [
            Lie(State(((),) * x.ndim), cut if each.grad else ())
            for x, each in zip(call.inputs[1:], reach[1:], strict=True)
        ]
        for count in range(len(free) + 1 if reach[0].grad else 1):
            for grads in combinations(free, count):
                lies = Lie(state, grads), *whole
                found, made = cheapest(inside, lies, links, device)
                outputs = tuple(made[n] for n in refs_in(inside.result))
                yield Option(lies, outputs, 1), found


def cheapest(inside: Logical, sources: Sequence[Lie], links: Links, device: Device) -> tuple[Spread, dict[int, Lie]]:
    """Each op in turn takes what is cheapest for it; also how every value then lies."""
    lies = dict(enumerate(sources))
    chosen: list[Option] = []
    total = moving = backward = 0.0
    for op in inside.ops:
        call = replace(inside.call(op), sizes=links.sizes)
        have = [lies[n] for n in op.inputs]
        flows = [n in inside.wants_grad for n in op.inputs]
        reach = [
            Reach((lie.state._replace(partial=(), reduction="sum"),), bool(lie.state.partial), grad)
            for lie, grad in zip(have, flows, strict=True)
        ]
        found = options(call, reach, [n in inside.wants_grad for n in op.numbers])
        kernels, dtype = kernels_of(call, flows if op.grad else ()), dtype_of(call)
        spent = [seconds(kernels, on_rank(call, o.inputs, o.outputs), o.share, dtype, device) for o in found]
        costs = [sum(each) for each in spent]
        moves, back = [0.0] * len(found), [each.backward for each in spent]
        for i, (x, lie) in enumerate(zip(call.inputs, have, strict=True)):
            need = [o.inputs[i] for o in found]
            tensor = tuple(x.shape), x.dtype.itemsize, links
            there = moved([lie.state], [n.state for n in need], *tensor)[0]
            if flows[i]:
                home = moved([n.dual.state for n in need], [lie.dual.state], *tensor)[:, 0]
                there = there + home
                back = [before + float(more) for before, more in zip(back, home, strict=True)]
            moves = [before + float(more) for before, more in zip(moves, there, strict=True)]
        costs = [cost + more for cost, more in zip(costs, moves, strict=True)]
        best = min(range(len(found)), key=_order(costs, found, have))
        chosen.append(found[best])
        total += costs[best]
        moving += moves[best]
        backward += back[best]
        lies.update(zip(op.numbers, found[best].outputs, strict=True))
    return Spread(inside, tuple(sources), tuple(chosen), total, moving, backward), lies


def _order(costs: Sequence[float], found: Sequence[Option], have: Sequence[Lie]) -> Callable[[int], tuple[float, ...]]:
    """Cheapest first; equal ones by how many inputs move."""
    return lambda k: (costs[k], sum(a != b for a, b in zip(have, found[k].inputs, strict=True)), k)
