"""Window attention computes what attention under a banded mask does on one device, and sends what windows reach."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.nn.composites.window_attention import Band, band_of
from sbpflow.placement import Placement
from sbpflow.placement.errors import SbpError
from tests.ranks import Ranks

from .ring import F64, close, line, numbers


class Banded(nn.Module):
    """Attention to keys from `before` places before a query to `after` behind it."""

    def __init__(self, before: int, after: int = 0, kind: str = "bool", **how: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=F64))
        self.before, self.after, self.kind, self.how = before, after, kind, how

    def mask(self, length: int) -> Tensor:
        ahead = torch.arange(length) - torch.arange(length)[:, None]
        seen = (ahead >= -self.before) & (ahead <= self.after)
        if self.kind == "bool":
            return seen
        return torch.zeros(length, length, dtype=F64).masked_fill(~seen, -torch.inf) + 0.1 * ahead

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = self.mask(query.shape[-2])
        out: Tensor = nn.functional.scaled_dot_product_attention(query * self.scale, key, value, mask, **self.how)
        return out


def weighed(model: nn.Module, query: Tensor, key: Tensor, value: Tensor, by: Tensor) -> Tensor:
    out: Tensor = (model(query, key, value) * by).sum()
    return out


def compared(where: Placement, length: int, heads: int = 2, shared: int = 2, sbp: Any = None, **how: Any) -> Any:
    model = Banded(**how)
    alone = copy.deepcopy(model)
    flow.nn.inside(model, use="window", over="context")
    given = [numbers(2, n, length, 4, seed=n + at) for at, n in enumerate((heads, shared, shared))]
    by = numbers(2, heads, length, 4, seed=9)
    plain = [x.clone().requires_grad_() for x in given]
    laid: list[Any] = [flow.tensor(x, placement=where, sbp=sbp or {"context": S(2)}).requires_grad_() for x in given]
    with flow.record() as moves:
        loss: Any = flow.compile(model, weighed, placement=where)(laid[0], laid[1], laid[2], by)
    want = weighed(alone, plain[0], plain[1], plain[2], by)
    want.backward()  # type: ignore[no-untyped-call]
    learnt: Any = model.scale.grad
    found = [loss.full_tensor(), *(x.grad.full_tensor() for x in laid), learnt.full_tensor()]
    return (found, [want.detach(), *(x.grad for x in plain), alone.scale.grad]), moves


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "length", "reach", "kind"),
    [
        (n, length, reach, kind)
        for (n, length), reach, kind in product(
            [(2, 16), (4, 16), (4, 21), (8, 19)], [(3, 0), (1, 1), (5, 0), (0, 2), (0, 0)], ["bool", "numbers"]
        )
        if sum(reach) - 0 + -(-length // n) < length
    ],
    ids=str,
)
def test_it_is_attention_under_the_mask(ranks: int, length: int, reach: tuple[int, int], kind: str) -> None:
    pair, _ = compared(line(ranks), length, before=reach[0], after=reach[1], kind=kind)
    close(pair)


@pytest.mark.parametrize("reach", [(2, 0), (4, 0), (1, 1)], ids=str)
def test_as_many_rows_of_keys_and_values_are_sent_as_the_window_reaches(reach: tuple[int, int]) -> None:
    pair, moves = compared(line(4), 16, before=reach[0], after=reach[1])
    close(pair)
    row = 2 * 2 * 4 * 8
    assert [m.bytes for m in moves if "halo" in m.route] == [sum(reach) * row] * 4  # keys, values, and their gradients


def test_heads_of_keys_may_be_shared_and_other_axes_split_them() -> None:
    close(compared(line(4), 16, heads=4, shared=2, before=3, enable_gqa=True)[0])
    where = flow.placement("cpu:[0-3] as (context=2, tensor=2)")
    close(compared(where, 16, before=3, sbp={"context": S(2), "tensor": S(1)})[0])


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"before": 15}, "every query may see keys far away"), ({"before": -1, "after": 3}, "no key at all"),
        ({"before": 3, "dropout_p": 0.1}, "draws numbers"),
    ],
    ids=["wide", "blind", "dropout"],
)  # fmt: skip
def test_other_masks_are_refused(how: Any, why: str) -> None:
    with pytest.raises(SbpError, match=why):
        compared(line(4), 16, **how)


class Given(nn.Module):
    """Attention under a mask that somebody else makes."""

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        out: Tensor = nn.functional.scaled_dot_product_attention(x, x, x, mask, is_causal=causal)
        return out


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_that_nobody_knows_beforehand_is_refused(causal: bool) -> None:
    model = flow.nn.inside(Given(), use="window", over="context")
    x = flow.tensor(numbers(1, 2, 16, 4), placement=line(4), sbp=S(2))
    mask = None if causal else flow.tensor(Banded(2).mask(16), placement=line(4), sbp=B)
    with pytest.raises(SbpError, match="is_causal" if causal else "comes from outside"):
        flow.compile(model, placement=line(4))(x, mask, causal)


def test_a_band_is_the_narrowest_that_leaves_something_out() -> None:
    assert band_of(Banded(3, 1).mask(9)) == Band(-3, 1)
    assert band_of(Banded(3, 1, "numbers").mask(9)) == Band(-3, 1)
    assert band_of(torch.stack([Banded(3).mask(9), Banded(1, 2).mask(9)])) == Band(-3, 2)


def on_ranks(where: Placement) -> None:
    close(compared(where, 13, before=3)[0])


def test_real_ranks_send_to_each_other(ranks4: Ranks) -> None:
    ranks4(on_ranks, line(4))
