"""The ops of a layer of experts: a token goes through those that it chose, whoever they are.

    experts           a layer that a user writes, of two products each
    module_experts    the same of a module's own code
    stacked_experts   that of a module which has a row of every token for every expert, zero where it was not chosen
    experts_part      the part of either that is of some of the experts

As much is computed as was chosen. The backward computes what is inside of experts once more, so that only tokens and
what came out of the router are kept.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...placement.errors import SbpError, ShapeError
from ...sbp.recurrent import apart, differentiable
from .expert_code import ACTS, code_named

__all__ = ["experts", "experts_part", "for_ranks", "from_ranks", "kept_rows", "stacked_experts", "through_own"]


def experts(x: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor, *, act: str = "silu") -> Tensor:
    """The sum of what the experts that each token of `x` [..., in] chose, [..., k], make of it, times its shares.

    An expert is `act(x @ up[e]) @ down[e]`, with `up` [experts, in, inner] and `down` [experts, inner, out]; where
    `up` gives twice what `down` takes, `(act(gate) * other) @ down[e]`, of which the gate is the first half. A choice
    that is no expert's number adds nothing.

    >>> x, chosen = torch.ones(2, 3), torch.tensor([[0], [1]])
    >>> up, down = torch.ones(2, 3, 4), torch.stack([torch.ones(4, 1), torch.zeros(4, 1)])
    >>> experts(x, chosen, torch.tensor([[0.5], [0.5]]), up, down, act="relu")
    tensor([[6.],
            [0.]])
    """
    shapes = f"x {tuple(x.shape)}, chosen {tuple(chosen.shape)}, share {tuple(share.shape)}"
    shapes += f", up {tuple(up.shape)}, down {tuple(down.shape)}"
    if act not in ACTS:
        raise SbpError(f"experts: act={act!r}\n  known are {', '.join(map(repr, ACTS))}")
    if chosen.shape != share.shape or chosen.shape[:-1] != x.shape[:-1] or chosen.dtype.is_floating_point:
        raise ShapeError(
            f"experts: {shapes}\n  chosen has so many numbers of experts for each token, and share has as many"
        )
    fits = up.dim() == down.dim() == 3 and len(up) == len(down) and up.shape[1] == x.shape[-1]
    if not fits or up.shape[2] not in (down.shape[1], 2 * down.shape[1]):
        raise ShapeError(
            f"experts: {shapes}\n  give up as [experts, in, inner], or twice inner with a gate, "
            "and down as [experts, inner, out]"
        )
    tokens, many = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    made = torch.ops.sbpflow.experts(tokens, chosen.reshape(-1, many), share.reshape(-1, many), up, down, act)
    out: Tensor = made.reshape(*x.shape[:-1], down.shape[2])
    return out


# The part of some experts


def _sum(
    rows: Tensor,
    chosen: Tensor,
    share: Tensor,
    stacks: Sequence[Tensor],
    shared: Sequence[Tensor],
    numbers: Sequence[int],
    code: str,
) -> Tensor:
    (x,), (first, end) = rows, (numbers[0], numbers[-1]) if numbers else (0, 0)
    tokens, choice = ((chosen >= first) & (chosen < end)).nonzero(as_tuple=True)
    width, dtype = code_named(code).made(x, stacks)
    out: Tensor = x.new_zeros(len(x), width, dtype=dtype)
    if len(tokens):
        pairs = x[tokens], chosen[tokens, choice] - first, share[tokens, choice]
        out = out.index_add(0, tokens, code_named(code).run(*pairs, stacks, shared).to(dtype))
    return out.unsqueeze(0)


@torch.library.custom_op("sbpflow::experts_part", mutates_args=())
def _part(
    rows: Tensor,
    chosen: Tensor,
    share: Tensor,
    stacks: Sequence[Tensor],
    shared: Sequence[Tensor],
    numbers: Sequence[int],
    code: str,
) -> Tensor:
    """The part of the sum that is of the experts with these numbers, for each token of rows [1, tokens, in]."""
    return _sum(rows, chosen, share, stacks, shared, numbers, code)


@torch.library.custom_op("sbpflow::experts_part_backward", mutates_args=())
def _part_backward(
    above: Tensor,
    rows: Tensor,
    chosen: Tensor,
    share: Tensor,
    stacks: Sequence[Tensor],
    shared: Sequence[Tensor],
    numbers: Sequence[int],
    code: str,
) -> list[Tensor]:
    """The gradients of rows, shares and weights."""
    given = [rows, share, *stacks, *shared]
    with differentiable():
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        x, shares, *weights = leaves
        made = _sum(x, chosen, shares, weights[: len(stacks)], weights[len(stacks) :], numbers, code)
        wanted = [t for t in leaves if t.requires_grad]
        found = _grad([made], wanted, [above], allow_unused=True) if made.requires_grad else [None] * len(wanted)
    grads = iter(found)
    each = [next(grads) if t.requires_grad else None for t in leaves]
    return apart([torch.zeros_like(t) if g is None else g for t, g in zip(given, each, strict=True)], [above])


_grad = torch.autograd.grad  # which a capture replaces meanwhile


@_part.register_fake
def _(rows: Tensor, chosen: Tensor, share: Tensor, stacks: Sequence[Tensor], *said: Any) -> Tensor:
    width, dtype = code_named(said[-1]).made(rows[0], stacks)
    return rows.new_empty(*rows.shape[:-1], width, dtype=dtype)


@_part_backward.register_fake
def _(
    above: Tensor,
    rows: Tensor,
    chosen: Tensor,
    share: Tensor,
    stacks: Sequence[Tensor],
    shared: Sequence[Tensor],
    *_: Any,
) -> list[Tensor]:
    return [of.new_empty(of.shape) for of in (rows, share, *stacks, *shared)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, chosen, share, stacks, shared, ctx.numbers, ctx.code = inputs
    ctx.many = len(stacks)
    ctx.save_for_backward(rows, chosen, share, *stacks, *shared)


def _backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
    rows, chosen, share, *weights = ctx.saved_tensors
    stacks, shared = weights[: ctx.many], weights[ctx.many :]
    drows, dshare, *dweights = torch.ops.sbpflow.experts_part_backward(
        above, rows, chosen, share, stacks, shared, ctx.numbers, ctx.code
    )
    none: Any = None if ctx.numbers else []  # torch takes any empty list for one of tensors
    return drows, None, dshare, dweights[: ctx.many], dweights[ctx.many :], none, None


_part.register_autograd(_backward, setup_context=_remember)


# Whole layers


def _experts(x: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor, act: str) -> Tensor:
    return _module_experts(x, chosen, share, [up, down], [], act)


def _module_experts(
    x: Tensor, chosen: Tensor, share: Tensor, stacks: Sequence[Tensor], shared: Sequence[Tensor], code: str
) -> Tensor:
    numbers = [0, len(stacks[0])]
    made: Tensor = torch.ops.sbpflow.experts_part(x[None], chosen, share, stacks, shared, numbers, code)
    return made.squeeze(0)


def through_own(
    x: Tensor, stacks: Sequence[Tensor], shared: Sequence[Tensor], code: str, taken: Tensor | None = None
) -> Tensor:
    """Rows [experts, rows, in], each through the expert that it is of; those that are not `taken` make zeros."""
    count, many, width = x.shape
    chosen = torch.arange(count, device=x.device).repeat_interleave(many)
    if taken is not None:
        chosen = torch.where(taken.reshape(-1), chosen, -1)
    rows, share = x.reshape(1, count * many, width), x.new_ones(count * many, 1)
    made: Tensor = torch.ops.sbpflow.experts_part(rows, chosen[:, None], share, stacks, shared, [0, count], code)
    return made.view(count, many, made.shape[-1])


def _stacked_experts(x: Tensor, stacks: Sequence[Tensor], shared: Sequence[Tensor], code: str) -> Tensor:
    """Rows that are zero make zeros."""
    return through_own(x, stacks, shared, code, (x != 0).any(-1))


# Tokens on their way


def _goes(chosen: Tensor, count: int, ranks: int) -> Tensor:
    """Whether a token chose an expert of a rank, [ranks, tokens, 1]; so many ranks share so many experts."""
    each, more = divmod(count, ranks)  # as S(0) cuts their weights: the first ranks have one more
    longer = more * (each + 1)
    owner = more + (chosen - longer) // each if each else torch.full_like(chosen, -1)
    if more:
        owner = torch.where(chosen < longer, chosen // (each + 1), owner)
    every = torch.arange(ranks, device=chosen.device)[:, None, None]
    return (owner == every).any(-1, keepdim=True)


def _for_ranks(x: Tensor, chosen: Tensor, count: int, ranks: int) -> Tensor:
    """Tokens [tokens, in] for each of the ranks: zero where none of its experts was chosen."""
    return torch.where(_goes(chosen, count, ranks), x, 0.0)


def _from_ranks(made: Tensor, chosen: Tensor, count: int, ranks: int) -> Tensor:
    """The sum of what ranks made; gradients go to those alone that have an expert which was chosen."""
    out: Tensor = torch.where(_goes(chosen, count, ranks), made, 0.0).sum(0)
    return out


def _kept_rows(made: Tensor, x: Tensor) -> Tensor:
    """Rows made of those that were not zero; no gradient goes to others."""
    return torch.where((x != 0).any(-1, keepdim=True), made, 0.0)


_library: Any = torch.library.Library("sbpflow", "FRAGMENT")  # type: ignore[no-untyped-call]
_TOKENS = "Tensor x, Tensor chosen, Tensor share"
_library.define(f"experts({_TOKENS}, Tensor up, Tensor down, str act) -> Tensor")
_library.define(f"module_experts({_TOKENS}, Tensor[] stacks, Tensor[] shared, str code) -> Tensor")
_library.define("stacked_experts(Tensor x, Tensor[] stacks, Tensor[] shared, str code) -> Tensor")
_library.define("kept_rows(Tensor made, Tensor x) -> Tensor")
_library.define("for_ranks(Tensor x, Tensor chosen, int count, int ranks) -> Tensor")
_library.define("from_ranks(Tensor made, Tensor chosen, int count, int ranks) -> Tensor")
_library.impl("experts", _experts, "CompositeImplicitAutograd")
_library.impl("module_experts", _module_experts, "CompositeImplicitAutograd")
_library.impl("stacked_experts", _stacked_experts, "CompositeImplicitAutograd")
_library.impl("kept_rows", _kept_rows, "CompositeImplicitAutograd")
_library.impl("for_ranks", _for_ranks, "CompositeImplicitAutograd")
_library.impl("from_ranks", _from_ranks, "CompositeImplicitAutograd")
experts_part: torch._ops.OpOverload = torch.ops.sbpflow.experts_part.default
for_ranks: torch._ops.OpOverload = torch.ops.sbpflow.for_ranks.default
stacked_experts: torch._ops.OpOverload = torch.ops.sbpflow.stacked_experts.default
kept_rows: torch._ops.OpOverload = torch.ops.sbpflow.kept_rows.default
from_ranks: torch._ops.OpOverload = torch.ops.sbpflow.from_ranks.default
