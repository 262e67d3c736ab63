"""Products of 8 bits: what they compute beside the same rounding by hand, how they are split, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S, SbpError
from sbpflow.nn.model.cast import cast
from sbpflow.nn.model.fp8 import EIGHTS, eights_of

WAYS = {"fp8": False, "fp8_rowwise": True}
NARROW, FAR = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: Tensor, dim: int | None, dtype: torch.dtype) -> Tensor:
    """A tensor as 8 bits with a scale hold it."""
    most = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = most.float() / torch.finfo(dtype).max
    return (x / scale).to(dtype).double() * scale.double()


def by_hand(a: Tensor, b: Tensor, by_row: bool, left: torch.dtype = NARROW) -> Tensor:
    left = NARROW if by_row else left
    made: Tensor = rounded(a, 1 if by_row else None, left) @ rounded(b, 0 if by_row else None, NARROW)
    return made


def whole_of(x: Tensor | None) -> Tensor:
    assert isinstance(x, flow.GlobalTensor)
    made: Tensor = x.full_tensor()
    return made


def net(wide: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, wide), nn.GELU(), nn.Linear(wide, 32))


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x).square().mean()
    return made


@pytest.mark.parametrize("how", EIGHTS)
@pytest.mark.parametrize("rows", [(24,), (3, 5), (1, 1), (0,)])
def test_a_product_and_its_gradients_are_those_of_rounded_numbers(how: str, rows: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    layer, x = nn.Linear(32, 48), torch.randn(*rows, 32)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    along = torch.randn(*rows, 48)

    def loss(model: nn.Module, x: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
        y = model(x)
        return (y * along).sum(), y

    step = flow.compile(cast(layer, {"*": how}), loss, placement=flow.placement("cpu", range(1)))
    _, y = step(x, along)
    flat, g = x.reshape(-1, 32), along.reshape(-1, 48)
    if not len(flat):
        assert y.shape == along.shape
        assert not whole_of(layer.weight.grad).any()
        return
    assert torch.allclose(whole_of(y).reshape(-1, 48).double(), by_hand(flat, weight.t(), WAYS[how]) + bias, atol=1e-5)
    dweight = by_hand(g.t(), flat, WAYS[how], FAR)
    assert torch.allclose(whole_of(layer.weight.grad).double(), dweight, atol=1e-4)
    assert torch.allclose(whole_of(layer.bias.grad), g.sum(0), atol=1e-5)


PLANS = {
    "data": "grid (data=2)\n",
    "columns, then rows": "grid (tensor=2)\nweights 0: tensor=S(0)\nweights 2.weight: tensor=S(1)\n",
    "ZeRO-3 in bf16": "grid (data=2)\nweights **: data=S(0)\ncast ** to bf16\ncast {grads,states} ** to fp32\n",
}


@pytest.mark.parametrize("how", EIGHTS)
def test_splits_of_what_eight_bits_hold_exactly_change_nothing(how: str) -> None:
    """Of every piece the largest number is 3.5, so that all scales are the same power of two."""
    torch.manual_seed(2)
    some = torch.tensor([0, 0.875, 1.75, 3.5, -0.875, -1.75, -3.5])
    whole = some[torch.randint(7, (3, 32, 32))]
    whole[:, 0::16] = whole[:, :, 0::16] = 3.5
    x, weight = whole[:2], whole[2]

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = model(x)
        return (y * 1.75).sum(), y

    results = set()
    p = flow.placement("cpu", range(2))
    for rows, cut in ((B, B), (S(0), B), (B, S(0)), (S(2), S(1))):
        layer = nn.Linear(32, 32, bias=False)
        layer.weight.data.copy_(weight)
        flow.nn.shard(cast(layer, {"*": how}), {"weight": cut})
        step = flow.compile(layer, loss, placement=p)
        given = flow.tensor(x, placement=p, sbp=rows)
        _, y = step(given)
        assert any("product_of_8_bits" in str(op) for op in step.planned.plan.logical.ops)
        results.add(str((whole_of(y).tolist(), whole_of(layer.weight.grad).tolist())))
    assert len(results) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", EIGHTS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_trains_in_a_plan_nearly_as_in_32_bits(how: str, plan: str) -> None:
    def losses(text: str) -> list[float]:
        model = net()
        step = flow.compile(model, square_loss, torch.optim.SGD(model.parameters(), lr=0.5), plan=text)
        torch.manual_seed(3)
        return [float(step(torch.randn(16, 32))) for _ in range(6)]

    exact = losses("grid (data=1)")
    found = losses(PLANS[plan] + f"cast 0 to {how}\ncast 2 to {how}\n")
    assert found != exact
    assert all(abs(a - b) < 0.05 * b for a, b in zip(found, exact, strict=True)), (found, exact)


def test_attention_and_what_is_not_named_stay_as_they_are() -> None:
    model = cast(net(), {"2": "fp8"})
    assert list(eights_of({"": model}).values()) == ["fp8"]
    step = flow.compile(model, square_loss, placement=flow.placement("cpu", range(1)))
    step(torch.randn(4, 32))
    ops = [str(op) for op in step.planned.plan.logical.ops]
    assert sum("product_of_8_bits" in op for op in ops) == 1
    assert sum("linear" in op for op in ops) == 1


def test_another_cast_takes_it_back_and_none_too() -> None:
    for later in ({"*": "bf16"}, {"0": None}):
        model = cast(net(), {"0": "fp8_rowwise"})
        assert eights_of({"": model})
        assert not eights_of({"": cast(model, later)})
    both = net()
    cast(both, {"0": "fp8", "*": "bf16"})
    assert list(eights_of({"": both}).values()) == ["fp8"]
    step = flow.compile(both, square_loss, placement=flow.placement("cpu", range(1)))
    step(torch.randn(4, 32))
    assert both[0].weight.dtype is torch.bfloat16


def refused(model: nn.Module, patterns: Any, kind: Any = "weights") -> str:
    with pytest.raises(SbpError) as caught:
        flow.compile(cast(model, patterns, kind=kind), square_loss, placement=flow.placement("cpu", range(1)))(
            torch.randn(4, 32)
        )
    return str(caught.value)


def test_what_cannot_be_of_8_bits_is_an_error_with_a_fix() -> None:
    odd = refused(net(40), {"*": "fp8"})
    assert "(40, 32)" in odd
    assert "in 0" in odd
    assert "multiples of 16" in odd
    assert "torch adds no numbers of 8 bits" in refused(net(), {"*": "fp8"}, "states")
    assert "holds no matrix" in refused(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)), {"1": "fp8"})
    assert "no weights rest" in refused(net(), {"*": torch.float8_e5m2})


def test_a_card_without_such_products_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    from sbpflow.nn.model.fp8 import refuse_eights

    model = {"": cast(net(), {"2": "fp8"})}
    refuse_eights(model, flow.placement("cpu", range(1)))
    with pytest.raises(SbpError, match=r"2 is to compute in fp8 on cuda.*\n.*8\.0"):
        refuse_eights(model, flow.placement("cuda", range(1)))
