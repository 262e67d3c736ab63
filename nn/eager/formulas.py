"""Ops written in terms of others, on global tensors: where a rule alone would have to gather.

Each is one device's formula in plain torch. The dispatcher gives every op in it its signature, so that a split class
dim needs a maximum and a sum of one number a row, never the logits, and a mean is a sum over the logical count.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...placement.device import family
from ...sbp.call import Call, fill, tensors_in
from ...sbp.layout import memory_order
from ...sbp.logical import LogicalOp
from ...sbp.state import State
from ..tensors import seeds
from ..tensors.factories import whole_everywhere
from ..tensors.memory_formats import in_order
from ..tensors.moves import shards_as
from ..tensors.tensor import GlobalTensor, wrap
from .abstract import Ghost
from .recipe import Recipe
from .recurrent import FORMULAS

__all__ = ["Handler", "composite", "formula_named", "random_like", "whole_like"]

When: TypeAlias = Callable[[Call], bool]
_composites: dict[str, tuple[When, Callable[..., Any]]] = {}


class Handler(Recipe):
    """A function of ours, called with the ATen call's arguments."""

    def __init__(self, function: Callable[..., Any], op: LogicalOp) -> None:
        self.function, self.op = function, op
        self.orders = [memory_order(y) for y in op.outputs]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        made = self.function(*fill(self.op.args, tensors), **fill(self.op.kwargs, tensors))
        for y, order in zip(tensors_in(made), self.orders, strict=True):
            if isinstance(y, GlobalTensor) and y._layout.order != order:  # the op itself would have laid it out so
                y._layout = of = y._layout.in_order(order)
                y._shards = tuple(in_order(shard, of) for shard in y._shards)
        return made


def composite(call: Call, op: LogicalOp) -> Recipe | None:
    """The recipe by a formula, where there is one and it is the better way for this call."""
    known = _composites.get(call.name)
    if known is None or not known[0](call):
        return None
    return Handler(known[1], op)


def formula(*names: str, when: When) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: these ops by this formula, where `when` says so."""

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            _composites[name] = when, function
        return function

    return put


def formula_named(name: str) -> Callable[..., Any]:
    """The formula of an op that has one, as a function of the op's arguments."""
    return _composites[name][1]


def always(call: Call) -> bool:
    return True


def _dims(call: Call, attribute: str = "dim") -> set[int]:
    """The dims that an argument names, all where it names none."""
    ndim, dim = call.inputs[0].ndim, call.bound.get(attribute)
    if dim is None or dim == []:
        return set(range(ndim))
    listed = dim if isinstance(dim, list | tuple) else [dim]
    return {d % ndim for d in listed if isinstance(d, int)} if ndim else set()


def along_split(call: Call) -> bool:
    """Whether the op works along a dim that is split; of no elements there is no maximum to subtract."""
    return bool(call.states) and call.inputs[0].numel() > 0 and any(call.states[0].dims[d] for d in _dims(call))


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None or x.dtype is dtype else x.to(dtype)


def random_like(x: GlobalTensor, fill: Callable[[Tensor], Tensor]) -> GlobalTensor:
    """Random numbers of the shape of `x`: those of one device, each rank's part of them."""
    if isinstance(x, Ghost):
        return x.drawn()
    seeds.agree(x.placement)
    everywhere = whole_everywhere(fill(whole_like(x)), x.placement)
    dense = x._layout.in_order(everywhere._layout.order)
    of = dense.with_state(State(dense.state.dims)).with_dtype(everywhere.dtype)
    mine = shards_as(everywhere, of, "random")
    if of.state == everywhere._layout.state and len(mine) == 1:
        return everywhere
    # A view of the whole would keep all of it alive, and ranks of one process must not write to one memory.
    return wrap(tuple(shard.clone() for shard in mine), of)


def whole_like(x: GlobalTensor) -> Tensor:
    """Memory for a plain tensor that lies as this one would on one device, without gaps."""
    dense = x._layout.in_order(x._layout.order)
    return torch.empty_strided(dense.shape, dense.strides, dtype=x.dtype, device=x.device)


