"""Gradients: local autograd on the shards, and what is left to do around it.

A leaf is a B tensor whose gradient each op may leave whole or as addends. It keeps one alias of its shards for each of
these, so that gradients add up locally in both, and are brought together once, when the backward pass is over: any
backward pass that reaches them, also that of a plain loss made of `to_local` or `full_tensor`.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ...boxing import box
from ...boxing.box import dense
from ...boxing.exchange.execute import token
from ...boxing.record import Asker, user_line
from ...placement.errors import ShapeError
from ...placement.world import device, owned
from ...sbp import B, Layout
from ...sbp.signature import Partial
from ...sbp.state import State
from .agreement import same
from .handle import AnyHandle, Handle, plain
from .memory_formats import in_order, is_in_order
from .moves import describe, flat, own_shards, shards_as

__all__ = ["Leaf", "accumulate", "backward", "become_leaf", "from_whole", "grad", "laid", "set_data"]

# Leaves whose gradients have to be brought together, in order of creation, which is the same on all ranks.
_leaves: "list[ref[Handle]]" = []
_pass = -1  # the backward pass at the end of which they will be


def _heed(shards: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Whatever backward pass leaves a gradient on these, bring the leaves' gradients together at its end."""
    for shard in shards:
        if _at_the_end not in (shard._post_accumulate_grad_hooks or {}).values():
            shard.register_post_accumulate_grad_hook(_at_the_end)  # type: ignore[no-untyped-call]
    return shards


def _at_the_end(shard: Tensor) -> None:
    global _pass
    now = torch._C._current_graph_task_id()
    if now != _pass:
        _pass, differentiably = now, torch.is_grad_enabled()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: settle(differentiably))


class Leaf:
    """The aliases of a leaf, by layout; they share its memory and its version counter, not its gradient.

    A leaf that is B nowhere has none, and nothing to bring together: what its shards gather is its gradient.
    """

    def __init__(self, direct: bool) -> None:
        self.direct = direct
        self.aliases: dict[Layout, tuple[Tensor, ...]] = {}

    def gathered(self, x: AnyHandle) -> AnyHandle | None:
        """The gradient that lies on the shards of a direct leaf."""
        grads = [shard.grad for shard in x._shards]
        if all(g is None for g in grads):
            return None
        known = x._grad
        if known is None or any(a is not b for a, b in zip(known._shards, grads, strict=True)):
            found, there = tuple(_grad_of(shard) for shard in x._shards), gradient_layout(x._layout)
            if known is not None and all(is_in_order(g, known._layout) for g in found):  # added to one that was set
                there = known._layout
            x._grad = type(x)._wrap(found, there)
        return x._grad

    def put(self, x: Handle, value: Handle | None) -> None:
        """Set the gradient of a direct leaf, which keeps its own order in memory."""
        held: tuple[Tensor | None, ...] = (None,) * len(x._shards)
        x._grad = None
        if value is not None:
            there, given = gradient_layout(x._layout), value._layout
            stays = given.placement is there.placement and given.state == there.state
            there = given.with_state(given.state) if stays else there.in_order(given.order)
            x._grad = mine = laid(type(x), shards_as(value, there, "grad"), there)
            held = mine._shards
        for shard, grad in zip(x._shards, held, strict=True):
            shard.grad = grad

    def watch(self, x: Handle) -> None:
        """From now on there is something to do after a backward pass: hooks to call, gradients to add up."""
        if self.direct:
            x._grad, self.direct = self.gathered(x), False
            for shard in x._shards:
                shard.grad = None
            _heed(x._shards)
            _leaves.append(ref(x))

    def alias(self, x: Handle, of: Layout) -> tuple[Tensor, ...]:
        known = self.aliases.get(of)
        if known is None:
            known = self.aliases[of] = _heed(tuple(shard.detach().requires_grad_() for shard in x._shards))
        return known

    def source(self, x: Handle, dst: Layout) -> tuple[Layout, tuple[Tensor, ...]]:
        """The source of a move: the alias whose gradient comes back for nothing, or for least."""
        src = x._layout
        if src.placement is not dst.placement:
            return src, x._shards
        whole = {a for a in range(src.placement.ndim) if _is_b(src, a)}
        partial = tuple(sorted(a for a in whole if not (_is_b(dst, a) and a not in dst.grad_partial)))
        if partial == src.grad_partial:  # as it is; on axes of one rank its layout may be spelled otherwise
            return src, x._shards
        of = Layout(src.placement, src.state, src.shape, src.dtype, partial)
        return of, self.alias(x, of)

    def held(self, x: Handle) -> list[tuple[Layout, tuple[Tensor, ...]]]:
        """Every layout in which gradients may lie."""
        return [(x._layout, x._shards), *self.aliases.items()]


