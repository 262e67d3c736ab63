"""torch's DTensor and back: the same shards in the other's words, nothing moved and nothing copied.

    S(d)  Shard(d)      B  Replicate()      P, P("max"), P("min")  Partial("sum"), Partial("max"), Partial("min")

DTensor cuts as torch.chunk does, 5 over 4 into 2, 2, 1, 0; sbpflow into 2, 1, 1, 1. Where the two differ there is no
other word for a layout, and an error says what to move first.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...boxing import between
from ...placement import Placement
from ...placement import placement as make_placement
from ...placement.errors import PlacementError, SbpError
from ...placement.world import at_close, world
from ...sbp import B, Layout, P, S, Sbp, layout
from ...sbp.layout import memory_order
from ...sbp.state import State
from .handle import plain
from .memory_formats import in_order
from .moves import describe, shards_as
from .tensor import GlobalTensor, wrap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["from_dtensor", "to_dtensor"]

_meshes: dict[Placement, "DeviceMesh"] = {}


def to_dtensor(x: Tensor) -> "DTensor":
    """The DTensor of the same shards; its gradient comes back to `x`.

    The first call for a placement makes a DeviceMesh, which every process of the job has to do together.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(x, GlobalTensor):
        raise SbpError(f"to_dtensor of a {type(x).__name__}\n  make it global: flow.tensor(x, placement=p, sbp=S(0))")
    if world().rank is None:
        raise PlacementError(
            f"to_dtensor: this process owns every rank, and a DTensor has one shard a process\n  {describe(x)}\n"
            "  start the program with torchrun, or take x.to_local() or x.full_tensor()"
        )
    of = plain(x._layout)
    _check_cut(x, of)
    (shard,) = shards_as(x, of, "to_dtensor")
    strides = [1]
    for n in reversed(of.shape[1:]):
        strides.insert(0, strides[0] * max(n, 1))
    return DTensor.from_local(
        shard,
        _mesh(of.placement),
        _placements(of),
        shape=torch.Size(of.shape),
        stride=tuple(strides[: len(of.shape)]),
    )


def from_dtensor(d: Tensor) -> GlobalTensor:
    """The global tensor of the same shards; its gradient goes back to `d`."""
    from torch.distributed.tensor import DTensor

    if not isinstance(d, DTensor):
        raise SbpError(
            f"from_dtensor of a {type(d).__name__}\n  a plain shard: flow.from_local(d, placement=p, sbp=S(0))"
        )
    there = placement_of(d.device_mesh)
    _meshes.setdefault(there, d.device_mesh)
    of = layout(there, tuple(map(_sbp, d.placements)), tuple(d.shape), d.dtype)
    odd = _odd(of)
    if odd:
        raise SbpError(
            f"from_dtensor: {of.dtype} {of.shape} as {tuple(d.placements)} is not cut as sbpflow cuts\n"
            f"  {_cuts(of, odd[0])}\n"
            f"  first: d.redistribute(placements={_replicated(d.placements, odd)})"
        )
    one = torch.empty_strided(of.shape, d.stride(), device="meta")
    of = of.in_order(memory_order(one))
    return wrap((in_order(d.to_local(), of),), of)


def placement_of(mesh: "DeviceMesh") -> Placement:
    """The same ranks in the same grid, with the same names."""
    names = mesh.mesh_dim_names
    return make_placement(mesh.device_type, mesh.mesh.tolist(), names=None if names is None else tuple(names))


def _mesh(p: Placement) -> "DeviceMesh":
    from torch.distributed.device_mesh import DeviceMesh

    if not _meshes:
        at_close(_meshes.clear)
    if p not in _meshes:
        _meshes[p] = DeviceMesh(p.type, torch.tensor(p.flat, device="cpu").reshape(p.shape), mesh_dim_names=p.names)
    return _meshes[p]


def _placements(of: Layout) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    found: list[Any] = [Replicate()] * of.placement.ndim
    for dim, factors in enumerate(of.state.dims):
        for axis in factors:
            found[axis] = Shard(dim)
    for axis in of.state.partial:
        found[axis] = Partial(of.state.reduction)
    return found


def _sbp(placement: Any) -> Sbp:
    from torch.distributed.tensor import Partial, Replicate, Shard

    kinds = {"sum": P, "max": P("max"), "min": P("min")}
    if type(placement) is Replicate:
        return B
    if type(placement) is Shard:
        return S(placement.dim)
    if type(placement) is Partial and placement.reduce_op in kinds:
        return kinds[placement.reduce_op]
    raise SbpError(
        f"from_dtensor: {placement!r} has no signature\n"
        "  there are Shard, Replicate and Partial of sum, max and min; first: d.redistribute(placements=[Replicate()])"
    )


def _check_cut(x: GlobalTensor, of: Layout) -> None:
    """A layout that DTensor has no words for is an error with the nearest that it has."""
    holes = [
        d for d, factors in enumerate(of.state.dims) if list(factors) != sorted(factors) or min(factors, default=0) < 0
    ]
    odd = holes or _odd(of)
    if not odd:
        return
    split = [() if d in odd else factors for d, factors in enumerate(of.state.dims)]
    there = Layout(of.placement, State(tuple(split), of.state.partial, of.state.reduction), of.shape, of.dtype)
    way = between(of, there)
    why = f"dim {holes[0]} is not cut axis by axis" if holes else _cuts(of, odd[0])
    raise SbpError(
        f"to_dtensor: DTensor does not cut so\n  {describe(x)}\n  {why}\n"
        f"  first: x.to_global(sbp={there.sbp}): {way.route} of {way.bytes} bytes a rank"
    )


def _odd(of: Layout) -> list[int]:
    """The dims of which some rank would hold another piece by torch.chunk's rule."""
    p = of.placement
    return [
        d
        for d, factors in enumerate(of.state.dims)
        if factors and any(of.spans(rank)[d] != _chunk(of, d, rank) for rank in p.flat)
    ]


def _chunk(of: Layout, dim: int, rank: int) -> tuple[tuple[int, int], ...]:
    """The piece of a dim that DTensor would have a rank hold."""
    lo, hi = 0, of.shape[dim]
    for axis in of.state.dims[dim]:
        longest = -(-(hi - lo) // of.placement.shape[axis])
        start = lo + longest * of.placement.coords(rank)[axis]
        lo, hi = min(start, hi), min(start + longest, hi)
    return ((lo, hi),) if lo < hi else ()


def _cuts(of: Layout, dim: int) -> str:
    ours = [sum(hi - lo for lo, hi in of.spans(rank)[dim]) for rank in of.placement.flat]
    theirs = [sum(hi - lo for lo, hi in _chunk(of, dim, rank)) for rank in of.placement.flat]
    return f"of dim {dim}, {of.shape[dim]} long, ranks hold {ours} in sbpflow and {theirs} as a DTensor"


def _replicated(placements: Sequence[Any], dims: Sequence[int]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if isinstance(entry, Shard) and entry.dim in dims else entry for entry in placements]