@torch.library.custom_op("sbpflow::kept_on_card", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _kept_on_card(x: Tensor, p: float) -> Tensor:
    """Elements that a card's own kernel keeps of a tensor that lies like `x`; `bernoulli` keeps others."""
    return torch.native_dropout(torch.ones_like(x), p, True)[1]


@_kept_on_card.register_fake
def _(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def drop_on_card(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Elements that are kept, divided by their share and rounded once, as there."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return (wide * kept * (1 / (1 - p))).to(x.dtype)


@formula("dropout", when=always)
def dropout(x: GlobalTensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    if p == 1:
        return x * 0
    if family(x.placement.type).card and x.numel():  # for none torch takes no kernel of its own
        with torch.no_grad():
            kept = random_like(x, lambda whole: torch.ops.sbpflow.kept_on_card(whole, p))
        return drop_on_card(x, kept, p)
    with torch.no_grad():
        noise = random_like(x, lambda whole: whole.bernoulli_(1 - p).div_(1 - p))
    return x * noise


for _op, _layers in FORMULAS.items():
    formula(Call(_op, (), {}, ()).name, when=always)(_layers)


@formula("softmax.int", "_softmax", when=along_split)
def softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = _cast(x, dtype if isinstance(dtype, torch.dtype) else None)
    top = x.detach().amax(dim, keepdim=True)
    e = (x - top).exp()
    return e / e.sum(dim, keepdim=True)


@formula("log_softmax.int", "_log_softmax", when=along_split)
def log_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = _cast(x, dtype if isinstance(dtype, torch.dtype) else None)
    top = x.detach().amax(dim, keepdim=True)
    x = x - top
    return x - x.exp().sum(dim, keepdim=True).log()


@formula("logsumexp", when=along_split)
def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    top = x.detach().amax(dim, keepdim=True)
    top = torch.where(top.abs() == math.inf, torch.zeros_like(top), top)
    out = (x - top).exp().sum(dim, keepdim=True).log() + top
    return out if keepdim else out.squeeze(tuple(dim) if isinstance(dim, list) else dim)


@formula("linalg_vector_norm", when=lambda call: along_split(call) and call.bound["ord"] != 0)
def vector_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x = _cast(x, dtype)
    if x.dtype in (torch.float16, torch.bfloat16) and not math.isinf(ord):  # whose powers would be infinite
        return _cast(vector_norm(x, ord, dim, keepdim, dtype=torch.float32), x.dtype)
    over = list(range(x.ndim)) if dim is None or dim == [] else dim
    size = x.abs() if not (ord == 2 and not x.dtype.is_complex) else x
    if ord == math.inf:
        return size.amax(over, keepdim)
    if ord == -math.inf:
        return size.amin(over, keepdim)
    if ord == 1:
        return size.sum(over, keepdim)
    total = (size * size if ord == 2 else size**ord).sum(over, keepdim)
    if ord < 0:
        return total ** (1 / ord)
    return _root(total, ord)


def _root(total: Tensor, ord: float = 2) -> Tensor:
    """At zero a root has no slope; torch gives norms and deviations the gradient 0 there."""
    if type(total) is GlobalTensor and total._layout.state.partial:
        total = total.abs()  # it is the same, and no longer addends: or each of what follows would bring these together
    zero = total == 0
    safe = torch.where(zero, torch.ones_like(total), total)
    root = safe.sqrt() if ord == 2 else safe ** (1 / ord)
    return torch.where(zero, torch.zeros_like(root), root)


def _variance(x: Tensor, dim: Any, correction: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    over = list(range(x.ndim)) if dim is None or dim == [] else dim
    listed = over if isinstance(over, list | tuple) else [over]
    count = math.prod(x.shape[d] for d in listed)
    mean = x.mean(listed, keepdim=True)
    off = x - mean
    square = (off * off.conj()).real if x.dtype.is_complex else off * off
    var = square.sum(listed, keepdim) / max(count - correction, 0)
    return var, mean if keepdim else mean.squeeze(tuple(listed))


def _number(correction: Any) -> float:
    return 1 if correction is None else correction


@formula("var.correction", when=along_split)
def var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _variance(x, dim, _number(correction), keepdim)[0]


@formula("std.correction", when=along_split)
def std(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _root(_variance(x, dim, _number(correction), keepdim)[0])


@formula("var.dim", when=along_split)
def var_dim(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return _variance(x, dim, int(unbiased), keepdim)[0]


@formula("std.dim", when=along_split)
def std_dim(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return _root(_variance(x, dim, int(unbiased), keepdim)[0])


@formula("var", when=along_split)
def var_all(x: Tensor, unbiased: bool = True) -> Tensor:
    return _variance(x, None, int(unbiased), False)[0]


@formula("std", when=along_split)
def std_all(x: Tensor, unbiased: bool = True) -> Tensor:
    return _root(_variance(x, None, int(unbiased), False)[0])


def _split_or_partial(call: Call) -> bool:
    return any(f for state in call.states for f in state.dims) or any(state.partial for state in call.states)


def _trains_apart(call: Call) -> bool:
    """Whether the batch's statistics are needed, and anything lies in pieces or addends."""
    return bool(call.bound["training"]) and _split_or_partial(call)


@formula("batch_norm", when=_trains_apart)
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Tensor:
    over = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    count = x.numel() // x.shape[1]
    mean = x.mean(over)
    off = x - mean.view(shape)
    biased = (off * off).mean(over)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.mul_(1 - momentum).add_(mean.detach().to(running_mean.dtype), alpha=momentum)
            fair = biased.detach() * (count / max(count - 1, 1))
            running_var.mul_(1 - momentum).add_(fair.to(running_var.dtype), alpha=momentum)
    out = off * (biased + eps).rsqrt().view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _within_samples(call: Call) -> bool:
    """Whether samples themselves are in pieces: their channels, or places of their images."""
    return bool(call.states) and call.inputs[0].numel() > 0 and any(call.states[0].dims[1:])


@formula("group_norm", when=_within_samples)
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Each group of channels of a sample has its mean and its variance: two sums of one number a group."""
    groups = x.reshape(len(x), num_groups, -1, *x.shape[2:])
    over, shape = list(range(2, groups.ndim)), [1, num_groups, -1] + [1] * (x.ndim - 2)
    mean = groups.mean(over, keepdim=True)
    off = groups - mean
    scale = ((off * off).mean(over, keepdim=True) + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.view(shape)
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias.view(shape)
    return torch.addcmul(shift, groups, scale).flatten(1, 2)


def _class_dim(x: Tensor) -> int:
    return 0 if x.ndim == 1 else 1


def _reduce(losses: Tensor, over: Tensor | int, reduction: int) -> Tensor:
    """0: each, 1: mean over what counts, 2: sum."""
    if reduction == 0:
        return losses
    if reduction == 2:
        return losses.sum()
    return losses.sum() / (over if isinstance(over, int) else over.to(losses.dtype).sum())


def _each_nll(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each sample, which of them count, and how much each does."""
    dim = _class_dim(x)
    valid = target != ignore_index
    index = torch.where(valid, target, torch.zeros_like(target))
    picked = x.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    if weight is None:
        return torch.where(valid, -picked, torch.zeros_like(picked)), valid, valid
    weights = torch.where(valid, weight[index], torch.zeros_like(picked))
    return -picked * weights, valid, weights


@formula("nll_loss_nd", "nll_loss", "nll_loss2d", when=_split_or_partial)
def nll_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    losses, _, over = _each_nll(x, target, weight, ignore_index)
    return _reduce(losses, over, reduction)


@formula("cross_entropy_loss", when=_split_or_partial)
def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    dim = _class_dim(x)
    logs = torch.log_softmax(x, dim)
    classes = x.shape[dim]
    shape = [1] * x.ndim
    shape[dim] = classes
    if target.shape == x.shape and target.dtype.is_floating_point:
        goal = target * (1 - label_smoothing) + label_smoothing / classes if label_smoothing else target
        each = -logs * goal
        losses = (each * weight.view(shape) if weight is not None else each).sum(dim)
        return _reduce(losses, max(x.numel() // classes, 1), reduction)
    losses, valid, over = _each_nll(logs, target, weight, ignore_index)
    nll = _reduce(losses, over, reduction)
    if not label_smoothing:
        return nll
    each = -(logs * weight.view(shape) if weight is not None else logs).sum(dim)
    smooth = _reduce(torch.where(valid, each, torch.zeros_like(each)), over, reduction)
    return nll * (1 - label_smoothing) + smooth * (label_smoothing / classes)
