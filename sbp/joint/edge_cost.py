"""The cost of an edge: the seconds in which a step moves a tensor from node to node, and its gradient back.

In micro-batches a step does some of that with each of them, and some once:

    what is computed                               with each, and its gradient too
    a weight that is gathered                      with each; once where all weights are
    one that goes to other ranks, or is only       once; gradients are added up, and brought home once, but where they
    seen in another way, such as data parallel     take less memory at home: these go there with each

Weights move beside the computing where the runtime has that so. Moves made once a step stand before or behind all
micro-batches, where nothing is computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...placement import Cluster, Placement
from ...placement.links import Links, common_grid
from ...placement.structure import ByIdentity
from ..logical import Logical
from ..state import Lie, State
from .demands import Demands, EncodedGrads, Rounds
from .move_cost import crossed, distinct, encoded_seconds, local_bytes, moved, regridded
from .placements import Homes
from .problem import Vector

__all__ = ["Carried", "EdgeCosts", "EdgeSeconds", "EdgeTensor", "Lies", "bytes_at_once"]

SLOWS = 0.05  # share of a move's time by which it delays what is computed beside it: both read and write memory
STRAIGHT = Rounds()
Mask: TypeAlias = npt.NDArray[np.bool_] | bool  # by pairs of candidates whether that is done with each micro-batch


class Lies(NamedTuple):
    """The layouts of one tensor of a node, by candidate; shared by equal nodes, and told apart by identity."""

    each: tuple[Lie, ...]
    back: tuple[Lie, ...]  # how the gradient must arrive, where that is not the dual
    grain: int = 0  # bytes of one of its numbers then, where these are not the tensor's
    encoded: EncodedGrads | None = None
    moves: tuple[bool, ...] = ()  # of a weight's copy whether it comes anew with each micro-batch
    once: tuple[bool, ...] = ()  # whether a gradient that is smaller at home goes there behind all of them

    def only(self, k: int) -> "Lies":
        """The same of one candidate alone."""
        one = slice(k, k + 1)
        return self._replace(each=self.each[one], back=self.back[one], moves=self.moves[one], once=self.once[one])


class Carried(NamedTuple):
    """A tensor on its way from a node to another.

    One that `lasts` is the same for a whole step, and one that is moved `again` goes a second time for the backward."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    here: Placement
    there: Placement
    grad: bool
    again: bool
    lasts: bool
    hides: bool  # whether it goes on beside what is computed

    @property
    def far(self) -> bool:
        """Whether it goes to ranks that have nothing of it."""
        return self.here is not self.there and set(self.here.flat).isdisjoint(self.there.flat)


class EdgeTensor(NamedTuple):
    """The tensor on an edge: the number of a value, how it lies at both ends, and how it is carried."""

    number: int
    have: Lies
    need: Lies
    of: Carried


class EdgeSeconds(NamedTuple):
    """Seconds to move a value and its gradient. Each micro-batch waits for `forward` and `backward`, and computes
    beside the hidden ones; `before` and `behind` all micro-batches a step moves once."""

    forward: float
    backward: float
    hidden_forward: float
    hidden_backward: float
    before: float
    behind: float


class _Seconds(NamedTuple):
    """The same of one way, by pairs of candidates."""

    waits: Vector
    hidden: Vector
    once: Vector


