"""Kept errors: what encoders leave out of each tensor on each rank, from one step to the next.

The errors of a step count when the step does. `commit` makes them count. `drop` puts back those before, because the
step is left out, such as one with a gradient that is not finite.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..placement.errors import SbpError
from ..placement.world import device, owned
from ..sbp import Layout, State
from .box import box

__all__ = ["KeptErrors", "KeptRows", "KeptTensors", "KeptUnder", "left_out", "share_bounds", "unshared"]

KeptTensors: TypeAlias = Mapping[str, Tensor]  # what is kept of a tensor on a rank from one move to the next


class KeptRows(NamedTuple):
    """All that is kept of a tensor: how its addends lie, the encoder, and for each rank owned here what it keeps."""

    lies: Layout
    by: str
    ranks: tuple[KeptTensors, ...]


class KeptUnder(NamedTuple):
    """The errors of one tensor, which has a name among others."""

    all: "KeptErrors"
    name: str


class KeptErrors:
    """All that is kept of tensors by name. Where addends come to lie otherwise, their errors follow them, and so do
    momenta and counts of steps; all else that an encoder keeps, and what another encoder kept, begins anew. On other
    ranks, such as those of a pipeline's second route, a tensor has errors of their own."""

    def __init__(self) -> None:
        self._held: dict[str, KeptRows] = {}
        self._next: dict[str, KeptRows] = {}
        self._loaded: dict[str, Mapping[str, Any]] = {}

    def of(self, name: str, lies: Layout, by: str) -> Sequence[KeptTensors]:
        """All that is kept of a tensor whose addends lie so, for each rank that is owned here."""
        name = self._slot(name, lies)
        if name in self._loaded:
            self._held[name] = _read(name, self._loaded.pop(name), lies, by)
        held = self._next.get(name) or self._held.get(name)
        here = owned(lies.placement)
        if held is None:
            return [{} for _ in here]
        if held.by != by:
            return [{} for _ in here]
        return held.ranks if held.lies is lies else _followed(held, lies)

    def put(self, name: str, lies: Layout, by: str, ranks: Sequence[KeptTensors]) -> None:
        self._next[self._slot(name, lies)] = KeptRows(lies, by, tuple(ranks))

    def _slot(self, name: str, lies: Layout) -> str:
        held = self._next.get(name) or self._held.get(name)
        return name if held is None or held.lies.placement is lies.placement else f"{name} on {lies.placement}"

    def commit(self) -> None:
        """The step counts."""
        self._held.update(self._next)
        self._next.clear()

    def drop(self) -> None:
        """The step does not count."""
        self._next.clear()

    def check_asked(self, encodes: bool) -> None:
        """Refuse to step by gradients of which none is encoded, where errors were loaded: they would never be added."""
        if self._loaded and not encodes:
            raise SbpError(
                f"the kept error of {sorted(self._loaded)[0]} was loaded, and no gradient of this step is encoded\n"
                "  go on with the ranks and the encoder that it was saved with, or begin without errors: "
                "step.kept.reset()"
            )

    def reset(self) -> None:
        """Forget all that is kept, such as when the parameters were given other values."""
        for held in (self._held, self._next, self._loaded):
            held.clear()

    def __bool__(self) -> bool:
        return bool(self._held or self._loaded)

    def __getitem__(self, name: str) -> "KeptUnder":
        return KeptUnder(self, name)

    def rows_of(self, name: str) -> KeptRows | None:
        """All that is kept of a tensor; None before it was first encoded."""
        return self._held.get(name)

    def __iter__(self) -> Any:
        return iter(self._held)

    def rows(self) -> dict[str, dict[str, Any]]:
        """All of it as rows, one for each rank, with their layouts: {name: {"lies": ..., "by": ..., "error": (layout,
        rows)}}. Every process calls it."""
        return {name: _rows(held) for name, held in self._held.items()} | {n: dict(x) for n, x in self._loaded.items()}

    def load(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from rows that `rows` gave, each whole on every process."""
        self.reset()
        self._loaded.update(rows)


def _followed(held: KeptRows, lies: Layout) -> Sequence[KeptTensors]:
    """All kept tensors that follow addends to their layout now; the sum of the errors over ranks stays the same."""
    was, here = held.lies, owned(lies.placement)
    if was.shape != lies.shape or not here:
        return [{} for _ in here]
    if was.state == lies.state:  # in another order of memory, or dtype
        return [{name: _as(x, was, lies) for name, x in kept.items()} for kept in held.ranks]
    rows: list[dict[str, Tensor]] = [{"steps": kept["steps"]} if "steps" in kept else {} for kept in held.ranks]
    left = [left_out(kept, was, rank) for kept, rank in zip(held.ranks, here, strict=True)]
    momenta = [kept["momentum"] for kept in held.ranks if "momentum" in kept]
    ways = ("error", left, was, lies), ("momentum", momenta, _whole(was), _whole(lies))
    for name, parts, src, dst in ways:
        if len(parts) == len(rows) and all(x is not None for x in parts):
            moved = box([x for x in parts if x is not None], src, dst.with_dtype(src.dtype), op="kept errors")
            for row, x in zip(rows, moved, strict=True):
                row[name] = x.to(lies.dtype)
    return rows


def _as(x: Tensor, was: Layout, lies: Layout) -> Tensor:
    return x.to(lies.dtype) if x.dtype is was.dtype else x


def _whole(lies: Layout) -> Layout:
    """The layout of a sum where it is added up."""
    return lies.with_state(State(lies.state.dims))


def unshared(kept: KeptTensors, lies: Layout, rank: int) -> KeptTensors:
    """The same, with what was left out of a share of the sum in the error of the addend."""
    if "share" not in kept:
        return kept
    left = left_out(kept, lies, rank)
    rest = {name: x for name, x in kept.items() if name not in ("error", "share")}
    return rest if left is None else {**rest, "error": left}


def left_out(kept: KeptTensors, lies: Layout, rank: int) -> Tensor | None:
    """All that a rank left out, of its addend and of its share of the sum, as an addend."""
    error, share = kept.get("error"), kept.get("share")
    if error is None or share is None:
        return error
    begin, end = _share(lies, rank)
    rest = torch.zeros_like(error).reshape(-1)
    rest[begin:end] = share
    return error + rest.view(error.shape)


def _share(lies: Layout, rank: int) -> tuple[int, int]:
    """The begin and end of a rank's share in its addend."""
    place, at, ranks = lies.placement, 0, 1
    for axis in lies.state.partial:
        at, ranks = at * place.shape[axis] + place.coords(rank)[axis], ranks * place.shape[axis]
    return share_bounds(prod(lies.local_shape(rank)), ranks)[at]


def _rows(held: KeptRows) -> dict[str, Any]:
    """All that is kept of a tensor as tensors with a row for each rank; those of uneven shards have zeros behind."""
    place = held.lies.placement
    found: dict[str, Any] = {"lies": _text(held.lies), "by": held.by}
    sizes = {"error": max(prod(held.lies.local_shape(rank)) for rank in place.flat)}
    sizes["share"] = max(end - begin for begin, end in (_share(held.lies, rank) for rank in place.flat))
    for name in sorted(held.ranks[0]) if held.ranks else ():
        parts = [kept[name].reshape(-1) for kept in held.ranks]
        size = sizes.get(name) or max(x.numel() for x in parts)
        axes = tuple(range(place.ndim))
        layout = Layout(place, State((axes, ())), (place.size, size), parts[0].dtype)
        rows = [torch.nn.functional.pad(x, (0, size - x.numel())).view(1, -1) for x in parts]
        found[name] = layout, tuple(rows), (size,) if name == "share" else tuple(held.ranks[0][name].shape)
    return found


def _read(name: str, rows: Mapping[str, Any], lies: Layout, by: str) -> KeptRows:
    if rows["lies"] != _text(lies) or rows["by"] != by:
        raise SbpError(
            f"the errors kept for {name} are of another run\n"
            f"  {rows['by']} of {rows['lies']}\n  now {by} of {_text(lies)}\n"
            "  go on with the ranks and encoder that they were saved with, or begin without errors: step.kept.reset()"
        )
    place, found = lies.placement, []
    for rank in owned(place):
        at = place.flat.index(rank)
        mine: dict[str, Tensor] = {}
        for what, value in rows.items():
            if what not in ("lies", "by"):
                whole, shape = value
                if what in ("error", "share"):  # of each rank as large as what it is of
                    begin, end = _share(lies, rank)
                    shape = lies.local_shape(rank) if what == "error" else (end - begin,)
                where = "cpu" if what == "steps" else device(place, rank)
                mine[what] = whole[at, : prod(shape)].reshape(tuple(shape)).to(where, copy=True)
        found.append(mine)
    return KeptRows(lies, by, tuple(found))


def _text(lies: Layout) -> str:
    return f"{str(lies.dtype).removeprefix('torch.')}{list(lies.shape)} {lies.state} on {lies.placement.shape}"


def share_bounds(numel: int, ranks: int) -> list[tuple[int, int]]:
    """The bounds of each rank's share of a tensor that is summed twice. Shares are cut as they are, and never filled
    up: an encoder would count what they are filled with.

    >>> share_bounds(7, ranks=3), share_bounds(2, ranks=3)
    ([(0, 3), (3, 6), (6, 7)], [(0, 1), (1, 2), (2, 2)])
    """
    size = -(-numel // ranks)
    return [(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(ranks)]
