"""Dropless experts: each token goes to the ranks that have an expert it chose, to no other; none is left out.

    tokens  S(tokens)  ->  [ranks, tokens, in] S(1): a token where it goes, zero elsewhere  ->  S(0)  ->  own experts
            S(tokens)  <-  sum over ranks  <-  S(1)  <-  [ranks, tokens, out] S(0): what experts made, zero elsewhere

Both moves are all_to_alls that send filled rows alone. A token that chose two experts of one rank goes there once. The
backward sends as many. Every rank has room for all tokens, whatever experts they choose.
"""

from typing import Any

from ...sbp import B, S
from .axis import Axis, AxisValue
from .experts import experts_part, for_ranks, from_ranks
from .registry import composite

__all__ = ["dropless"]


@composite("dropless", of="sbpflow::experts", noun="layer of experts (flow.nn.experts)")
def dropless(axis: Axis, *given: Any) -> AxisValue:
    """A layer of experts S(expert), tokens S(tokens) in and out."""
    x, chosen, share, up, down, act = given
    ranks, choices, tokens = axis.size, chosen.shape[-1], S(0)
    expected = min(1.0, choices / ranks)  # the share of a rank's tokens that go to one other at equal load
    theirs, shared = chosen.lying(tokens), (up.shape[0], ranks)
    leaving = axis.run(for_ranks, x.lying(tokens), theirs, *shared, gives=S(1))
    mine = up.lying(S(0))
    given = leaving.lying(S(0)).filled(expected), chosen.lying(B), share.lying(B), mine, down.lying(S(0))
    made = axis.run(experts_part, *given, mine.indices(0), act, gives=S(0), round=1)
    out: AxisValue = axis.run(from_ranks, made.lying(S(1)).filled(expected), theirs, *shared, gives=tokens, round=2)
    return out