@dataclass(frozen=True, eq=False)
class EdgeCosts:
    """The costs of edges on a cluster, in a step that makes such demands."""

    cluster: Callable[[Placement], Cluster]
    demands: Demands
    together: Mapping[Placement, float] = field(default_factory=dict)  # bytes of gradients that go at once
    known: dict[object, EdgeSeconds] = field(default_factory=dict)
    places: dict[object, Placement] = field(default_factory=dict)
    grids: dict[tuple[Placement, Placement], Placement | None] = field(default_factory=dict)

    def alike(self, there: Placement) -> Placement:
        """The first placement on which everything costs what it costs there, such as that of another stage."""
        if there not in self.places:
            device, links = self.cluster(there).device_of(there), self.links(there)
            key = there.type, there.names, ByIdentity(device), self.together.get(there), links.figures
            self.places[there] = self.places.setdefault(key, there)
        return self.places[there]

    def like(self, of: Carried) -> Carried:
        """A tensor as it would be carried on the first placement like that, or between two grids of its ranks."""
        here, there = self.alike(of.here), self.alike(of.there)
        if of.here is not of.there:
            one, first = self.grid(of.here, of.there), self.grid(here, there)
            if one is None or first is None or self.alike(one) is not self.alike(first):
                return of
        return of._replace(here=here, there=there)

    def grid(self, here: Placement, there: Placement) -> Placement | None:
        """The grid on which something goes from one to the other, if these are grids of the same ranks."""
        if (here, there) not in self.grids:
            self.grids[here, there] = common_grid(here, there)
        return self.grids[here, there]

    @property
    def rounds(self) -> Rounds:
        return self.demands.rounds or STRAIGHT

    def links(self, placement: Placement) -> Links:
        return Links.of(placement, self.cluster(placement))

    def matrices(self, have: Lies, need: Lies, of: Carried) -> tuple[Vector, Vector | None]:
        """The seconds of a step by pairs of candidates, and those of moves that go on beside what is computed."""
        if self._is_still(have, need, of):
            none = np.zeros((len(have.each), len(need.each)))
            return none, none if of.hides else None
        ways, times = self._ways(have, need, of), self.rounds.times
        waits = sum(times * way.waits + way.once for way in ways)
        hidden = sum(times * way.hidden for way in ways)
        return np.asarray(waits), np.asarray(hidden) if of.hides else None

    def _is_still(self, have: Lies, need: Lies, of: Carried) -> bool:
        """Whether nothing moves, because all is on one rank and nothing is asked of sums or copies."""
        asked = self.demands.real_sums or have.encoded is not None or need.moves
        return of.here is of.there and of.here.size == 1 and not asked

    def chosen(self, have: Lies, need: Lies, of: Carried, i: int, j: int) -> EdgeSeconds:
        """The seconds of one pair; of equal ones, as those of equal layers are, they are worked out once."""
        key = one, other, _ = have.only(i), need.only(j), of
        if key not in self.known:
            ways = [map(float, map(np.ndarray.item, way)) for way in self._ways(one, other, of)]
            (waits, hidden, before), (back, beside, behind) = ways if len(ways) > 1 else (*ways, (0.0, 0.0, 0.0))
            self.known[key] = EdgeSeconds(waits, back, hidden, beside, before, behind)
        return self.known[key]

    def _ways(self, have: Lies, need: Lies, of: Carried) -> list[_Seconds]:
        """The way of a value and of its gradient, if it has one; equal pairs of candidates are worked out once."""
        back = have.back or tuple(lie.dual for lie in have.each)
        anew, late = (of or (False,) * len(have.each) for of in (have.moves, have.once))
        rows, at = distinct(list(zip(have.each, back, anew, late, strict=True)))
        columns, to = distinct(list(zip(need.each, need.moves or (None,) * len(need.each), strict=True)))
        src, dst = [lie.state for lie, *_ in rows], [lie.state for lie, _ in columns]
        small, whole = self._moved(src, dst, of, of.dtype.itemsize)
        each: Mask = True
        if of.lasts:
            gathered, sends = np.array([moves for _, _, moves, _ in rows])[:, None], whole > 0
            each = np.full(sends.shape, False) if of.far or self.rounds.gathers else sends | gathered
        ways = [self._split(small, whole - small, each, of, 2.0 if of.again else 1.0)]
        if need.moves:  # a copy comes anew where it does not lie so already
            asked = np.array([moves for _, moves in columns])[None, :]
            ways = [ways[0]._replace(once=ways[0].once + np.where(each == asked, 0.0, np.inf))]
        if of.grad:
            duals, homes = [lie.dual.state for lie, _ in columns], [(home.state, late) for _, home, _, late in rows]
            ways.append(self._gradient(have, duals, homes, each, of))
        return [_Seconds(*(x[np.ix_(at, to)] for x in way)) for way in ways]

    def _gradient(
        self, have: Lies, duals: Sequence[State], ends: Sequence[tuple[State, bool]], each: Mask, of: Carried
    ) -> _Seconds:
        """The way of a gradient to its home; `ends` are homes, each with whether it goes there late.

        Those of parameters go many at once, so that only a share of the latency counts for one; but those of weights
        that are gathered go alone, with each micro-batch."""
        grain, p = have.grain or of.dtype.itemsize, of.here
        homes, back = [home for home, _ in ends], of._replace(here=of.there, there=p)
        small, whole = self._moved(duals, homes, back, grain)
        if have.encoded is not None and p is of.there:
            for plain, links in ((small, self.links(p).without_latency), (whole, self.links(p))):
                plain[:] = encoded_seconds(plain, *have.encoded[:2], duals, homes, of.shape, p, links)
        small, starts = small.T, (whole - small).T
        if have.back:
            size = prod(of.shape) * grain
            share = min(1.0, size / self.together.get(p, inf)) if size else 1.0
            starts = np.where(each, starts, share * starts) if of.lasts else share * starts
            if of.lasts and p is of.there and not self.rounds.gathers:
                come, there = (local_bytes(states, of.shape, 1, p.shape) for states in (duals, homes))
                late = np.array([late for _, late in ends])
                each |= (there[:, None] < come[None, :]) & ~late[:, None]
        found = self._split(small, starts, each, of, 1.0)
        if self.demands.real_sums and p is of.there:
            found = found._replace(once=found.once + _hollow(self.demands.summed_over(p), duals, homes))
        if have.encoded is not None and have.encoded.summed and p is of.there:
            found = found._replace(once=found.once + _no_sums(have.encoded.by.axes(p), duals, homes))
        return found

    def _split(self, small: Vector, starts: Vector, each: Mask, of: Carried, times: float) -> _Seconds:
        moving, none = times * small, np.zeros_like(small)
        waits = times * starts + (SLOWS * moving if of.hides else moving)
        hidden = (1 - SLOWS) * moving if of.hides else none
        if each is True:
            return _Seconds(waits, hidden, none)
        once = np.where(each, none, starts + small)
        return _Seconds(np.where(each, waits, none), np.where(each, hidden, none), once)

    def _moved(self, src: Sequence[State], dst: Sequence[State], of: Carried, itemsize: int) -> tuple[Vector, Vector]:
        """Seconds of all these moves, without latency and with it."""
        here, there = self.links(of.here), self.links(of.there)
        if of.here is of.there:
            each = [moved(src, dst, of.shape, itemsize, links) for links in (here.without_latency, here)]
        else:
            across = self.cluster(of.here).between(of.here, of.there)
            ends = (here.without_latency, there.without_latency), (here, there)
            each = [crossed(src, dst, of.shape, itemsize, *links, across) for links in ends]
            self._on_a_grid(each, src, dst, of, itemsize)
        return each[0], each[1]

    def _on_a_grid(
        self, each: Sequence[Vector], src: Sequence[State], dst: Sequence[State], of: Carried, itemsize: int
    ) -> None:
        """Put seconds in the place of those between two grids of the same ranks: of what both can say, a finer grid has
        the same pieces, and nothing else moves."""
        fine = self.grid(of.here, of.there)
        if fine is None:
            return
        a, b = regridded(src, of.shape, of.here.shape, fine.shape), regridded(dst, of.shape, of.there.shape, fine.shape)
        for found, links in zip(each, (self.links(fine).without_latency, self.links(fine)), strict=True):
            if a and b:
                found[np.ix_([*a], [*b])] = moved([*a.values()], [*b.values()], of.shape, itemsize, links)


