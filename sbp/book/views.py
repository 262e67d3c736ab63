"""Views: the same elements in other dims, so that every state of the input is a state of the output, or nearly.

Laid out in order, the factors of all dims of a tensor say how its elements are cut; a view cuts this list anew:

    (8, 6) split (a, b), (c)      a b -2 | c -3          8 = a*b*2,  6 = c*3
    view (2, 4, 6)                a | b -2 | c -3        S(0) by a, S(1) by b, S(2) by c
    view (48,)                    a b -2 c               one dim, with a hole between b and c

A hole may be cut in two. An axis that the new dims would tear apart, or that cuts unevenly before the end of its dim,
cannot stay: that axis alone is gathered, or brought to where it can stay.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from ..call import Call, Rewritten, Way
from ..rule import register
from ..state import Factors, State, drop, trim
from ..traits import named
from .windows.regrouping import Block, seen_regrouped

__all__ = ["carried"]

Dims = tuple[Factors, ...]
Shape = tuple[int, ...]


def _view(x: Tensor, shape: Shape) -> Tensor:
    """As a view where the memory allows it: a shard may lie otherwise than the whole would on one device."""
    try:
        return x.view(shape)
    except RuntimeError:
        return x.reshape(shape)


def _view_as_told(op: torch._ops.OpOverload) -> Rewritten:
    """The op with the shape of this rank's piece in place of the logical one."""
    function: dict[str, Callable[..., Tensor]] = {
        "aten::view": _view,
        "aten::_unsafe_view": torch.ops.aten._unsafe_view.default,
    }
    chosen = function.get(op._schema.name, torch.Tensor.reshape)
    return Rewritten(lambda piece, x, *args, **kwargs: (chosen, (x, piece.shape())), shapes=True)


@register(*named("regrouped"))
def view(call: Call) -> list[Way]:
    shape, target = tuple(call.inputs[0].shape), tuple(call.outputs[0].shape)
    state = call.states[0].plain if call.states else State(((),) * len(shape))
    local = _view_as_told(call.op)
    ways = [
        Way((state._replace(dims=before),), (State(after, state.partial, state.reduction),), local)
        for before, after in _stays(shape, target, state.dims, call.sizes)
    ]
    return ways if not ways or ways[0].inputs == (state,) else [*ways, *_seen(shape, target, state, call.sizes)]


def _seen(shape: Shape, target: Shape, state: State, sizes: tuple[int, ...]) -> list[Way]:
    """The ways in which one block is cut elsewhere than its dims end, and ranks take what they lack of neighbours."""
    found = []
    for block in (Block(*pair) for pair in _blocks(shape, target) if prod(shape) and len(pair[0]) + len(pair[1]) > 2):
        alone = tuple(() if d in block.dims else factors for d, factors in enumerate(state.dims))
        rest = carried(shape, target, alone, sizes)
        way = rest and seen_regrouped(shape, target, state, block, rest, sizes)
        found += [way] if way else []
    return found


@lru_cache(maxsize=1 << 14)
def _stays(shape: Shape, target: Shape, dims: Dims, sizes: tuple[int, ...]) -> list[tuple[Dims, Dims]]:
    """How the input may lie and how the output then lies, with as few axes gathered as can be."""
    axes = sorted({f for factors in dims for f in factors if f >= 0})
    for count in range(len(axes) + 1):
        found: dict[Dims, Dims] = {}
        for gone in map(frozenset, combinations(axes, count)):
            with_holes = tuple(drop(factors, gone, sizes) for factors in dims)
            closed_up = tuple(tuple(f for f in factors if f not in gone) for factors in dims)
            for before in (with_holes, closed_up):
                after = carried(shape, target, before, sizes)
                if after is not None:
                    found[before] = after
                    break
        if found:
            return [*found.items(), *_moved(shape, target, found, axes, sizes).items()]
    return []


def _moved(shape: Shape, target: Shape, found: dict[Dims, Dims], axes: list[int], sizes: Shape) -> dict[Dims, Dims]:
    """For each way that gathers one axis, those that let it split another dim evenly instead."""
    more = {}
    for before in found:
        gone = set(axes) - {f for factors in before for f in factors}
        for d, size in enumerate(shape):
            if len(gone) != 1 or size % prod(sizes[f] if f >= 0 else -f for f in (*before[d], *gone)):
                continue
            moved = (*before[:d], (*before[d], *gone), *before[d + 1 :])
            after = carried(shape, target, moved, sizes)
            if after is not None:
                more[moved] = after
    return more