def _is_b(of: Layout, axis: int) -> bool:
    return of.placement.shape[axis] > 1 and axis not in of.state.split and axis not in of.state.partial


def become_leaf(x: Handle, on: bool) -> None:
    """`requires_grad_`: torch's own checks first, on every shard."""
    if x.requires_grad is on:
        return
    grad = x.grad
    for shard in x._shards:
        shard.requires_grad_(on)
    x._leaf = None
    if on:
        axes = tuple(a for a in range(x.placement.ndim) if _is_b(x._layout, a))
        of = x._layout
        x._layout = Layout(of.placement, of.state, of.shape, of.dtype, axes, of.sbp, of.order, of.gaps)
        x._leaf = Leaf(direct=not axes and not x._layout.state.partial and x._hooks is None)
        if not x._leaf.direct:
            _heed(x._shards)
            _leaves.append(ref(x))
    else:
        x._layout = plain(x._layout)
    x.grad = grad


def set_data(x: Handle, value: Tensor) -> None:
    """`x.data = value`: other values in the same tensor, which stays a leaf. A plain value, which is the same on every
    process, lies as the tensor does; of another shape it is whole on every rank."""
    if not isinstance(value, Handle):
        shards, of = _laid(x, value)
    else:
        shards, of = tuple(shard.detach() for shard in value._shards), plain(value._layout)
        memories = {shard.untyped_storage()._cdata for shard in shards}
        if len(memories) < len(shards):  # of one process: each is written to
            shards = tuple(shard.clone() for shard in shards)
    on, grad = x.requires_grad, x.grad
    x._shards, x._layout, x._leaf, x._moved, x._grad = shards, of, None, None, None
    if on:
        become_leaf(x, True)
    if grad is not None and grad.shape == x.shape:
        x.grad = grad if grad.dtype is x.dtype else None


def _laid(x: Handle, value: Tensor) -> tuple[tuple[Tensor, ...], Layout]:
    """A plain value on the ranks of a tensor; its memory is not shared."""
    where, shape = x.placement, tuple(value.shape)
    same({"": value.detach()}, where, f"x.data = value at {user_line()}")
    whole = Layout(where, State(((),) * value.ndim), shape, value.dtype)
    lies = Layout(where, x._layout.state, shape, value.dtype) if shape == x.shape else whole
    if lies.state.partial:
        lies = whole
    held = [value.detach().to(device(where, rank)).clone() for rank in owned(where)]
    return tuple(box(held, whole, lies, op="data")) if held else (token(lies),), lies


def gradient_layout(of: Layout) -> Layout:
    """The layout in which a leaf's gradient is kept: as the leaf lies, in memory too, added up."""
    return Layout(of.placement, State(of.state.dims), of.shape, of.dtype, order=() if of.gaps else of.order)