def _no_sums(axes: tuple[int, ...], duals: Sequence[State], homes: Sequence[State]) -> Vector:
    """Infinity where a gradient is no sum over these axes on its way home, if it is one for some pair."""
    sums = [[not {*axes}.isdisjoint({*dual.partial} - {*home.partial}) for dual in duals] for home in homes]
    return np.where(sums, 0.0, inf if np.any(sums) else 0.0)


def _hollow(axes: frozenset[int], duals: Sequence[State], homes: Sequence[State]) -> Vector:
    """Infinite for pairs of a home and a gradient in which what is whole over one of these axes becomes an addend."""
    sums = [[axes.intersection(home.partial) - {*dual.partial} - dual.split for dual in duals] for home in homes]
    return np.where([[bool(of) for of in row] for row in sums], inf, 0.0)


def bytes_at_once(logical: Logical, where: Homes, demands: Demands) -> dict[Placement, float]:
    """The bytes of gradients that go at once: of a placement with fewer, all."""
    every: dict[Placement, float] = {}
    for number, (source, there) in enumerate(zip(logical.sources, where.sources, strict=True)):
        trained = source.kind == "parameter" and source.requires_grad and number in logical.reached
        if trained and there.type in demands.together:
            grain = (source.grads or source.fake.dtype).itemsize
            every[there] = every.get(there, 0.0) + prod(source.fake.shape) * grain
    return {there: min(size, demands.together[there.type]) for there, size in every.items()}
