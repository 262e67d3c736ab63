"""One layer of an LSTM, GRU or RNN as one op: of whole sequences, or of such that end early.

    recurrent(x, lengths, states, weights, kind, biases, both, narrow)  ->  out, *states

`x` has time, samples and features, in this order, and `out` as well; behind its length a sample has zeros. `kind` is
the name of torch's function, `both` says that a second layer goes from the end to the beginning, and `narrow` is the
dtype of autocast where that is on.
Autograd differentiates torch's own function. Where a step is traced, which would take each moment apart, the op stands
for it: its backward is an op too, and runs the layer once more.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

__all__ = ["KINDS", "apart", "differentiable", "layer", "recurrent"]

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_KEYS = torch._C.DispatchKey
_TAKES = (
    "Tensor x, Tensor? lengths, Tensor[] states, Tensor[] weights, str kind, bool biases, bool both, ScalarType? narrow"
)


def layer(
    x: Tensor,
    lengths: Tensor | None,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    biases: bool,
    both: bool,
    narrow: torch.dtype | None,
) -> list[Tensor]:
    """The op's results, by torch's own function where tensors have values."""
    if isinstance(x, FakeTensor):
        made: list[Tensor] = recurrent(x, lengths, list(states), list(weights), kind, biases, both, narrow)
        return made
    given = any(t.requires_grad for t in (x, *states, *weights))
    # As if it trained: some kernels can only go back then, and there is no dropout behind a single layer.
    rest = list(weights), biases, 1, 0.0, given and torch.is_grad_enabled(), both
    run = getattr(torch, kind)
    with torch.autocast(x.device.type, narrow, enabled=narrow is not None):
        if lengths is None:
            return list(run(x, *_held(kind, states), *rest, False))
        if not len(lengths):
            return [x.new_zeros(_shape(x, states, both)), *states]
        packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        order, back = packed.sorted_indices, packed.unsorted_indices
        assert order is not None
        assert back is not None
        moved = [s.index_select(1, order) for s in states]
        data, *ends = run(packed.data, packed.batch_sizes, *_held(kind, moved), *rest)
        out, _ = pad_packed_sequence(packed._replace(data=data), total_length=len(x))
        return [out, *(s.index_select(1, back) for s in ends)]


def _held(kind: str, states: Sequence[Tensor]) -> list[Any]:
    """States as torch takes them: those of an LSTM are a list."""
    return [list(states)] if kind == "lstm" else list(states)


def _shape(x: Tensor, states: Sequence[Tensor], both: bool) -> tuple[int, ...]:
    return (*x.shape[:-1], states[0].shape[-1] * (1 + both))


@torch.library.custom_op("sbpflow::recurrent", mutates_args=(), schema=f"({_TAKES}) -> Tensor[]")
def _recurrent(*call: Any) -> list[Tensor]:
    x, _, states, weights, *_ = call
    return apart(layer(*call), (x, *states, *weights))


@torch.library.custom_op(
    "sbpflow::recurrent_backward", mutates_args=(), schema=f"(Tensor[] grads, {_TAKES}) -> Tensor[]"
)
def _recurrent_backward(
    grads: list[Tensor], x: Tensor, lengths: Tensor | None, states: list[Tensor], weights: list[Tensor], *said: Any
) -> list[Tensor]:
    """The gradients of x, states and weights."""
    with differentiable():
        leaves = [t.detach().requires_grad_() for t in (x, *states, *weights)]
        n = 1 + len(states)
        outs = layer(leaves[0], lengths, leaves[1:n], leaves[n:], *said)
        found = torch.autograd.grad(outs, leaves, grads, allow_unused=True)
    zeroed = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]
    return apart(zeroed, grads)


@contextmanager
def differentiable() -> Iterator[None]:
    """Inside of an op's kernel, which is called below autograd, have autograd see what is called."""
    off = torch._C._dispatch_tls_local_exclude_set()
    for key in (_KEYS.AutogradCPU, _KEYS.AutogradCUDA, _KEYS.AutogradOther):
        off = off - torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off), torch.enable_grad():
        yield


def apart(made: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of which none shares memory with another, or with what was given; in row-major order."""
    seen = {t.untyped_storage()._cdata for t in given}
    out = []
    for t in made:
        mine = t.detach().contiguous()
        if mine.untyped_storage()._cdata in seen:
            mine = mine.clone()
        seen.add(mine.untyped_storage()._cdata)
        out.append(mine)
    return out


@_recurrent.register_fake
def _(x: Tensor, lengths: Tensor | None, states: list[Tensor], weights: list[Tensor], *said: Any) -> list[Tensor]:
    _, _, both, _ = said
    dtype = torch.promote_types(x.dtype, states[0].dtype)  # of a GRU under autocast states stay as they were
    return [x.new_empty(_shape(x, states, both), dtype=dtype), *(s.new_empty(s.shape) for s in states)]


@_recurrent_backward.register_fake
def _(
    grads: list[Tensor], x: Tensor, lengths: Tensor | None, states: list[Tensor], weights: list[Tensor], *_: Any
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (x, *states, *weights)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, lengths, states, weights, *ctx.said = inputs
    ctx.many, ctx.has = len(states), lengths is not None
    ctx.save_for_backward(x, *([lengths] if ctx.has else []), *states, *weights, *output)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    lengths = rest.pop(0) if ctx.has else None
    n = ctx.many
    outs, rest = rest[len(rest) - n - 1 :], rest[: len(rest) - n - 1]
    given = [torch.zeros_like(y) if g is None else g for y, g in zip(outs, grads, strict=True)]
    found = _recurrent_backward(given, x, lengths, rest[:n], rest[n:], *ctx.said)
    return found[0], None, found[1 : 1 + n], found[1 + n :], None, None, None, None


_recurrent.register_autograd(_backward, setup_context=_remember)

recurrent: torch._ops.OpOverload = torch.ops.sbpflow.recurrent.default
