"""Implicit and explicit moves of global tensors: shared between consumers, and refused where the user said so."""

import contextlib
from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ...boxing import between, box
from ...boxing.encoding import Encoding, MoveEncoder
from ...boxing.kept import KeptErrors, KeptUnder
from ...placement import Placement
from ...placement.errors import SbpError, TransportError
from ...placement.world import owned, world
from ...sbp import Layout
from ...sbp.layout import memory_gaps, memory_order
from ...sbp.state import State
from .handle import Handle
from .memory_formats import in_order

__all__ = [
    "data_of",
    "encoded_shards",
    "everywhere",
    "explicit",
    "flat",
    "own_shards",
    "run_by",
    "shards_as",
    "to_all",
    "version",
    "whole",
]

_explicit = 0
# Whose processes alone run the code, where that is not all.
_members: ContextVar[Placement | None] = ContextVar("members", default=None)


@contextlib.contextmanager
def explicit() -> Iterator[None]:
    """Inside, a move that an op would need is an error that names it; only `to_global` and its kin move."""
    global _explicit
    _explicit += 1
    try:
        yield
    finally:
        _explicit -= 1


def flat(of: Layout, placement: Placement | None = None, grad_partial: tuple[int, ...] = ()) -> Layout:
    """The layout of the same tensor whole on every rank."""
    return Layout(placement or of.placement, State(((),) * len(of.shape)), of.shape, of.dtype, grad_partial)


def whole(one: Tensor, placement: Placement, grad_partial: tuple[int, ...] = ()) -> Layout:
    """The layout of what every rank has as this tensor."""
    if one.layout is not torch.strided:
        raise SbpError(
            f"a {str(one.layout).removeprefix('torch.')} tensor of shape {tuple(one.shape)} came out\n"
            "  global tensors are dense; call the function on x.full_tensor()"
        )
    state = State(((),) * one.ndim)
    grads = grad_partial if one.is_floating_point() or one.is_complex() else ()
    return Layout(placement, state, tuple(one.shape), one.dtype, grads, None, memory_order(one), memory_gaps(one))


def shards_as(x: Handle, dst: Layout, op: str, *, implicit: bool = False) -> tuple[Tensor, ...]:
    """The shards of `x` as they lie in `dst`. Consumers that want the same share it, and one gradient comes back."""
    src = x._layout
    if src is dst:
        return x._shards
    shards = x._shards
    if src.state == dst.state and src.placement is dst.placement:
        if src.grad_partial == dst.grad_partial or not x.requires_grad or not torch.is_grad_enabled():
            return shards
        if x._leaf is not None:
            return x._leaf.alias(x, dst)  # type: ignore[no-any-return]
    if implicit and _explicit:
        _refuse(x, dst, op)
    known = _shared(x, dst)
    if known is not None:
        return known
    if x._leaf is not None and torch.is_grad_enabled():
        src, shards = x._leaf.source(x, dst)
    moved = box(shards, src, dst, op=op)
    if moved is not shards and not any(a is b for a, b in zip(moved, x._shards, strict=False)):
        _share(x, dst, moved)
    return moved


def encoded_shards(x: Handle, dst: Layout, encoder: MoveEncoder, kept: KeptUnder | None) -> tuple[Tensor, ...]:
    """The shards of `x` as they lie in `dst`, which go there encoded: a sum over ranks, or a hop to others."""
    src, dst = x._layout.with_state(x._layout.state), dst.with_state(dst.state)
    if x.requires_grad and torch.is_grad_enabled():
        raise SbpError(
            f"an encoded move of {tuple(x.shape)} that requires grad: what is rounded has no gradient\n"
            "  detach it, x.detach().to_global(...); in a graph gradients and hops are encoded by flow.nn.compress"
        )
    of = f"a tensor {tuple(x.shape)}"
    shards = tuple([shard.detach() for shard in x._shards])
    if src.placement is not dst.placement:
        encoder.check_hop(src, dst, of)
        if kept is not None:
            raise SbpError(f"{of} hops to other ranks encoded, and nothing is kept of hops\n  leave kept= out")
        hop = encoder.hop(src, dst)
        return hop.decode(box(hop.encode(shards), *hop.code, op="encoded hop"))
    axes = tuple(a for a in src.state.partial if a not in dst.state.partial)
    encoder.check_sum(src, dst, axes, of)
    if not owned(src.placement):
        return shards
    if not src.numel:  # no level, scale or largest is of nothing
        return box(shards, src, dst)
    move = encoder.sums([(src, dst)], [Encoding(encoder, axes, kept.name if kept else "")])
    errors = kept.all if kept else KeptErrors()
    (moved,) = move.now(errors, shards)
    errors.commit()
    return moved


def own_shards(x: Handle, dst: Layout, op: str) -> tuple[Tensor, ...]:
    """The shards of `x` as they lie in `dst`, in memory too, for the user to keep: nobody else has them."""
    known = x._moved is not None and dst in x._moved
    moved = shards_as(x, dst, op)
    rows = dst.in_rows
    moved = tuple([s if rows and s.is_contiguous() else in_order(s, dst) for s in moved])
    if known:  # consumers share it
        return tuple(s.clone() for s in moved)
    if x._moved is not None:
        x._moved.pop(dst, None)
    mine = {shard.untyped_storage()._cdata for shard in x._shards}
    return tuple(s.clone() if s.untyped_storage()._cdata in mine else s for s in moved)


