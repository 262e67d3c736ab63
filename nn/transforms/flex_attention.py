"""Attention whose scores functions change or mask (`flex_attention`), written in ops that split as others do.

torch compiles a kernel of the functions. Here vmap runs them for all scores at once: on global tensors in eager code,
and where a step is captured, so that their calls are ops of the graph.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from ...boxing.record import user_line
from ...placement.errors import SbpError
from ..tensors.tensor import GlobalTensor

__all__ = ["IN_OPS", "attention", "install", "picking"]

_VMAPS = [(None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)]
_INF = float("inf")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Mapping[str, Any],
    *captured: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and by powers of two the logarithms of sums and the largest scores, as torch's own op has them."""
    _refuse_blocks(query, block_mask)
    key, value = (_grown(x, query) for x in (key, value))
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)) * scale
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    scores = _everywhere(score_mod, 1)(scores, *places)
    if block_mask[-1] is not flex_attention.noop_mask:
        scores = scores.masked_fill(~_everywhere(block_mask[-1], 0)(*places), -_INF)
    none = (scores == -_INF).all(-1, keepdim=True)  # such a row attends to nothing
    weights = scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)
    out = weights.to(query.dtype) @ value.to(query.dtype)
    empty = scores.new_empty(0)
    sums = scores.detach().new_empty(0) if not kernel_options.get("OUTPUT_LOGSUMEXP") else scores.logsumexp(-1) / log(2)
    most = empty if not kernel_options.get("OUTPUT_MAX") else scores.amax(-1) / log(2)
    return out, sums, most


def _everywhere(function: Callable[..., Any], given: int) -> Callable[..., Any]:
    """A function of a score's batch, head, query and key, for all of them."""
    for dims in _VMAPS:
        function = torch.vmap(function, in_dims=(0,) * given + dims)
    return function


def _grown(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values for every head and sample of the queries."""
    if x.size(1) != query.size(1):
        x = x.repeat_interleave(query.size(1) // x.size(1), dim=1)
    return x if x.size(0) == query.size(0) else x.expand(query.size(0), *x.shape[1:])


def _refuse_blocks(query: Tensor, block_mask: Sequence[Any]) -> None:
    """Refuse blocks without a mask function: torch leaves them out in eager code, and heeds them in its kernel."""
    whole = flex_attention._LARGE_SPARSE_BLOCK_SIZE
    if block_mask[-1] is flex_attention.noop_mask and whole not in block_mask:
        raise SbpError(
            f"flex_attention: a block mask {tuple(query.shape[-2:])} without a mask function, at {user_line()}\n"
            "  give it one, as create_block_mask(mask_mod, ...) or BlockMask.from_kv_blocks(..., mask_mod=...)"
        )


@contextmanager
def _in_ops() -> Iterator[str]:
    """Inside, torch takes this attention for its op, and does not compile it."""
    before = {name: getattr(flex_attention, name) for name in _OP}
    try:
        vars(flex_attention).update(_OP)
        yield "eager"
    finally:
        vars(flex_attention).update(before)


_OP = {"flex_attention_hop": attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for what torch warns of, and what it refuses on processors: its own kernel."""


def _index(x: Tensor, indices: list[Tensor]) -> Tensor:
    return torch.ops.aten.index.Tensor(x, indices)  # type: ignore[no-any-return]


IN_OPS: list[tuple[Any, str, Any]] = [
    (flex_attention, "setup_compilation_env", _in_ops),
    (flex_attention, "_warn_once", _nothing),
    (flex_attention, "_validate_device", _nothing),
]


def picking() -> tuple[Any, str, Any]:
    """The place of the Function by which masks pick, and an op for it. It loads torch._dynamo, as captures do."""
    from torch._dynamo import _trace_wrapped_higher_order_op

    return _trace_wrapped_higher_order_op, "mod_index", _index


def install() -> None:
    """Have torch's flex_attention take these for global tensors, once: torch's function asks nobody else."""
    for module, name, ours in IN_OPS:
        setattr(module, name, _either(getattr(module, name), ours))


def _either(plain: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        spread = isinstance(sys._getframe(1).f_locals.get("query"), GlobalTensor)
        return (ours if spread else plain)(*args, **kwargs)

    return chosen