def backward(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | Tensor | None = None,
) -> None:
    """Run the backward pass of all ranks owned here."""
    y: Any = tensors[0]
    given: Any = gradients[0]
    if (
        inputs is None
        and len(tensors) == 1
        and isinstance(given, Handle)
        and isinstance(y, Handle)
        and given._layout is y._layout.dual
        and y._layout.state.reduction == "sum"
        and y._shards[0].requires_grad
        and len(y._shards) == 1
    ):  # the usual case, spared all that follows
        torch.autograd.backward(y._shards, given._shards, retain_graph, create_graph)
        return
    roots, cotangents = _roots(tensors, gradients)
    if not roots:
        raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    into = None
    if inputs is not None:
        for x in _listed(inputs):
            if isinstance(x, Handle) and x._leaf is None:
                x._asked = True
        into = [shard for x in _listed(inputs) for _, shards in _holders(x) for shard in shards if shard.requires_grad]
    torch.autograd.backward(roots, cotangents, retain_graph, create_graph, inputs=into)


def _roots(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    roots: list[Tensor] = []
    cotangents: list[Tensor | None] = []
    for y, given in zip(tensors, gradients, strict=True):
        if not isinstance(y, Handle):
            roots.append(y)
            cotangents.append(given)
        elif y.requires_grad:
            if y._layout.state.partial and y._layout.state.reduction != "sum":
                held = y._layout.to(tuple(B if isinstance(e, Partial) else e for e in y.sbp)).in_order(y._layout.order)
                y = type(y)._wrap(own_shards(y, held, "to_global"), held)
            for shard, cotangent in zip(y._shards, _cotangent(y, given), strict=True):
                if shard.requires_grad:  # a rank without elements may have nothing to differentiate
                    roots.append(shard)
                    cotangents.append(cotangent)
        elif y._of_step:
            raise RuntimeError(
                f"backward() of what {y._of_step} returned, at {user_line()}: the step has made all gradients\n"
                "  leave the call out; with an optimizer the step has stepped too, without one gradients are in p.grad"
            )
        else:
            raise RuntimeError(
                "element 0 of tensors does not require grad and does not have a grad_fn\n"
                f"  {describe(y)}, at {user_line()}\n"
                "  it comes of no parameter, or of what a compiled step returned, whose gradients are made: scale and "
                "add up losses in the step's own loss function"
            )
    return roots, cotangents


def _cotangent(y: Handle, given: Tensor | None) -> tuple[Tensor, ...]:
    """The gradient that backward starts from, as the dual of `y` lies."""
    if given is None:
        if y.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        given = torch.ones(y._layout.shape, dtype=y.dtype, device=y.device)
    if given.shape != y.shape:
        raise ShapeError(f"a gradient of shape {tuple(given.shape)} for\n  {describe(y)}\n  give one of that shape")
    if not isinstance(given, Handle):
        given = type(y)._wrap(from_whole(y, given), flat(y._layout))
    elif given.dtype != y.dtype:
        given = given.to(y.dtype)
    assert isinstance(given, Handle)
    return shards_as(given, y._layout.dual, "backward")


def from_whole(y: Handle, value: Tensor) -> tuple[Tensor, ...]:
    """The same value on every rank owned here; the token where there is none."""
    return tuple(value.to(device(y.placement, r), y.dtype) for r in owned(y.placement)) or (token(y._layout),)


def _listed(inputs: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    return (inputs,) if isinstance(inputs, Tensor) else inputs


def _holders(x: Tensor) -> list[tuple[Layout, tuple[Tensor, ...]]]:
    if not isinstance(x, Handle):
        raise TypeError("inputs of the backward pass of a global tensor must be global tensors")
    return x._leaf.held(x) if x._leaf is not None else [(x._layout, x._behind)]


def settle(differentiably: bool) -> None:
    """Bring what has gathered on the leaves' aliases into their `grad`, in the order in which leaves were made."""
    with torch.set_grad_enabled(differentiably):
        _settle()


def _settle() -> None:
    gone = 0
    for known in tuple(_leaves):
        x = known()
        if x is None or x._leaf is None or x._leaf.direct:
            gone += 1
            continue
        found = []
        for of, shards in x._leaf.held(x):
            if any(shard.grad is not None for shard in shards):
                found.append((of, tuple(_grad_of(shard) for shard in shards)))
                for shard in shards:
                    shard.grad = None
        if found:
            accumulate(x, _together(x, found))
    if gone > 64:
        _leaves[:] = [known for known in _leaves if _is_watched(known())]


def _is_watched(x: Handle | None) -> bool:
    return x is not None and x._leaf is not None and not x._leaf.direct


def _grad_of(shard: Tensor) -> Tensor:
    return torch.zeros_like(shard) if shard.grad is None else dense(shard.grad)


def _together(x: AnyHandle, found: Iterable[tuple[Layout, tuple[Tensor, ...]]]) -> AnyHandle:
    """One gradient from those of several aliases: added up as addends, then moved, once."""
    duals = [(of.dual, tuple(map(dense, grads))) for of, grads in found]
    there = gradient_layout(x._layout)
    common, by = duals[0][0], None if not x._path else Asker(user_line(), x._path)
    if len(duals) > 1:
        axes = {a for dual, _ in duals for a in dual.state.partial}
        common = Layout(there.placement, State(there.state.dims, tuple(sorted(axes))), there.shape, there.dtype)
    total: tuple[Tensor, ...] | None = None
    for dual, grads in duals:
        part = grads if dual is common else box(grads, dual, common, op="gradient", by=by)
        total = part if total is None else tuple(a + b for a, b in zip(total, part, strict=True))
    assert total is not None
    return laid(type(x), box(total, common, there, op="gradient", by=by), there)


def laid(kind: type[AnyHandle], gradients: tuple[Tensor, ...], of: Layout) -> AnyHandle:
    """The global tensor of gradients, in memory as it is said to lie: autograd leaves them as it likes."""
    return kind._wrap(tuple(in_order(g, of) for g in gradients), of)


def accumulate(x: Handle, new: Handle) -> None:
    """Add what a backward pass found for a leaf to its gradient, and call its hooks."""
    hooks = x._hooks
    if hooks is not None:
        new = hooks.run(new)
    if x._grad is None:
        x._grad = new
    elif torch.is_grad_enabled() and new.requires_grad:
        x._grad = x._grad + new  # type: ignore[assignment]
    else:
        with torch.no_grad():
            x._grad.add_(new)
    if hooks is not None:
        for hook in list(hooks.after.values()):
            if hook(x) is not None:
                raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def grad(
    outputs: Sequence[Tensor] | Tensor,
    inputs: Sequence[Tensor] | Tensor,
    grad_outputs: Sequence[Tensor | None] | Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad for global tensors."""
    ys, xs = _listed(outputs), _listed(inputs)
    given = [None] * len(ys) if grad_outputs is None else list(_listed(grad_outputs))  # type: ignore[arg-type]
    roots, cotangents = _roots(ys, given)
    holders = [_holders(x) for x in xs]
    wanted = [shard for held in holders for _, shards in held for shard in shards]
    if not all(shard.requires_grad for shard in wanted):
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    found = iter(torch.autograd.grad(roots, wanted, cotangents, retain_graph, create_graph, allow_unused=True))
    results: list[Tensor | None] = []
    for x, held in zip(xs, holders, strict=True):
        parts = []
        for of, shards in held:
            grads = [next(found) for _ in shards]
            if any(g is not None for g in grads):
                full = tuple(torch.zeros_like(s) if g is None else g for s, g in zip(shards, grads, strict=True))
                parts.append((of, full))
        assert isinstance(x, Handle)
        if parts:
            whole = _together(x, parts) if x._leaf is not None else laid(type(x), parts[0][1], parts[0][0].dual)
            if x._hooks is not None and x._leaf is not None:  # on the way to other tensors they were called
                whole = x._hooks.run(whole)
            results.append(whole)
        elif materialize_grads:
            results.append(torch.zeros_like(x))
        elif allow_unused:
            results.append(None)
        else:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
    return tuple(results)
