"""States: which part of each tensor dim a rank holds, in full generality.

A dim is cut by an ordered list of *factors*, outermost first. A factor is an axis of the placement (the rank holds the
piece of its own index) or a *hole*, written -k (cut in k, and the rank holds all k). 8 elements over axes a=2, b=2:

    (a, b)     ranks hold  01  23  45  67
    (b, a)                 01  45  23  67        the order of nested splits
    (-2, b)    ranks hold  01 45 (b=0) and 23 67 (b=1)   what is left after gathering a in (a, b)

Signatures that a user writes have ascending axes and no holes; the rest are stops on a good route, and what views make.

An axis may have *lengths*: as many ranks as there are samples, in `Runs` of which each is held in one place.

Where an op's windows reach over the ends of pieces, as those of a convolution do, ranks take what their windows see:
pieces that overlap. A `Window` says of a dim how another looks at it, and that one is cut by the factors:

    8 rows over 2 ranks, windows of 3      ranks see   0 1 2 3 4   and   3 4 5 6 7

Their gradients lie so too, and then *add*: a row that two ranks saw has two addends.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate, chain
from math import prod
from typing import Literal, NamedTuple, TypeAlias

from .signature import B, P, Reduction, S, Sbp

__all__ = [
    "Border", "Factors", "Lie", "Runs", "Spans", "State", "Window", "drop", "extent", "fill", "local_numel", "merged",
    "nth_part", "overlap", "pieces", "spans", "state_of", "trim",
]  # fmt: skip

Factors: TypeAlias = tuple[int, ...]
Spans: TypeAlias = tuple[tuple[int, int], ...]
Overlap: TypeAlias = tuple[tuple[int, int, int], ...]
Border: TypeAlias = Literal["ends", "wraps", "mirrors", "repeats"]  # of a dim, as those of `torch.nn.functional.pad`


class Window(NamedTuple):
    """A dim as another of `size` sees it. Place o sees those from (o * step + first) / per to (o * step + last) / per,
    both rounded inwards, as far as there are such places; `beyond` its ends it sees no more, or those that a border
    repeats.

    >>> Window(4, -1, 1).seen(((0, 2),), 8), Window(4, -1, 1, step=2).seen(((1, 3),), 8)
    (((0, 3),), ((1, 6),))
    >>> [Window(9, -2, -2, beyond=border).seen(((0, 3),), 8) for border in ("wraps", "mirrors", "repeats")]
    [((0, 1), (6, 8)), ((0, 3),), ((0, 1),)]
    """

    size: int
    first: int
    last: int
    step: int = 1
    per: int = 1
    adds: bool = False  # what ranks hold of one place are addends, as of a gradient
    beyond: Border = "ends"

    def seen(self, by: Spans, length: int) -> Spans:
        """The places of a dim of this length that are seen from these of the other, each once."""
        found: list[tuple[int, int]] = []
        for lo, hi in by:
            first = -(-(lo * self.step + self.first) // self.per)
            end = ((hi - 1) * self.step + self.last) // self.per + 1
            found += _bordered(first, end, length, self.beyond)
        joined: list[tuple[int, int]] = []
        for first, end in sorted(found):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            elif first < end:
                joined.append((first, end))
        return tuple(joined)

    def __str__(self) -> str:
        """In words, for who reads a layout: which places a place o of the other dim sees."""
        o = "o" if self.step == 1 else f"{self.step}o"
        ends = " to ".join(o + (f"{k:+}" if k else "") for k in (self.first, self.last))
        said = ends if self.per == 1 else f"({ends}) / {self.per}"
        said += "" if self.beyond == "ends" else f", and it {self.beyond}"
        return said + (", addends" if self.adds else "")


def _bordered(first: int, end: int, length: int, beyond: Border) -> Iterator[tuple[int, int]]:
    """The places of a dim that are seen from `first` to `end`, and those that stand for what is beyond its ends."""
    yield max(0, first), min(length, end)
    before, behind, last = min(end, 0), max(first, length), length - 1
    if first >= before and behind >= end:
        return
    if beyond == "wraps":
        yield first + length, before + length
        yield behind - length, end - length
    elif beyond == "mirrors":
        yield 1 - before, 1 - first
        yield 2 * last + 1 - end, 2 * last + 1 - behind
    elif beyond == "repeats":
        yield 0, int(first < 0)
        yield last + int(end <= length), length


class State(NamedTuple):
    """The factors of each dim, and the axes on which ranks hold addends (of one reduction: two do not commute).

    `windows` has one entry a dim, None where ranks hold pieces; it is empty if they do so of all.
    """

    dims: tuple[Factors, ...]
    partial: tuple[int, ...] = ()
    reduction: Reduction = "sum"
    windows: tuple[Window | None, ...] = ()

    @property
    def split(self) -> frozenset[int]:
        """The axes that split some dim."""
        return frozenset(f for factors in self.dims for f in factors if f >= 0)

    @property
    def plain(self) -> "State":
        """The same with pieces that do not overlap."""
        return self._replace(windows=()) if self.windows else self

    @property
    def adds(self) -> bool:
        """Whether pieces that overlap are addends there."""
        return any(window is not None and window.adds for window in self.windows)

    def merged(self, here: tuple[int, ...], there: tuple[int, ...]) -> "State | None":
        """The same pieces on a grid of the same ranks with fewer axes; None where these cannot say it."""
        dims = [merged(factors, here, there) for factors in self.dims]
        known = [factors for factors in dims if factors is not None]
        return State(tuple(known)) if len(known) == len(dims) and not (self.partial or self.windows) else None

    def refined(self, parts: Sequence[Factors]) -> "State":
        """The same on a grid of the same ranks whose axes are `parts` of these."""
        dims = tuple(tuple(chain.from_iterable(parts[f] if f >= 0 else (f,) for f in d)) for d in self.dims)
        return State(dims, tuple(chain.from_iterable(parts[a] for a in self.partial)), self.reduction)

    @property
    def seen_over(self) -> tuple[int, ...]:
        """The axes that cut dims of which ranks hold what their windows see."""
        cuts = (f for f, window in zip(self.dims, self.windows, strict=False) if window is not None)
        return tuple(sorted(a for factors in cuts for a in factors if a >= 0))

    def spans(self, shape: tuple[int, ...], coords: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Spans, ...]:
        """For each dim of a tensor of this shape, the index ranges that the rank at `coords` holds."""
        if not self.windows:
            return tuple(spans(n, f, coords, sizes) for n, f in zip(shape, self.dims, strict=True))
        return tuple(
            spans(n, f, coords, sizes) if window is None else window.seen(spans(window.size, f, coords, sizes), n)
            for n, f, window in zip(shape, self.dims, self.windows, strict=True)
        )

    def sbp(self, ndim: int) -> tuple[Sbp, ...]:
        """The signature as a user would write it, where nesting order and holes do not show."""
        out: list[Sbp] = [B] * ndim
        for dim, factors in enumerate(self.dims):
            for f in factors:
                if f >= 0:
                    out[f] = S(dim)
        for axis in self.partial:
            out[axis] = P(self.reduction)
        return tuple(out)


class Lie(NamedTuple):
    """A state, and the B axes on which the gradient is partial."""

    state: State
    grads: tuple[int, ...] = ()

    @property
    def dual(self) -> "Lie":
        """The lie of the gradient; that of a maximum comes whole to all who may hold it."""
        state, grads = self
        windows = tuple(window and window._replace(adds=not window.adds) for window in state.windows)
        if state.reduction != "sum":
            return Lie(State(state.dims, tuple(sorted({*grads, *state.partial})), windows=windows))
        return Lie(State(state.dims, grads, windows=windows), state.partial)


def state_of(sbp: tuple[Sbp, ...], ndim: int, sizes: tuple[int, ...]) -> State:
    """The state that signatures of checked dims mean; an axis of one rank holds everything whatever it is called."""
    dims: list[Factors] = [()] * ndim
    partial: list[int] = []
    reduction: Reduction = "sum"
    for axis, entry in enumerate(sbp):
        if sizes[axis] == 1 or entry is B:
            continue
        if hasattr(entry, "dim"):
            dims[entry.dim] += (axis,)
        else:
            partial.append(axis)
            reduction = entry.reduction  # type: ignore[union-attr]
    return State(tuple(dims), tuple(partial), reduction)


def drop(factors: Factors, axes: frozenset[int], sizes: tuple[int, ...]) -> Factors:
    """The factors after the ranks of these axes have shared all they hold: holes where they stood, none at the end.

    >>> drop((0, 1), frozenset({0}), (2, 2)), drop((0, 1), frozenset({1}), (2, 2))
    ((-2, 1), (0,))
    """
    return trim(tuple(-sizes[f] if f in axes else f for f in factors))


def trim(factors: Factors) -> Factors:
    """Without holes at the end: all pieces of a cut are the whole."""
    end = len(factors)
    while end and factors[end - 1] < 0:
        end -= 1
    return factors[:end]


def merged(factors: Factors, here: tuple[int, ...], there: tuple[int, ...]) -> Factors | None:
    """The same cuts on a grid of the same ranks with fewer axes, each of which has those of some neighbours; None where
    only a part of these cuts.

    >>> merged((0, 1), (2, 4), (8,)), merged((2, 0, 1), (2, 4, 3), (8, 3)), merged((1,), (2, 4), (8,))
    ((0,), (1, 0), None)
    """
    groups, end = list[Factors](), 0
    for size in there:
        first, many = end, 1
        while many < size and end < len(here):
            many, end = many * here[end], end + 1
        if many != size:
            return None
        groups.append(tuple(range(first, end)))
    found, left = list[int](), factors
    while left:
        axis = next((axis for axis, group in enumerate(groups) if group and left[: len(group)] == group), None)
        if axis is None and left[0] >= 0:
            return None
        found.append(left[0] if axis is None else axis)
        left = left[1 if axis is None else len(groups[axis]) :]
    return tuple(found)


def fill(factors: Factors, axis: int, sizes: tuple[int, ...]) -> list[Factors]:
    """Every way to cut further by an unsplit axis without moving anything: at the end, or in a hole of its size.

    >>> fill((-2, 1), 0, (2, 2))
    [(-2, 1, 0), (0, 1)]
    """
    holes = [i for i, f in enumerate(factors) if f == -sizes[axis]]
    return [(*factors, axis), *((*factors[:i], axis, *factors[i + 1 :]) for i in holes)]


@lru_cache(maxsize=1 << 16)
def spans(size: int, factors: Factors, coords: tuple[int, ...], sizes: tuple[int, ...]) -> Spans:
    """The index ranges of a dim that the rank at `coords` holds, ascending, touching ones joined, none empty.

    >>> spans(8, (-2, 1), (0, 1), (2, 2)), spans(5, (0,), (1, 0), (4, 2)), spans(1, (0,), (3, 0), (4, 2))
    (((2, 4), (6, 8)), ((2, 3),), ())
    """
    held = [(0, size)]
    for f in factors:
        if f >= 0:
            held = [nth_part(lo, hi, coords[f], sizes[f]) for lo, hi in held]
        else:
            held = [nth_part(lo, hi, i, -f) for lo, hi in held for i in range(-f)]
    return _joined(held)


def _joined(held: Iterable[tuple[int, int]]) -> Spans:
    """Ascending ranges, touching ones as one, without empty ones."""
    joined: list[tuple[int, int]] = []
    for lo, hi in held:
        if joined and joined[-1][1] == lo:
            joined[-1] = (joined[-1][0], hi)
        elif lo < hi:
            joined.append((lo, hi))
    return tuple(joined)


def nth_part(lo: int, hi: int, index: int, count: int) -> tuple[int, int]:
    """One of so many nearly equal parts of a range: the first ones are longer by one where it does not divide.

    >>> [nth_part(0, 8, index, 3) for index in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    base, extra = divmod(hi - lo, count)
    start = lo + index * base + min(index, extra)
    return start, start + base + (index < extra)


@lru_cache(maxsize=1 << 16)
def overlap(have: Spans, need: Spans) -> Overlap:
    """The overlap of two ranks in a dim, as (offset in the first's buffer, offset in the second's, length), in order.

    >>> overlap(((0, 4),), ((2, 3), (3, 6)))
    ((2, 0, 2),)
    """
    found: list[tuple[int, int, int]] = []
    i = j = at_have = at_need = 0
    while i < len(have) and j < len(need):
        lo, hi = max(have[i][0], need[j][0]), min(have[i][1], need[j][1])
        if lo < hi:
            a, b = at_have + lo - have[i][0], at_need + lo - need[j][0]
            if found and found[-1][0] + found[-1][2] == a and found[-1][1] + found[-1][2] == b:
                found[-1] = (found[-1][0], found[-1][1], found[-1][2] + hi - lo)
            else:
                found.append((a, b, hi - lo))
        if have[i][1] <= need[j][1]:
            at_have += have[i][1] - have[i][0]
            i += 1
        else:
            at_need += need[j][1] - need[j][0]
            j += 1
    return tuple(found)


@cache
def pieces(factors: Factors, sizes: tuple[int, ...]) -> int:
    """In how many parts the axes among the factors cut a dim."""
    return prod(sizes[f] for f in factors if f >= 0)


@lru_cache(maxsize=1 << 14)
def extent(size: int, factors: Factors, sizes: tuple[int, ...]) -> int:
    """The longest local length of a dim among all ranks.

    >>> extent(5, (0,), (2, 2)), extent(8, (-2, 1), (2, 2)), extent(1, (0,), (4,))
    (3, 4, 1)
    """
    copies, longest = 1, size
    for f in factors:
        parts = sizes[f] if f >= 0 else -f
        longest = -(-longest // parts)
        copies *= 1 if f >= 0 else parts
    return min(size, longest * copies)


@lru_cache(maxsize=1 << 15)
def local_numel(dims: tuple[Factors, ...], shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Elements that the fullest rank holds."""
    return prod(extent(n, f, sizes) for n, f in zip(shape, dims, strict=True))


@dataclass(frozen=True)
class Runs:
    """Axes of single samples whose ranks hold runs of them, so many samples each; a micro-batch is such a run.

        samples   0  1  2  3  4  5  6  7        lengths (3, 1, 4)
        runs      └─ 0 ─┘  1  └── 2 ───┘

    To rules each sample is a rank: what divides for one sample divides for any run. A run holds what its samples hold,
    each by itself: cut as one piece, it would hold others where something lies outside of samples in one dim with them.

    >>> runs = Runs(((3, 1, 4),))
    >>> runs.sizes, runs.bounds(0, 2), runs.spans(8, (0,), (2,)), runs.spans(16, (-2, 0), (1,))
    ((8,), (4, 8), ((4, 8),), ((3, 4), (11, 12)))
    """

    lengths: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The grid of samples, which rules look at."""
        return tuple(map(sum, self.lengths))

    def bounds(self, axis: int, at: int) -> tuple[int, int]:
        """The first sample of a run, and the one behind its last."""
        ends = [0, *accumulate(self.lengths[axis])]
        return ends[at], ends[at + 1]

    def spans(self, size: int, factors: Factors, where: tuple[int, ...]) -> Spans:
        """The index ranges of a dim that a run holds: those of its samples."""
        picked = tuple(range(-f) if f < 0 else range(*self.bounds(f, where[f])) for f in factors)
        return _picked(size, picked, tuple(-f if f < 0 else self.sizes[f] for f in factors))


@lru_cache(maxsize=1 << 14)
def _picked(size: int, picked: tuple[range, ...], counts: tuple[int, ...]) -> Spans:
    """Cut in so many, of which some are picked, and each of these again."""
    held = [(0, size)]
    for picks, count in zip(picked, counts, strict=True):
        assert all((hi - lo) % count == 0 for lo, hi in held), (size, counts)
        held = [nth_part(lo, hi, i, count) for lo, hi in held for i in picks]
    return _joined(held)
