"""The op of a layer of experts, each of two products: a token goes through those that it chose, whoever they are.

It runs one expert after the other, each on its own tokens, so that as much is computed as was chosen. Its backward
computes what is inside once more, so that only tokens and what came out of the router are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...placement.errors import SbpError, ShapeError
from ...sbp.state import nth_part

__all__ = ["experts", "experts_of", "experts_part", "for_ranks", "from_ranks"]

aten = torch.ops.aten
Act = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
ACTS: dict[str, Act] = {  # the function, and its input's gradient, made of its output's gradient and the input
    "relu": (torch.relu, lambda above, x: above * (x > 0)),
    "silu": (aten.silu.default, aten.silu_backward.default),
    "gelu": (aten.gelu.default, aten.gelu_backward.default),
    "gelu_tanh": (
        lambda x: aten.gelu.default(x, approximate="tanh"),
        lambda above, x: aten.gelu_backward.default(above, x, approximate="tanh"),
    ),
}


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


KINDS = {
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
}  # the classes of activations in transformers and torch
SAID = ("has_gate", "has_bias", "is_concatenated", "is_transposed")  # by transformers of each layer of experts


def experts_of(module: nn.Module, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    """A layer of transformers' experts, for its register of ways to compute them. It refuses more than two products and
    a gate."""
    said: Any = module
    name, lacking = type(module).__name__, [one for one in SAID if not hasattr(module, one)]
    if lacking:
        raise SbpError(
            f"experts_of: {name} says no {lacking[0]}, unlike layers of experts in transformers\n"
            "  it is for their register, ALL_EXPERTS_FUNCTIONS.register('sbpflow', flow.nn.experts_of); "
            "give the weights of a layer of your own to flow.nn.experts"
        )
    if more := _more(said):
        raise SbpError(
            f"experts_of: {name} has {', '.join(more)}\n"
            "  it computes gated experts without biases: take another way, model.set_experts_implementation('eager')"
        )
    up, down = said.gate_up_proj, said.down_proj
    if not said.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    return experts(x, chosen, share, up, down, act=KINDS[type(said.act_fn).__name__])


def _more(said: Any) -> list[str]:
    """All that a layer of transformers has which is not two products with a gate between them."""
    act, gate = getattr(said, "act_fn", None), getattr(type(said), "_apply_gate", None)
    own = gate is not None and gate.__name__ != "_default_apply_gate"
    named = "no act_fn" if act is None else f"{getattr(act, '__name__', type(act).__name__)} as act_fn"
    return [
        *(["biases"] if said.has_bias else []),
        *(["no gate"] if not said.has_gate else []),
        *(["gates between what they open"] if not said.is_concatenated else []),
        *(["a norm behind each expert"] if getattr(said, "has_post_expert_norm", False) else []),
        *(["a gate of its own"] if own else []),
        *([named] if type(act).__name__ not in KINDS and not own else []),
    ]


class _ExpertLoad(NamedTuple):
    """The tokens of one expert: its place among those here, which tokens, and as the how manyth choice of each."""

    at: int
    tokens: Tensor
    choice: Tensor


def _work(chosen: Tensor, numbers: Sequence[int]) -> Iterator[_ExpertLoad]:
    first, end = (numbers[0], numbers[-1]) if numbers else (0, 0)
    for expert in range(first, end):
        tokens, choice = (chosen == expert).nonzero(as_tuple=True)
        if len(tokens):
            yield _ExpertLoad(expert - first, tokens, choice)


def _inner(x: Tensor, up: Tensor, down: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """The first product of an expert, and what its second takes."""
    wide = x @ up
    if up.shape[1] == down.shape[0]:
        return wide, ACTS[act][0](wide)
    gate, other = wide.chunk(2, -1)
    return wide, ACTS[act][0](gate) * other


@torch.library.custom_op("sbpflow::experts_part", mutates_args=())
def _part(
    rows: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor, numbers: Sequence[int], act: str
) -> Tensor:
    """The part of the sum that is of the experts with these numbers, for each token of rows [1, tokens, in]."""
    (x,) = rows
    out: Tensor = x.new_zeros(1, len(x), down.shape[2])
    for at, tokens, choice in _work(chosen, numbers):
        _, inner = _inner(x[tokens], up[at], down[at], act)
        made = (inner @ down[at]) * share[tokens, choice, None]
        out[0].index_add_(0, tokens, made.to(out.dtype))
    return out


@torch.library.custom_op("sbpflow::experts_part_backward", mutates_args=())
def _part_backward(
    above: Tensor,
    rows: Tensor,
    chosen: Tensor,
    share: Tensor,
    up: Tensor,
    down: Tensor,
    numbers: Sequence[int],
    act: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of rows, shares and weights."""
    (x,), (grad,) = rows, above
    drows, dshare, dup, ddown = (torch.zeros_like(of) for of in (rows, share, up, down))
    for at, tokens, choice in _work(chosen, numbers):
        given, come = x[tokens], grad[tokens]
        wide, inner = _inner(given, up[at], down[at], act)
        dshare[tokens, choice] = (come * (inner @ down[at])).sum(-1).to(share.dtype)
        out = (come * share[tokens, choice, None]).to(x.dtype)
        ddown[at] = inner.T @ out
        dwide = _through(out @ down[at].T, wide, act)
        dup[at] = given.T @ dwide
        drows[0].index_add_(0, tokens, dwide @ up[at].T)
    return drows, dshare, dup, ddown


