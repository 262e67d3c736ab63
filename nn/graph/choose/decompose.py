"""Ops taken apart before signatures are chosen, so that their parts may lie better.

Losses and statistics become sums that may be partial, ops without a rule become ops with one, dropout random numbers
and a product, and an index into each sample a `gather`. On one rank only ops that draw random numbers are taken apart,
so that these are the same on any placement.
"""

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....placement.device import card_of
from ....placement.structure import mapped
from ....sbp.call import Call, Ref, fill, frozen, in_order, map_tensors, refs_in
from ....sbp.joint.options import answer_of
from ....sbp.layout import memory_gaps, memory_order
from ....sbp.logical import Logical, LogicalOp, Source
from ....sbp.precision import holds, promotes, rounded
from ....sbp.registry import has_rule
from ....sbp.traits import traits
from ...eager import formulas
from ...eager.capture import alone
from ..capture.interceptor import functional

__all__ = ["expand", "formula_of", "in_line", "looks", "opened", "part_of"]

_log = logging.getLogger(__name__)


def expand(logical: Logical, ranks: Callable[[LogicalOp], int]) -> Logical:
    """The graph with such ops replaced by what they are made of; `ranks` says on how many an op may run."""
    taken = _Apart(logical)
    for op in logical.ops:
        taken.put(op, ranks(op))
    return taken.made()


class _Apart:
    def __init__(self, logical: Logical) -> None:
        self.logical = logical
        self.ops: list[LogicalOp] = []
        self.same: dict[int, int] = {}  # a value that is another, since an op turned out to do nothing
        self.rows: set[int] = set()  # values that are the number of their row
        self.next = max(logical.fakes, default=-1) + 1
        self.fakes = dict(logical.fakes)
        # The function of a call, and its capture, by the call's key: equal layers have equal calls.
        self.functions: dict[Hashable, Callable[..., Any] | None] = {}
        self.known: dict[Hashable, Logical | None] = {}

    def put(self, op: LogicalOp, ranks: int) -> None:
        op = op.of(self.same)
        call = Call(op.op, fill(op.args, self.fakes), fill(op.kwargs, self.fakes), op.outputs)
        if _counts(call) if not op.inputs else op.inputs[0] in self.rows and _keeps_rows(call):
            self.rows.update(op.numbers)
        kind = _kind(op, call, ranks)
        if op.fixed is None and kind not in self.functions:
            self.functions[kind] = _formula(call, ranks)
        function = self.functions[kind] if op.fixed is None else None
        if not (function or op.fixed) and ranks > 1 and call.name == "index.Tensor" and op.inputs[1] in self.rows:
            function = _picked(call)
        if function is None:
            self.ops.append(op)
            self.fakes.update(zip(op.numbers, op.outputs, strict=True))
            return
        key = kind, function is _of_each_row
        if key not in self.known:
            self.known[key] = _captured(function, call, op)
        seen = self.known[key]
        if seen is None:
            self.ops.append(op)
            return
        names = dict(enumerate(op.inputs))
        for part in seen.ops:
            if set(part.numbers) <= names.keys():  # it returned its argument, such as x.to(x.dtype)
                continue
            for n, y in zip(part.numbers, part.outputs, strict=True):
                if n not in names:
                    names[n] = self.next
                    self.fakes[self.next] = y
                    self.next += 1
            part = part_of(op, part)
            self.put(part.of(names, numbers=tuple(names[n] for n in part.numbers)), ranks)
        for n, m in zip(op.numbers, refs_in(seen.result), strict=True):
            self.same[n] = self.same.get(names[m], names[m])

    def made(self) -> Logical:
        return replace(replace(self.logical, ops=()).map(self.same), ops=tuple(self.ops)).needed(self.fakes)


def _kind(op: LogicalOp, call: Call, ranks: int) -> Hashable:
    """All of a call that its formula looks at."""
    return op.op, frozen(in_line(op)), tuple(map(looks, (*call.inputs, *call.outputs))), ranks, _on_card(call)


def _on_card(call: Call) -> bool:
    return card_of(call.inputs[:1]) is not None


