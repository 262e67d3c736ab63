"""Placements: which ranks hold a tensor, laid out as a grid with axes.

placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))

          tensor
           0  1
  data 0 [ 0  1 ]      shape (2, 2), flat (0, 1, 2, 3)
       1 [ 2  3 ]      groups along tensor: (0, 1) and (2, 3)
"""

import operator
import threading
from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from math import prod
from types import EllipsisType
from typing import NoReturn, TypeAlias
from weakref import WeakValueDictionary

from .errors import PlacementError, did_you_mean
from .ranks import Array, Nested, check_names, check_type, grid_table, read_ranks

__all__ = ["Placement", "placement"]

NestedTuple: TypeAlias = "int | tuple[NestedTuple, ...]"
Index: TypeAlias = int | slice | EllipsisType


_interned: "WeakValueDictionary[tuple[object, ...], Placement]" = WeakValueDictionary()
_lock = threading.Lock()


class Placement:
    """A grid of ranks on one type of device; equal placements are the same object.

    Made by `placement(...)`, never changed. Equality and hash are identity, so a placement as a dict key
    costs nothing; pickling and copying return the one object of the process.

    >>> p = placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
    >>> p.shape, p.flat, p.at(data=1)
    ((2, 2), (0, 1, 2, 3), placement("cpu:[2-3] as (tensor=2)"))
    >>> placement("cpu", range(4)).reshape((2, 2), names=("data", "tensor")) is p
    True
    """

    __slots__ = ("__weakref__", "_coords", "flat", "memo", "names", "ndim", "ranks", "shape", "size", "type")

    type: str
    flat: tuple[int, ...]  # all ranks, row-major
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    ranks: tuple[NestedTuple, ...]  # the grid as nested tuples
    size: int
    ndim: int
    memo: dict[Hashable, object]  # what other modules remember about this placement; keys start with their own word
    _coords: dict[int, tuple[int, ...]]

    def __new__(
        cls, type: str, flat: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...] | None
    ) -> "Placement":
        key = (type, flat, shape, names)
        with _lock:
            known = _interned.get(key)
            if known is not None:
                return known
            self = super().__new__(cls)
            fields = {
                "type": type,
                "flat": flat,
                "shape": shape,
                "names": names,
                "ranks": _nest(flat, shape),
                "size": len(flat),
                "ndim": len(shape),
                "memo": {},
                "_coords": dict(zip(flat, product(*map(range, shape)), strict=True)),
            }
            for field, value in fields.items():
                object.__setattr__(self, field, value)
            _interned[key] = self
            return self

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a placement does not change; make another instead of setting {name!r} on {self!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a placement does not change; {name!r} cannot be deleted from {self!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return Placement, (self.type, self.flat, self.shape, self.names)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        # Without this, Python would iterate by p[0], p[1], ..., which are rows and end in no IndexError.
        return iter(self.flat)

    def __contains__(self, rank: object) -> bool:
        return rank in self._coords

    def __repr__(self) -> str:
        return f'placement("{self}")'

    def _repr_html_(self) -> str:
        return grid_table(self, repr(self))

    def __str__(self) -> str:
        """The text form; `placement(str(p)) is p`.

        >>> str(placement("cpu", [[0, 1], [4, 5]], names=("host", "card")))
        'cpu:[0-1, 4-5] as (host=2, card=2)'
        """
        known = self.memo.get("text")
        if not isinstance(known, str):
            known = self.memo["text"] = self._text()
        return known

    def _text(self) -> str:
        text = f"{self.type}:[{', '.join(_runs(self.flat))}]"
        if self.names is not None:
            axes = [f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True)]
        elif self.ndim > 1:
            axes = [str(size) for size in self.shape]
        else:
            return text
        return f"{text} as ({', '.join(axes)})"

    def axis(self, name_or_index: str | int) -> int:
        """The index of an axis, counted from the front; a negative index counts from the back.

        >>> p = placement("cpu:[0-3] as (data=2, tensor=2)")
        >>> p.axis("tensor"), p.axis(-2)
        (1, 0)
        """
        if isinstance(name_or_index, str):
            if self.names is not None and name_or_index in self.names:
                return self.names.index(name_or_index)
        elif -self.ndim <= name_or_index < self.ndim:
            return name_or_index % self.ndim
        raise PlacementError(f"no axis {name_or_index!r} in {self!r}\n  {self._say_axes(name_or_index)}")

    def at(self, /, **axis: int | slice) -> "Placement":
        """The ranks at these positions of named axes; an int drops its axis, a slice keeps it.

        >>> placement("cpu:[0-7] as (pipe=4, data=2)").at(pipe=slice(1, 3))
        placement("cpu:[2-5] as (pipe=2, data=2)")
        """
        if self.names is None:
            raise PlacementError(
                f"at({', '.join(axis)}) needs named axes\n  {self!r} has no names\n"
                "  index it by position, p[0], or name its axes first, p.with_names(...)"
            )
        chosen: list[int | slice] = [slice(None)] * self.ndim
        for name, where in axis.items():
            chosen[self.axis(name)] = where
        return self[tuple(chosen)]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> "Placement":
        """The sub-grid, as numpy would index: an int drops its axis, a slice keeps it.

        Where every axis is dropped, one rank is left, as a placement of shape (1,).

        >>> p = placement("cpu:[0-7] as (2, 2, 2)")
        >>> p[1], p[..., 0], p[0, 1, 1]
        (placement("cpu:[4-7] as (2, 2)"), placement("cpu:[0, 2, 4, 6] as (2, 2)"), placement("cpu:[3]"))
        """
        steps: list[Sequence[int]] = []
        kept: list[int] = []
        for axis, where in enumerate(self._full_index(index)):
            if isinstance(where, slice):
                steps.append(range(self.shape[axis])[where])
                kept.append(axis)
            else:
                steps.append((self._position(axis, where),))
        if not all(steps):
            raise PlacementError(f"index {index!r} selects no rank\n  in {self!r}")
        flat = tuple(self._pick(range(self.ndim), steps))
        names = self.names and tuple(self.names[axis] for axis in kept)
        return Placement(self.type, flat, tuple(len(steps[axis]) for axis in kept) or (1,), names or None)

    def coords(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank in the grid, one index an axis.

        >>> placement("cpu", [[5, 4], [7, 6]]).coords(7)
        (1, 0)
        """
        try:
            return self._coords[rank]
        except KeyError:
            raise PlacementError(f"rank {rank} is not in {self!r}") from None

    def group(self, axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The ranks that share `rank`'s place on all other axes, row-major over `axes` as given.

        >>> p = placement("cpu:[0-7] as (2, 2, 2)")
        >>> p.group((0, 2), 3), p.group((2, 0), 3)
        ((2, 3, 6, 7), (2, 6, 3, 7))
        """
        key = ("grid.group", axes)
        of_rank = self.memo.get(key)
        if not isinstance(of_rank, dict):
            of_rank = {member: group for group in self.groups(axes) for member in group}
            self.memo[key] = of_rank
        found = of_rank.get(rank)
        if not isinstance(found, tuple):
            raise PlacementError(f"rank {rank} is not in {self!r}")
        return found

    def groups(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Every group along `axes`, in row-major order of the other axes; each rank is in exactly one.

        >>> placement("cpu:[0-3] as (2, 2)").groups((0,))
        ((0, 2), (1, 3))
        """
        key = ("grid.groups", axes)
        known = self.memo.get(key)
        if isinstance(known, tuple):
            return known
        inner = [self.axis(axis) for axis in axes]
        if len(set(inner)) != len(inner):
            raise PlacementError(f"axes {axes} name an axis twice\n  in {self!r}")
        outer = [axis for axis in range(self.ndim) if axis not in inner]
        spots = [range(size) for size in self.shape]
        found = tuple(
            tuple(self._pick([*outer, *inner], [*((i,) for i in place), *(spots[axis] for axis in inner)]))
            for place in product(*(spots[axis] for axis in outer))
        )
        self.memo[key] = found
        return found

    def with_names(self, names: Sequence[str] | None) -> "Placement":
        """The same grid under other axis names, or under none.

        >>> placement("cpu:[0-3]").with_names(["x"])
        placement("cpu:[0-3] as (x=4)")
        """
        return Placement(self.type, self.flat, self.shape, check_names(names, self.shape))

    def reshape(self, shape: Sequence[int], names: Sequence[str] | None = None) -> "Placement":
        """The same ranks in the same row-major order, in a grid of another shape.

        >>> placement("cpu:[0-3]").reshape((2, 2))
        placement("cpu:[0-3] as (2, 2)")
        """
        sizes = tuple(map(operator.index, shape))
        if not sizes or min(sizes) < 1 or prod(sizes) != self.size:
            raise PlacementError(f"cannot reshape {self!r} to {sizes}\n  it has {self.size} ranks")
        return Placement(self.type, self.flat, sizes, check_names(names, sizes))

    def folded(self, axis: str, into: str, size: int) -> "Placement":
        """The same ranks in the same order, of which `size` neighbours along an axis are an axis of their own.

        >>> placement("cpu:[0-7] as (data=4, tensor=2)").folded("data", "expert", 2)
        placement("cpu:[0-7] as (data=2, expert=2, tensor=2)")
        >>> placement("cpu:[0-3] as (data=4)").folded("data", "expert", 4)
        placement("cpu:[0-3] as (expert=4)")
        """
        at = self.axis(axis)
        if self.names is None or size < 1 or self.shape[at] % size:
            raise PlacementError(f"{size} ranks called {into} do not divide axis {axis!r}\n  in {self!r}")
        left = self.shape[at] // size
        inner = ([(axis, left)] if left > 1 else []) + [(into, size)]
        axes = list(zip(self.names, self.shape, strict=True))
        axes[at : at + 1] = inner
        return self.reshape([n for _, n in axes], [name for name, _ in axes])

    def turned(self, axis: int, by: int) -> "Placement":
        """The same grid, in which each rank stands so many places further along an axis; the last are the first again.

        >>> placement("cpu:[0-3]").turned(0, 1)
        placement("cpu:[1-3, 0]")
        """
        known = self.memo.get(("turned", axis, by))  # each round of a ring asks again
        if isinstance(known, Placement):
            return known
        n = self.shape[axis]
        spots = [range(size) for size in self.shape]
        spots[axis] = [(i + by) % n for i in range(n)]  # type: ignore[call-overload]
        found = Placement(self.type, tuple(self._pick(range(self.ndim), spots)), self.shape, self.names)
        self.memo["turned", axis, by] = found
        return found

    def swapped(self, axis: int, distance: int) -> "Placement":
        """The same grid, in which ranks change places in pairs along an axis: i and i with the bit `distance` changed.

        >>> placement("cpu:[0-3]").swapped(0, 2)
        placement("cpu:[2-3, 0-1]")
        """
        n = self.shape[axis]
        if distance < 1 or distance & (distance - 1) or n % (2 * distance):
            raise PlacementError(
                f"{n} ranks of an axis do not pair up at a distance of {distance}\n  in {self!r}\n"
                "  distances are powers of two, twice which divides the ranks"
            )
        spots = [range(size) for size in self.shape]
        spots[axis] = [i ^ distance for i in range(n)]  # type: ignore[call-overload]
        return Placement(self.type, tuple(self._pick(range(self.ndim), spots)), self.shape, self.names)

    def turn_to(self, other: "Placement") -> tuple[int, int] | None:
        """The axis and the places by which the grid is turned in another, if it is.

        >>> placement("cpu:[0-3]").turn_to(placement("cpu:[1-3, 0]"))
        (0, 1)
        """
        if self.shape == other.shape and self.flat[0] in other:
            where = other.coords(self.flat[0])
            moved = [(axis, i) for axis, i in enumerate(where) if i]
            if len(moved) == 1:
                axis, back = moved[0]
                by = self.shape[axis] - back
                return (axis, by) if self.turned(axis, by) is other else None
        return None

    def same_ranks(self, other: "Placement") -> bool:
        """Whether both hold the same set of ranks on the same type of device, in whatever grid.

        >>> placement("cpu:[0-3]").same_ranks(placement("cpu:[3, 1, 2, 0] as (2, 2)"))
        True
        """
        return self.type == other.type and self._coords.keys() == other._coords.keys()

    def _pick(self, axes: Sequence[int], steps: Sequence[Sequence[int]]) -> Iterator[int]:
        """The ranks at steps[j] of axes[j], the last axis running fastest."""
        strides = [prod(self.shape[axis + 1 :]) for axis in axes]
        for spot in product(*steps):
            yield self.flat[sum(map(operator.mul, spot, strides))]

    def _full_index(self, index: Index | tuple[Index, ...]) -> list[int | slice]:
        """The index with its Ellipsis spelled out: one int or slice for each axis."""
        parts = list(index) if isinstance(index, tuple) else [index]
        dots = [k for k, part in enumerate(parts) if part is Ellipsis]
        if len(dots) > 1 or len(parts) - len(dots) > self.ndim:
            raise PlacementError(f"index {index!r} has too many parts\n  {self!r} has {self.ndim} axes")
        cut = dots[0] if dots else len(parts)
        fill = [slice(None)] * (self.ndim - len(parts) + len(dots))
        return [part for part in (*parts[:cut], *fill, *parts[cut + 1 :]) if not isinstance(part, EllipsisType)]

    def _position(self, axis: int, where: int) -> int:
        size = self.shape[axis]
        if isinstance(where, bool) or not hasattr(where, "__index__"):
            raise PlacementError(f"a placement is indexed by ints, slices and `...`, not {where!r}\n  in {self!r}")
        if not -size <= where < size:
            name = repr(self.names[axis]) if self.names else axis
            raise PlacementError(f"position {where} is out of range on axis {name} of size {size}\n  in {self!r}")
        return operator.index(where) % size

    def _say_axes(self, asked: str | int) -> str:
        if self.names is None:
            fix = f"use 0 to {self.ndim - 1}, or name them, p.with_names(...)"
            return f"its {self.ndim} axes have no names: {fix}"
        meant = did_you_mean(str(asked), self.names, "")
        return f"its axes are {', '.join(self.names)}" + (f"\n  {meant}" if meant else "")


def placement(type: str, ranks: "Nested | Array | None" = None, names: Sequence[str] | None = None) -> Placement:
    """The placement of these ranks on "cpu" or "cuda" devices, or the one that a text names.

    `ranks` is an int, a range, nested lists, or an array of integers; its shape is that of the grid.

    >>> p = placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
    >>> p
    placement("cpu:[0-3] as (data=2, tensor=2)")
    >>> placement("cpu:[0-3] as (data=2, tensor=2)") is p
    True
    """
    if ranks is None:
        from .text import (
            parse,
        )  # here, because lark takes 40 ms to load and most programs give ranks as numbers

        named = Placement(*parse(type))
        return named if names is None else named.with_names(names)
    check_type(type)
    flat, shape = read_ranks(ranks)
    return Placement(type, flat, shape, check_names(names, shape))


def _nest(flat: tuple[int, ...], shape: tuple[int, ...]) -> tuple[NestedTuple, ...]:
    """The flat ranks as nested tuples of this shape."""
    rows: tuple[NestedTuple, ...] = flat
    for size in reversed(shape[1:]):
        rows = tuple(rows[k : k + size] for k in range(0, len(rows), size))
    return rows


def _runs(flat: tuple[int, ...]) -> list[str]:
    """The ranks with ascending runs shortened: 0, 1, 2, 5 becomes 0-2, 5."""
    runs: list[list[int]] = []
    for rank in flat:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
