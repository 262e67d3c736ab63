"""The core of attention: all between query, key and value, and the context.

scores = product(q, k) -> scale, mask, cast -> softmax -> cast, dropout -> product(., v)

A fused call is one by itself. Where it is written out it is found by its softmax, among the calls that a graph captured
or those that went by below autograd; what a mask is made of is no part of it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ....sbp.traits import VIEWS, traits
from .kept_ops import FUSED, PRODUCTS, SOFTMAX

__all__ = ["CoreCall", "cores"]

FUSED_CALLS = FUSED | {"scaled_dot_product_attention"}
PRODUCT_CALLS = PRODUCTS | {"matmul", "einsum"}
SOFTMAX_CALLS = SOFTMAX | {"softmax"}
PASSING = frozenset(
    ["native_dropout", "masked_fill", "empty_like", "bernoulli", "bernoulli_", "clone", "_to_copy", "copy_", "to"]
)


class CoreCall(NamedTuple):
    """A call by what it is, and the numbers of the values that it takes and makes."""

    op: Any
    inputs: Sequence[int]
    outputs: Sequence[int]

    @property
    def name(self) -> str:
        """The op without namespace and overload."""
        return str(self.op._schema.name).rpartition("::")[2]

    @property
    def passes(self) -> bool:
        """Whether it is done number by number, or shows its input otherwise."""
        said = traits(self.name)
        return torch.Tag.pointwise in self.op.tags or bool(said & {*VIEWS, "drops"}) or self.name in PASSING


def cores(calls: Sequence[CoreCall]) -> list[frozenset[int]]:
    """The calls, by their place, that each core has."""
    makers = {n: at for at, call in enumerate(calls) for n in call.outputs}
    users: dict[int, list[int]] = {}
    for at, call in enumerate(calls):
        for n in dict.fromkeys(call.inputs):
            users.setdefault(n, []).append(at)

    def before(at: int) -> Iterable[int]:
        return [makers[n] for n in dict.fromkeys(calls[at].inputs) if n in makers]

    def behind(at: int) -> Iterable[int]:
        return [user for n in calls[at].outputs for user in users.get(n, ())]

    found: list[frozenset[int]] = []
    for at, call in enumerate(calls):
        if call.name in FUSED_CALLS:
            found.append(frozenset({at}))
        elif call.name in SOFTMAX_CALLS:
            scores, context = _to_products(calls, at, before), _to_products(calls, at, behind)
            if scores and context:
                found.append(frozenset({at, *scores, *context}))
    return found


def _to_products(calls: Sequence[CoreCall], start: int, next_to: Callable[[int], Iterable[int]]) -> set[int]:
    """All on a way from a softmax to a product, in one direction."""
    leads: dict[int, bool] = {}

    def follow(at: int) -> bool:
        if at not in leads:
            leads[at] = calls[at].name in PRODUCT_CALLS
            if not leads[at] and calls[at].passes:
                for other in next_to(at):
                    leads[at] |= follow(other)
        return leads[at]

    for other in next_to(start):
        follow(other)
    return {at for at, is_on in leads.items() if is_on}
