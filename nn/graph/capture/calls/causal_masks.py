"""Causal masks: attention whose mask hides later keys and nothing else is told `is_causal`, as it is without a graph.

Libraries look whether a mask hides more than that, and leave it away if not; while a program is captured they cannot
look, and hand it on. Kernels that read a mask compute all of the scores, twice as many. A mask that is made of places
alone is computed here, and compared; dims along which it is the same have stride 0 and cost nothing. Beside a mask
they repeat heads of keys that several of the queries share, and not without one: nor does the graph.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from .....placement.structure import mapped
from .....sbp.call import Call, Ref, fill, frozen, in_order, refilled, tensors_in
from .....sbp.logical import LogicalOp

__all__ = ["LARGEST", "without_causal_masks"]

aten = torch.ops.aten
LARGEST = 2**28  # scores of a mask that is looked at: about a second of a core
WIDEST, SHARED = 256, (torch.bfloat16, torch.float16)  # heads for which cards have kernels that share them
MOST = 200  # ops by which a mask is made
REMEMBERED = 256  # masks
_NAMES = [each.name for each in aten.scaled_dot_product_attention.default._schema.arguments]
_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_FILLS = {  # by the place of the shape
    **dict.fromkeys((aten.ones.default, aten.zeros.default, aten.full.default), 0),
    **dict.fromkeys((aten.new_ones.default, aten.new_zeros.default, aten.new_full.default), 1),
}
_POINTWISE = {  # beside those that torch calls so
    *(aten.__and__.Tensor, aten.__or__.Tensor, aten._to_copy.default, aten.contiguous.default),
    *(aten.to.dtype, aten.to.device, aten.to.dtype_layout),
}
_ALONG = (aten.cumsum.default, aten.diff.default, aten.cat.default)  # one dim
_TRIANGLES = (aten.tril.default, aten.triu.default)


def without_causal_masks(ops: Sequence[LogicalOp], fakes: Sequence[Tensor]) -> tuple[LogicalOp, ...]:
    """The same ops, where attention that saw its mask is told what it is; the mask is left to whoever else reads it.
    `fakes` are tensors as all values are, by their numbers."""
    masks = _Masks({n: op for op in ops for n in op.numbers}, fakes)
    return tuple([_told(op, masks) if op.op is aten.scaled_dot_product_attention.default else op for op in ops])


def _told(op: LogicalOp, masks: "_Masks") -> LogicalOp:
    given = dict(zip(_NAMES, op.args, strict=False)) | dict(op.kwargs)
    mask = given.pop("attn_mask", None)
    query, *keys = (given.pop(name) for name in _NAMES[:3])
    if not isinstance(mask, Ref) or given.get("is_causal") or not masks.hides_later(mask, query, keys[0]):
        return op
    shared = None if given.get("enable_gqa") else masks.shared(*keys, learns=op.grad)
    if shared is not None:
        keys, given["enable_gqa"] = [*shared], True
    return replace(op, args=(query, *keys), kwargs={**given, "is_causal": True})


class _Masks:
    """Knows which values are causal masks, and which are repeated, of ops by the numbers of what they make."""

    def __init__(self, made_by: Mapping[int, LogicalOp], fakes: Sequence[Tensor]) -> None:
        self.made_by, self.fakes = made_by, fakes
        self.causal: dict[int, bool] = {}

    def hides_later(self, mask: Ref, query: Ref, key: Ref) -> bool:
        """Whether all that a mask does to these queries is to hide later keys: it may also make several of one."""
        (*batch, rows, columns), (*samples, many, _) = (self.fakes[ref.number].shape for ref in (mask, query))
        same = rows == columns == many == self.fakes[key.number].shape[-2] and len(batch) <= len(samples)
        if not same or not all(size in (1, own) for size, own in zip(batch[::-1], samples[::-1], strict=False)):
            return False
        if mask.number not in self.causal:
            ops = self._behind(mask.number)
            self.causal[mask.number] = bool(ops) and _made_causal(ops)
        return self.causal[mask.number]

    def shared(self, keys: Ref, values: Ref, *, learns: bool) -> tuple[Ref, Ref] | None:
        """The heads of which these are each one several times in a row, where kernels take them as they are."""
        (key, *sizes), (value, *others) = self._repeated(keys, learns), self._repeated(values, learns)
        fits = key and value and sizes == others and sizes[1] <= WIDEST and sizes[2] in SHARED
        return (key, value) if fits else None

    def _repeated(self, heads: Ref, learns: bool) -> tuple[Any, ...]:
        """The value before it was repeated, how many heads it has, how wide they are, and of which dtype; None if it
        was not."""
        made, chain = self.made_by.get(heads.number), list[LogicalOp]()
        for wanted in (aten.reshape.default, aten.expand.default, aten.unsqueeze.default):
            if made is None or made.op is not wanted or (learns and not made.grad):
                return (None,)
            chain.append(made)
            made = self.made_by.get(made.inputs[0])
        whole, wide, thin = (tuple(op.outputs[0].shape) for op in chain)
        if len(wide) != 5:
            return (None,)
        batch, few, times, length, width = wide
        fits = thin == (batch, few, 1, length, width) and whole == (batch, few * times, length, width)
        return (Ref(chain[-1].inputs[0]), few, width, chain[0].outputs[0].dtype) if fits else (None,)

    def _behind(self, number: int) -> list[LogicalOp]:
        """The ops that make a value out of nothing, in their order; none, if something else goes in."""
        found: dict[int, LogicalOp] = {}
        open_ = [number]
        while open_:
            op = self.made_by.get(open_.pop())
            if op is None or len(found) > MOST or len(op.numbers) != 1:
                return []
            if op.numbers[0] not in found:
                found[op.numbers[0]] = op
                open_ += op.inputs
        return [found[n] for n in sorted(found)]


def _made_causal(ops: Sequence[LogicalOp]) -> bool:
    """Whether the last of these ops makes a causal mask. It is remembered by all that these ops are: a planner captures
    the same mask for each plan."""
    at = {op.numbers[0]: Ref(k) for k, op in enumerate(ops)}
    key = (
        LARGEST,
        *(
            (op.op, frozen(mapped((op.args, dict(op.kwargs)), Ref, lambda ref: at[ref.number])), _like(op))
            for op in ops
        ),
    )
    if key not in _KNOWN:
        if len(_KNOWN) >= REMEMBERED:
            _KNOWN.clear()
        _KNOWN[key] = _is_causal(_computed(ops))
    return _KNOWN[key]


_KNOWN: dict[Hashable, bool] = {}


def _like(op: LogicalOp) -> Hashable:
    made = op.outputs[0]
    return tuple(made.shape), made.dtype


def _is_causal(mask: Tensor | None) -> bool:
    if mask is None or mask.shape[-1] < 2:
        return False
    mask = _narrowed(mask, [d - mask.dim() for d in range(mask.dim() - 2) if mask.stride(d) == 0])
    if mask.numel() > LARGEST:
        return False
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((seen | (mask == -inf)).all()):
        return False
    return torch.equal(seen, torch.ones(mask.shape[-2:], dtype=torch.bool, device="cpu").tril().expand_as(seen))


def _computed(ops: Sequence[LogicalOp]) -> Tensor | None:
    """The value of the last op, on the host; None where it has one that is not known here, or too much to compute."""
    known: dict[int, Tensor] = {}
    with torch.no_grad():
        for op in ops:
            value = _value(op, known)
            if value is None:
                return None
            known[op.numbers[0]] = value
    return known[ops[-1].numbers[0]]


def _value(op: LogicalOp, known: Mapping[int, Tensor]) -> Tensor | None:
    """The value that an op makes, with stride 0 along dims that nothing which goes in depends on."""
    shape, host = tuple(op.outputs[0].shape), torch.device("cpu")
    args, kwargs = mapped(fill((op.args, in_order(op.op, op.kwargs)), known), torch.device, lambda _: host)
    made: Tensor
    if op.op in _COUNTS:
        made = op.op(*args, **{**kwargs, "device": host})
        return made
    if op.op in _FILLS:
        at = _FILLS[op.op]
        made = op.op(*args[:at], [1] * len(shape), *args[at + 1 :], **{**kwargs, "device": host})
        return made.expand(shape)
    if op.op is aten.index.Tensor:
        return _indexed(args[0], args[1], shape)
    if op.op in _ALONG:
        dim: int = Call(op.op, args, kwargs, ()).bound["dim"]
        return _small(op.op, args, kwargs, shape, [dim if dim < 0 else dim - len(shape)])
    if op.op in _TRIANGLES:
        return _small(op.op, args, kwargs, shape, (-2, -1))
    if op.op in _POINTWISE or torch.Tag.pointwise in op.op.tags:
        return _small(op.op, args, kwargs, shape)
    if op.op.is_view and (op.op is not aten.reshape.default or prod(shape) <= LARGEST):
        made = op.op(*args, **kwargs)
        return made
    return None


def _small(op: Any, args: Any, kwargs: Any, shape: Sequence[int], whole: Sequence[int] = ()) -> Tensor | None:
    """An op of inputs with one entry along dims in which all of them are the same, but for those it reads whole."""
    tensors = tensors_in((args, kwargs))
    same = [d for d in range(-len(shape), 0) if d not in whole and all(_same(x, d) for x in tensors)]
    if prod(size for d, size in zip(range(-len(shape), 0), shape, strict=True) if d not in same) > LARGEST:
        return None
    few, named = refilled((args, kwargs), [_narrowed(x, same) for x in tensors])
    made: Tensor = op(*few, **named)
    return made.expand(shape)


def _indexed(x: Tensor, at: Sequence[Tensor | None], shape: Sequence[int]) -> Tensor | None:
    """Entries of a tensor by numbers for each of its dims."""
    if len(at) != x.dim() or any(each is None or each.dtype != torch.int64 for each in at):
        return None
    first = torch.zeros((), dtype=torch.int64, device="cpu")
    read = [first if x.stride(d) == 0 else each for d, each in enumerate(at)]
    return _small(lambda *each: x[each], read, {}, shape)


def _same(x: Tensor, dim: int) -> bool:
    return x.dim() < -dim or x.shape[dim] == 1 or x.stride(dim) == 0


def _narrowed(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        if x.dim() >= -dim and x.shape[dim]:
            x = x.narrow(dim, 0, 1)
    return x
