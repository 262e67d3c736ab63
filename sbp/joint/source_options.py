"""Options of sources: how a parameter may be stored, and an input be cut."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import inf, prod
from typing import NamedTuple

import numpy as np

from ...placement.device import family
from ...placement.hardware import Device
from ...placement.links import Links
from ..kernels.update_kernels import ONE_KERNEL, UpdateKernels
from ..logical import OffloadPlace, Source
from ..signature import S, Sbp, Split
from ..state import Factors, Lie, State, local_numel
from .demands import RestPins, Said, SourcePin
from .move_cost import each_moved, seen_seconds
from .op_cost import bandwidth
from .options import source_states
from .pins import allows, stated
from .problem import Vector

__all__ = ["Sources", "Stored", "stored", "update_seconds"]


class Stored(NamedTuple):
    """The layouts of a source, its gradient and its optimizer state.

    Over micro-batches the gradient goes there `once`, behind all of them, or with each where that is smaller."""

    lie: Lie
    grads: Lie
    states: Lie
    once: bool = False


class Sources(NamedTuple):
    """All candidates with their seconds and bytes, and the states that users may find.

    `moves` are the part of the seconds in which gradients go to the states' layout, and changed pieces to the
    parameter's."""

    candidates: tuple[Stored, ...]
    cost: Vector
    moves: Vector
    memory: Vector
    states: tuple[State, ...]


def stored(
    source: Source,
    wished: Collection[tuple[int, Factors]],
    pinned: SourcePin | None,
    rest: RestPins,
    kept: int,
    sharded: bool,
    device: Device,
    links: Links,
    *,
    reached: bool = True,
    together: float = inf,
    update: UpdateKernels = ONE_KERNEL,
) -> Sources:
    """Every way to keep a source; `kept` tensors of its size belong to it if a gradient trains it.

    Changed pieces go home with others, so many bytes `together`. An optimizer reads and writes each of these tensors
    once a step. With `sharded` they may be cut further than the parameter, where nothing is said of them. Where states
    are of another dtype, a master of the parameter belongs to them.
    """
    shape, size, sizes = tuple(source.fake.shape), source.fake.dtype.itemsize, links.sizes
    wide, most = (size if dtype is None else dtype.itemsize for dtype in (source.grads, source.states))
    by_master = source.states not in (None, source.fake.dtype)
    kept += by_master
    states = _allowed(source_states(shape, sizes, wished), pinned, shape, sizes)
    trained = source.kind == "parameter" and source.requires_grad
    changes = trained and reached
    found: list[Stored] = []
    cost: list[float] = []
    memory: list[float] = []
    back: list[tuple[_Trip | None, _Trip | None]] = []
    for state in states:
        for grads, master, once in _apart(state, rest, shape, sizes, sharded) if trained else [(state, state, False)]:
            found.append(Stored(Lie(state), Lie(grads), Lie(master), once))
            each = zip((state, state if once else grads, master), (size, wide, most), strict=True)
            here, come, there = (local_numel(lie.dims, shape, sizes) * bytes_ for lie, bytes_ in each)
            held = source.kind in ("parameter", "buffer")
            stays = 0 if source.offload else there * kept  # else it is the host's memory
            memory.append(float(here * held + (come + stays) * changes))
            there_too = _Trip(grads, master, min(wide, most)) if grads != master else None
            home = _Trip(master, state, min(most, size)) if master != state else None
            back.append((there_too, home))
            # Beside a master, the gradient is read as it comes, and the parameter only written.
            beside = come // wide * (wide + size) if by_master else 3 * there
            cost.append(update_seconds(there, kept, source.offload, device, beside, update) if changes else 0.0)
    moving = np.zeros(len(found))
    if changes:
        for at, way in enumerate(zip(*back, strict=True)):
            moving += _moving(way, shape, links, together if at else 0.0)
    return Sources(tuple(found), np.array(cost) + moving, moving, np.array(memory), tuple(states))


class _Trip(NamedTuple):
    """A move from a state to a state, of numbers of so many bytes."""

    src: State
    dst: State
    grain: int


def _moving(ways: Sequence[_Trip | None], shape: tuple[int, ...], links: Links, together: float) -> Vector:
    """Seconds of the move of each candidate, if it has one.

    Even pieces go so many bytes at once, so that only a share of the latency counts for one."""
    found = np.zeros(len(ways))
    every = [(at, way) for at, way in enumerate(ways) if way is not None]
    if not every:
        return found
    local = [float(local_numel(a.dims, shape, links.sizes) * grain) for _, (a, _, grain) in every]
    each = [(a, b, held) for (_, (a, b, _)), held in zip(every, local, strict=True)]
    small, whole = each_moved(each, links.without_latency), each_moved(each, links)
    for row, (at, (a, b, grain)) in enumerate(every):
        size = prod(shape) * grain
        share = min(1.0, size / together) if size < together and _even(a, shape, links.sizes) else 1.0
        found[at] = small[row] + share * (whole[row] - small[row])
        if a.windows or b.windows:
            found[at] += seen_seconds(a, b, shape, grain, links)
    return found


