"""`box`: move a tensor's shards from one layout to another, with the gradient moved back by the transpose.

The transpose of a move is a move: from the dual of the target to the dual of the source. So every row of the table of
gradients, and the gradient's own gradient, is this one function again. A maximum's gradient goes to the ranks that
hold it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..placement.device import current_stream, on_stream, side_stream
from ..placement.errors import DtypeError, ShapeError
from ..placement.world import device, owned, world
from ..sbp import B, Layout
from ..sbp.state import State
from .boxing import Boxing, between
from .exchange.execute import Flight, land, run, steps, transport
from .exchange.filled_rows import filled_steps
from .record import Asker, asker, note

__all__ = ["Pending", "box", "box_async", "gather", "scatter"]


def box(
    shards: Sequence[Tensor], src: Layout, dst: Layout, *, op: str = "box", by: Asker | None = None
) -> tuple[Tensor, ...]:
    """The shards of `dst` that this process owns, made of those of `src`; a view where nothing needs to move.

    `shards` holds one tensor for each owned rank of the placement, in its order; a process that owns none passes, and
    gets, one empty token, which keeps its place in the autograd graph.

    >>> from ..placement import placement
    >>> from ..sbp import layout
    >>> p = placement("cpu:[0-1]")
    >>> rows, terms = layout(p, "S(0)", (3,)), layout(p, "P", (3,))
    >>> box([torch.ones(2), torch.zeros(1)], rows, terms)
    (tensor([1., 1., 0.]), tensor([0., 0., 0.]))
    """
    way = between(src, dst)
    _check(shards, way)
    note(op, way, by)
    if torch.is_grad_enabled() and any(shard.requires_grad for shard in shards):
        if way.moves or src.dual is not dst.dual:
            return _Box.apply(way, *shards)  # type: ignore[no-any-return, no-untyped-call]
    elif way.moves:
        return run(way, shards)
    return tuple(shards)


class Pending:
    """A boxing under way. `wait()` returns the shards; on a card it makes the current stream wait, never the host."""

    def __init__(self, flight: Flight, stream: Any = None) -> None:
        self._flight, self._stream = flight, stream
        self._result: tuple[Tensor, ...] | None = None
        self._advance(one=True)

    def _advance(self, *, one: bool) -> None:
        with on_stream(self._stream):
            try:
                if one:
                    next(self._flight)
                else:
                    self._result = land(self._flight)
            except StopIteration as end:
                self._result = end.value

    def go_on(self) -> None:
        """Wait for the exchange that is on the wire, and start the one behind it, if there is one."""
        if self._result is None:
            self._advance(one=True)

    def wait(self) -> tuple[Tensor, ...]:
        if self._result is None:
            self._advance(one=False)
        assert self._result is not None
        if self._stream is not None:
            here = current_stream(self._stream.device)
            here.wait_stream(self._stream)
            for shard in self._result:
                if not shard.is_cpu:
                    shard.record_stream(here)
        return self._result


def box_async(shards: Sequence[Tensor], src: Layout, dst: Layout, *, filled: bool = False) -> Pending:
    """Start a boxing and go on; its first exchange is on the wire when this returns. Outside autograd. With `filled`
    only rows that hold something go.

    On a card all of it runs on the side stream for these, behind what the current stream has been given so far.
    """
    way = between(src, dst)
    _check(shards, way)
    if not filled:  # the bytes of filled rows are known behind the move
        note("box_async", way)
    shards = [shard.detach() for shard in shards]
    stream = None
    if not shards[0].is_cpu:
        where = shards[0].device
        stream = side_stream(where, "box_async")
        stream.wait_stream(current_stream(where))
        for shard in shards:
            shard.record_stream(stream)
    flight = filled_steps(shards, src, dst, op="box_async", background=True) if filled else None
    return Pending(flight or steps(way, shards, background=True), stream)


class _Box(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Boxing, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.way, ctx.by = way, asker()
        out = run(way, shards) if way.moves else shards
        if _extremal(way.src):
            ctx.save_for_backward(*shards, *out)
        # An input returned as it is would lose its own graph, and views refuse later in-place changes.
        return tuple(t.detach() if t._is_view() or any(t is s for s in shards) else t for t in out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        src, dst = ctx.way.src, ctx.way.dst
        if _extremal(src) and src.state != dst.state:
            count = len(owned(src.placement)) or 1
            saved = ctx.saved_tensors  # once: under checkpoint each look unpacks them anew
            held, out = saved[:count], saved[count:]
            return None, *_to_holders(grads, held, out, src, dst)
        return None, *box([dense(g) for g in grads], dst.dual, src.dual, op="box backward", by=ctx.by)


def dense(grad: Tensor) -> Tensor:
    """The tensor in a form that can be moved: plain, with memory of its own."""
    if grad._is_zerotensor():
        return grad.clone()
    return grad if grad.layout is torch.strided else grad.to_dense()


def _extremal(layout: Layout) -> bool:
    return bool(layout.state.partial) and layout.state.reduction != "sum"


def _to_holders(
    grads: Sequence[Tensor], held: Sequence[Tensor], out: Sequence[Tensor], src: Layout, dst: Layout
) -> tuple[Tensor, ...]:
    """The gradient of a maximum: to the ranks whose addend it was, in equal shares where several had it."""
    whole = src.with_state(State(src.state.dims))
    best = box(out, dst, whole, op="box backward")
    # On B axes as the source's gradient lies; on those of the maximum whole, and used by each rank for its own addend.
    state = State(src.state.dims, src.grad_partial)
    lies = Layout(src.placement, state, src.shape, src.dtype, src.state.partial)
    grad = box(grads, dst.dual, lies, op="box backward")
    if not owned(src.placement):
        box(grad, src.with_state(State(src.state.dims, src.state.partial)), whole, op="box backward")
        return grad
    mine = [(a == b).to(g.dtype) for a, b, g in zip(held, best, grad, strict=True)]
    ties = box(mine, src.with_state(State(src.state.dims, src.state.partial)), whole, op="box backward")
    return tuple(g * m / t for g, m, t in zip(grad, mine, ties, strict=True))


def scatter(whole: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """The owned shards of a tensor that every process passes whole; each is a copy. Sends nothing."""
    if tuple(whole.shape) != layout.shape or whole.dtype is not layout.dtype:
        raise ShapeError(
            f"scatter of {whole.dtype} {tuple(whole.shape)} as {layout}\n"
            "  the layout is that of another tensor; make it with layout(placement, sbp, x.shape, x.dtype)"
        )
    here = owned(layout.placement)
    copies = [whole.to(device(layout.placement, r)) for r in here]
    plain = layout.to(B)
    shards = box(copies or [whole.new_empty(0)], plain, layout, op="scatter")
    return tuple(
        shard.clone() if shard.data_ptr() == whole.data_ptr() or shard._is_view() else shard for shard in shards
    )


def gather(shards: Sequence[Tensor], layout: Layout) -> Tensor:
    """The whole logical tensor, on every process that owns one of its ranks (elsewhere an empty token)."""
    return box(shards, layout, layout.to(B), op="gather")[0]


def _check(shards: Sequence[Tensor], way: Boxing) -> None:
    """Refuse shards that are not what the layout says, and let waiting peers know."""
    here = way.expected
    if len(shards) == len(here):
        for shard, (_, shape, dtype, kind) in zip(shards, here, strict=True):
            if shard.shape != shape or shard.dtype is not dtype or shard.device.type != kind:
                break
        else:
            return
    error = _misfit(shards, way)
    if error is not None:
        if world().rank is not None:
            transport().refuse(way, error)
        raise error


def _misfit(shards: Sequence[Tensor], way: Boxing) -> Exception | None:
    src = way.src
    ranks = owned(src.placement)
    if not ranks and len(shards) == 1 and not shards[0].numel():
        return None
    if len(shards) != max(1, len(ranks)):
        return ShapeError(
            f"box of {src}: {len(shards)} shards for {len(ranks)} ranks that this process owns\n"
            f"  pass one tensor for each of ranks {list(ranks)}, in this order"
            + ("" if ranks else ", so here one empty tensor as a token")
        )
    for rank, shard in zip(ranks, shards, strict=True):
        found = f"rank {rank} has {shard.dtype} {tuple(shard.shape)} on {shard.device.type}"
        wants = f"  {src} gives it {src.dtype} {src.local_shape(rank)} on {src.placement.type}"
        if shard.dtype is not src.dtype:
            return DtypeError(f"{found}\n{wants}\n  convert it, x.to({src.dtype}), or make the layout of {shard.dtype}")
        if tuple(shard.shape) != src.local_shape(rank):
            return ShapeError(
                f"{found}\n{wants}\n  cut it as layout.slices({rank}) says, or use scatter(whole, layout)"
            )
        if shard.device.type != src.placement.type:
            return DtypeError(f"{found}\n{wants}\n  move it there, x.to({str(device(src.placement, rank))!r})")
    return None