def _through(dinner: Tensor, wide: Tensor, act: str) -> Tensor:
    """The gradient of the first product, made of that of the second's input."""
    forward, backward = ACTS[act]
    if dinner.shape[-1] == wide.shape[-1]:
        return backward(dinner, wide)
    gate, other = wide.chunk(2, -1)
    return torch.cat([backward(dinner * other, gate.contiguous()), dinner * forward(gate)], -1)


@_part.register_fake
def _(rows: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], down.shape[2])


@_part_backward.register_fake
def _(
    above: Tensor, rows: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    drows, dshare, dup, ddown = (of.new_empty(of.shape) for of in (rows, share, up, down))
    return drows, dshare, dup, ddown


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.numbers, ctx.act = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
    drows, dshare, dup, ddown = torch.ops.sbpflow.experts_part_backward(above, *ctx.saved_tensors, ctx.numbers, ctx.act)
    return drows, None, dshare, dup, ddown, None, None


_part.register_autograd(_backward, setup_context=_remember)


def _experts(x: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor, act: str) -> Tensor:
    made: Tensor = torch.ops.sbpflow.experts_part(x[None], chosen, share, up, down, [0, len(up)], act)
    return made.squeeze(0)


def _goes(chosen: Tensor, count: int, ranks: int) -> Tensor:
    """Whether a token chose an expert of a rank, [ranks, tokens, 1]; so many ranks share so many experts."""
    theirs = [nth_part(0, count, rank, ranks) for rank in range(ranks)]  # as S(0) cuts their weights
    return torch.stack([((chosen >= first) & (chosen < end)).any(-1) for first, end in theirs])[..., None]


def _for_ranks(x: Tensor, chosen: Tensor, count: int, ranks: int) -> Tensor:
    """Tokens [tokens, in] for each of the ranks: zero where none of its experts was chosen."""
    return torch.where(_goes(chosen, count, ranks), x, 0.0)


def _from_ranks(made: Tensor, chosen: Tensor, count: int, ranks: int) -> Tensor:
    """The sum of what ranks made; gradients go to those alone that have an expert which was chosen."""
    out: Tensor = torch.where(_goes(chosen, count, ranks), made, 0.0).sum(0)
    return out


_library: Any = torch.library.Library("sbpflow", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("experts(Tensor x, Tensor chosen, Tensor share, Tensor up, Tensor down, str act) -> Tensor")
_library.define("for_ranks(Tensor x, Tensor chosen, int count, int ranks) -> Tensor")
_library.define("from_ranks(Tensor made, Tensor chosen, int count, int ranks) -> Tensor")
_library.impl("experts", _experts, "CompositeImplicitAutograd")
_library.impl("for_ranks", _for_ranks, "CompositeImplicitAutograd")
_library.impl("from_ranks", _from_ranks, "CompositeImplicitAutograd")
experts_part: torch._ops.OpOverload = torch.ops.sbpflow.experts_part.default
for_ranks: torch._ops.OpOverload = torch.ops.sbpflow.for_ranks.default
from_ranks: torch._ops.OpOverload = torch.ops.sbpflow.from_ranks.default