def _share(x: Handle, dst: Layout, moved: tuple[Tensor, ...]) -> None:
    if any(s.is_inference() for s in (*x._shards, *moved)):
        return  # these have no version, so that a change would not show
    if x._moved is None:
        x._moved = {}
    # Weakly: what is gathered for one op lives as long as the graph needs it, not as long as the parameter.
    refs = tuple(map(TensorWeakRef, moved))
    x._moved[dst] = refs, _stamp(x._shards), _stamp(moved), torch.is_grad_enabled() and x.requires_grad


def _shared(x: Handle, dst: Layout) -> tuple[Tensor, ...] | None:
    if x._moved is None or dst not in x._moved:
        return None
    refs, source, copies, tracked = x._moved[dst]
    tensors = tuple(ref() for ref in refs)
    wanted = torch.is_grad_enabled() and x.requires_grad
    if any(t is None for t in tensors) or tracked is not wanted or _stamp(x._shards) != source:
        del x._moved[dst]
        return None
    return tensors if _stamp(tensors) == copies else None


def _stamp(shards: tuple[Any, ...]) -> tuple[int, ...]:
    """Changes whenever the values may have: by an in-place op, or because the shards are others."""
    return tuple(number for s in shards for number in (version(s), s.data_ptr()))


# By shard, what all its `x.data` are aliases of: what is written to them counts there.
_data: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def data_of(shards: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The shards as `x.data` gives them: autograd does not see what is written to them, and `version` does."""
    return tuple(shard.data if shard.is_inference() else _data_of(shard) for shard in shards)


def _data_of(shard: Tensor) -> Tensor:
    known = _data.get(shard)
    if known is None or known.untyped_storage()._cdata != shard.untyped_storage()._cdata:
        known = _data[shard] = shard.data
    if known.shape == shard.shape and known.stride() == shard.stride():
        return known.detach()
    return known.as_strided(shard.shape, shard.stride(), shard.storage_offset())


def version(shard: Tensor) -> int:
    """How often a shard was written to, through its `x.data` too."""
    known = _data.get(shard) if _data else None
    return shard._version if known is None else shard._version + known._version


class Refused(SbpError):
    """A move that would be needed, inside `explicit`."""


def _refuse(x: Handle, dst: Layout, op: str) -> None:
    way, back = between(x._layout, dst), between(dst.dual, x._layout.dual)
    if not way.total and not (back.total and x.requires_grad and torch.is_grad_enabled()):
        return
    grad = f", grad_sbp={dst.dual.sbp}" if dst.grad_partial else ""
    costs = f"{way.route} of {way.bytes} bytes a rank"
    raise Refused(
        f"{op} would move a tensor, inside flow.explicit()\n"
        f"  {describe(x)}\n"
        f"  try x.to_global(sbp={dst.sbp}{grad}) before it: {costs}, and {back.bytes} for the gradient"
    )


def describe(x: Handle) -> str:
    """A line of an error message: what the tensor is, and where it was made if that is known."""
    known = x._made  # a line of a file or, of parameters, their name
    made = "" if not known else f"   made at {known}" if ":" in known else f"   named {known}"
    return f"{tuple(x.shape)}  {str(x.dtype).removeprefix('torch.')}  {x._layout.lie} on {x.placement}{made}"


@contextlib.contextmanager
def run_by(members: Placement) -> Iterator[None]:
    """Inside, no other processes than those of these ranks run the code: a whole value is for them alone."""
    before = _members.set(members)
    try:
        yield
    finally:
        _members.reset(before)


def everywhere(x: Handle) -> Tensor:
    """The whole value on every process, also on those that own no rank of the placement; for the user to keep."""
    here, there, members = world(), x.placement, _members.get()
    if here.rank is not None:
        ranks = tuple(range(here.size or 0)) if members is None else members.flat
        if len(ranks) != there.size or (members is not None and {*ranks} != {*there.flat}):
            there = Placement(there.type, ranks, (len(ranks),), None)
    try:
        shards = own_shards(x, flat(x._layout, there).in_order(x._layout.order), "full_tensor")
    except TransportError as error:
        raise TransportError(
            f"{error}\n  item(), full_tensor() and the like need every rank: take value = x.item() on all of them, "
            "then print it on one"
        ) from error
    assert owned(there)
    if len(shards) > 1 and torch.is_grad_enabled() and any(s.requires_grad for s in shards):
        return _ForAll.apply(*shards)  # type: ignore[no-any-return,no-untyped-call]
    return shards[0]


class _ForAll(torch.autograd.Function):
    """One whole value in the place of one a rank: what comes back is what each rank would have had come back."""

    @staticmethod
    def forward(ctx: Any, *shards: Tensor) -> Tensor:
        ctx.devices = [shard.device for shard in shards]
        return shards[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ToAll.apply(ctx.devices, *grads)  # type: ignore[no-untyped-call]


class _ToAll(torch.autograd.Function):
    """One value a rank, all alike; what comes back to one has come back to all, and counts once."""

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], value: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.to(device, copy=True) for device in devices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, _ForAll.apply(*grads)  # type: ignore[no-untyped-call]


def to_all(value: Tensor, ranks: int) -> tuple[Tensor, ...]:
    """A copy for each of several ranks that hold the same; the gradient, which each of them has, is that of one."""
    return _ToAll.apply([value.device] * ranks, value)  # type: ignore[no-any-return,no-untyped-call]
