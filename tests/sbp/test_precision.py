"""Casts to fewer bits: addends are added up before, or what they leave of each other is lost."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.sbp.precision import holds

PAIR = flow.placement("cpu", range(2))
HALF = torch.bfloat16
KINDS = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


def extremes(dtype: torch.dtype) -> Tensor:
    """The numbers of a dtype that another is most likely to lack."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        whole = torch.iinfo(dtype)
        return torch.tensor([whole.min, whole.max, whole.max // 2 + 1, 1], dtype=dtype)
    limits = torch.finfo(dtype)
    return torch.tensor([limits.max, limits.tiny, 1 + limits.eps, -limits.max], dtype=dtype)


@pytest.mark.parametrize(("source", "target"), list(product(KINDS, KINDS)), ids=str)
def test_a_dtype_holds_what_comes_back_from_it_unchanged(source: torch.dtype, target: torch.dtype) -> None:
    whole = extremes(source)
    if source != torch.bool:  # whose addends cannot be added
        assert holds(target, source) == torch.equal(whole.to(target).to(source), whole)


def partial(*addends: float, dtype: torch.dtype = torch.float32) -> flow.GlobalTensor:
    return flow.from_local([torch.tensor([a], dtype=dtype) for a in addends], placement=PAIR, sbp=P)


def autocast(run: Callable[..., Tensor], *args: Any) -> Tensor:
    with torch.autocast("cpu", HALF):
        return run(*args)


def one(sbp: Any = B, dtype: torch.dtype = torch.float32) -> Tensor:
    return flow.zeros(1, placement=PAIR, sbp=sbp, dtype=dtype)


EYE = flow.ones(1, 1, placement=PAIR, sbp=B)
NARROW: dict[str, Callable[[Tensor], Any]] = {
    "a cast": lambda x: x.bfloat16(),
    "to another": lambda x: x.to(one(dtype=HALF)),
    "autocast": lambda x: autocast(F.linear, x, EYE),
    "autocast of a product": lambda x: autocast(torch.mm, x[None], EYE)[0],
    "a copy": lambda x: one(P, HALF).copy_(x),
    "in place": lambda x: one(S(0), HALF).add_(x),
    "out": lambda x: torch.add(x, x, alpha=0, out=one(P, HALF)),
    "a sum": lambda x: x[None].sum(0, dtype=HALF),
}


@pytest.mark.parametrize("name", NARROW)
def test_a_partial_sum_cast_to_fewer_bits_keeps_the_difference(name: str) -> None:
    for addends in ((1000.3, -1000.0), (-1000.0, 1000.3)):
        wanted = torch.tensor([1000.3]).sub(1000).to(HALF)
        assert torch.equal(NARROW[name](partial(*addends)).full_tensor(), wanted)


def test_whole_numbers_beyond_a_float_are_added_up_first() -> None:
    x, wanted = partial(2**24 + 1, 2**24, dtype=torch.int64), torch.tensor([2**25 + 1])
    runs: list[Callable[[Any], Any]] = [torch.Tensor.float, lambda x: x * 1.0, lambda x: x / 2, lambda x: x + 0.5]
    for run in runs:
        assert torch.equal(run(x).full_tensor(), run(wanted))


def test_a_graph_adds_up_before_it_rounds() -> None:
    class Round(flow.nn.Graph):
        def build(self, x: Tensor, w: Tensor) -> Tensor:
            return (x @ w).bfloat16()

    x = flow.tensor(torch.tensor([[1000.3, -1000.0]]), placement=PAIR, sbp=S(1))
    w = flow.tensor(torch.ones(2, 1), placement=PAIR, sbp=S(0))
    assert torch.equal(Round(placement=PAIR)(x, w).full_tensor(), torch.tensor([[1000.3]]).sub(1000).to(HALF))


def test_what_is_cast_to_more_bits_stays_partial_and_sends_nothing() -> None:
    x, small, wide = partial(1, 2), partial(1, 2, dtype=HALF), one(P, torch.float64)
    with flow.record() as moves:
        for y in (x.double(), small.float(), x + wide, x.to(torch.complex64), torch.complex(x, x).real):
            assert y.sbp == (P,)  # type: ignore[attr-defined]
    assert not moves


def test_the_sum_before_a_cast_is_priced_in_the_wide_dtype() -> None:
    x = flow.zeros(8, 4, placement=PAIR, sbp=P, dtype=torch.float64)
    with flow.record() as moves:
        assert x.float().sbp == (S(0),)  # type: ignore[attr-defined]
    assert [(move.route, move.bytes) for move in moves] == [("reduce_scatter", 8 * 4 * 8 // 2)]
    assert "S(0) -> S(0)  60 us  128 bytes" in str(flow.explain(torch.Tensor.float, x))


ROWS = torch.tensor([[1000.3], [-1000.0]])
WIDE: dict[str, Callable[[Any, Any], Any]] = {
    "a cast of a weight": lambda w, x: x * w.float(),
    "a cast of what is made of one": lambda w, x: x * (w * 2).float(),
    "a cast of a view": lambda w, x: x * w[None].float(),
    "a product of both": lambda w, x: x * w,
    "a product in place": lambda w, x: (x * 1).mul_(w),
    "a sum in place of addends": lambda w, x: (w.float() * x).sum(0).add_(w).mul(x),
    "a choice": lambda w, x: torch.where(x > 2000, x, w) * x,
    "softmax": lambda w, x: torch.softmax(w.expand(2), 0, dtype=torch.float32)[0] * w.float() * x,
    "a sum": lambda w, x: w.sum(dtype=torch.float32) * x,
    "joined": lambda w, x: torch.cat([w, x.sum(0)])[0] * x,
    "gathered": lambda w, x: w.masked_select(w > 0).float() * x,
}


@pytest.mark.parametrize("name", WIDE)
def test_a_gradient_is_added_up_before_a_cast_rounds_it(name: str) -> None:
    grads = []
    for whole in (True, False):
        w = torch.ones(1, dtype=HALF) if whole else one(dtype=HALF) + 1
        x = ROWS if whole else flow.tensor(ROWS, placement=PAIR, sbp=S(0))
        WIDE[name](w.requires_grad_(), x).sum().backward()
        assert w.grad is not None
        grads.append(w.grad if whole else w.grad.full_tensor())  # type: ignore[attr-defined]
    assert grads[0] > 0.1
    torch.testing.assert_close(grads[1], grads[0], rtol=2**-7, atol=0)


def test_the_sum_before_a_gradients_cast_is_one_reduction_of_the_wide_dtype() -> None:
    w, x = one(dtype=HALF).requires_grad_(), flow.tensor(ROWS, placement=PAIR, sbp=S(0))
    with flow.record() as moves:
        torch.autograd.backward((x * w.float()).sum())
    assert [(move.route, move.bytes) for move in moves if move.bytes] == [("all_reduce_once", 4)]
    with flow.record() as moves, torch.no_grad():
        w.float().add(w)
    assert not moves


def test_a_cast_whose_gradient_gets_wider_leaves_addends() -> None:
    w, x = one().requires_grad_(), flow.tensor(ROWS.to(HALF), placement=PAIR, sbp=S(0))
    with flow.record() as moves:
        torch.autograd.backward((x * w.bfloat16()).sum())
    assert [(move.op, move.bytes) for move in moves if move.bytes] == [("gradient", 4)]


@pytest.mark.parametrize("name", [name for name in WIDE if "place" not in name and name != "gathered"])
def test_a_graph_adds_up_a_gradient_before_it_rounds_it(name: str) -> None:
    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1, dtype=HALF))

        def forward(self, x: Tensor) -> Tensor:
            return WIDE[name](self.w, x).sum()  # type: ignore[no-any-return]

    many = ROWS.repeat_interleave(1 << 16, 0)  # too many to gather
    alone, model = Rows(), Rows()
    alone(many).backward()
    assert alone.w.grad is not None
    wanted = alone.w.detach() - alone.w.grad * 2**-16
    flow.nn.to_global(model, PAIR, B)
    step = flow.compile(model, lambda m, x: m(x), torch.optim.SGD(model.parameters(), lr=2.0**-16))
    step(flow.tensor(many, placement=PAIR, sbp=S(0)))
    assert isinstance(model.w, flow.GlobalTensor)
    torch.testing.assert_close(model.w.full_tensor(), wanted, rtol=0, atol=2**-8)