def looks(x: Tensor) -> Hashable:
    """The kind of a tensor; two of one kind are treated alike in all decisions."""
    return tuple(x.shape), x.dtype, x.stride() if x.layout is torch.strided else x.layout


def _formula(call: Call, ranks: int) -> Callable[..., Any] | None:
    """The formula that replaces a call, as a function of its own arguments."""
    name, said = call.name, traits(call.name)
    drop = _dropout_on_card if _on_card(call) else _dropout
    if name == "dropout":
        return drop
    if name == "scaled_dot_product_attention" and call.bound["dropout_p"]:
        return partial(_attention, drop)
    if name == "rrelu":
        return _rrelu
    if "drops" in said:
        return call.op.decompose
    if "unread" in said and call.inputs and (how := _memory(call)) != ((), False):
        return partial(_drawn_in_memory, call.op, *how)
    if ranks == 1:
        return None
    if "addends" in said or (name == "batch_norm" and call.bound["training"]):
        return formulas.formula_named(name)
    if torch.Tag.nondeterministic_seeded in call.op.tags or "kept" in said or call.op._schema.is_mutable:
        return None
    if answer_of(call) is None and not has_rule(call.op) and call.op._can_decompose():
        return call.op.decompose
    narrow = rounded(call.inputs, call.outputs) if promotes(call.op) and len(call.inputs) > 1 else ()
    if any(call.inputs[i].numel() < call.outputs[0].numel() for i in narrow):
        return partial(_cast_first, call.op, call.outputs[0].dtype)
    return None


def _counts(call: Call) -> bool:
    """Whether a call makes 0, 1, 2 and so on."""
    bound = call.bound
    return call.name.startswith("arange") and not bound.get("start") and bound.get("step", 1) == 1


def _keeps_rows(call: Call) -> bool:
    """Whether each number stays in its row, which may become longer."""
    (x, *_), (y, *_) = call.inputs, call.outputs
    said, stays = traits(call.name), x.shape[:1] == y.shape[:1]
    reshaped = "reshaped" in said and y.numel() == len(y)
    return stays and ("same" in said or reshaped or ("spread" in said and x.ndim == y.ndim))


def _picked(call: Call) -> Callable[..., Any] | None:
    """`x[arange(len(x)), i]` as elements of each row of x, so that rows may be split."""
    if len(call.inputs) != 3:
        return None
    x, first, i = call.inputs
    leads = all(each is not None for each in call.bound["indices"][:2]) and i.dtype == torch.int64
    lined = x.shape[:1] == first.shape[:1] == torch.broadcast_shapes(first.shape, i.shape)[:1]  # type: ignore[no-untyped-call]
    return _of_each_row if leads and lined and first.ndim >= i.ndim else None


