"""Dropless experts: each token goes to the ranks that have an expert it chose, to no other; none is left out.

    tokens  S(tokens)  ->  [ranks, tokens, in] S(1): a token where it goes, zero elsewhere  ->  S(0)  ->  own experts
            S(tokens)  <-  sum over ranks  <-  S(1)  <-  [ranks, tokens, out] S(0): what experts made, zero elsewhere

Both moves are all_to_alls that send filled rows alone. A token that chose two experts of one rank goes there once. The
backward sends as many. Every rank has room for all tokens, whatever experts they choose.
"""

from typing import Any

import torch

from ...sbp import B, S
from ..mixtures.expert_ops import experts_part, for_ranks, from_ranks, kept_rows, stacked_experts
from .axis import Axis, AxisValue
from .registry import composite

__all__ = ["NOUN", "OPS", "dropless", "layer_of"]

NOUN = "layer of experts (flow.nn.experts, or a module of tokens, numbers of experts and shares)"
STACKED = "sbpflow::stacked_experts"
OPS = ("sbpflow::experts", "sbpflow::module_experts")


@composite("dropless", of=(*OPS, STACKED), noun=NOUN)
def dropless(axis: Axis, *given: Any) -> AxisValue:
    """A layer of experts S(expert), tokens S(tokens) in and out."""
    if axis.name == STACKED:
        return _stacked(axis, *given)
    x, chosen, share, stacks, shared, code = layer_of(*given)
    ranks, choices, tokens = axis.size, chosen.shape[-1], S(0)
    expected = min(1.0, choices / ranks)  # the share of a rank's tokens that go to one other at equal load
    theirs, sizes = chosen.lying(tokens), (stacks[0].shape[0], ranks)
    leaving = axis.run(for_ranks, x.lying(tokens), theirs, *sizes, gives=S(1), nested=True)  # tokens of other axes too
    mine = [w.lying(S(0)) for w in stacks]
    sent = leaving.lying(S(0)).filled(expected), chosen.lying(B), share.lying(B)
    common = [w.lying(B) for w in shared]
    made = axis.run(experts_part, *sent, mine, common, mine[0].indices(0), code, gives=S(0), round=1)
    back = made.lying(S(1)).filled(expected)
    out: AxisValue = axis.run(from_ranks, back, theirs, *sizes, gives=tokens, round=2, nested=True)
    return out


def _stacked(axis: Axis, x: AxisValue, stacks: Any, shared: Any, code: str) -> AxisValue:
    """Rows of every token for every expert, of which those go there that are not zero."""
    mine, home = [w.lying(S(0)) for w in stacks], x.lying(S(1))
    leaving = axis.run(torch.ops.aten.alias.default, home, gives=S(1))
    sent, expected = leaving.lying(S(0)), 1 / x.shape[0]
    common = [w.lying(B) for w in shared]
    made = axis.run(stacked_experts, sent.filled(expected), mine, common, code, gives=S(0), round=1)
    out: AxisValue = axis.run(kept_rows, made.lying(S(1)).filled(expected), home, gives=S(1), round=2)
    return out


def layer_of(x: Any, chosen: Any, share: Any, *weights: Any) -> tuple[Any, Any, Any, list[Any], list[Any], str]:
    """The arguments of either op: tokens, choices, shares, weights by experts, weights of all experts, and the code."""
    stacks, shared, code = weights
    return (
        (x, chosen, share, list(stacks), list(shared), code)
        if isinstance(stacks, list | tuple)
        else (x, chosen, share, [stacks, shared], [], code)
    )
