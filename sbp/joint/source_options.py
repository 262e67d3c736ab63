"""Options of sources: how a parameter may be stored, and an input be cut."""

from collections.abc import Collection, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from ...placement.cluster import Device
from ...placement.links import Links
from ..logical import Source
from ..signature import Sbp
from ..state import Factors, Lie, State, local_numel, state_of
from .move_cost import moved
from .options import source_states
from .problem import Vector

__all__ = ["Sources", "Stored", "stored"]


class Stored(NamedTuple):
    """How a source lies, and how its gradient is brought together and the optimizer's state lies."""

    lie: Lie
    home: Lie


class Sources(NamedTuple):
    """All candidates with what they cost in seconds and bytes, and the states that users may find."""

    candidates: tuple[Stored, ...]
    cost: Vector
    memory: Vector
    states: tuple[State, ...]


def stored(
    source: Source,
    wished: Collection[tuple[int, Factors]],
    pinned: tuple[Sbp, ...] | State | None,
    kept: int,
    sharded: bool,
    device: Device,
    links: Links,
) -> Sources:
    """Every way to keep a source; `kept` tensors of its size belong to it if it is trained.

    An optimizer reads and writes each of these once a step. With `sharded` they may be cut further than the parameter.
    """
    shape, size, sizes = tuple(source.fake.shape), source.fake.dtype.itemsize, links.sizes
    states = _allowed(source_states(shape, sizes, wished), pinned, shape, sizes)
    trained = source.kind == "parameter" and source.requires_grad
    found: list[Stored] = []
    cost: list[float] = []
    memory: list[float] = []
    for state in states:
        for home in _homes(state, shape, sizes) if trained and sharded else [state]:
            found.append(Stored(Lie(state), Lie(home)))
            here, there = (local_numel(each.dims, shape, sizes) * size for each in (state, home))
            held = source.kind in ("parameter", "buffer")
            memory.append(float(here * held + there * (1 + kept) * trained))
            back = float(moved([home], [state], shape, size, links)[0, 0])
            cost.append((2 * kept + 3) * there / device.memory_bandwidth + back if trained else 0.0)
    return Sources(tuple(found), np.array(cost), np.array(memory), tuple(states))


def _allowed(
    states: list[State], pinned: tuple[Sbp, ...] | State | None, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> list[State]:
    """Those that a signature allows, which does not say how a dim is cut inside; or the one state that is given."""
    if pinned is None:
        return states
    if isinstance(pinned, State):
        return [pinned]
    wanted = state_of(pinned, len(shape), sizes)
    alike = [state for state in states if state.sbp(len(sizes)) == wanted.sbp(len(sizes))]
    return alike or [wanted]


def _homes(state: State, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[State]:
    """The state itself, and those that cut it further along the axes on which it is whole, each along one dim."""
    free = [a for a, n in enumerate(sizes) if n > 1 and a not in state.split]
    for dims in product(*[[None, *range(len(shape))]] * len(free)):
        cut = list(state.dims)
        for axis, d in zip(free, dims, strict=True):
            if d is not None:
                cut[d] = (*cut[d], axis)
        pieces = State(tuple(cut))
        even = all(
            n % int(np.prod([sizes[f] for f in factors if f >= 0], dtype=np.int64)) == 0
            for n, factors in zip(shape, cut, strict=True)
            if factors
        )
        if even:
            yield pieces