def carried(shape: Shape, target: Shape, dims: Dims, sizes: tuple[int, ...]) -> Dims | None:
    """The factors of a view's dims if nothing is sent; None if no state says that.

    >>> carried((8, 6), (2, 4, 6), ((0, 1), (2,)), (2, 2, 3)), carried((8, 6), (48,), ((0, 1), (2,)), (2, 2, 3))
    (((0,), (1,), (2,)), ((0, 1, -2, 2),))
    >>> carried((4, 3), (12,), ((), (0,)), (2,)), carried((4, 3), (6, 2), ((0,), ()), (4,))
    (((-4, 0),), None)
    """
    if prod(shape) == 0:  # any piece of nothing is right; dims that stay as they are keep their split
        same = _leading(shape, target)
        return (*dims[:same], *((),) * (len(target) - same))
    out: list[Factors] = [()] * len(target)
    # A split dim of size one (the first rank has it, the others nothing) can only become another such dim.
    ones = [dims[d] for d, n in enumerate(shape) if n == 1 and any(f >= 0 for f in dims[d])]
    free = [d for d, n in enumerate(target) if n == 1]
    if len(ones) > len(free):
        return None
    for d, factors in zip(free, ones, strict=False):
        out[d] = factors
    for group, into in _blocks(shape, target):
        if len(group) == len(into) == 1:
            out[into[0]] = dims[group[0]]
            continue
        cut = _recut([(shape[d], dims[d]) for d in group], [target[d] for d in into], sizes)
        if cut is None:
            return None
        for d, factors in zip(into, cut, strict=True):
            out[d] = factors
    return tuple(map(trim, out))


def _leading(shape: Shape, target: Shape) -> int:
    """How many dims the two begin with alike, up to the first that is empty."""
    for d, (n, m) in enumerate(zip(shape, target, strict=False)):
        if n != m:
            return d
    return min(len(shape), len(target))


def _blocks(shape: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of dims that hold the same elements, dims of size one left out."""
    before, after = ([d for d, n in enumerate(dims) if n != 1] for dims in (shape, target))
    i = j = 0
    while i < len(before):
        start, other, held, wanted = i, j, shape[before[i]], target[after[j]]
        while held != wanted:
            if held < wanted:
                i += 1
                held *= shape[before[i]]
            else:
                j += 1
                wanted *= target[after[j]]
        i, j = i + 1, j + 1
        yield before[start:i], after[other:j]


def _recut(dims: Sequence[tuple[int, Factors]], target: Sequence[int], sizes: tuple[int, ...]) -> list[Factors] | None:
    """The factors of some dims in a row, shared out among other dims of the same elements."""
    out = _Dims(target)
    for number, (rest, factors) in enumerate(dims):
        for place, f in enumerate(factors):
            ranks = sizes[f] if f >= 0 else -f
            if f < 0 and rest % ranks == 0:
                out.held *= ranks
            else:
                if not out.place_holes():
                    return None
                if number == len(dims) - 1 and out.only(rest):
                    # From here on the two are one dim, so that uneven pieces are alike too.
                    out.factors[-1] += factors[place:]
                    return out.factors
                if rest % ranks or not out.place(f, ranks):
                    return None
            rest //= ranks
        out.held *= rest
    return out.factors


class _Dims:
    """Dims of a block that are cut by one factor after the other, outermost first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.factors: list[Factors] = [()] * len(sizes)
        self.at, self.room = 0, sizes[0]  # the dim that is being cut, and in how many it can still be
        self.held = 1  # cuts of which ranks hold all pieces, not yet placed

    def place(self, f: int, ranks: int) -> bool:
        """Cut further by an axis, if the dim's end is not in between."""
        self._go_on()
        if self.room % ranks:
            return False
        self.factors[self.at] += (f,)
        self.room //= ranks
        return True

    def place_holes(self) -> bool:
        """Cut by what is held, which may be shared out among several dims."""
        while self.held > 1:
            self._go_on()
            step = self.room if self.held % self.room == 0 else self.held
            if self.room % step:
                return False
            before = self.factors[self.at]
            joins = bool(before) and before[-1] < 0
            self.factors[self.at] = (*before[:-1], before[-1] * step) if joins else (*before, -step)
            self.held, self.room = self.held // step, self.room // step
        return True

    def only(self, rest: int) -> bool:
        """Whether all that is left is one dim of this size."""
        self._go_on()
        return self.at == len(self.sizes) - 1 and self.room == rest

    def _go_on(self) -> None:
        while self.room == 1 and self.at < len(self.sizes) - 1:
            self.at += 1
            self.room = self.sizes[self.at]
