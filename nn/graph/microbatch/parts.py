"""Parts: what a value of a micro-batch, or of a slice of its sequences, is of the batch's; what an op makes of parts.

The batch is cut along one axis or two: axis 0 has a place for each sample, axis 1 one for each token of a sequence.
What a micro-batch holds is a rectangle of these places, so an op that is right for single places is right for it.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from ....sbp.call import NEVER, Call, Match
from ....sbp.state import Factors, State, trim
from ....sbp.traits import traits

__all__ = ["Axes", "Part", "Size", "part_of_rule"]

Size: TypeAlias = tuple[int, ...]  # so many samples, and tokens of each where sequences are cut

MEAN = 1  # as ATen numbers reductions


class Axes(NamedTuple):
    """How many samples, and tokens of each where sequences are cut, the batch has, and how many a micro-batch.

    `inputs` says by which axis each dim of an argument is cut.
    """

    sizes: Size
    small: Size
    inputs: Mapping[str, tuple[Factors, ...]]

    def dims(self, shape: Sequence[int], mine: Sequence[int], *, tokens: bool = False) -> tuple[Factors, ...] | None:
        """How a value of the batch is cut into those of micro-batches, by what they measure; None if that says nothing.

        Where both axes measure the same, the first is taken first, or with `tokens` that of these. A choice that is
        wrong does not fit what else there is in an op, and so is refused there.
        """
        found: list[Factors] = []
        for n, m in zip(shape, mine, strict=True):
            fits = [axis for axis, pair in enumerate(zip(self.sizes, self.small, strict=True)) if pair == (n, m)]
            free = [axis for axis in fits if (axis,) not in found]
            if n == m:
                found.append(())
            elif free:
                found.append((free[-1] if tokens or len(shape) == 1 else free[0],))
            elif not fits and (n, m) == (prod(self.sizes), prod(self.small)):
                found.append(self.both)
            else:
                return None
        return tuple(found)

    def longer(self, shape: Sequence[int], mine: Sequence[int]) -> tuple[Factors, ...] | None:
        """The same of a value that is the same in all places: a dim may have samples or tokens in any order."""
        found: list[Factors] = []
        for n, m in zip(shape, mine, strict=True):
            cuts = [(axis,) for axis in range(len(self.sizes)) if n * self.small[axis] == m * self.sizes[axis]]
            if n != m and not cuts and n * prod(self.small) != m * prod(self.sizes):
                return None
            found.append(() if n == m else next((cut for cut in cuts if cut not in found), self.both))
        return tuple(found)

    @property
    def both(self) -> Factors:
        """How a dim is cut that has all samples, and in each of these all tokens."""
        cut = [n != m for n, m in zip(self.sizes, self.small, strict=True)]
        return trim(tuple(axis if cut[axis] else -n for axis, n in enumerate(self.sizes)))


class Part(NamedTuple):
    """`state` is on the axes of samples and tokens; `avg` are those along which addends are means, to be weighted. What
    is `odd` is of the micro-batch alone, and nobody may use it. `rows` are places along an axis numbered from 0, by
    this value: they may index what has these places."""

    state: State
    avg: frozenset[int] = frozenset()
    odd: bool = False
    rows: int | None = None

    def dim(self, axis: int = 0) -> int | None:
        """The dim that an axis cuts, if it cuts one."""
        return next((d for d, factors in enumerate(self.state.dims) if axis in factors), None)

    @property
    def whole(self) -> bool:
        return not self.state.split and not self.state.partial and not self.odd

    def on(self, axis: int) -> str:
        """In a word, what it is along an axis."""
        if axis in self.state.partial:
            return "avg" if axis in self.avg else self.state.reduction
        dim = self.dim(axis)
        return "whole" if dim is None else f"split along {dim}"

    def __str__(self) -> str:
        if self.odd:
            return "numbered by itself"
        axes = sorted({*self.state.split, *self.state.partial})
        return ", ".join(dict.fromkeys(self.on(axis) for axis in axes)) or "whole"


def part_of_rule(call: Call, match: Match, parts: Sequence[Part]) -> list[Part] | None:
    """An op's part of its inputs' parts, where an axis splits one factor or carries the addends of one group of inputs.

    The op itself runs, and not what ranks would run in its place, so it must be one that does the same. None where that
    is not what all pieces make together.
    """
    cut = _cut(call, match, parts)
    if cut is None:
        return None
    split = {axis for factors, _ in cut.values() for axis in factors}
    partial = {axis for part in parts for axis in part.state.partial}
    if split & partial or any(part.state.partial and part.state.reduction != "sum" for part in parts):
        return None
    avg: set[int] = set()
    for axis in partial:
        means = _linear(call, match, parts, axis)
        if means is None:
            return None
        avg |= {axis} if means else set()
    kinds = {"sum"} if partial else set()
    for f, (factors, _) in cut.items():
        kind = _reduced(call, match, f)
        if kind == "":
            return None
        if kind is not None:
            kinds.add("sum" if kind == "avg" else kind)
            partial.update(axis for axis in factors if axis >= 0)
            avg.update(axis for axis in factors if axis >= 0 and kind == "avg")
    if len(kinds) > 1:
        return None
    reduction: Any = next(iter(kinds), "sum")
    made = []
    for dims, y in zip(match.outputs, call.outputs, strict=True):
        lies = _lies(dims, y, {f: held for f, held in cut.items() if f not in match.reduced})
        if lies is None:
            return None
        made.append(Part(State(lies, tuple(sorted(partial)), reduction), frozenset(avg)))
    return made


def _cut(call: Call, match: Match, parts: Sequence[Part]) -> dict[int, tuple[Factors, int]] | None:
    """The factors that are cut, by what, and how long they are; None if inputs do not agree on that."""
    cut: dict[int, tuple[Factors, int]] = {}
    for part, dims, x in zip(parts, match.inputs, call.inputs, strict=True):
        for f, factors, size in zip(dims, part.state.dims, x.shape, strict=True):
            if factors and cut.setdefault(f, (factors, size)) != (factors, size):
                return None
    axes = [axis for factors, _ in cut.values() for axis in factors if axis >= 0]
    if NEVER in cut or len(axes) != len(set(axes)):
        return None
    for part, dims, x in zip(parts, match.inputs, call.inputs, strict=True):
        for f, factors, size in zip(dims, part.state.dims, x.shape, strict=True):
            if f in cut and size > 1 and not factors:
                return None  # whole along what others have in pieces
    return cut


def _linear(call: Call, match: Match, parts: Sequence[Part], axis: int) -> bool | None:
    """Whether the addends that go through an op are means; None if they do not go through it.

    They do where it is linear in them; means also go past what is the same for all, as shares add up to one.
    """
    mine = {at for at, part in enumerate(parts) if axis in part.state.partial}
    kinds = {axis in parts[at].avg for at in mine}
    if len(kinds) != 1:
        return None
    (avg,) = kinds
    fits = any(mine == set(group) or (avg and mine <= set(group)) for group in match.linear)
    return avg if fits or (avg and "shifts" in traits(call.name)) else None


def _reduced(call: Call, match: Match, f: int) -> str | None:
    """How pieces of a factor are to be put together, where an op reduces it; empty if they cannot be."""
    if f not in match.reduced:
        return None
    mean = call.bound.get("reduction") == MEAN
    if match.addends or (match.local is not None and not mean):
        return ""  # one row of the batch, not one of every micro-batch
    return "avg" if mean else match.reduced[f]


def _lies(dims: Sequence[int], y: Tensor, cut: dict[int, tuple[Factors, int]]) -> tuple[Factors, ...] | None:
    """How an output is cut; None if it lacks a factor, or has it in another length."""
    if any(f not in dims or y.shape[dims.index(f)] != size for f, (_, size) in cut.items()):
        return None
    return tuple(cut[f][0] if f in cut else () for f in dims)