def update_seconds(
    size: int,
    kept: int,
    offload: OffloadPlace | None,
    device: Device,
    beside: int | None = None,
    update: UpdateKernels = ONE_KERNEL,
) -> float:
    """Seconds of an optimizer's step over so many bytes: it reads and writes parameter and states, and reads the
    gradient; or it touches so many bytes `beside` the states. Of several kernels each touches some by itself.

    On the host that goes through a device's share of the host's memory, and from disk through that of the disk;
    gradient and changed parameter go over the link between."""
    touched = 2 * kept * size + (3 * size if beside is None else beside)
    if offload is None:
        return _updating(touched, update.more * size, update, device)
    files = 0.0 if offload == "cpu" else (2 * kept + 2) * size / device.disk_bandwidth
    return (touched + 2 * size) / device.host_bandwidth + files


def _updating(touched: float, more: float, update: UpdateKernels, device: Device) -> float:
    """Seconds of kernels that touch so many bytes, and so many `more` than one kernel would; where a fused one was
    timed, their launches count."""
    fitted = device.fitted
    if fitted is None or fitted.update is None:
        return (touched + more) / bandwidth(device)
    launches = 0.0 if update.together and family(device.type).card else update.launches
    slower = 1.0 if more else fitted.update
    return slower * (touched + more) / bandwidth(device) + launches * fitted.launch


def _allowed(
    states: list[State], pinned: SourcePin | None, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> list[State]:
    """Those that a signature allows, which does not say how a dim is cut inside; or the one state that is given."""
    if pinned is None:
        return states
    if isinstance(pinned, State):
        return [pinned]
    said = tuple(None if n == 1 else entry for entry, n in zip(pinned, sizes, strict=True))
    alike = [state for state in states if allows(said, state)]
    if alike or None not in pinned:
        return alike or [stated(said, len(shape), sizes)]
    fixed = {axis: entry for axis, entry in enumerate(said) if entry is not None}
    return list(dict.fromkeys(_turned(state, fixed, sizes) for state in states))


def _apart(
    state: State, rest: RestPins, shape: tuple[int, ...], sizes: tuple[int, ...], sharded: bool
) -> Iterable[tuple[State, State, bool]]:
    """Pairs of states in which gradient and optimizer state may lie beside a parameter, and whether the gradient comes
    there once."""
    if rest.grads is None and rest.states is None:
        return ((home, home, False) for home in (_homes(state, shape, sizes) if sharded else [state]))
    free = list(_homes(state, shape, sizes)) if sharded else [state]
    grads, states = (free if said is None else list(_resting(state, said, shape, sizes)) for said in rest[:2])
    pairs: Collection[tuple[State, State]]
    if rest.grads is None:  # also as the optimizer wants it, which may be uneven
        pairs = dict.fromkeys((come, there) for there in states for come in (*grads, *([there] if sharded else ())))
    elif rest.states is None:
        pairs = dict.fromkeys((come, there) for come in grads for there in (*states, *([come] if sharded else ())))
    else:
        pairs = dict.fromkeys(product(grads, states))
    left = rest.grads is None or not (sharded or any(entry is not None for _, entry in rest.grads))
    if rest.reads or not left:
        return ((come, there, False) for come, there in pairs)
    # Whole it would be summed everywhere, for an update that reads pieces.
    whole = local_numel(state.dims, shape, sizes)
    smaller = {there for _, there in pairs if local_numel(there.dims, shape, sizes) < whole}
    return dict.fromkeys(
        (there, there, True) if come == state and there in smaller else (come, there, False) for come, there in pairs
    )


def _resting(state: State, said: Said, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[State]:
    """The states that words allow beside a parameter in this one. Axes left open lie as there, or are cut: evenly along
    any dim, or along the first one, as ZeRO does."""
    fixed = _turned(state, {axis: entry for axis, entry in said if entry is not None}, sizes)
    free = [axis for axis, entry in said if entry is None and sizes[axis] > 1]
    for dims in product(*[[None, *range(len(shape))]] * len(free)):
        cuts = {axis: S(d) for axis, d in zip(free, dims, strict=True) if d is not None}
        found = _turned(fixed, cuts, sizes)
        if all(entry.dim == 0 for entry in cuts.values()) or _even(found, shape, sizes):
            yield found


def _turned(state: State, entries: Mapping[int, Sbp], sizes: tuple[int, ...]) -> State:
    """The state with other entries on some axes. New cuts lie inside of those that stay, so that pieces are parts of
    what ranks hold already."""
    before = state.sbp(len(sizes))
    others = {axis: entry for axis, entry in entries.items() if sizes[axis] > 1 and before[axis] != entry}
    dims = [[f for f in factors if f not in others] for factors in state.dims]
    for factors in dims:
        while factors and factors[-1] < 0:
            factors.pop()
    for axis, entry in sorted(others.items()):
        if isinstance(entry, Split):
            dims[entry.dim].append(axis)
    return State(tuple(map(tuple, dims)))


def _homes(state: State, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[State]:
    """The state itself, and those that cut it further along the axes on which it is whole, each along one dim."""
    free = [a for a, n in enumerate(sizes) if n > 1 and a not in state.split]
    for dims in product(*[[None, *range(len(shape))]] * len(free)):
        cut = list(state.dims)
        for axis, d in zip(free, dims, strict=True):
            if d is not None:
                cut[d] = (*cut[d], axis)
        pieces = State(tuple(cut))
        if pieces == state or _even(pieces, shape, sizes):
            yield pieces


def _even(state: State, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    pairs = zip(shape, state.dims, strict=True)
    return all(n % prod(sizes[f] for f in factors if f >= 0) == 0 for n, factors in pairs)