def _of_each_row(x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    first, i = indices[:2]
    shape = torch.broadcast_shapes(first.shape, i.shape)  # type: ignore[no-untyped-call]
    places = torch.where(i < 0, i + x.shape[1], i).expand(shape)
    flat, rest = places.reshape(len(x), -1), x.shape[2:]
    picked = x.gather(1, flat.view(*flat.shape, *[1] * len(rest)).expand(*flat.shape, *rest))
    return picked.view(*places.shape, *rest)


def formula_of(op: LogicalOp, call: Call, wants: Sequence[bool]) -> Logical | None:
    """The formula of an op along a dim that is split, as a graph; None if it has none. `wants` says which inputs
    gradients flow back to."""
    if "along" not in traits(call.name) or not call.inputs[0].numel():
        return None
    function = formulas.formula_named(call.name)
    seen = _captured(function, call, op)
    if seen is None:
        return None
    ops = tuple(part_of(op, part) for part in seen.ops)
    given = zip(call.inputs, wants, strict=True)
    sources = tuple(Source(f"x{n}", "input", x, requires_grad=op.grad and grad) for n, (x, grad) in enumerate(given))
    return replace(seen, sources=sources, ops=ops)


def _captured(function: Callable[..., Any], call: Call, op: LogicalOp) -> Logical | None:
    """A function on an op's inputs by ops that write nowhere; None if it cannot be captured."""
    args, kwargs = in_line(op)
    try:
        return opened(function, args, kwargs, call.inputs)
    except Exception:  # what cannot be captured stays as it is, and runs whole
        _log.info("%s cannot be taken apart", call.name, exc_info=True)
        return None


def part_of(op: LogicalOp, part: LogicalOp) -> LogicalOp:
    """A part of an op, at its place in the program."""
    grad = op.grad and part.grad and part.op._schema.name != "aten::detach"
    return replace(part, grad=grad, origin=op.origin, placement=op.placement)


def opened(function: Callable[..., Any], args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> Logical:
    """A function on tensors like these as ops that write nowhere."""
    layouts = [alone(x.shape, x.dtype, memory_order(x), memory_gaps(x)) for x in inputs]
    return functional(function, args, kwargs, layouts)


def in_line(op: LogicalOp) -> Any:
    """The arguments with Refs numbered in the order of the inputs."""
    order = iter(range(len(op.inputs)))
    return mapped((op.args, in_order(op.op, op.kwargs)), Ref, lambda _: Ref(next(order)))


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    if p == 1:
        return x * 0
    with torch.no_grad():
        noise: Tensor = torch.ops.aten.bernoulli.p(x.detach(), 1 - p).div(1 - p)
    return x * noise


def _dropout_on_card(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p in (0, 1) or not x.numel():  # for which torch takes no kernel of its own
        return _dropout(x, p, train)
    return formulas.drop_on_card(x, torch.ops.sbpflow.kept_on_card(x.detach(), p), p)


def _rrelu(x: Tensor, lower: float, upper: float, training: bool) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    with torch.no_grad():
        rows = x.detach().contiguous()  # torch draws row by row here, whatever the order in memory
        slopes = torch.ops.aten.rrelu_with_noise_functional(rows, torch.empty_like(rows), lower, upper, True)[1]
    scaled: Tensor = x * slopes
    return scaled


def _memory(call: Call) -> tuple[tuple[int, ...], bool]:
    """The order of dims in which numbers are drawn for a tensor, and whether they are normal ones for one whose
    elements do not lie in a row: of these torch draws others."""
    like = call.outputs[0] if "_like" in call.name else call.inputs[0]
    normal = call.name in ("normal_functional", "randn_like")
    return memory_order(like), normal and not like.is_contiguous()


def _drawn_in_memory(op: Any, order: tuple[int, ...], apart: bool, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Numbers for a tensor that does not lie row by row, drawn in the order in which its elements do."""
    kwargs.pop("memory_format", None)
    order = order or tuple(range(x.ndim))
    line = x.detach().permute(order).contiguous()
    if apart:
        mean, std = args or (0.0, 1.0)
        made: Tensor = torch.ops.sbpflow.normal_apart(line, mean, std, kwargs.get("dtype") or x.dtype)
    else:
        made = op(line, *args, **kwargs)
    return made.permute(sorted(range(len(order)), key=order.__getitem__))


@torch.library.custom_op("sbpflow::normal_apart", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _normal_apart(x: Tensor, mean: float, std: float, dtype: torch.dtype) -> Tensor:
    """Normal numbers as torch draws them for a tensor whose elements do not lie in a row: one by one."""
    return torch.empty(*x.shape, 2, dtype=dtype, device=x.device)[..., 0].normal_(mean, std).contiguous()


@_normal_apart.register_fake
def _(x: Tensor, mean: float, std: float, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _cast_first(op: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """The op of inputs as wide as what comes out, so that their gradients are added up before they are cast."""
    return op(*map_tensors(args, lambda t: _wider(t, dtype)), **map_tensors(kwargs, lambda t: _wider(t, dtype)))


def _wider(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() and not holds(t.dtype, dtype) else t


def _attention(
    drop: Callable[[Tensor, float, bool], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout on its weights, which is drawn as a device that has no fused kernel draws it."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if attn_mask is not None:
        blocked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if blocked else scores + attn_mask
    mixed: Tensor = drop(torch.softmax(scores, -1), dropout_p, True) @ value
    return mixed
