"""A call of `scaled_dot_product_attention` as composites take it: what was passed by place or by name, in one value."""

import math
from typing import NamedTuple

from .axis import Axis, AxisValue

__all__ = ["AttentionCall"]


class AttentionCall(NamedTuple):
    """The tensors of a call and what it says of them; `factor` scales products of queries and keys."""

    query: AxisValue
    key: AxisValue
    value: AxisValue
    mask: AxisValue | None
    is_causal: bool
    scale: float | None
    shared: bool  # heads of keys, by several heads of queries

    @classmethod
    def of(
        cls,
        axis: Axis,
        query: AxisValue,
        key: AxisValue,
        value: AxisValue,
        attn_mask: AxisValue | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> "AttentionCall":
        """The call with these arguments; one that drops weights at random is refused."""
        if dropout_p:
            raise axis.refuse(
                f"dropout_p={dropout_p} draws numbers for the whole square of weights, of which no rank has all",
                "set dropout_p=0.0 there (of transformers: attention_dropout=0.0), or leave out the note",
            )
        return cls(query, key, value, attn_mask, is_causal, scale, enable_gqa)

    @property
    def factor(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    def check_shapes(self, axis: Axis) -> None:
        """Batch dims that are repeated would have to be so on every rank; heads may be, where that is said."""
        query, key, value = self.query, self.key, self.value
        batch, heads = (
            (query.shape[:-3], key.shape[:-3], value.shape[:-3]),
            tuple(x.shape[-3:-2] for x in (query, key, value)),
        )
        fits = heads[0] == heads[1] == heads[2] or (
            self.shared and heads[1] == heads[2] and heads[1] and heads[0][0] % heads[1][0] == 0
        )
        if len({*batch}) > 1 or not fits or key.shape[-2] != value.shape[-2]:
            raise axis.refuse(
                f"query {query.shape}, key {key.shape} and value {value.shape} have other batch dims or heads",
                "expand them to the same before, or say enable_gqa=True where heads of keys are shared",
            )
